"""A replayed step waits for the device where it says so, and nowhere else; the audit adds one read at its end.

No GPU is needed: on `meta` tensors there is no value to read, and on CPU tensors every read is counted as it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from r3channel.bench.router_stack import Stack, added_operations, operations
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.rank_shard import RankShard
from tests.engine.host_copies import HostCopies
from tests.unit.test_rank_shard import calls, two_samples

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


class Reads(TorchFunctionMode):
    """Inside the block: which methods brought a value to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """What waited inside the block, once it is left."""
    waits: list[str] = []
    reads, copies = Reads(), HostCopies()
    try:
        with reads, copies:
            yield waits
    finally:
        waits += [*reads.seen, *copies.blocking]


def on(device: str, layers: int = 2) -> tuple[RankShard, RoutingAudit, Stack]:
    """A shard as it lies on a GPU: what is found there is noted, and read at the end."""
    rank = two_samples(layers)
    expected_SL = rank.digests._expected_SL
    assert expected_SL is not None
    rank = RankShard(rank.ticket, rank.shard, rank.data_N.to(device), tp=0, digests_SL=expected_SL.to(device))
    rank.digests._host_SL = None
    audit = RoutingAudit(step=0, microbatches=rank.num_microbatches, count=2, counted_rows=rank.counted_rows)
    return rank, audit, Stack(rank).to(device)


def passes(rank: RankShard, model: Stack, step: Any, device: str) -> None:
    for index in range(rank.num_microbatches):
        x = model.rows(rank, index, device)
        with torch.no_grad(), step.microbatch(index, mode="logprob"):
            model(x)
        step.compare_logprobs(index, x[:, :1], x[:, 1:2], torch.ones(len(x), 1, device=device))
        with step.microbatch(index):
            loss = model(x)
        loss.backward()


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be pinned without a GPU: what would be is marked."""

    def pinned(host: torch.Tensor) -> torch.Tensor:
        copy = host.clone()
        copy.is_pinned = lambda: True  # type: ignore[method-assign]
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)


def test_an_upload_from_pageable_memory_is_seen() -> None:
    with watched() as waits:
        torch.zeros(3).to("meta", non_blocking=True)
        torch.zeros(3, device="meta").copy_(torch.zeros(3), non_blocking=True)
    assert waits == ["_to_copy", "copy_"]


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("audited", [True, False], ids=["audit", "no audit"])
def test_no_pass_of_a_step_waits_for_the_device(audited: bool) -> None:
    class Enough(Exception):
        """Left before the end of the step, where the one look is."""

    rank, audit, model = on("meta")
    with (
        pytest.raises(Enough), watched() as waits, closing(model.driver()) as driver,
        driver.step(rank, step=0, audit=audit if audited else None) as step,
    ):  # fmt: skip
        passes(rank, model, step, "meta")
        raise Enough
    assert waits == []


def test_a_step_reads_once_and_its_audit_once_more() -> None:
    rank, audit, model = on("cpu")
    with closing(model.driver()) as driver:
        with watched() as verdict, driver.step(rank, step=0, audit=audit) as step, watched() as body:
            passes(rank, model, step, "cpu")
        with watched() as reading:
            report = audit.report()
    assert body == [] and verdict == ["__bool__", "_local_scalar_dense"]
    assert reading == ["tolist"]
    assert report.pairs == 8 * len(calls(rank)) and report.logprobs.tokens == 2 * 9


def test_a_router_costs_one_operation_more_and_a_pass_eight() -> None:
    """Beside the same routers that choose themselves: a gather in the place of their top-k."""
    more = [added_operations(layers) for layers in (8, 48)]
    assert more == [16 + 8, 16 + 48], "of eight in each pass; one for each router is in the gather's backward"
    assert operations() == {"per_router": 1, "per_microbatch": 16}
