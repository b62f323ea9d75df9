"""Names the known silent misalignments: what explains the ids that differ between two sides of a step with the fewest claims.

Shapes are right in nearly all of these, so only the ids can tell. What most cells show by themselves goes first (another order,
other id types). Then mistakes that move rows or layers are searched for, one after another, each where it explains what is left;
two at once where none explains much alone. Then what the remaining cells show by themselves. What is left then is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import perm
from typing import Any, NamedTuple

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.findings import FAULTS, Finding
from r3channel.recordings.search import Search
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind

_MOST = 0.5
_AGAIN = 16
"""Ids that must be seen again, and mean the same again, for a mapping not to be chance."""


def judge(sides: AlignedPair) -> list[Finding]:
    """Every fault of one pass of one step; empty where the sides agree."""
    return [*_Case(sides).findings(), *_versions(sides)]


@dataclass(eq=False)
class _Case:
    sides: AlignedPair

    def findings(self) -> Iterator[Finding]:
        yield from self._missing()
        yield from self._extra_layers()
        if self.sides.seen_RLK.shape[2] != self.sides.spec.top_k:
            yield from self._columns()
        elif self.sides.differs_RL.any():
            yield from self._explained(self.sides.differs_RL.copy())

    def _explained(self, left_RL: Bools) -> Iterator[Finding]:
        again_RL = left_RL & _decoded_again(self.sides)[:, None]
        if again_RL.any():
            yield self._found("retraction_overwrite", again_RL)
            left_RL &= ~again_RL
        yield from self._by_value(left_RL, _OF_ALL, least=_MOST)
        if left_RL.any():
            search = Search(self.sides, left_RL)
            for name, hit_RL in search.run().items():
                yield self._found(name, hit_RL)
            left_RL &= search.left_RL
        yield from self._by_value(left_RL, _OF_SOME)
        if left_RL.any():
            yield self._found("unexplained", left_RL)

    # -- rows that are not there, layers and columns that are too many -------------------------------------------------------

    def _missing(self) -> Iterator[Finding]:
        gone_R = self.sides.valid_R & ~self.sides.there_R
        for sample in np.unique(self.sides.sample_R[gone_R]):
            hit_R = gone_R & (self.sides.sample_R == sample)
            first = self.sides.position_R[hit_R][0] == 0
            yield self._found("missing_prefix" if first else "zero_rows", self._all_layers(hit_R))

    def _extra_layers(self) -> Iterator[Finding]:
        """MTP layers that hold a decoder layer's ids, though the layout maps none to it."""
        sides, mapped = self.sides, self.sides.ticket.layout.mtp
        for index, move in product(range(sides.extra_RLK.shape[1]), (0, 1)):
            rows = len(sides.want_RLK) - move
            same_RL = _same(sides.want_RLK[:rows], sides.extra_RLK[move:, index, None])
            for place in np.flatnonzero(same_RL.sum(0) > max(1, _MOST * rows)):
                if mapped[index : index + 1] != (sides.spec.moe_layers[place],):
                    hit_RL = same_RL & (np.arange(same_RL.shape[1]) == place)
                    yield self._found("mtp_shift", hit_RL)

    def _columns(self) -> Iterator[Finding]:
        sides, top_k = self.sides, self.sides.spec.top_k
        more = sides.seen_RLK[..., top_k:]
        constant = more.size and (more == more[:1, :1]).all()
        name = "fused_shared_expert" if constant else "unexplained"
        yield self._found(name, self._all_layers(sides.both_R))

    def _all_layers(self, hit_R: Bools) -> Bools:
        return np.repeat(hit_R[:, None], self.sides.spec.num_moe_layers, axis=1)

    # -- ids that are wrong by themselves --------------------------------------------------------------------------------

    def _by_value(self, left_RL: Bools, tests: Sequence[Test], *, least: float = 0.0) -> Iterator[Finding]:
        """Name what cells show without any others, where it is at least this share of what is left."""
        for test in tests:
            rows, layers = np.nonzero(left_RL)
            if not len(rows):
                return
            want, seen = self.sides.want_RLK[rows, layers], self.sides.seen_RLK[rows, layers]
            hit = test(Cells(self.sides, rows, layers, want, seen))
            if hit.any() and hit.sum() >= least * len(rows):
                hit_RL = np.zeros_like(left_RL)
                hit_RL[rows[hit], layers[hit]] = True
                yield self._found(test.__name__[1:], hit_RL)
                left_RL &= ~hit_RL

    def _found(self, name: str, hit_RL: Bools) -> Finding:
        return _finding(name, self.sides, cells=int(hit_RL.sum()), **self.sides.example(hit_RL))


def _finding(name: str, sides: AlignedPair, **values: Any) -> Finding:
    fields = {"verdict": True, "what": FAULTS[name], "step": sides.ticket.step, "of_pass": sides.of_pass}
    return Finding(name=name, **fields, **values)


def _same(want: Ids, seen: Ids) -> Bools:
    """Whether two arrays are equal, row by row."""
    return np.all(want == seen, axis=-1)


# -- what a cell shows by itself ------------------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """Cells that differ: a row, a layer, and both sides' ids of each."""

    sides: AlignedPair
    rows: Ints
    layers: Ints
    want: Ids
    seen: Ids


Test = Callable[[Cells], Bools]
"""Its name is that of the fault, behind an underscore."""


def _row_order(cells: Cells) -> Bools:
    return _same(np.sort(cells.want, -1), np.sort(cells.seen, -1))


def _int16_as_uint8(cells: Cells) -> Bools:
    want, seen = cells.want, cells.seen
    if want.dtype.itemsize == 1:
        return np.zeros(len(want), bool)
    halves = np.ascontiguousarray(want.astype("<i2")).view(np.uint8).reshape(len(want), -1)
    return _sure(_same(halves[:, : seen.shape[1]], seen) | _same(halves[:, ::2], seen))


def _zero_rows(cells: Cells) -> Bools:
    return np.all(cells.seen == 0, axis=-1)


def _padding_rows(cells: Cells) -> Bools:
    """Ids on end, as padding has them, in more cells than chance makes in a model of few experts."""
    spec = cells.sides.spec
    on_end = (cells.seen[:, :1].astype(np.int64) + np.arange(spec.top_k)) % spec.num_experts
    hit = _same(cells.seen, on_end)
    chance = len(hit) * spec.num_experts / perm(spec.num_experts, min(spec.top_k, spec.num_experts))
    return _sure(hit) if hit.sum() > 4 * chance else np.zeros_like(hit)


def _fused_shared_expert(cells: Cells) -> Bools:
    """Whether the last column is one id that no routed expert has, and the others are the first K - 1."""
    last = cells.seen[:, -1].astype(np.int64)
    alike = (last >= cells.sides.spec.num_experts) & (last == last[0])
    return alike & _same(cells.want[:, :-1], cells.seen[:, :-1])


def _physical_ids(cells: Cells) -> Bools:
    """Whether in each layer every seen id stands for one wanted id only, and enough ids are seen again."""
    good = np.zeros(len(cells.want), bool)
    for layer in np.unique(cells.layers):
        index = np.flatnonzero(cells.layers == layer)
        pairs = np.stack((cells.seen[index].ravel(), cells.want[index].ravel()), axis=1).astype(np.int64)
        distinct, times = np.unique(pairs, axis=0, return_counts=True)
        ids = len(np.unique(distinct[:, 0]))
        good[index] = len(distinct) == ids and int(times.sum()) - ids >= _AGAIN
    return _sure(good)


def _duplicated_ids(cells: Cells) -> Bools:
    return np.any(np.diff(np.sort(cells.seen, -1), axis=-1) == 0, axis=-1)


def _out_of_range(cells: Cells) -> Bools:
    return np.any((cells.seen >= cells.sides.spec.num_experts) | (cells.seen < 0), axis=-1)


def _sure(hit: Bools) -> Bools:
    """Nothing where a reading holds for a few cells among many."""
    return hit if hit.mean() >= _MOST or hit.sum() > _AGAIN else np.zeros_like(hit)


_OF_ALL: tuple[Test, ...] = (_row_order, _int16_as_uint8, _fused_shared_expert, _physical_ids)
"""What is made of all ids at once."""
_OF_SOME = (*_OF_ALL[:2], _zero_rows, _padding_rows, *_OF_ALL[2:], _duplicated_ids, _out_of_range)
"""The plainest first."""


# -- versions -----------------------------------------------------------------------------------------------------------------


def _versions(sides: AlignedPair) -> Iterator[Finding]:
    """Differences between what the two sides say about who made a row."""
    for name, _, (want_T, want_kind_T), (seen_T, seen_kind_T) in _said(sides):
        again_T = (want_kind_T == RowKind.DECODED) & (seen_kind_T == RowKind.PREFILLED)
        off = np.flatnonzero((want_T != seen_T) & ~again_T)
        if len(off):
            fewer = len(np.unique(want_T)) > len(np.unique(seen_T))
            by_one = np.unique(np.abs(seen_T[off] - want_T[off])).tolist() == [1]
            fault = "version_off_by_one" if by_one and not fewer else "mixed_versions"
            yield _finding(fault, sides, sample=name, position=int(off[0]))


def _decoded_again(sides: AlignedPair) -> Bools:
    """Rows that were decoded by the engines' side and prefilled by the routers'."""
    again_R = np.zeros(len(sides.sample_R), bool)
    for _, begin, (_, want_T), (_, seen_T) in _said(sides):
        again_R[begin : begin + len(want_T)] = (want_T == RowKind.DECODED) & (seen_T == RowKind.PREFILLED)
    return again_R


def _said(sides: AlignedPair) -> Iterator[tuple[str, int, tuple[Ints, Ints], tuple[Ints, Ints]]]:
    """(sample, its first row, what the engines' side says of its rows, what the routers') where they do not say the same."""
    samples = zip(sides.names, sides.begin_S[:-1], sides.want_spans, sides.seen_spans, strict=True)
    for name, begin, want, seen in samples:
        if want and seen and want != seen:
            rows = min(want[-1].end, seen[-1].end)
            yield name, int(begin), spread(want, rows), spread(seen, rows)


def spread(spans: Sequence[ProvenanceSpan], rows: int) -> tuple[Ints, Ints]:
    """(version, kind) of each row; -1 where no span says."""
    version, kind = np.full(rows, -1, np.int64), np.full(rows, -1, np.int64)
    for span in spans:
        version[span.start : span.end], kind[span.start : span.end] = span.weight_version, int(span.kind)
    return version, kind
