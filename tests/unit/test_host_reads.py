"""A replayed step waits for the device where it says so, and nowhere else; the audit adds one read at its end.

No GPU is needed: on `meta` tensors there is no value to read, and on CPU tensors every read is counted as it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from examples.embedded.bench.operations import Operations
from r3channel.errors import ReplayError
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.replay import ReplayDriver
from tests.engine.host_copies import HostCopies
from tests.unit.test_rank_shard import calls, two_samples
from tests.unit.test_replay_step import Router, handle

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


class Layers(torch.nn.Module):
    """A router per layer of the shard, each recomputed in the backward pass."""

    def __init__(self, rank: RankShard) -> None:
        super().__init__()
        spec = rank.shard.spec
        self.routers = torch.nn.ModuleList([Router(spec.num_experts, spec.top_k) for _ in rank.shard.layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(checkpoint(router, x, use_reentrant=True).sum() for router in self.routers)  # type: ignore[return-value]


def on(device: str, layers: int = 2) -> tuple[RankShard, RoutingAudit, Layers]:
    """A shard as it lies on a GPU: what is found there is noted, and read at the end."""
    rank = two_samples(layers)
    expected_SL = rank.digests._expected_SL
    assert expected_SL is not None
    rank = RankShard(rank.ticket, rank.shard, rank.data_N.to(device), tp=0, digests_SL=expected_SL.to(device))
    rank.digests._host_SL = None
    audit = RoutingAudit(step=0, microbatches=rank.num_microbatches, count=2, counted_rows=rank.counted_rows)
    return rank, audit, Layers(rank).to(device)


@contextmanager
def driver_of(model: Layers, rank: RankShard) -> Iterator[ReplayDriver]:
    routers = [router for router in model.routers if isinstance(router, Router)]
    handles = {layer: handle(router, layer) for layer, router in zip(rank.shard.layers, routers, strict=True)}
    driver = ReplayDriver(handles, [model], spec=rank.shard.spec)
    yield driver
    driver.close()


def passes(rank: RankShard, model: Layers, step: Any, device: str) -> None:
    for index in range(rank.num_microbatches):
        rows = len(rank.layer_ids(index, rank.shard.layers[0]))
        x = torch.randn(rows, rank.shard.spec.num_experts, device=device, requires_grad=True)
        with torch.no_grad(), step.microbatch(index, mode="logprob"):
            model(x)
        step.compare_logprobs(index, x[:, :1], x[:, 1:2], torch.ones(rows, 1, device=device))
        with step.microbatch(index):
            loss = model(x)
        loss.backward()


def pinned(host: torch.Tensor) -> torch.Tensor:
    """Nothing can be pinned without a GPU: what would be is marked."""
    copy = host.clone()
    copy.is_pinned = lambda: True  # type: ignore[method-assign]
    return copy


def test_an_upload_from_pageable_memory_is_seen() -> None:
    with watched() as waits:
        torch.zeros(3).to("meta", non_blocking=True)
        torch.zeros(3, device="meta").copy_(torch.zeros(3), non_blocking=True)
    assert waits == ["_to_copy", "copy_"]


@pytest.mark.parametrize("audited", [True, False], ids=["audit", "no audit"])
def test_no_pass_of_a_step_waits_for_the_device(audited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        """Left before the end of the step, where the one look is."""

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    rank, audit, model = on("meta")
    with (
        pytest.raises(Enough), watched() as waits, driver_of(model, rank) as driver,
        driver.step(rank, step=0, audit=audit if audited else None) as step,
    ):  # fmt: skip
        passes(rank, model, step, "meta")
        raise Enough
    assert waits == []


def test_a_step_reads_once_and_its_audit_once_more() -> None:
    rank, audit, model = on("cpu")
    with driver_of(model, rank) as driver:
        with watched() as verdict, driver.step(rank, step=0, audit=audit) as step, watched() as body:
            passes(rank, model, step, "cpu")
        with watched() as reading:
            report = audit.report()
    assert body == [] and verdict == ["__bool__", "_local_scalar_dense"]
    assert reading == ["tolist"]
    assert report.pairs == 8 * len(calls(rank)) and report.logprobs.tokens == 2 * 9


def operations_of(rank: RankShard, model: Layers, step: Any) -> int:
    """What the device is given in one forward pass, its recompute and backward."""
    spec = rank.shard.spec
    x = torch.randn(len(rank.layer_ids(0, 0)), spec.num_experts, requires_grad=True)
    with Operations() as operations:
        with nullcontext() if step is None else step.microbatch(0):
            loss = model(x)
        loss.backward()
    return len(operations.names)


def test_a_router_costs_one_operation_more_and_a_pass_eight() -> None:
    """Beside the same routers that choose themselves: a gather in the place of their top-k."""
    more = []
    for layers in (8, 48):
        rank, _, model = on("cpu", layers)
        with driver_of(model, rank) as driver:
            alone = operations_of(rank, model, None)
            with suppress(ReplayError), driver.step(rank, step=0) as step:
                more.append(operations_of(rank, model, step) - alone)
    assert more == [16 + 8, 16 + 48], "of eight in each pass; one for each router is in the gather's backward"
