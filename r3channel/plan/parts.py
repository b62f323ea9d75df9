"""Several relays: which rows of a shard each relay sends ("part"), in which order, and how parts make the shard again. Pure.

A part of a shard is the rows of one relay's samples, in the shard's own order, one after another:
`[micro-batch][tp slot][layer][row][k]`. Pads after a sample's last token go with their sample, the tail of a pack with relay
0, so parts tile the shard: every byte of it is in exactly one part. With one relay the part is the shard, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import ConfigError, SampleUnknown
from r3channel.plan.place import fresh, place_runs, row_items
from r3channel.plan.rows import Ints
from r3channel.plan.shards import Plan, Shard, ShardKey
from r3channel.routing import Ids

COORDINATOR = 0
"""The relay that seals; it also sends the tails of packs."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Columns = slice | list[int]


@dataclass(frozen=True)
class Parts:
    """A plan, cut over `relays` relays. Equal inputs give equal parts and an equal digest on every process.

    Raises:
        SampleUnknown: a planned sample has no relay.
        ConfigError: a relay number is not in 0..relays-1.
    """

    plan: Plan
    relays: int
    relay_of: Mapping[str, int]
    """Sample id -> the relay that holds its frame."""

    def __post_init__(self) -> None:
        names = [name for rank in self.plan.microbatches for batch in rank for name in batch.sample_ids]
        missing = [name for name in names if name not in self.relay_of]
        if missing:
            raise SampleUnknown(f"{len(missing)} planned samples have no relay: {missing[:5]}")
        wrong = {name: self.relay_of[name] for name in names if not 0 <= self.relay_of[name] < self.relays}
        if wrong:
            raise ConfigError(f"samples of relays {wrong}, expected 0..{self.relays - 1}")

    def serves(self, relay: int, dp: int) -> bool:
        """Does this relay send anything to this DP rank? If so, all of the rank's processes receive from it, even 0 bytes."""
        return self.relays == 1 or bool(self.cut(dp).positions_RCMS[relay].any())

    def part(self, shard: Shard, relay: int) -> Part:
        return Part(self, shard, relay)

    def of_relay(self, relay: int) -> tuple[Part, ...]:
        """Every part that a relay sends, DP rank by DP rank."""
        served = [dp for dp in range(self.plan.layout.dp) if self.serves(relay, dp)]
        return tuple(Part(self, shard, relay) for dp in served for shard in self._shards(dp))

    def samples_of(self, relay: int, *, dp: int | None = None) -> tuple[str, ...]:
        """The samples that a relay sends (to one DP rank), in the plan's order."""
        ranks = self.plan.microbatches if dp is None else self.plan.microbatches[dp : dp + 1]
        names = (name for rank in ranks for batch in rank for name in batch.sample_ids)
        return tuple(name for name in names if self.relay_of[name] == relay)

    def place(
        self, relay: int, *, dp: int, ids_of: Callable[[str], Ids], buffer_of: Callable[[Any], _Bytes] = fresh
    ) -> dict[ShardKey, _Bytes]:
        """As `place_samples`, for one relay's parts: uint8 by (dp, pp, cp); empty where it serves that rank nothing.

        `buffer_of(part)` gives `part.nbytes` bytes of any content; every byte is overwritten.
        """
        if not self.serves(relay, dp):
            return {}
        parts = [Part(self, shard, relay) for shard in self._shards(dp)]
        buffers = [buffer_of(part) for part in parts]
        views = [part.views(buffer) for part, buffer in zip(parts, buffers, strict=True)]
        for number, batch in enumerate(self.plan.microbatches[dp]):
            if relay == COORDINATOR and batch.tail:
                for part, view in zip(parts, views, strict=True):
                    part.place(view[number], microbatch=number, sample=-1, expert_ids_TLK=None)
            for sample in self.cut(dp).samples[relay][number]:
                ids_TLK = ids_of(batch.sample_ids[sample])
                for part, view in zip(parts, views, strict=True):
                    part.place(view[number], microbatch=number, sample=sample, expert_ids_TLK=ids_TLK)
        return {part.key: buffer for part, buffer in zip(parts, buffers, strict=True)}

    def cut(self, dp: int) -> Cut:
        """Where the runs of one DP rank lie in the parts; made when first asked for."""
        if dp not in self._cuts:
            self._cuts[dp] = Cut.of(self.plan, dp, self.relay_of, relays=self.relays)
        return self._cuts[dp]

    @cached_property
    def _cuts(self) -> dict[int, Cut]:
        return {}

    def _shards(self, dp: int) -> list[Shard]:
        layout = self.plan.layout
        return [self.plan.shard(dp=dp, pp=pp, cp=cp) for pp in range(layout.pp) for cp in range(layout.cp)]

    @cached_property
    def digest(self) -> int:
        """64-bit identity of plan and relays; with one relay, the plan's own."""
        if self.relays == 1:
            return self.plan.digest
        names = (name for rank in self.plan.microbatches for batch in rank for name in batch.sample_ids)
        values = [self.plan.digest, self.relays, [self.relay_of[name] for name in names]]
        return xxhash.xxh3_64_intdigest(json.dumps(values, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Cut:
    """One DP rank's runs (`RowTable.runs`, the same order) with their relay and their place in its part."""

    samples: tuple[tuple[tuple[int, ...], ...], ...]
    """By relay and micro-batch: indices of its samples in the micro-batch, ascending."""
    relay: Ints
    """Of each run."""
    begin: Ints
    """Of each run's first row in its part's slot, counted in positions."""
    positions_RCMS: Ints
    """[relay, cp, micro-batch, slot]: positions of each part's slot; times the part's width: rows."""

    @classmethod
    def of(cls, plan: Plan, dp: int, relay_of: Mapping[str, int], *, relays: int) -> Cut:
        batches, layout, runs = plan.microbatches[dp], plan.layout, plan.table(dp).runs
        owner = np.full((len(batches), max(len(batch.sample_ids) for batch in batches) + 1), COORDINATOR)
        for number, batch in enumerate(batches):
            owner[number, 1 : len(batch.sample_ids) + 1] = [relay_of[name] for name in batch.sample_ids]
        relay = owner[runs.microbatch, runs.sample + 1]  # column 0: a tail
        shape = (relays, layout.cp, len(batches), layout.tp_slots)
        positions = np.zeros(shape, np.int64)
        where = (relay, runs.cp, runs.microbatch, runs.slot)
        if batches[0].packed:
            np.add.at(positions, where, runs.length)
            begin = _begins(np.ravel_multi_index(where, shape), runs.local, runs.length)
        else:  # every sample has a column of its own, as long as the slot
            begin = runs.local
            np.maximum.at(positions, where, runs.local + runs.length)
        samples = tuple(
            tuple(tuple(np.flatnonzero(row[1 : len(batch.sample_ids) + 1] == index).tolist())
                  for row, batch in zip(owner, batches, strict=True))
            for index in range(relays)
        )  # fmt: skip
        return cls(samples, relay, begin, positions)


def _begins(group: Ints, local: Ints, length: Ints) -> Ints:
    """Where each run begins when the runs of a group lie one after another in the order of `local`."""
    order = np.lexsort((local, group))
    ends = np.cumsum(length[order])
    starts = ends - length[order]
    first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    base = np.repeat(starts[first], np.diff(np.append(np.flatnonzero(first), len(order))))
    begin = np.empty_like(starts)
    begin[order] = starts - base
    return begin


@dataclass(frozen=True, slots=True)
class Move:
    """One copy from a part into its shard: `there[:, to_positions, to_columns] = here[:, from_positions]`, rows being items."""

    here: slice
    """Bytes of the part."""
    here_LPW: tuple[int, int, int]
    """Layers, positions, width: the shape of those bytes, in rows."""
    there: slice
    """Bytes of the shard."""
    there_LPW: tuple[int, int, int]
    from_positions: slice
    to_positions: slice
    to_columns: Columns


@dataclass(frozen=True)
class Part:
    """What one relay sends of one shard."""

    parts: Parts
    shard: Shard
    relay: int

    @property
    def key(self) -> ShardKey:
        return self.shard.key

    @cached_property
    def nbytes(self) -> int:
        if self.parts.relays == 1:
            return self.shard.nbytes
        rows = sum(int(self._positions_S(m).sum()) * self._width(m) for m in range(self._microbatches))
        return rows * self.shard.row_bytes

    @property
    def whole(self) -> bool:
        """The part is the shard, byte for byte."""
        return self.nbytes == self.shard.nbytes

    def views(self, buffer: _Bytes) -> list[list[Any]]:
        """Per micro-batch and tp slot a view [L, positions, width], one item per row of K ids."""
        views, at, spec = [], 0, self.shard.spec
        for number in range(self._microbatches):
            slots = []
            for positions in self._positions_S(number).tolist():
                shape = (len(self.shard.layers), positions, self._width(number), spec.top_k)
                size = positions * self._width(number) * self.shard.row_bytes
                slots.append(row_items(buffer[at : at + size].view(spec.id_dtype).reshape(shape)))
                at += size
            views.append(slots)
        return views

    def place(
        self, target_SLPW: Sequence[Any], *, microbatch: int, sample: int, expert_ids_TLK: Ids | None
    ) -> None:
        """Write the rows of one of this relay's samples (-1: the tail) into a micro-batch's views. Each sample once."""
        runs, begin_R = self.shard.table.runs, self._cut.begin
        found = self.shard.table.find(cp=self.shard.cp, microbatch=microbatch, sample=sample)
        columns = (runs.position, runs.slot, begin_R, runs.length, runs.real)
        rows = list(zip(*(column[found].tolist() for column in columns), strict=True))
        packed = self.shard.microbatches[microbatch].packed
        column = 0 if packed else self._samples(microbatch).index(sample)
        place_runs(self.shard, target_SLPW, rows, column=column, expert_ids_TLK=expert_ids_TLK)

    def merge(self, part_N: _Bytes, whole_N: _Bytes) -> None:
        """Write this part's rows into the shard's bytes; the parts of all relays together write each of them once."""
        if self.whole:
            whole_N[:] = part_N
            return
        dtype, top_k = self.shard.spec.id_dtype, self.shard.spec.top_k
        for move in self.moves():
            own = row_items(part_N[move.here].view(dtype).reshape(*move.here_LPW, top_k))
            all_ = row_items(whole_N[move.there].view(dtype).reshape(*move.there_LPW, top_k))
            all_[:, move.to_positions, move.to_columns] = own[:, move.from_positions]

    def moves(self) -> Iterator[Move]:
        """The copies that `merge` makes, each of one tp slot of one micro-batch."""
        here = there = 0
        for number in range(self._microbatches):
            layers, width = len(self.shard.layers), self.shard.microbatches[number].width
            there_LPW = (layers, self.shard.slot_rows(number) // width, width)
            stretches = self._stretches(number)
            for slot, positions in enumerate(self._positions_S(number).tolist()):
                here_LPW = (layers, positions, self._width(number))
                mine, its = self._extent(here, here_LPW), self._extent(there, there_LPW)
                for first, start, length, columns in stretches.get(slot, ()):
                    to, back = slice(first, first + length), slice(start, start + length)
                    yield Move(mine, here_LPW, its, there_LPW, back, to, columns)
                here, there = mine.stop, its.stop

    def _extent(self, at: int, shape_LPW: tuple[int, int, int]) -> slice:
        return slice(at, at + shape_LPW[1] * shape_LPW[2] * self.shard.row_bytes)

    def _stretches(self, microbatch: int) -> dict[int, list[tuple[int, int, int, Columns]]]:
        """Slot -> (first position in the shard, in the part, positions, columns in the shard)."""
        if not self.shard.microbatches[microbatch].packed:
            own, positions_S = self._samples(microbatch), self._positions_S(microbatch).tolist()
            columns = _as_slice(own) if own else slice(0)
            return {slot: [(0, 0, positions, columns)] for slot, positions in enumerate(positions_S) if own}
        runs, cut = self.shard.table.runs, self._cut
        every = self.shard.table.of_microbatch(cp=self.shard.cp, microbatch=microbatch)
        mine = every.start + np.flatnonzero(cut.relay[every] == self.relay)
        mine = mine[np.lexsort((runs.local[mine], runs.slot[mine]))]
        return _joined(runs.slot[mine], runs.local[mine], cut.begin[mine], runs.length[mine])

    @property
    def _cut(self) -> Cut:
        return self.parts.cut(self.shard.dp)

    @property
    def _microbatches(self) -> int:
        return len(self.shard.microbatches)

    def _samples(self, microbatch: int) -> tuple[int, ...]:
        return self._cut.samples[self.relay][microbatch]

    def _width(self, microbatch: int) -> int:
        return 1 if self.shard.microbatches[microbatch].packed else len(self._samples(microbatch))

    def _positions_S(self, microbatch: int) -> Ints:
        return self._cut.positions_RCMS[self.relay, self.shard.cp, microbatch]


def _as_slice(columns: Sequence[int]) -> Columns:
    """A slice where the columns are evenly spaced: numpy then copies without an index array.

    >>> _as_slice((1, 3, 5)), _as_slice((4,)), _as_slice((0, 1, 3))
    (slice(1, 6, 2), slice(4, 5, 1), [0, 1, 3])
    """
    steps = set(np.diff(columns).tolist()) or {1}
    return slice(columns[0], columns[-1] + 1, steps.pop()) if len(steps) == 1 else list(columns)


def _joined(
    slot: Ints, there: Ints, here: Ints, length: Ints
) -> dict[int, list[tuple[int, int, int, Columns]]]:
    """Runs of packs in the order of (slot, there), joined where one follows another in the shard as well as in the part."""
    if not len(slot):
        return {}
    new = np.ones(len(slot), bool)
    new[1:] = (slot[1:] != slot[:-1]) | (there[1:] != there[:-1] + length[:-1])
    first = np.flatnonzero(new)
    columns = (slot[first], there[first], here[first], np.add.reduceat(length, first))
    found: dict[int, list[tuple[int, int, int, Columns]]] = {}
    for at_slot, at, start, total in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(at_slot, []).append((at, start, total, slice(1)))
    return found
