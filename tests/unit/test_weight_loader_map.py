"""What a loader may do and be replayed: views, joins, copies, what is derived at the end. All else is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
import torch

from r3channel.weights.geometry import Box
from r3channel.weights.loader_map import Learned, derive, learn
from r3channel.weights.manifest import TensorMeta

Load = Callable[["Fused", Iterable[tuple[str, torch.Tensor]]], object]
HIDDEN = 4


class Fused(torch.nn.Module):
    """Gate and up in one parameter, as engines keep them."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.arange(2.0 * HIDDEN * HIDDEN).view(2 * HIDDEN, HIDDEN))
        self.scale = torch.ones(1)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load(self, weights)

    def post_load_weights(self, factor: float) -> None:
        self.scale.copy_(factor * self.w13.detach().sum())


def place(model: Fused, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        model.w13.data.narrow(0, HIDDEN * (name == "up"), HIDDEN).copy_(tensor)


SOMETHING = "writes w13 from something that is not the checkpoint"
REFUSED: dict[str, tuple[Load, str]] = {
    "doubled": (lambda m, w: place(m, ((n, 2 * t) for n, t in w)), "from something that is not the checkpoint|no parameter"),
    "joined of other": (lambda m, w: m.w13.data.copy_(torch.cat([2 * t for _, t in w])), "is computed"),
    "joined and changed": (lambda m, w: m.w13.data.copy_(torch.cat([t for _, t in w]).mul_(2)), "writes w13 from something"),
    "joined and cut": (lambda m, w: m.w13.data[:1].copy_(torch.cat([t for _, t in w])[:1]), "a part of what it joins"),
    "written in place": (lambda m, w: [place(m, w), m.w13.data.mul_(2)], SOMETHING),
    "written as output": (lambda m, w: [place(m, w), torch.add(0 * m.w13.detach(), 1.0, out=m.w13.data)], SOMETHING),
    "changed first": (lambda m, w: place(m, ((n, t.mul_(2)) for n, t in w)), "mul_.* writes its own memory"),
    "replaced": (lambda m, w: [place(m, w), m.register_parameter("w13", torch.nn.Parameter(0 * m.w13))], "replaces parameters"),
    "derived": (lambda m, w: [place(m, w), vars(m).update(scale=torch.full((1,), 3.0))], "derives other tensors"),
    "looked at": (lambda m, w: place(m, ((n, t) for n, t in w if t.sum().item())), "does more than copy"),
    "twice": (lambda m, w: place(m, [*(given := [*w]), *given[:1]]), "w13 is written more than once"),
}  # fmt: skip


def learned(model: Fused, metas: list[TensorMeta]) -> Learned:
    return learn(model, tuple(metas), Learned())


METAS = [TensorMeta.of(name, torch.empty(HIDDEN, HIDDEN)) for name in ("gate", "up")]


def joined(model: Fused, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Each row first, then the rows. As MLA's loaders, it has the model derive what is no parameter."""
    rows = [torch.cat([tensor[:, :1], tensor[:, 1:]], dim=-1) for _, tensor in weights]
    model.w13.data.copy_(torch.cat(rows))
    model.post_load_weights(factor=3.0)


def test_what_a_loader_joins_is_placed_piece_by_piece_and_what_it_derives_is_made_again_afterwards() -> None:
    model = Fused(joined)
    found = learned(model, METAS)
    given, flat = torch.randn(2, HIDDEN, HIDDEN), torch.zeros(2 * HIDDEN * HIDDEN)
    for part in found.needs.parts:
        part.view(flat).add_(given[part.tensor][part.box.slices_in(Box.whole((HIDDEN, HIDDEN)))])
    assert not found.refused and not found.needs.missing and torch.equal(flat, given.flatten())

    assert model.scale.item() == 1
    model.w13.data.fill_(2.0)
    derive(model, found)
    assert model.scale.item() == 3 * model.w13.sum()
    model.extra = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    assert "from quantised ones" in learned(model, METAS).refused


def padded(model: Fused, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The last row of each half is padding."""
    for name, tensor in weights:
        half = model.w13.data.narrow(0, HIDDEN * (name == "up"), HIDDEN)
        half.narrow(0, HIDDEN - 1, 1).zero_()
        half.narrow(0, 0, HIDDEN - 1).copy_(tensor)


def emptied_first(model: Fused, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    model.w13.data.zero_()
    padded(model, weights)


SHORT = [TensorMeta.of(name, torch.empty(HIDDEN - 1, HIDDEN)) for name in ("gate", "up")]


def test_padding_that_does_not_hold_its_constant_is_noted_and_not_filled() -> None:
    model = Fused(padded)
    before = model.w13.detach().clone()
    needs = learned(model, SHORT).needs
    assert not needs.missing and torch.equal(model.w13, before)
    copy = before.flatten()
    for place, constant in needs.padding:
        place.view(copy).fill_(constant)
    rows = copy.view(2, HIDDEN, HIDDEN)
    assert not rows[:, -1].any() and torch.equal(rows[:, :-1], before.view(2, HIDDEN, HIDDEN)[:, :-1])
    model.w13.data.copy_(copy.view_as(model.w13))
    again = learned(model, SHORT).needs
    assert again.padding == () and not again.missing


def test_what_a_loader_empties_before_it_places_a_tensor_there_is_not_emptied_afterwards() -> None:
    needs = learned(Fused(emptied_first), SHORT).needs
    assert not needs.missing and len(needs.padding) == 2


@pytest.mark.parametrize(("load", "why"), REFUSED.values(), ids=REFUSED)
def test_a_loader_that_does_more_is_refused_and_nothing_is_written(load: Load, why: str) -> None:
    model = Fused(load)
    kept = model.w13
    before = kept.detach().clone()
    found = learned(model, METAS)
    assert re.search(why, found.refused) and torch.equal(kept, before)
    assert [(part.tensor, part.param) for part in found.needs.parts] == [(0, 0), (1, 1)], "whole"
