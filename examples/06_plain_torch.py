"""Replay without Megatron: a small MoE in plain torch, and the adapter that tells the channel where its routers are.

    python examples/06_plain_torch.py

With several ranks `LAYOUT` has dp=N, and each attaches to its own model (FSDP wraps it; that was not run).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from r3channel import Assignment, RoutingSpec, TrainerLayout
from r3channel.plan.layout import RankCoords
from r3channel.relay import Relay
from r3channel.trainer import TrainerChannel
from r3channel.trainer.router import RouterHandle
from r3channel.wire.frame import encode_frame

WIDTH, SPEC = 32, RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=16, top_k=4)
LAYOUT = TrainerLayout(packing="thd")  # samples one after the other, without padding


def live_topk(scores_RE: torch.Tensor, top_k: int, *_groups: Any) -> Any:
    return scores_RE.topk(top_k)


class Topk:
    """The router's choice in a method of its own: replay puts another one in its place."""

    def get_replay_topk(self, *call: Any) -> Any:
        return live_topk(*call)


class MoE(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, SPEC.num_experts, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(SPEC.num_experts, WIDTH, WIDTH) / WIDTH)
        self.topk = Topk()

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        scores_RE = self.gate(hidden_RH).softmax(-1)
        weights_RK, self.used = self.topk.get_replay_topk(scores_RE, SPEC.top_k, None, None, live_topk)
        return hidden_RH + torch.einsum("rk,rh,rkhj->rj", weights_RK, hidden_RH, self.experts[self.used])


class PlainTorch:
    """See r3channel.trainer.router.Adapter."""

    def spec_from_config(self, chunks: Any) -> RoutingSpec:
        return SPEC

    def parallel_coords(self) -> RankCoords:
        return LAYOUT.coords(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)

    def tp_group(self) -> Any:
        raise NotImplementedError("this model has no tensor parallelism")

    def input_ids(self, ids_R: torch.Tensor) -> torch.Tensor:
        return ids_R

    def routers(self, chunks: Any, layout: TrainerLayout) -> dict[int, RouterHandle]:
        # under torch.utils.checkpoint give recomputed=True: the router then runs again in the backward pass
        found = enumerate(module for module in chunks[0].modules() if isinstance(module, MoE))
        top_k, experts = SPEC.top_k, SPEC.num_experts
        return {
            layer: RouterHandle(layer=layer, module=moe, replay=moe.topk, top_k=top_k, num_experts=experts)
            for layer, moe in found
        }


def captured(tokens: list[int]) -> np.ndarray:
    """What an engine would have captured: distinct ids per row and layer, and no row for the last token."""
    every = np.tile(np.arange(SPEC.num_experts), (len(tokens) - 1, SPEC.num_moe_layers, 1))
    return np.random.default_rng(len(tokens)).permuted(every, axis=2)[..., : SPEC.top_k].astype(SPEC.id_dtype)


def main() -> None:
    torch.manual_seed(0)
    routers = MoE(), MoE()
    model = torch.nn.Sequential(torch.nn.Embedding(1000, WIDTH), *routers, torch.nn.Linear(WIDTH, 1000))
    samples = {name: torch.randint(0, 1000, (length,)).tolist() for name, length in (("a", 20), ("b", 33))}
    with (
        Relay(SPEC, LAYOUT) as relay,
        TrainerChannel.attach([model], relay, layout=LAYOUT, adapter=PlainTorch()) as channel,
    ):
        for name, tokens in samples.items():
            relay.add_frame(name, encode_frame(SPEC, expert_ids_TLK=captured(tokens)), tokens)
        lengths = {name: len(tokens) for name, tokens in samples.items()}
        ticket = relay.seal(0, Assignment.balanced(lengths, dp=1, microbatch_size=2))
        batch = [samples[name] for name in ticket.assignment.ranks[0][0]]
        with channel.step(ticket, tokens=[batch]) as step, step.microbatch(0):
            shard = channel.shard
            assert shard is not None
            ids, _ = shard.model_input(0, batch)
            loss = functional.cross_entropy(model(ids[0]), ids[0].roll(-1), reduction="none")
            (loss * shard.loss_mask(0)[0]).mean().backward()
            samples_R, positions_R = shard.shard.row_map(0, tp=0)
        relay.join_previous()
    different = 0
    for layer, router in enumerate(routers):
        for index, tokens in enumerate(batch):
            rows = samples_R == index
            different += int((router.used[rows].numpy() != captured(tokens)[positions_R[rows], layer]).sum())
    used = sum(each.used.numel() for each in routers)
    print(f"loss {loss.mean():.3f}: {used} ids used, {different} different")
    assert not different


if __name__ == "__main__":
    main()
