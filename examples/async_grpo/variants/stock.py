"""Routing the way it is carried without r3channel: int32 over all layers, through Ray, whole to every trainer process.

The steps follow slime at 624b824 (August 2026), written anew: base64 int32 in the reply, `torch.frombuffer`, one
`ray.put` per DP rank, and every process of the rank fetches all rows of all layers and cuts out its own.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from examples.async_grpo.grpo import Request
from r3channel.model.spec import RoutingSpec
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Shard, plan_shards


class DefaultRouting:
    """The rollout manager's side; see rollout.ManagerRouting."""

    def __init__(
        self, args: argparse.Namespace, spec: RoutingSpec, layout: TrainerLayout, clock: StageClock
    ) -> None:
        self.spec, self.layout, self.clock = spec, layout, clock
        clock.keep(args.r3_trace or "", "relay")
        self._ids: dict[str, torch.Tensor] = {}
        self._bytes = {"engine_http": 0.0}
        self._rows = 0

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None:
        if "routed_experts" not in reply["meta_info"]:
            raise RuntimeError(f"{url} sends no routing; start it with --enable-return-routed-experts")

    def join_previous(self) -> None:
        """Nothing is under way: the bytes went with the data."""

    def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
        with self.clock.span("decode"):
            reply = json.loads(body)
            rows = len(request.prompt) + len(reply["output_ids"]) - 1
            raw = bytearray(base64.b64decode(reply["meta_info"]["routed_experts"]))
            ids = torch.frombuffer(raw, dtype=torch.int32)
            self._ids[request.sample_id] = ids.reshape(rows, self.spec.num_layers, self.spec.top_k)
        self._bytes["engine_http"] += len(body)
        self._rows += rows
        return reply

    def discard(self, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            self._ids.pop(sample_id, None)

    def seal(self, step: int, assignment: Assignment, lengths: dict[str, int]) -> list[dict[str, Any]]:
        return [
            {
                "routed_experts": {name: self._ids.pop(name) for batch in rank for name in batch},
                "ranks": assignment.ranks,
                "sample_tokens": lengths,
            }
            for rank in assignment.ranks
        ]

    def control(self, call: str, arguments: dict[str, Any]) -> Any:
        raise RuntimeError(f"control call {call} without --use-r3-channel")

    def report(self) -> dict[str, Any]:
        return {"rows": self._rows, "bytes": self._bytes, "metrics_url": ""}

    def close(self) -> None:
        self._ids.clear()


class DefaultReplay:
    """A trainer's side; see trainer.TrainerRouting. Drives Megatron's RouterReplay by hand."""

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: Sequence[torch.nn.Module],
        manager: Any,
        layout: TrainerLayout,
        clock: StageClock,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router import TopKRouter

        self.layout, self.clock = layout, clock
        clock.keep(args.r3_trace or "", f"trainer{torch.distributed.get_rank()}")
        self.spec = RoutingSpec.from_megatron(
            next(m.config for m in chunks[0].modules() if hasattr(m, "config"))
        )
        self.tp = parallel_state.get_tensor_model_parallel_rank()
        self.routers: list[Any] = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)
        ]
        self._shard: Shard | None = None
        self._data: dict[str, Any] = {}
        self._landed = 0

    def shard(self, data: dict[str, Any], coords: RankCoords) -> Shard:
        tokens = data["sample_tokens"]
        plan = plan_shards(Assignment(data["ranks"]), tokens=tokens, spec=self.spec, layout=self.layout)
        self._shard = plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)
        return self._shard

    def prefetch(self, data: dict[str, Any]) -> None:
        """What there is came with the data."""

    @contextmanager
    def step(self, data: dict[str, Any], *, version: int) -> Iterator[None]:
        self._data = data["routed_experts"]
        self._landed += sum(ids.numel() * 4 for ids in self._data.values())
        yield
        for router in self.routers:
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()

    @contextmanager
    def _replaying(self, index: int, mode: str, chunk: torch.nn.Module) -> Iterator[None]:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

        inside = set(chunk.modules())
        routers = [router for router in self.routers if router in inside]
        for router in routers:
            replay = router.router_replay
            replay.set_target_indices(self._rows(index, router.layer_number - 1))
            replay.set_router_replay_action(Action.REPLAY_FORWARD)
        yield
        for router in routers:
            if mode == "logprob":
                router.router_replay.clear_indices()
            router.router_replay.set_router_replay_action(Action.REPLAY_BACKWARD)

    def microbatch(self, index: int, mode: str, chunk: torch.nn.Module) -> AbstractContextManager[None]:
        return self._natural() if mode == "natural" else self._replaying(index, mode, chunk)

    @contextmanager
    def _natural(self) -> Iterator[None]:
        for router in self.routers:
            router.router_replay.clear_router_replay_action()
        yield

    def _rows(self, index: int, layer: int) -> torch.Tensor:
        """Everything is here; pick this rank's rows, and cycle through the experts where no engine row is."""
        assert self._shard is not None
        sample_R, position_R = self._shard.row_map(index, tp=self.tp)
        experts = torch.arange(len(sample_R) * self.spec.top_k) % self.spec.num_experts
        rows = experts.view(len(sample_R), -1)
        for number, name in enumerate(self._shard.microbatches[index].sample_ids):
            here = sample_R == number
            rows[here] = self._data[name][position_R[here], layer].long()
        return rows

    def loss_mask(self, index: int) -> None:
        """Rows carry no provenance here."""

    def compare_logprobs(self, ours: list[torch.Tensor], off: Any, batches: list[Any]) -> None:
        """No audit without the channel."""

    def report(self) -> dict[str, Any]:
        return {"metrics_url": "", "landed": self._landed, "wire_received": 0}

    metrics = None

    def weight_version(self, version: int) -> None:
        """No metrics without the channel."""

    def close(self) -> None:
        self._data = {}
