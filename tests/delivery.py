"""One small step from relay to receivers, whose trainers are threads: what is added, and what must arrive."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard import RankShard
from tests.samples import SPEC, random_ids, reply_for

LIMIT_S = 20.0
TOKENS = {f"s{i}": n for i, n in enumerate((9, 30, 17, 5))}


def receivers_of(relay: Relay) -> list[Receiver]:
    layout, config = relay.layout, relay.config
    return [
        Receiver(relay, spec=SPEC, layout=layout, coords=layout.coords(rank), config=config)
        for rank in range(layout.world_size)
    ]


def fill(relay: Relay, *, prefix: str = "") -> None:
    for index, (name, tokens) in enumerate(TOKENS.items()):
        relay.add(prefix + name, reply_for(prefix + name, tokens, seed=index), range(tokens))


def assignment(*, prefix: str = "", dp: int = 2) -> Assignment:
    return Assignment.round_robin(
        [prefix + name for name in TOKENS], dp=dp, microbatch_size=2 if dp == 2 else 4
    )


def start(receivers: list[Receiver], ticket: Ticket) -> list[Future[RankShard]]:
    pool = ThreadPoolExecutor(len(receivers))
    return [pool.submit(receiver.receive, ticket) for receiver in receivers]


def check_rows(shard: RankShard, *, prefix: str = "") -> int:
    """Compare every real row with what was added; returns their number."""
    seen = 0
    originals = {prefix + name: random_ids(n - 1, seed=i) for i, (name, n) in enumerate(TOKENS.items())}
    for number, batch in enumerate(shard.shard.microbatches):
        sample, position = shard.shard.row_map(number, tp=shard.tp)
        for layer in shard.shard.layers:
            rows = shard.layer_ids(number, layer).numpy()
            for row in np.flatnonzero(sample >= 0):
                expected = originals[batch.sample_ids[sample[row]]][position[row], SPEC.moe_index(layer)]
                assert np.array_equal(rows[row], expected)
                seen += 1
    return seen
