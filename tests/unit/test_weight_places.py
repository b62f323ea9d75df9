"""Where a parameter's elements go in the checkpoint: learned from functions that move, refused where they compute, kept."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch

from r3channel.errors import ConfigError
from r3channel.weights.convert import Part, merged_tp, shards_of
from r3channel.weights.geometry import Box

Made = list[torch.Tensor]
ROWS, COLUMNS = 8, 6
NAME = "decoder.layers.3.x.weight"


def qkv(w: torch.Tensor) -> Made:
    """Query and key heads by group, as Megatron interleaves them."""
    groups = w.view(2, -1, 2, COLUMNS)
    return [part.reshape(-1, COLUMNS) for part in groups.split([groups.shape[1] - 1, 1], dim=1)]


MOVES: dict[str, Callable[[torch.Tensor], Made]] = {
    "whole, padded, twice": lambda w: [w, w[: ROWS - 1], torch.stack([w, w])], "qkv": qkv,
    "gate and up by row or column": lambda w: [w[0::2], w[1::2], w[:, 0::2], w[:, 1::2]],
    "halves swapped": lambda w: [torch.cat([w[:, 3:], w[:, :3]], 1), torch.cat([w[4:], w[:4]])],
    "transposed, flat": lambda w: [w.T.contiguous(), w.reshape(-1)],
    "by expert": lambda w: [w.view(4, -1, COLUMNS), w.view(-1, 2, COLUMNS).permute(1, 0, 2)],
    "any order": lambda w: [w[torch.tensor([3, 1, 2, 7, 0, 4, 6, 5])]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "dim"), [("x", 1, 0), ("x", 4, 0), ("x", 2, 1), ("linear_fc1", 2, 0)]
)
@pytest.mark.parametrize("moved", MOVES)
def test_the_shards_of_all_ranks_together_are_what_the_functions_make_of_the_whole(
    moved: str, kind: str, size: int, dim: int
) -> None:
    name, values = f"decoder.layers.3.{kind}.weight", [torch.randn(ROWS, COLUMNS) for _ in range(size)]
    truth = MOVES[moved](values[0] if size == 1 else merged_tp(name, values, dim))
    made, convert = [torch.zeros_like(tensor) for tensor in truth], MOVES[moved]
    for rank, value in enumerate(values):
        part = Part(name, value, dim if size > 1 else -1, rank, size)
        for shard in shards_of([part], merged_tp, lambda _, w: zip("012345", convert(w), strict=False)):
            made[int(shard.meta.name)][shard.box.within(Box.whole(shard.meta.shape))] += shard.tensor
    assert all(map(torch.equal, made, truth))


MIXED = torch.randperm(9000)


@pytest.mark.parametrize(("made", "word"), [
    (lambda w: w + 1, "computed"), (lambda w: 2 * w, "computed"), (lambda w: w.to(torch.bfloat16), "computed"),
    (lambda w: torch.nn.functional.pad(w, (0, 1)), "computed"), (lambda w: w[:, torch.randperm(9000)], "computed"),
    (lambda w: w[:, MIXED], "regrouped"), (lambda w: w.reshape(-1).roll(1).view(w.shape), "regrouped"),
])  # fmt: skip
def test_what_is_not_moved_box_by_box_is_refused_by_name(
    made: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    with pytest.raises(ConfigError, match=f"{NAME} is {word}"):
        shards_of([Part(NAME, torch.zeros(4, 9000), -1, 0, 1)], merged_tp, lambda n, w: [(n, made(w))])


def test_an_embedding_of_600_million_elements_takes_no_memory_and_is_learned_once_by_an_owner() -> None:
    """Each element's index would be 5 GB. Other memory of the same shape needs no learning, another shape does."""
    learned, owner = list[torch.Size](), torch.nn.Module()

    def convert(name: str, w: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        learned.extend([] if w.is_meta else [w.shape])
        return [(name, w[:151_900])]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rows, times in ((37_984, 3), (37_984, 3), (8, 6), (37_984, 6)):
        part = Part(NAME, torch.zeros(rows, 4096, device="meta"), 0, 1, 4)
        (shard,) = shards_of([part], merged_tp, convert, owner=owner)
        assert len(learned) == times and shard.box.start == (rows, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
    moved = torch.ones(8, 4096)
    (shard,) = shards_of([Part(NAME, moved, 0, 1, 4)], merged_tp, convert, owner=owner)
    assert len(learned) == 6 and shard.tensor.data_ptr() == moved.data_ptr()
