"""A replay step on a router that does as Megatron's does, without Megatron: which ids wait for which recompute, what it costs.

A step waits for the device where it says so, and nowhere else; the audit adds one read at its end. No GPU is needed: on `meta`
tensors there is no value to read, and on CPU tensors every read is counted as it is asked for. At the end are the audit's
sums: what differs, what is sampled, how ranks add up, what reaches the metrics.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from examples.embedded.bench.operations import Operations
from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, DigestMismatch, ReplayError, TransportError, UsageError
from r3channel.observe.metrics import Metrics
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.adapters.megatron_schedule import with_replay
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.mismatch import LayerMismatch, LogprobDifference, MismatchReport, RoutingAudit, publish
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.replay import ReplayDriver
from r3channel.trainer.router import RouterHandle
from tests.engine.host_copies import HostCopies
from tests.support.samples import sparse
from tests.unit.test_rank_shard import calls, two_samples

ROWS, EXPERTS, TOP_K = 4, 8, 2
SPEC = sparse(1, experts=EXPERTS, top_k=TOP_K)


class Replay:
    """The part of Megatron-core's RouterReplay that is used."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return compute(scores, topk, num_groups, group_topk)


def live_topk(scores: torch.Tensor, topk: int, *_groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores.topk(topk, dim=1)
    return values, ids


class Router(torch.nn.Module):
    """Keeps the ids that it used."""

    def __init__(self, experts: int = EXPERTS, top_k: int = TOP_K) -> None:
        super().__init__()
        self.weight, self.top_k = torch.nn.Parameter(torch.eye(experts)), top_k
        self.replay = Replay()
        self._used: list[torch.Tensor] = []

    @property
    def used(self) -> list[list[list[int]]]:
        return [ids.tolist() for ids in self._used]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        values, ids = self.replay.get_replay_topk(input @ self.weight, self.top_k, None, None, live_topk)
        self._used.append(ids)
        return values


def handle(module: Router, layer: int = 0) -> RouterHandle:
    top_k, experts = module.top_k, len(module.weight)
    return RouterHandle(
        layer=layer, module=module, replay=module.replay, top_k=top_k, num_experts=experts, recomputed=True
    )


class Model(torch.nn.Module):
    """One router, recomputed as Megatron's full recompute does it: its first run has no gradients."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        self.router, self.wrap = Router(), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(checkpoint(self.router, x, use_reentrant=True))


class Routing:
    """Micro-batch m replays experts 2m and 2m + 1; the live router chooses for the first row."""

    num_microbatches, looks = 2, 0
    refused: DigestMismatch | None = None

    def __init__(self, *, live: bool = True) -> None:
        self.live, self.given = live, list[tuple[int, int, torch.Tensor]]()

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        return torch.tensor([[2 * microbatch, 2 * microbatch + 1]] * ROWS, dtype=torch.uint8)

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        return torch.arange(ROWS) == 0 if self.live else None

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        return torch.zeros(ROWS, dtype=torch.bool)

    def check_digest(
        self, microbatch: int, layer: int, ids_RK: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        self.given.append((microbatch, layer, ids_RK.clone()))
        if self.refused is not None:
            raise self.refused
        return ids_RK.to(dtype)

    def verify(self) -> None:
        self.looks += 1


def rows(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def driver_on(model: Model) -> ReplayDriver:
    return ReplayDriver({0: handle(model.router)}, [model], spec=SPEC)


@contextmanager
def replaying(model: Model, routing: Routing) -> Iterator[Any]:
    """A step."""
    with closing(driver_on(model)) as driver, driver.step(routing, step=0) as step:
        yield step


def test_a_logprob_pass_before_a_backward_leaves_the_waiting_ids_alone() -> None:
    model = Model()
    with replaying(model, Routing()) as step:
        for index in range(2):
            with step.microbatch(index):
                output = model(rows(index))
            with torch.no_grad(), step.microbatch(1 - index, mode="logprob"):
                model(rows(1 - index))
            forward = model.router.used[-2]
            output.sum().backward()
            assert model.router.used[-1] == forward, f"recompute of {index} took other ids than its forward"


@pytest.mark.parametrize(
    ("wrap", "loss_of"),
    [
        (lambda output: output, lambda output: output.sum()),
        (lambda output: {"logits": output}, lambda output: output["logits"].sum()),
        (lambda output: (None, [output]), lambda output: output[1][0].sum()),
    ],
    ids=["tensor", "mapping", "nested"],
)
def test_backward_passes_in_any_order_take_their_own_ids(wrap: Any, loss_of: Any) -> None:
    model = Model(wrap)
    with replaying(model, Routing(live=False)) as step:
        losses = []
        for index in range(2):
            with step.microbatch(index):
                losses.append(loss_of(model(rows(index))))
        forward = model.router.used
        (losses[0] + losses[1]).backward()  # the newest first
        assert model.router.used[2:] == forward[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_taken_out_of_counts_that_are_large(dtype: torch.dtype) -> None:
    model, routing, counts = Model(), Routing(live=False), torch.full((EXPERTS,), 512, dtype=dtype)
    setattr(routing, "padding_rows", lambda _: torch.ones(ROWS, dtype=torch.bool))  # noqa: B010
    own = {0: replace(handle(model.router), counts=lambda: counts)}
    with closing(ReplayDriver(own, [model], spec=SPEC)) as driver, driver.step(routing, step=0) as step:
        for index in range(2):
            with step.microbatch(index):
                output = model(rows(index))
            output.sum().backward()
    assert counts.tolist() == [512 - ROWS] * 4 + [512] * 4


def test_an_output_whose_backward_would_begin_unnoticed_is_refused() -> None:
    model = Model(lambda output: lambda: output)
    refused = pytest.raises(UsageError, match="chunk 0 returned a function")
    with refused, replaying(model, Routing()) as step, step.microbatch(0):
        model(rows(0))


def test_ids_are_looked_at_before_a_router_uses_them_and_what_was_noted_before_the_step_ends() -> None:
    model, routing = Model(), Routing(live=False)
    with replaying(model, routing) as step:
        for index in range(2):
            with step.microbatch(index):
                model(rows(index)).sum().backward()
        assert routing.looks == 0
    assert routing.looks == 1
    assert [(index, layer) for index, layer, _ in routing.given] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert [ids.tolist() for _, _, ids in routing.given] == model.router.used


@pytest.mark.parametrize("refused_in", ["forward", "recompute"])
def test_a_router_does_not_run_on_ids_that_are_not_the_engines(refused_in: str) -> None:
    model, routing = Model(), Routing(live=False)
    refusal = DigestMismatch("rows were exchanged", samples=["a"], step=0)
    with pytest.raises(DigestMismatch, match="exchanged"), replaying(model, routing) as step:
        routing.refused = refusal if refused_in == "forward" else None
        with step.microbatch(0):
            output = model(rows(0))
        routing.refused = refusal  # a byte has changed since
        output.sum().backward()
    assert len(model.router.used) == (refused_in == "recompute")


class Nowhere:
    """A relay's control whose relay has left: nobody listens where it says."""

    def hello(self, **_where: int) -> dict[str, Any]:
        with socket.socket() as gone:
            gone.bind(("127.0.0.1", 0))
            port = gone.getsockname()[1]
            return {"host": "127.0.0.1", "port": port, "token": "00" * 32, "run": "run"}


def test_an_attach_that_cannot_join_or_serve_its_page_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model, control, layout = Model(), Nowhere(), TrainerLayout()
    monkeypatch.setattr(ReplayDriver, "attach", lambda chunks, **_: driver_on(chunks[0]))
    monkeypatch.setattr(megatron, "spec_from_config", lambda _chunks: SPEC)
    monkeypatch.setattr(megatron, "parallel_coords", lambda: layout.coords(0))
    with closing(Metrics("relay")) as page:
        for port, error in (
            (-1, TransportError),
            (page.serve() - 1, ConfigError),
        ):  # taken: rank 0 serves at 1 more
            config = ChannelConfig(join_timeout_s=0.01, metrics_port=port)
            with pytest.raises(error):
                TrainerChannel.attach([model], control, layout=layout, config=config)
            assert not model._forward_hooks and not vars(model.router.replay)


# -- Megatron's schedule with a step in it: contexts by the iterator's own count, and a check before the optimizer ------------


class Seen:
    """A step that says what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.wrong = False

    @contextmanager
    def microbatch(self, index: int, *, mode: str, chunk: Any) -> Iterator[None]:
        self.seen.append((index, mode, chunk))
        yield

    def verify_rows(self) -> None:
        self.seen.append("verified")
        if self.wrong:
            raise DigestMismatch("other rows")


class Batches:
    offset = 4


def forward_step(batches: Batches, chunk: str) -> str:
    batches.offset += 1
    return chunk


def interleaved(*, forward_step_func: Any, forward_only: bool, data_iterator: list[Batches]) -> list[str]:
    """Interleaves two chunks, each with an iterator of its own."""
    return [forward_step_func(data_iterator[chunk], f"chunk {chunk}") for chunk in (0, 1, 1, 0)]


@pytest.mark.parametrize("forward_only, mode", [(True, "logprob"), (False, "train")])
def test_each_chunk_counts_by_its_own_iterator_and_wrong_rows_are_raised(
    forward_only: bool, mode: str
) -> None:
    step: Any = Seen()
    schedule = partial(with_replay(interleaved, lambda: step), forward_step_func=forward_step)
    run = partial(schedule, forward_only=forward_only, data_iterator=[Batches(), Batches()])
    assert run() == ["chunk 0", "chunk 1", "chunk 1", "chunk 0"]
    order = [(4, mode, "chunk 0"), (4, mode, "chunk 1"), (5, mode, "chunk 1"), (5, mode, "chunk 0")]
    assert step.seen == [*order, "verified"]
    step.wrong = True
    with pytest.raises(DigestMismatch):
        run()
    outside = with_replay(interleaved, lambda: None)
    assert outside(forward_step_func=forward_step, data_iterator=[Batches(), Batches()])[0] == "chunk 0"


# -- what a step costs: when it waits for the device, and how many operations it is given ---------------------------------

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


def driver_of(model: Layers, rank: RankShard) -> closing[ReplayDriver]:
    routers = [router for router in model.routers if isinstance(router, Router)]
    handles = {layer: handle(router, layer) for layer, router in zip(rank.shard.layers, routers, strict=True)}
    return closing(ReplayDriver(handles, [model], spec=rank.shard.spec))


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
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    rank, audit, model = on("meta")
    with (
        pytest.raises(InterruptedError), watched() as waits, driver_of(model, rank) as driver,
        driver.step(rank, step=0, audit=audit if audited else None) as step,
    ):  # fmt: skip
        passes(rank, model, step, "meta")
        raise InterruptedError  # before the end of the step, where the one look is
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


# -- the audit ------------------------------------------------------------------------------------------------------------

NATURAL = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
COUNTED = torch.arange(4) < 3
REPLAYED = torch.tensor([[1, 0], [2, 9], [8, 9], [0, 1]])  # same set, half, disjoint, not counted


def audit(
    counted_R: torch.Tensor = COUNTED, *, step: int = 0, microbatches: int = 1, count: int = 1
) -> RoutingAudit:
    return RoutingAudit(step=step, microbatches=microbatches, count=count, counted_rows=lambda _: counted_R)


def audited(audit: RoutingAudit, *layers: tuple[int, torch.Tensor, torch.Tensor]) -> MismatchReport:
    """What is said of (layer, the router's own choice, what it replayed)."""
    for layer, natural_RK, replayed_RK in layers:
        observer = audit.observer(layer, 0)
        assert observer is not None and audit.observer(layer, 0) is None, "the first pass only"
        observer(natural_RK, replayed_RK)
    return audit.report()


def report() -> MismatchReport:
    return audited(audit(), (3, NATURAL, REPLAYED), (5, NATURAL, NATURAL))


def test_choices_that_have_nothing_to_do_with_each_other_are_at_chance() -> None:
    def of(rows: int, replayed_RK: torch.Tensor) -> MismatchReport:
        own = audit(torch.ones(rows, dtype=torch.bool))
        return audited(own, (3, choices[:rows], replayed_RK[:rows]))

    torch.manual_seed(0)
    choices, others = (torch.rand(1200, 128).topk(8).indices for _ in range(2))
    assert of(1200, others).is_at(8 / 128)
    assert not of(900, others).is_at(8 / 128)  # too few to tell
    half = torch.where(torch.arange(1200)[:, None] % 4 == 0, choices, others)
    assert not of(1200, half).is_at(8 / 128)
    assert not of(1200, others).is_at(0.5)  # of 16 experts 8: chance itself is agreement


def test_tokens_count_once_however_many_layers_differ_but_for_the_order_or_in_padding() -> None:
    found = report()
    assert found.layers[0] == LayerMismatch(3, rows=3, different=2, overlap=1.5, disjoint=1)
    assert (found.tokens, found.tokens_different, found.pairs) == (3, 2, 6)
    assert math.isclose(found.different_fraction, 2 / 6) and math.isclose(found.mean_overlap, 4.5 / 6)


def test_other_micro_batches_are_audited_in_each_step() -> None:
    chosen = [audit(step=step, microbatches=5, count=2).chosen for step in range(5)]
    assert {index for pair in chosen for index in pair} == set(range(5)) and all(len(p) == 2 for p in chosen)
    assert audit(step=9, microbatches=2, count=5).chosen == (0, 1)
    assert audit(step=9, microbatches=2, count=0).chosen == ()


def test_log_prob_differences_are_those_of_response_tokens() -> None:
    own = audit()
    ours, engine = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.5, -math.inf]])
    own.add_logprobs(ours[:, :1], engine[:, :1], torch.ones(1, 1))
    own.add_logprobs(ours[:, 1:], engine[:, 1:], torch.tensor([[1.0, 0.0]]))
    sums = own.report().logprobs
    assert sums.tokens == 2 and math.isclose(sums.absolute, 1.0) and math.isclose(sums.k1, 0.0)
    assert math.isclose(sums.k3, math.exp(0.5) + math.exp(-0.5) - 2, rel_tol=1e-6)


def test_the_report_reaches_the_metrics_by_layer() -> None:
    metrics = Metrics("trainer")
    found = report()
    found.logprobs = LogprobDifference(tokens=1, absolute=0.5, k1=-0.5, k3=0.15)
    publish(found, metrics)
    totals = {"pairs": 6, "pairs_different": 2, "pairs_disjoint": 1, "tokens_different": 2}
    assert {name: metrics.value(f"r3channel_audit_{name}_total") for name in totals} == totals
    assert metrics.value("r3channel_audit_layer_overlap", layer="3") == 0.5
    assert metrics.value("r3channel_audit_layer_different", layer="5") == 0.0
    assert metrics.value("r3channel_audit_logprob_abs_diff") == 0.5
