"""A user's own model code, in small: routers that replay recorded ids. Whatever stands here is what the test guards."""

from __future__ import annotations

import torch

HIDDEN = 16


class Router(torch.nn.Module):
    """Takes the ids that it is given instead of its own top-k, as R3 asks."""

    def __init__(self, layer: int, num_experts: int) -> None:
        super().__init__()
        self.layer, self.gate = layer, torch.nn.Linear(HIDDEN, num_experts)

    def forward(self, hidden_RH: torch.Tensor, replay_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids_RK = replay_RK.long()
        return self.gate(hidden_RH).softmax(-1).gather(1, ids_RK), ids_RK


class Model(torch.nn.Module):
    """An embedding and a router for each MoE layer of this rank."""

    def __init__(self, layers: tuple[int, ...], num_experts: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1 << 16, HIDDEN)
        self.routers = torch.nn.ModuleList(Router(layer, num_experts) for layer in layers)

    def forward(self, tokens, replay, used):
        """`replay(layer)` gives recorded ids; `used(layer, ids)` hears what a router used."""
        rows = len(replay(self.routers[0].layer)) if len(self.routers) else 0
        hidden_RH = self.embed(tokens.T.reshape(-1))[:rows]
        for router in self.routers:
            weights_RK, ids_RK = router(hidden_RH, replay(router.layer))
            used(router.layer, ids_RK)
            hidden_RH = hidden_RH + weights_RK.sum(-1, keepdim=True)
        return hidden_RH


def train(rank) -> None:
    """One step of one rank: every micro-batch through the model."""
    model = Model(rank.layers, rank.step.ticket.spec.num_experts)
    for microbatch in rank.microbatches:
        tokens = torch.from_numpy(rank.tokens(microbatch) % (1 << 16))
        model(
            tokens,
            lambda layer, m=microbatch: torch.from_numpy(rank.rows(m, layer).copy()),
            lambda layer, ids, m=microbatch: rank.record_used(m, layer, ids),
        )
