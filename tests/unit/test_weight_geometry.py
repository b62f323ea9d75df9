"""Boxes and splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3channel.errors import ManifestMismatch
from r3channel.weights.geometry import Box, Layout
from tests.reshard_model import chunked


@given(st.integers(0, 40), st.integers(1, 13))
def test_parts_are_those_of_torch_chunk(size: int, parts: int) -> None:
    pieces = torch.arange(size).chunk(parts) if size else ()
    expected = [(int(p[0]), int(p[-1]) + 1) for p in pieces if len(p)]
    layout = chunked((size, 2), 0, [[rank] for rank in range(parts)])
    bounds = list(zip(layout.starts_ND[:, 0].tolist(), layout.stops_ND[:, 0].tolist(), strict=True))
    assert len(bounds) == parts and [b for b in bounds if b[0] < b[1]] == expected


@st.composite
def boxes(draw: st.DrawFn, axes: int) -> Box:
    corners = [sorted((draw(st.integers(0, 6)), draw(st.integers(0, 6)))) for _ in range(axes)]
    return Box(tuple(lo for lo, _ in corners), tuple(hi for _, hi in corners))


@given(st.integers(0, 3).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes))))
def test_an_intersection_holds_the_indexes_that_both_hold(pair: tuple[Box, Box]) -> None:
    shape = (6,) * len(pair[0].start)
    masks = [torch.zeros(shape, dtype=torch.bool) for _ in range(3)]
    for box, mask in zip((*pair, pair[0].intersect(pair[1])), masks, strict=True):
        if box is not None:
            mask[box.within(Box.whole(shape))] = True
    assert torch.equal(masks[0] & masks[1], masks[2])


def test_a_box_outside_its_tensor_is_refused_with_rank_and_shape() -> None:
    with pytest.raises(ManifestMismatch, match=r"rank 3 holds \[0\]\.\.\[9\].*shape \[8\]"):
        Layout.of((8,), [(3, Box((0,), (9,)))])


def test_equal_layouts_are_one_key() -> None:
    one, other = (chunked((8, 4), 0, [[0], [1]]) for _ in range(2))
    assert one == other and len({one, other}) == 1
    assert one != chunked((8, 4), 0, [[2], [3]])
