"""The paths of `bench relay`: where all of them start, where all of them end, and the two halves of each.

The manager's half (`...Sending`): `prepare` starts from the bodies of engines' replies and returns its seconds (`whole=False`
may skip work whose result is at hand). `deliver` starts from what a sealed step starts from and starts every rank. It returns
the time.monotonic at which the clock started, as soon as the manager's part is done. `settle` frees what the step held, once all
ranks have ended. `bytes_sent` leave the manager per step, over all ranks.

A rank's half (`...Taking`): `take` ends when the rank's routers have taken the rows. It returns the time.monotonic at which the
rows were held, contiguous and writable. `tensors` are what the routers took, before widening, in memory of that path alone: so no
path can end right by what another has left. Both halves live in processes that all paths share.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pybase64
import torch
import xxhash

from r3channel.bench.wire import generate
from r3channel.config import ChannelConfig
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Plan, plan_shards
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.routing import Ids

OWN = "r3channel"
_GENERATED_ROWS = 4096
"""Rows that are drawn. Each sample begins at another of these rows, and repeats them as often as it takes."""
_SAMPLE_TOKENS, _PACK_TOKENS = 4096, 16384
_WAIT_S = 60.0
_CONFIG = ChannelConfig(step_timeout_s=60, send_timeout_s=30, join_timeout_s=60)
Seconds = tuple[float, float]
"""Wall and CPU seconds of this process."""
Start = Callable[[int, Any], None]
"""(rank, payload): lets a rank take its payload, without waiting for it."""


def measure(call: Callable[[], object]) -> Seconds:
    wall_s, cpu_s = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - wall_s, time.process_time() - cpu_s


# -- where every path starts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """The data that one measurement moves, as plain values. Each process builds the same plan from it."""

    model: str
    tokens: int
    dp: int = 1

    @property
    def spec(self) -> RoutingSpec:
        return model_named(self.model).spec

    @property
    def trainer(self) -> TrainerLayout:
        return TrainerLayout.parse(f"dp={self.dp},packing=thd")

    @property
    def lengths(self) -> dict[str, int]:
        """Return tokens by sample: uneven, 4,096 in the mean, `tokens` in all."""
        share = np.random.default_rng(0).uniform(0.5, 1.5, max(4 * self.dp, self.tokens // _SAMPLE_TOKENS))
        tokens = np.maximum(2, (share / share.sum() * self.tokens).astype(int))
        tokens[-1] += self.tokens - tokens.sum()
        return {f"sample-{index}": int(length) for index, length in enumerate(tokens)}

    def plan(self) -> tuple[Assignment, Plan]:
        """Return the assignment and the plan.

        Micro-batches are packs of at most 16,384 tokens, balanced over DP ranks.
        """
        assignment = Assignment.dynamic(self.lengths, dp=self.dp, max_tokens=_PACK_TOKENS)
        return assignment, plan_shards(assignment, tokens=self.lengths, spec=self.spec, layout=self.trainer)


class Workload:
    """A case's bytes, made on first use and kept: every path starts from the same memory."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.lengths = case, case.spec, case.lengths
        self.assignment, self.plan = case.plan()

    def ids(self, sample_id: str) -> Ids:
        """Return a sample's ids in a new array.

        The ids are [tokens - 1, L, K] in the id dtype.
        """
        drawn_TLK = _draw_ids(self.case.model)
        start = 257 * int(sample_id.rpartition("-")[2])
        return drawn_TLK[(start + np.arange(self.lengths[sample_id] - 1)) % len(drawn_TLK)]

    @cached_property
    def bodies(self) -> dict[str, bytes]:
        """Return the reply of an engine of ours, by sample."""
        found = {}
        for name, tokens in self.lengths.items():
            frame = encode_frame(self.spec, expert_ids_TLK=self.narrow[name], sample_key=sample_key(name))
            found[name] = reply(name, frame, tokens=tokens)
        return found

    @cached_property
    def narrow(self) -> dict[str, Ids]:
        """Return decoded ids in the id dtype, by sample."""
        return {name: self.ids(name) for name in self.lengths}

    @cached_property
    def wide(self) -> dict[str, Ids]:
        """Return decoded ids as int32, by sample, as SGLang sends them."""
        return {name: self.ids(name).astype(np.int32) for name in self.lengths}

    def of_rank(self, dp: int) -> list[str]:
        """Return the samples of a DP rank, micro-batch by micro-batch."""
        return [name for microbatch in self.assignment.ranks[dp] for name in microbatch]


def reply(sample_id: str, raw: Any, *, tokens: int) -> bytes:
    """Return an engine's JSON reply.

    Its token ids are those of the whole sequence, so no prompt is needed beside it.

    Args:
        sample_id: The sample.
        raw: What `routed_experts` holds in base64: bytes or a contiguous array.
        tokens: Number of token ids.
    """
    meta = {"id": sample_id, "finish_reason": {"type": "stop"}}
    meta["routed_experts"] = pybase64.b64encode(raw).decode()
    return json.dumps({"text": "", "output_ids": list(range(tokens)), "meta_info": meta}).encode()


@cache
def _draw_ids(model: str) -> Ids:
    return generate(model_named(model), regime="Zmid", rows=_GENERATED_ROWS)


# -- where every path ends -------------------------------------------------------------------------------------------------


class Router:
    """A router's buffer, in which it widens ids to int32, as Megatron's gather takes them. The buffer is reused."""

    def __init__(self) -> None:
        self._wide = torch.empty((0, 0), dtype=torch.int32)

    def memory(self, ids_RK: torch.Tensor) -> torch.Tensor:
        """Return the memory where these ids go.

        The next call may reuse it.
        """
        if len(self._wide) < len(ids_RK):
            self._wide = torch.empty(ids_RK.shape, dtype=torch.int32)
        return self._wide[: len(ids_RK)]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of all ids in order, whatever their dtype.

    The call refuses rows that a router could not use in place.

    Raises:
        AssertionError: If rows are not contiguous.
    """
    state = xxhash.xxh3_128()
    for ids_RK in tensors:
        assert ids_RK.is_contiguous(), f"rows of stride {ids_RK.stride()}, expected contiguous ones"
        state.update(ids_RK.to(torch.int32).numpy().data)
    return state.hexdigest()


# -- the two halves --------------------------------------------------------------------------------------------------------


class ChannelSending:
    """Our half of the manager: replies go into a real relay, which seals a step. The ranks' control calls reach `relay`."""

    def __init__(self, work: Workload) -> None:
        self._work, self._steps, self._step = work, itertools.count(), 0
        self.relay = Relay(work.spec, work.case.trainer, _CONFIG)

    def prepare(self, *, whole: bool) -> Seconds:
        """Verify the bodies in memory and put their rows into the store."""
        bodies = self._work.bodies
        return measure(lambda: add_bodies(self.relay, bodies))

    def seal(self) -> Ticket:
        """Seal a step and wait until all receivers' rows can be sent.

        Nobody receives yet.
        """
        ticket = self.relay.seal(next(self._steps), self._work.assignment)
        for key in self.relay.status()["steps"][ticket.step]["missing"]:
            self.relay.steps.outgoing(ticket.identity, key, timeout_s=60.0)
        return ticket

    def deliver(self, start: Start, *, ticket: Ticket | None = None) -> float:
        begin_s = time.monotonic()
        ticket = ticket or self.relay.seal(next(self._steps), self._work.assignment)
        for rank in range(self._work.case.dp):
            start(rank, ticket.to_bytes())
        self._step = ticket.step
        return begin_s

    def settle(self) -> None:
        self.relay.join_previous(timeout_s=_WAIT_S)

    @property
    def bytes_sent(self) -> int:
        return round(self.relay.metrics.value("r3channel_bytes_total", leg="wire_sent") / (self._step + 1))


def add_bodies(relay: Relay, bodies: dict[str, bytes]) -> None:
    for name, body in bodies.items():
        relay.add_body(name, body, lambda reply: reply["output_ids"])


class ChannelTaking:
    """Our half of a rank: a real receiver over TCP, which says hello over Ray."""

    def __init__(self, case: Case, rank: int, control: Control) -> None:
        coords = case.trainer.coords(rank)
        self.receiver = Receiver(control, spec=case.spec, layout=case.trainer, coords=coords, config=_CONFIG)
        self._router, self._shard = Router(), None
        self.receiver.join()

    def take(self, payload: Any) -> float:
        """Receive a step's rows and widen them, layer by layer.

        As in `ReplayDriver`, what a router takes is widened and compared with the engines' digests.
        """
        shard = self._shard = self.receiver.receive(Ticket.from_bytes(payload))
        held_s = time.monotonic()
        for number, layer in _microbatch_layers(shard):
            ids_RK = shard.layer_ids(number, layer)
            shard.check_digest(number, layer, ids_RK, out=self._router.memory(ids_RK))
        return held_s

    def tensors(self) -> Iterable[torch.Tensor]:
        assert self._shard is not None, "nothing was received"
        return [self._shard.layer_ids(number, layer) for number, layer in _microbatch_layers(self._shard)]


def _microbatch_layers(shard: RankShard) -> list[tuple[int, int]]:
    return [(number, layer) for number in range(shard.num_microbatches) for layer in shard.shard.layers]


def receive(relay: Relay, ticket: Ticket, rows_N: Any = None) -> Any:
    """Receive a step as its only receiver, without a connection.

    Args:
        relay: The relay that has sealed the step.
        ticket: The step's ticket.
        rows_N: Memory for the rows, from an earlier call, or None.

    Returns:
        The memory of the rows, to be used again.
    """
    shard = ticket.plan.shard(dp=0, pp=0)
    rows_N = np.zeros(shard.nbytes, np.uint8) if rows_N is None else rows_N
    outgoing: Any = relay.steps.outgoing(ticket.identity, shard.key, timeout_s=60.0)
    landed, begin = ShardBuffer(ticket, shard, rows_N), 0
    landed.begin()
    for ids_TLK in outgoing.pieces():
        landed.rows(ids_TLK, begin=begin)
        begin += len(ids_TLK)
    assert not landed.verify(outgoing.digests), "rows were damaged"
    relay.steps.acknowledge(ticket.identity, shard.key)
    return rows_N
