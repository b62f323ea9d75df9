"""`r3channel bench plan`: CPU time of assigning and cutting steps of realistic size. Nothing is moved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from r3channel.bench import at_least_one
from r3channel.bench.machine import show
from r3channel.models import model_named
from r3channel.plan.assignment import Assignment, names_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import Placement
from r3channel.plan.shards import plan_shards
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import TicketSample
from r3channel.report import commands

CASES = {
    "1024x16k on 64 ranks": (1024, "dp=4,tp=4,cp=2,pp=2,packing=thd"),
    "8192x16k on 512 ranks": (8192, "dp=16,tp=4,cp=2,pp=4,packing=thd"),
}
TARGETS_MS = {"1024x16k on 64 ranks": 20.0, "8192x16k on 512 ranks": 100.0, "assign": 1000.0}


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("bench", prog="bench plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few rounds: the shape of the result only")
    parser.add_argument("--rounds", type=at_least_one, help="of each case")
    options = parser.parse_args(argv)
    rounds = options.rounds or (2 if options.quick else 9)
    show(["plan", *argv], lambda: measure(rounds=rounds), _text, as_json=options.json)
    return 0


def measure(*, rounds: int) -> dict[str, Any]:
    """`cut_ms`: plan, row tables of all DP ranks and all shards' bytes. `assign_ms`: balanced, 8,192 samples to 64 ranks."""
    lengths = names_of(np.random.default_rng(0).integers(2, 2 * 16384, 8192).tolist())
    cut = {name: _cut_ms(count, layout, rounds=rounds) for name, (count, layout) in CASES.items()}
    assign = [_cpu_ms(lambda: Assignment.balanced(lengths, dp=64, microbatch_size=4)) for _ in range(rounds)]
    return {
        "cut_ms": cut["1024x16k on 64 ranks"],
        "cut_ms_by_case": cut,
        "assign_ms": statistics.median(assign),
        "place_us_per_token": _place_us(rounds=rounds, reuse=True),
        "place_fresh_us_per_token": _place_us(rounds=rounds, reuse=False),
        "targets_ms": TARGETS_MS,
    }


def _cut_ms(samples: int, text: str, *, rounds: int) -> float:
    layout, spec = TrainerLayout.parse(text), model_named("qwen3-30b-a3b").spec
    tokens = names_of(np.random.default_rng(1).integers(2, 2 * 16384, samples).tolist())
    assignment = Assignment.balanced(tokens, dp=layout.dp, microbatch_size=4)

    def cut() -> None:
        plan = plan_shards(assignment, tokens=tokens, spec=spec, layout=layout)
        assert all(shard.nbytes >= shard.slot_bytes for shard in plan.shards)

    return statistics.median(_cpu_ms(cut) for _ in range(rounds))


def _place_us(*, rounds: int, reuse: bool) -> float:
    """One sample of 16k tokens of 48 x top-8, as rows come, into the shards of TP4 SP, CP2, PP4; into reused or new memory."""
    spec, layout = model_named("qwen3-30b-a3b").spec, TrainerLayout(tp=4, cp=2, pp=4)
    ids = np.random.default_rng(0).integers(0, 128, (16383, 48, 8), dtype=np.uint8)
    plan = plan_shards(Assignment.given([[["a"]]]), tokens={"a": 16384}, spec=spec, layout=layout)
    sample = TicketSample("a", 16384, 0, 0, (), (), ((16383, 0),))
    streams = [Stream(shard, [sample]) for shard in plan.shards]
    sources = [
        np.concatenate([ids[at : at + rows, list(stream.columns)] for _, at, rows in stream.sends()])
        for stream in streams
    ]
    kept = [np.empty(stream.shard.nbytes, np.uint8) for stream in streams]

    def place() -> None:
        for stream, source_TLK, buffer_N in zip(streams, sources, kept, strict=True):
            placement = Placement(stream, buffer_N if reuse else np.empty(len(buffer_N), np.uint8))
            placement.pads()
            placement.rows(stream, source_TLK, placement.new_digests(), begin=0)

    place()
    times = [_cpu_ms(place) for _ in range(rounds)]
    return statistics.median(times) * 1e3 / 16384


def _cpu_ms(call: Any) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"cut {name}: {ms:.1f} ms (target {TARGETS_MS[name]:.0f})"
        for name, ms in result["cut_ms_by_case"].items()
    ]
    lines.append(
        f"assign 8,192 samples to 64 ranks: {result['assign_ms']:.1f} ms (target {TARGETS_MS['assign']:.0f})"
    )
    lines.append(
        f"place: {result['place_us_per_token']:.3f} us per token of 48 x top-8 into reused buffers, "
        f"{result['place_fresh_us_per_token']:.3f} into new memory"
    )
    return "\n".join(lines)
