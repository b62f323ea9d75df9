"""Boxes, splits and rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3channel.errors import PlanInvalid
from r3channel.weights.geometry import Box, Layout, chunk_bounds, grid_boxes, split_box
from r3channel.weights.schedule import partner, round_count, round_of


@given(st.integers(0, 40), st.integers(1, 13))
def test_parts_are_those_of_torch_chunk(size: int, parts: int) -> None:
    pieces = torch.arange(size).chunk(parts) if size else ()
    expected = [(int(p[0]), int(p[-1]) + 1) for p in pieces if len(p)]
    bounds = chunk_bounds(size, parts)
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


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(1, 20))
def test_a_split_box_covers_each_element_once_in_memory_order(shape: list[int], cap: int) -> None:
    numbers = torch.arange(Box.whole(shape).numel).view(shape)
    parts = split_box(Box.whole(shape), max_numel=cap)
    assert all(part.numel <= cap for part in parts)
    seen = [number for part in parts for number in numbers[part.within(Box.whole(shape))].flatten().tolist()]
    assert seen == numbers.flatten().tolist()


def test_a_grid_cuts_every_axis() -> None:
    assert [box.shape for box in grid_boxes((5, 2), (2, 2))] == [(3, 1), (3, 1), (2, 1), (2, 1)]


def test_a_box_outside_its_tensor_is_refused_with_rank_and_shape() -> None:
    with pytest.raises(PlanInvalid, match=r"rank 3 holds \[0\]\.\.\[9\].*shape \[8\]"):
        Layout.of((8,), [(3, Box((0,), (9,)))])


def test_equal_layouts_are_one_key() -> None:
    one, other = (Layout.chunked((8, 4), 0, [[0], [1]]) for _ in range(2))
    assert one == other and len({one, other}) == 1
    assert one != one.shifted(2) and one.shifted(2).ranks_N.tolist() == [2, 3]


@pytest.mark.parametrize("world_size", range(2, 130))
def test_every_pair_meets_once_and_no_rank_twice_in_a_round(world_size: int) -> None:
    met: set[tuple[int, int]] = set()
    for index in range(round_count(world_size)):
        busy = [rank for rank in range(world_size) if partner(rank, index, world_size) is not None]
        assert len(busy) >= world_size - 1
        for rank in busy:
            other = partner(rank, index, world_size)
            assert other is not None and other != rank
            assert partner(other, index, world_size) == rank and round_of(rank, other, world_size) == index
            if rank < other:
                assert (rank, other) not in met
                met.add((rank, other))
    assert len(met) == world_size * (world_size - 1) // 2


def test_a_rank_does_not_meet_itself() -> None:
    with pytest.raises(ValueError, match="two different ranks"):
        round_of(2, 2, 4)
