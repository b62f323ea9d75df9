"""A relay and its trainers as separate processes over TCP: what crosses a process boundary, and nothing else.

    python examples/02_processes.py

A trainer needs the ticket, and where and with what token its relay is to be met: `Relay.hello`, plain values that a queue or an
argument can carry. Between machines `r3channel.relay.ray_host` asks for them over Ray.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np

from r3channel import Assignment, RoutingSpec, Ticket, TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import encode_frame

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
LAYOUT = TrainerLayout.parse("dp=2,pp=2")
LENGTHS = {"a": 900, "b": 700, "c": 300, "d": 1500}


class Known:
    """The control channel of a trainer that was told the answer."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where

    def hello(self, *, dp: int, pp: int, cp: int) -> dict[str, Any]:
        return self._where


def captured(sample_id: str) -> np.ndarray:
    """What an engine would have captured: distinct ids per row, the same in every process."""
    rng = np.random.default_rng(ord(sample_id))
    start = rng.integers(0, SPEC.num_experts, (LENGTHS[sample_id] - 1, 48, 1))
    return ((start + rng.permutation(SPEC.num_experts)[:8]) % SPEC.num_experts).astype(SPEC.id_dtype)


def trainer(rank: int, ticket: bytes, where: dict[str, Any], results: Any) -> None:
    receiver = Receiver(Known(where), spec=SPEC, layout=LAYOUT, coords=LAYOUT.coords(rank))
    shard = receiver.receive(Ticket.from_bytes(ticket))
    different = compared = 0
    for number, batch in enumerate(shard.shard.microbatches):
        samples, positions = shard.shard.row_map(number, tp=0)
        for index, sample_id in enumerate(batch.sample_ids):
            rows = samples == index
            for layer in shard.shard.layers:
                used = shard.layer_ids(number, layer).numpy()[rows]
                different += int((used != captured(sample_id)[positions[rows], layer]).sum())
                compared += used.size
    receiver.close()
    results.put((rank, len(shard.data_N), compared, different))


def main() -> None:
    relay = Relay(SPEC, LAYOUT)
    for sample_id, length in LENGTHS.items():
        frame = encode_frame(SPEC, expert_ids_TLK=captured(sample_id))
        relay.add_frame(sample_id, frame, range(length))
    ticket = relay.seal(0, Assignment.balanced(LENGTHS, dp=2, microbatch_size=1)).to_bytes()
    context = multiprocessing.get_context("spawn")
    results, ranks = context.Queue(), []
    for rank in range(LAYOUT.world_size):
        coords = LAYOUT.coords(rank)
        where = relay.hello(dp=coords.dp, pp=coords.pp, cp=coords.cp)
        ranks.append(context.Process(target=trainer, args=(rank, ticket, where, results)))
        ranks[-1].start()
    found = sorted(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
    relay.join_previous(timeout_s=30)
    relay.close()
    for rank, nbytes, compared, different in found:
        print(f"rank {rank}: {nbytes:,} bytes, {compared:,} ids compared, {different} different")
    assert not any(different for *_, different in found)


if __name__ == "__main__":
    main()
