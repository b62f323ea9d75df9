"""What replay asks of a device and of Python: operations counted, not timed, on a stack of routers that do as Megatron's do.

On a CPU, in the way that a GPU takes: all layers of a micro-batch are widened at once, and what differs is noted, not raised.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from r3channel.bench.harness import medians_s
from r3channel.bench.wire import generate
from r3channel.model.presets import Model
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.trainer.router import RouterHandle
from r3channel.trainer.step import index_dtype
from r3channel.wire.digest import layer_digests

_EXPERTS, _TOP_K, _TOKENS = 128, 8, 65
_FEW, _MANY = 8, 48
"""Layers of the two stacks whose difference is what one router costs."""
_MICROBATCHES = 16
"""Micro-batches of the step in which a call is timed."""


class Operations(TorchDispatchMode):
    """Lists the operations that are given to a device inside the block, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, call: Any, _types: Any, given: Any = (), named: Any = None) -> Any:
        views = [one.alias_info is not None and not one.alias_info.is_write for one in call._schema.returns]
        self.names += [call.name()] if not any(views) else []
        return call(*given, **(named or {}))


class Replay:
    """The part of Megatron-core's RouterReplay that replay uses."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return compute(scores, topk, num_groups, group_topk)


def _live_topk(scores: torch.Tensor, topk: int, *_groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores.topk(topk, dim=1)
    return values, ids


class Router(torch.nn.Module):
    """Scores its input and chooses."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.weight, self.top_k = torch.nn.Parameter(torch.eye(experts)), top_k
        self.replay = Replay()

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' scores and ids, each [rows, K]."""
        return self.replay.get_replay_topk(scores, self.top_k, None, None, _live_topk)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.choose(input @ self.weight)[0]

    def handle(self, layer: int = 0) -> RouterHandle:
        return RouterHandle(
            layer=layer, module=self, replay=self.replay, top_k=self.top_k, num_experts=len(self.weight), recomputed=True
        )  # fmt: skip


class Stack(torch.nn.Module):
    """A router for each MoE layer of a shard, recomputed in the backward pass."""

    def __init__(self, rank: RankShard) -> None:
        super().__init__()
        self._spec, self._layers = rank.shard.spec, rank.shard.layers
        self.routers = [Router(self._spec.num_experts, self._spec.top_k) for _ in self._layers]
        self._held = torch.nn.ModuleList(self.routers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(checkpoint(router, x, use_reentrant=True).sum() for router in self.routers)  # type: ignore[return-value]

    def driver(self) -> ReplayDriver:
        """Return replay for these routers; to be closed."""
        pairs = zip(self._layers, self.routers, strict=True)
        return ReplayDriver({layer: router.handle(layer) for layer, router in pairs}, [self], spec=self._spec)

    def rows(self, rank: RankShard, microbatch: int, device: str = "cpu") -> torch.Tensor:
        """Return random input [rows, E] of a micro-batch."""
        rows = len(rank.layer_ids(microbatch, self._layers[0]))
        return torch.randn(rows, self._spec.num_experts, device=device, requires_grad=True)


def rank_of(layers: int, microbatches: int = 1) -> RankShard:
    """Return rows with the digests of an engine, a sample for each micro-batch, as they lie on a GPU."""
    spec = RoutingSpec(num_layers=layers, moe_layers=tuple(range(layers)), num_experts=_EXPERTS, top_k=_TOP_K)
    names = [f"sample-{number}" for number in range(microbatches)]
    assignment, samples = (
        Assignment.given([[[n] for n in names]]),
        [TicketSample(n, _TOKENS, 0, 0, ()) for n in names],
    )
    ticket = Ticket("bench", 1, spec, TrainerLayout(), assignment, samples, 1 << 20)
    ids_TLK = generate(Model("stack", layers, _EXPERTS, _TOP_K, ""), regime="U", rows=_TOKENS - 1)
    (shard,) = ticket.plan.shards
    rows_N = torch.from_numpy(place_samples(ticket.plan, dp=0, ids_of=lambda _: ids_TLK)[shard.key])
    digests_L = torch.from_numpy(layer_digests(ids_TLK, first_row=0).view("i8"))
    rank = RankShard(ticket, shard, rows_N, tp=0, digests_SL=digests_L.repeat(microbatches, 1))
    rank.digests._host_SL = None  # a difference is noted, and read at the end of the step
    return rank


def added_operations(layers: int) -> int:
    """Return what replay adds to one micro-batch's forward pass, its recompute and backward, beside routers that choose."""
    rank = rank_of(layers)
    stack = Stack(rank)
    with closing(stack.driver()) as driver:
        alone = _operations_of(stack, rank, None)
        with driver.step(rank, step=0) as step:
            return _operations_of(stack, rank, step) - alone


def _operations_of(stack: Stack, rank: RankShard, step: ReplayStep | None) -> int:
    x = stack.rows(rank, 0)
    index_dtype(x.device)  # which a device is asked once in its life
    with Operations() as operations:
        with nullcontext() if step is None else step.microbatch(0):
            loss = stack(x)
        loss.backward()
    return len(operations.names)


def operations() -> dict[str, float]:
    """Return what replay adds to each router and to each micro-batch, forward pass, recompute and backward together."""
    few, many = added_operations(_FEW), added_operations(_MANY)
    per_router = (many - few) / (_MANY - _FEW)
    return {"per_router": per_router, "per_microbatch": many - _MANY * per_router}


def call_cpu_us(rounds: int) -> dict[str, float]:
    """Return CPU microseconds of a router's call that replays, with its share of pass and step, and of one that chooses."""
    rank = rank_of(_MANY, _MICROBATCHES)
    stack = Stack(rank)
    scores_RE = stack.rows(rank, 0).detach()

    def passes(step: ReplayStep | None = None) -> None:
        for index in range(_MICROBATCHES):
            with nullcontext() if step is None else step.microbatch(index, mode="logprob"):
                for router in stack.routers:
                    router.choose(scores_RE)

    def replayed() -> None:
        with driver.step(rank, step=0) as step:
            passes(step)

    with torch.no_grad(), closing(stack.driver()) as driver:
        seconds = medians_s({"replayed": replayed, "chosen": passes}, rounds=rounds)
    return {name: 1e6 * each_s / (_MANY * _MICROBATCHES) for name, each_s in seconds.items()}
