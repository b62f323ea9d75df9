"""Where every tensor of a model lies over the ranks of one side: the metadata from which each rank plans by itself.

One instance of each side reports its map; everybody reads both. Names, dtypes, whole shapes and layouts only: no values,
no network. Tensors that are cut alike share one layout object, so 45,000 tensors over 256 ranks stay small.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import PlanInvalid
from r3channel.weights.geometry import Box, Layout
from r3channel.weights.manifest import TensorMeta


class ShardMap:
    """Tensors in order, each with its layout. Immutable.

    >>> import torch
    >>> weight = TensorMeta(name="w", dtype=torch.bfloat16, shape=(4, 2))
    >>> shards = ShardMap([(weight, Layout.chunked((4, 2), 0, [[0], [1]]))])
    >>> shards.held_by(1)
    {'w': [Box(start=(2, 0), stop=(4, 2))]}
    """

    def __init__(self, tensors: Iterable[tuple[TensorMeta, Layout]]) -> None:
        """Raises PlanInvalid for a name given twice, and for a layout of another shape than its tensor's."""
        metas: list[TensorMeta] = []
        interned: dict[Layout, int] = {}
        indexes: list[int] = []
        for meta, layout in tensors:
            if layout.shape != meta.shape:
                raise PlanInvalid(f"tensor {meta}: its layout is of shape {list(layout.shape)}")
            metas.append(meta)
            indexes.append(interned.setdefault(layout, len(interned)))
        self.metas: tuple[TensorMeta, ...] = tuple(metas)
        self.layouts: tuple[Layout, ...] = tuple(interned)
        self.layout_of: tuple[int, ...] = tuple(indexes)
        """Index into `layouts`, per tensor."""
        self.index_of: Mapping[str, int] = {meta.name: i for i, meta in enumerate(metas)}
        if len(self.index_of) != len(metas):
            raise PlanInvalid(f"tensor {_repeated(metas)} is given twice")
        self.digest: str = self._digest()

    @classmethod
    def gathered(cls, reports: Mapping[int, Sequence[tuple[TensorMeta, Box]]]) -> ShardMap:
        """From what each rank says it holds: (whole tensor's meta, its box). Ranks in ascending order decide the order.

        Raises PlanInvalid when two ranks disagree about a tensor, with both values.
        """
        held: dict[str, list[tuple[int, Box]]] = {}
        metas: dict[str, TensorMeta] = {}
        for rank in sorted(reports):
            for meta, box in reports[rank]:
                known = metas.setdefault(meta.name, meta)
                if known != meta:
                    raise PlanInvalid(f"rank {rank} holds a part of {meta}, earlier ranks of {known}")
                held.setdefault(meta.name, []).append((rank, box))
        return cls((meta, Layout.of(meta.shape, held[name])) for name, meta in metas.items())

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ShardMap:
        """From `to_dict` of another process. Raises PlanInvalid when it arrives damaged."""
        layouts = [_layout(item) for item in value["layouts"]]
        shards = cls((TensorMeta.from_row(row), layouts[index]) for *row, index in value["tensors"])
        if shards.digest != value["digest"]:
            raise PlanInvalid(
                f"shard map {value['digest']} arrived as {shards.digest}; damaged, or another version?"
            )
        return shards

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        layouts = [
            [list(layout.shape), layout.ranks_N.tolist(), layout.starts_ND.tolist(), layout.stops_ND.tolist()]
            for layout in self.layouts
        ]
        rows = [[*meta.row(), index] for meta, index in zip(self.metas, self.layout_of, strict=True)]
        return {"digest": self.digest, "layouts": layouts, "tensors": rows}

    def shifted(self, offset: int) -> ShardMap:
        """The same shards with ranks numbered `offset` higher: engines after the trainer's ranks in a joint group."""
        layouts = [layout.shifted(offset) for layout in self.layouts]
        return ShardMap(
            (meta, layouts[index]) for meta, index in zip(self.metas, self.layout_of, strict=True)
        )

    def layout(self, name: str) -> Layout:
        return self.layouts[self.layout_of[self.index_of[name]]]

    def held_by(self, rank: int) -> dict[str, list[Box]]:
        """The boxes of one rank, by tensor; tensors of which it holds nothing are left out."""
        boxes = [layout.boxes(rank) for layout in self.layouts]
        pairs = zip(self.metas, self.layout_of, strict=True)
        return {meta.name: boxes[index] for meta, index in pairs if boxes[index]}

    @property
    def world_size(self) -> int:
        """One more than the highest rank that holds anything."""
        return 1 + max((int(lay.ranks_N.max()) for lay in self.layouts if len(lay.ranks_N)), default=-1)

    def _digest(self) -> str:
        rows = [[*meta.row(), index] for meta, index in zip(self.metas, self.layout_of, strict=True)]
        digest = xxhash.xxh3_128(json.dumps(rows, separators=(",", ":")).encode())
        for layout in self.layouts:
            digest.update(layout.digest)
        return digest.hexdigest()


def _layout(item: Sequence[Any]) -> Layout:
    shape, ranks, starts, stops = item
    corners = (len(ranks), len(shape))
    arrays = [np.array(values, dtype=np.int64) for values in (ranks, starts, stops)]
    return Layout(shape, arrays[0], arrays[1].reshape(corners), arrays[2].reshape(corners))


def _repeated(metas: Sequence[TensorMeta]) -> str:
    seen: set[str] = set()
    return next(meta.name for meta in metas if meta.name in seen or seen.add(meta.name))
