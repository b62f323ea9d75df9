"""What a trainer sends to each rank of each engine so that the ranks' staged copies become whole. No HTTP, no transaction.

`WholeStages`: one trainer has every tensor whole, bucket by bucket, and cuts out what a rank needs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.deadline import Deadline
from r3channel.weights.dryrun import Part
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import Manifest, TensorMeta
from r3channel.weights.ranklink import Door, RankLink
from r3channel.weights.staging import Entry

_SHOWN = 3


class Stages(Protocol):
    """What goes over the links of a session."""

    def plan(self, manifest: Manifest) -> None: ...

    def order(self, engine: str) -> dict[str, Any]: ...

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]: ...

    def check(self, ranks: Sequence[RankLink], *, names: bool) -> tuple[dict[str, str], tuple[str, ...]]: ...

    def send(
        self, rank: RankLink, number: int, named: Mapping[str, torch.Tensor], version: int, left_s: float
    ) -> None: ...


class WholeStages:
    """Of one session. Threads may send to different ranks at once."""

    def __init__(self, door: Door, staged: bool | str) -> None:
        self._door, self._staged = door, "auto" if staged == "auto" else "yes"
        self._metas: tuple[TensorMeta, ...] = ()
        self._ends: list[int] = []
        """Of each bucket: tensors up to its end."""
        self._firsts: dict[RankLink, list[int]] = {}

    def plan(self, manifest: Manifest) -> None:
        """What will be sent; equal to the last plan in all but the first call."""
        self._metas = tuple(meta for bucket in manifest.buckets for meta in bucket.tensors)
        self._ends = list(itertools.accumulate(len(bucket.tensors) for bucket in manifest.buckets))

    def order(self, engine: str) -> dict[str, Any]:
        """To an engine that is to open its links."""
        trainers = [self._door.listen()]
        return self._door.order(
            "open", engine=engine, tensors=self._metas, trainers=trainers, staged=self._staged
        )

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]:
        """The links of engines (url -> ranks) that have opened; each has been told the pieces that will come."""
        found = self._door.accept(wanted, deadline)
        for rank in itertools.chain(*found.values()):
            self._tell(rank, timeout_s=deadline.left_s())
        return found

    def check(self, ranks: Sequence[RankLink], *, names: bool) -> tuple[dict[str, str], tuple[str, ...]]:
        """(tensors kept in another dtype, tensors without a place); ManifestMismatch when `names` and parameters are missing."""
        return check_complete(ranks, self._metas, names=names)

    def _tell(self, rank: RankLink, *, timeout_s: float) -> None:
        """Announce the pieces, bucket by bucket, each part whole and in the order of the tensors."""
        parts = rank.needs.parts
        rank.tell([Entry(index, part.box) for index, part in enumerate(parts)], timeout_s=timeout_s)
        tensors = [part.tensor for part in parts]
        self._firsts[rank] = [0, *(bisect_left(tensors, end) for end in self._ends)]

    def send(
        self, rank: RankLink, number: int, named: Mapping[str, torch.Tensor], version: int, left_s: float
    ) -> None:
        """The part of bucket `number` that the rank needs."""
        first, end = self._firsts[rank][number : number + 2]
        parts = rank.needs.parts[first:end]
        pieces = [_cut(named[self._metas[part.tensor].name], part) for part in parts]
        if pieces:
            rank.send(version, first, pieces, timeout_s=left_s)


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[part.box.within(Box.whole(tensor.shape))]


def check_complete(
    ranks: Sequence[RankLink], metas: Sequence[TensorMeta], *, names: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """ManifestMismatch, naming what, unless these tensors fill every parameter of every rank.

    Returns what the engines keep in another dtype (tensor -> `float32 -> bfloat16`), and what has no place there.
    """
    missing = sorted({name for rank in ranks for name in rank.needs.missing})
    used = {part.tensor for rank in ranks for part in rank.needs.parts}
    unknown = [meta.name for index, meta in enumerate(metas) if index not in used]
    if missing and names:
        raise ManifestMismatch(
            f"{len(missing)} parameters of the engine would keep their old values, first {missing[:_SHOWN]}; of the tensors "
            f"{len(unknown)} have no place there: {unknown[:_SHOWN]}. Is one misspelt, or the model given in part?"
        )
    rounded = {}
    for rank in ranks:
        for part in rank.needs.parts:
            own, kept = metas[part.tensor].dtype_name, rank.needs.params[part.param].dtype_name
            if own != kept:
                rounded[metas[part.tensor].name] = f"{own} -> {kept}"
    return rounded, tuple(unknown)
