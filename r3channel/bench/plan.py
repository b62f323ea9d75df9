"""CPU time of assigning and cutting steps of realistic size. Nothing is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from r3channel.bench.harness import Effort, Parts, medians_s
from r3channel.model.presets import model_named
from r3channel.plan.assignment import Assignment, names_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import plan_shards

CASES = {
    "1024x16k on 64 ranks": (1024, "dp=4,tp=4,cp=2,pp=2,packing=thd"),
    "8192x16k on 512 ranks": (8192, "dp=16,tp=4,cp=2,pp=4,packing=thd"),
}
_TOKENS = 16384


def measure(effort: Effort) -> dict[str, Any]:
    """Measure the CPU time of assigning and cutting steps.

    Returns:
        `cut_ms_by_case`: ms to plan, and to make the row tables of all DP ranks and the bytes of all shards. `assign_ms`: ms to
        assign 8,192 samples to 64 ranks, balanced.
    """
    lengths = names_of(np.random.default_rng(0).integers(2, 2 * _TOKENS, 8192).tolist())
    calls: dict[str, Callable[[], object]] = {name: _cut(*case) for name, case in CASES.items()}
    calls["assign"] = lambda: Assignment.balanced(lengths, dp=64, microbatch_size=4)
    seconds = medians_s(calls, rounds=effort.rounds_of(9, 2))
    cut_ms = {name: seconds[name] * 1e3 for name in CASES}
    return {"cut_ms_by_case": cut_ms, "assign_ms": seconds["assign"] * 1e3}


PARTS: Parts = {"plan": measure}


def _cut(samples: int, text: str) -> Callable[[], None]:
    layout, spec = TrainerLayout.parse(text), model_named("qwen3-30b-a3b").spec
    tokens = names_of(np.random.default_rng(1).integers(2, 2 * _TOKENS, samples).tolist())
    assignment = Assignment.balanced(tokens, dp=layout.dp, microbatch_size=4)

    def cut() -> None:
        plan = plan_shards(assignment, tokens=tokens, spec=spec, layout=layout)
        assert all(shard.nbytes >= shard.slot_bytes for shard in plan.shards)

    return cut
