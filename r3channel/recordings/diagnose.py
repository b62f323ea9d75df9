"""Names the known silent misalignments: each is a hypothesis about two sides of a step, and the best explanation wins.

A hypothesis says, for each row and layer that differs, which ids would be there had its mistake been made. The one that explains
most is named, what it explains is taken away, and so on. Shapes are right in nearly all of these, so only the ids can tell.

A mistake that moves rows or layers is an index map of the step: for each row of the concatenated samples the row whose ids it
would hold, -1 where the mistake says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from r3channel.plan.placement import spread_ids
from r3channel.plan.ticket import Ticket
from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.findings import Finding
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind
from r3channel.wire.validate import items_of, row_words

FAULTS = {
    "zero_rows": "rows of zeros: memory that nobody wrote, or a path that never captures",
    "duplicated_ids": "an expert stands twice in a row: zero-filled, stale or overlapping memory",
    "padding_rows": "rows hold padding's made-up ids: the end of the padding was taken for rows",
    "fused_shared_expert": "the shared expert's column is among the routed ones: cut it off",
    "int16_as_uint8": "ids above 8 bits were read as single bytes: another id type than the sender's",
    "physical_ids": "ids are mapped one to one: physical experts (after load balancing), not logical ones",
    "out_of_range": "ids that the model does not have",
    "off_by_one_row": "each row has its neighbour's ids: a last token without a row, padding or shifted labels",
    "missing_prefix": "the leading rows are not there: a start offset, or a cached prompt that was not returned",
    "dense_layer_counted": "decoder layers and MoE layers were counted alike: dense layers have no routing",
    "mtp_shift": "an MTP layer took a decoder layer's ids, or pushed all others on: layer numbers collide",
    "shifted_layer": "each layer has its neighbour's ids: layers are bound by the order of construction",
    "stage_reversed": "the layers of a pipeline stage are bound from the last to the first",
    "swapped_samples": "two samples have each other's rows: an order was changed on one side only",
    "cp_chunks_swapped": "context-parallel chunks of two sequences are exchanged: a pack's offsets",
    "zigzag_order": "context-parallel chunks are in the other order, zigzag against contiguous",
    "sp_halves_swapped": "sequence-parallel parts are exchanged between TP ranks",
    "rotated_rows": "the rows of a micro-batch are rotated: a start offset within the pack",
    "other_microbatch": "a micro-batch's routers have another one's rows",
    "recompute_other_microbatch": "the recompute took another micro-batch's ids than its forward pass: one queue for all",
    "stale_row": "rows are those of another request: a cached slot was not written again",
    "retraction_overwrite": "rows that were decoded came back prefilled: a retracted request was computed again over its own",
    "mixed_versions": "one range of rows is said to be of one weight version, and is of several",
    "version_off_by_one": "weight versions are one off: stamped before instead of after the update",
    "replay_hurts": "log-probs are further from the engine's with replay than without: rows of other tokens or layers",
    "row_order": "the same experts in another order: nothing is lost unless weights travel in that order",
    "unexplained": "rows differ, and no known mistake explains them",
}
"""Name -> what it is and what usually makes it."""
NOTES = frozenset({"row_order"})
"""Names that are reported and are no fault."""
_ENOUGH, _SOME = 0.5, 0.1
"""The share of differing cells that a hypothesis must explain: to be believed at once, and after the plain ones."""
_AGAIN = 16
"""Ids that must be seen again, and mean the same again, for a mapping not to be chance."""
_LOOKED_UP = 4096
"""Cells that are looked up among all rows, to find where they came from."""


def judge(sides: AlignedPair) -> list[Finding]:
    """Every fault of one pass of one step; empty where the sides agree."""
    return [*_Case(sides).findings(), *_versions(sides)]


@dataclass(frozen=True, eq=False)
class _Explanation:
    name: str
    hit_RL: Bools
    """Cells that it explains."""
    silent_RL: Bools
    """Cells that it leaves open while it explains others."""
    moved_rows: int
    """Rows that it would change."""

    @property
    def score(self) -> tuple[int, int]:
        """The order of hypotheses: the most cells explained, then the fewest rows claimed."""
        return int(self.hit_RL.sum()), -self.moved_rows


@dataclass(eq=False)
class _Case:
    sides: AlignedPair

    def findings(self) -> Iterator[Finding]:
        yield from self._missing()
        yield from self._extra_layers()
        if self.sides.seen_RLK.shape[2] != self.sides.spec.top_k:
            yield from self._columns()
            return
        left_RL = self.sides.differs_RL.copy()
        if left_RL.any():
            yield from self._explained(left_RL)

    def _explained(self, left_RL: Bools) -> Iterator[Finding]:
        again_RL = left_RL & _decoded_again(self.sides)[:, None]
        if again_RL.any():
            yield self._found("retraction_overwrite", again_RL)
            left_RL &= ~again_RL
        yield from self._moved(left_RL, least=_ENOUGH)
        for name, test in self._by_value():
            hit_RL = self._hits(left_RL, test)
            if hit_RL.any() and self._believed(name, hit_RL, left_RL):
                yield self._found(name, hit_RL)
                left_RL &= ~hit_RL
        yield from self._moved(left_RL, least=_SOME)
        if left_RL.any():
            yield self._found("unexplained", left_RL)

    def _moved(self, left_RL: Bools, *, least: float) -> Iterator[Finding]:
        """Name what explains most, take it out of `left_RL`, and so on, down to a share of what is left."""
        while left_RL.any():
            best = max(self._by_move(left_RL), key=lambda one: one.score)
            if best.score[0] < max(1, least * left_RL.sum()):
                return
            yield self._found(best.name, best.hit_RL)
            left_RL &= ~best.hit_RL & ~best.silent_RL  # at its edges a mistake says nothing

    # -- rows that are not there, layers and columns that are too many -------------------------------------------------------

    def _missing(self) -> Iterator[Finding]:
        gone_R = self.sides.valid_R & ~self.sides.there_R
        for sample in np.unique(self.sides.sample_R[gone_R]):
            rows = np.flatnonzero(gone_R & (self.sides.sample_R == sample))
            name = "missing_prefix" if self.sides.position_R[rows[0]] == 0 else "zero_rows"
            yield self._at(name, int(rows[0]), 0, cells=len(rows) * self.sides.spec.num_moe_layers)

    def _extra_layers(self) -> Iterator[Finding]:
        """MTP layers that hold a decoder layer's ids, though the layout maps none to it."""
        sides, mapped = self.sides, self.sides.ticket.layout.mtp
        for index in range(sides.extra_RLK.shape[1]):
            for place in range(sides.spec.num_moe_layers):
                for move in (0, 1):
                    same_R = _same(
                        sides.extra_RLK[move:, index], sides.want_RLK[: len(sides.want_RLK) - move, place]
                    )
                    layer = sides.spec.moe_layers[place]
                    if len(same_R) > 1 and same_R.mean() > _ENOUGH and mapped[index : index + 1] != (layer,):
                        row = int(np.flatnonzero(same_R)[0])
                        yield self._at("mtp_shift", row, place, cells=int(same_R.sum()))

    def _columns(self) -> Iterator[Finding]:
        sides, top_k = self.sides, self.sides.spec.top_k
        more = sides.seen_RLK[..., top_k:]
        constant = more.size and sides.seen_RLK.shape[2] > top_k and (more == more[:1, :1]).all()
        name = "fused_shared_expert" if constant else "unexplained"
        yield self._at(name, int(np.flatnonzero(sides.both_R)[0]), 0, cells=int(sides.differs_RL.sum()))

    # -- ids that are wrong by themselves --------------------------------------------------------------------------------

    def _by_value(self) -> Iterator[tuple[str, Callable[[Ids, Ids, Ints, Ints], Bools]]]:
        """(name, test of (wanted, seen, rows, layers) cells); the plainest first."""
        spec = self.sides.spec
        yield "row_order", lambda want, seen, _r, _l: _same(np.sort(want, -1), np.sort(seen, -1))
        yield "int16_as_uint8", self._as_bytes
        yield "zero_rows", lambda _w, seen, _r, _l: np.all(seen == 0, axis=-1)
        yield "padding_rows", self._padding
        yield "fused_shared_expert", self._shared
        yield "physical_ids", self._physical
        yield (
            "duplicated_ids",
            lambda _w, seen, _r, _l: np.any(np.diff(np.sort(seen, -1), axis=-1) == 0, axis=-1),
        )
        yield (
            "out_of_range",
            lambda _w, seen, _r, _l: np.any((seen >= spec.num_experts) | (seen < 0), axis=-1),
        )

    def _hits(self, left_RL: Bools, test: Callable[[Ids, Ids, Ints, Ints], Bools]) -> Bools:
        rows, layers = np.nonzero(left_RL)
        hit_RL = np.zeros_like(left_RL)
        if len(rows):
            hit = test(self.sides.want_RLK[rows, layers], self.sides.seen_RLK[rows, layers], rows, layers)
            hit_RL[rows[hit], layers[hit]] = True
        return hit_RL

    def _believed(self, name: str, hit_RL: Bools, left_RL: Bools) -> bool:
        """Whether a mapping, or a reading of bytes, holds for all that differs; else it is chance."""
        if name in ("physical_ids", "int16_as_uint8", "padding_rows", "row_order"):
            return bool(
                hit_RL.sum() >= (2 if name == "row_order" else _ENOUGH * left_RL.sum()) or hit_RL.sum() > 16
            )
        return True

    def _padding(self, _want: Ids, seen: Ids, rows: Ints, _layers: Ints) -> Bools:
        pads = spread_ids(self.sides.spec, positions_T=self.sides.position_R[rows])
        plain = np.arange(self.sides.spec.top_k) % self.sides.spec.num_experts
        return _same(seen, pads) | (seen == plain).all(-1)

    def _shared(self, want: Ids, seen: Ids, _rows: Ints, _layers: Ints) -> Bools:
        """Whether the last column is one id that no routed expert has, and the others are the first K - 1."""
        last = seen[:, -1].astype(np.int64)
        return (last >= self.sides.spec.num_experts) & (last == last[0]) & _same(want[:, :-1], seen[:, :-1])

    def _as_bytes(self, want: Ids, seen: Ids, _rows: Ints, _layers: Ints) -> Bools:
        if want.dtype.itemsize == 1:
            return np.zeros(len(want), bool)
        halves = np.ascontiguousarray(want.astype("<i2")).view(np.uint8).reshape(len(want), -1)
        low = halves[:, ::2]
        return _same(halves[:, : seen.shape[1]], seen) | _same(low, seen)

    def _physical(self, want: Ids, seen: Ids, _rows: Ints, layers: Ints) -> Bools:
        """Whether in each layer every seen id stands for one wanted id only, and enough ids are seen again."""
        good = np.zeros(len(want), bool)
        for layer in np.unique(layers):
            own = np.flatnonzero(layers == layer)
            pairs = np.stack((seen[own].ravel(), want[own].ravel()), axis=1).astype(np.int64)
            found, times = np.unique(pairs, axis=0, return_counts=True)
            ids = len(np.unique(found[:, 0]))
            again = int(times.sum()) - ids
            good[own] = len(found) == ids and again >= _AGAIN
        return good

    # -- ids of another place ----------------------------------------------------------------------------------------------

    def _by_move(self, left_RL: Bools) -> Iterator[_Explanation]:
        rows, layers = np.nonzero(left_RL)
        moves, all_layers = Moves(self.sides), np.arange(self.sides.spec.num_moe_layers)
        for name, source_R in self._row_moves(moves, rows, layers):
            yield self._tried(name, source_R, all_layers, rows, layers)
        all_rows = np.arange(len(self.sides.sample_R))
        for name, source_L in self._layer_moves(moves):
            yield self._tried(name, all_rows, source_L, rows, layers)
        yield from self._of_others(moves, rows, layers)

    def _tried(self, name: str, source_R: Ints, source_L: Ints, rows: Ints, layers: Ints) -> _Explanation:
        from_row, from_layer = source_R[rows], source_L[layers]
        said = (from_row != NOTHING) & (from_layer != NOTHING)
        hit_RL = np.zeros(self.sides.differs_RL.shape, bool)
        want_NK = self.sides.want_RLK[from_row[said], from_layer[said]]
        same = _same(want_NK, self.sides.seen_RLK[rows[said], layers[said]])
        hit_RL[rows[said][same], layers[said][same]] = True
        touched_R = np.isin(self.sides.sample_R, np.unique(self.sides.sample_R[hit_RL.any(1)]))
        silent_RL = touched_R[:, None] & ((source_R == NOTHING)[:, None] | (source_L == NOTHING)[None])
        moved_R = (source_R != NOTHING) & (source_R != np.arange(len(source_R)))
        return _Explanation(name, hit_RL, silent_RL, int(moved_R.sum()))

    def _row_moves(self, moves: Moves, rows: Ints, layers: Ints) -> Iterator[tuple[str, Ints]]:
        yield "off_by_one_row", moves.shifted(1)
        yield "off_by_one_row", moves.shifted(-1)
        for source in moves.zigzag():
            yield "zigzag_order", source
        for source in moves.slots_exchanged():
            yield "sp_halves_swapped", source
        yield from self._prefix(moves, rows, layers)
        recompute = "recompute_other_microbatch" if self.sides.of_pass == "recompute" else "other_microbatch"
        count = len(self.sides.ticket.plan.microbatches[0])
        for by in {1, count - 1} - {0, count}:
            yield recompute, moves.other_microbatch(by)
        for by in self._rotations(moves, rows, layers):
            yield "rotated_rows", moves.rotated(by)

    def _prefix(self, moves: Moves, rows: Ints, layers: Ints) -> Iterator[tuple[str, Ints]]:
        """The first wrong row of a sample is found further on in it: so many leading rows are missing."""
        found = {
            target - row for row, target in self._origins(rows, layers) if self._same_sample(row, target)
        }
        for by in sorted(found - {0, 1, -1}, key=abs)[:4]:
            if by > 1:
                yield "missing_prefix", moves.shifted(by)

    def _same_sample(self, row: int, other: int) -> bool:
        return self.sides.sample_R[row] == self.sides.sample_R[other]

    def _rotations(self, moves: Moves, rows: Ints, layers: Ints) -> list[int]:
        origins, found = dict(self._origins(rows, layers)), set()
        for order in moves.orders.values():
            flat = order.reshape(-1).tolist()
            place = {row: index for index, row in enumerate(flat) if row >= 0}
            found |= {
                (place[target] - place[row]) % len(flat)
                for row, target in origins.items()
                if row in place and target in place
            }
        return [*sorted(found - {0, 1})[:4], 1]

    def _layer_moves(self, moves: Moves) -> Iterator[tuple[str, Ints]]:
        spec, extra = self.sides.spec, self.sides.extra_RLK.shape[1]
        for source in moves.dense_counted():
            yield "dense_layer_counted", source
        for by in (-1, 1, -2, 2):
            if abs(by) < spec.num_moe_layers:
                yield "mtp_shift" if extra and abs(by) == extra else "shifted_layer", moves.layers_shifted(by)
        for source in moves.stage_reversed():
            yield "stage_reversed", source

    def _of_others(self, moves: Moves, rows: Ints, layers: Ints) -> Iterator[_Explanation]:
        """Samples that have another one's rows at the same positions: exchanged whole, by chunks, or stale in one direction."""
        pairs = {
            (int(self.sides.sample_R[row]), int(self.sides.sample_R[target]))
            for row, target in self._origins(rows, layers, in_place=True)
            if not self._same_sample(row, target)
        }
        hits: dict[tuple[int, int], Bools] = {}
        for sample, other in sorted(pairs):
            source, own = moves.of_sample(sample, other), self.sides.sample_R[rows] == sample
            all_layers = np.arange(self.sides.spec.num_moe_layers)
            hits[sample, other] = self._tried("", source, all_layers, rows[own], layers[own]).hit_RL
        by_name: dict[str, list[Bools]] = {}
        for (sample, other), hit_RL in hits.items():
            name = "stale_row"
            if (other, sample) in hits:
                name = "swapped_samples" if self._whole(sample, hit_RL) else "cp_chunks_swapped"
            by_name.setdefault(name, []).append(hit_RL)
        for name, parts in by_name.items():
            hit_RL = np.logical_or.reduce(parts)
            yield _Explanation(name, hit_RL, np.zeros_like(hit_RL), int(hit_RL.any(1).sum()))

    def _whole(self, sample: int, hit_RL: Bools) -> bool:
        begin, end = self.sides.begin_S[sample : sample + 2]
        return bool(hit_RL[begin:end].any(1).mean() > 0.9) or self.sides.ticket.layout.cp == 1

    def _origins(self, rows: Ints, layers: Ints, *, in_place: bool = False) -> list[tuple[int, int]]:
        """(row, a row whose ids it has in some layer) of some that differ. `in_place`: at the same position of another sample, of
        which there may be several; else rows whose ids are not unique are left out."""
        pick = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _LOOKED_UP)).astype(np.int64))
        keys = self._keys(self.sides.seen_RLK[rows[pick], layers[pick]], rows[pick], layers[pick], in_place)
        known, row_of = self._known_in_place if in_place else self._known
        if not len(known):
            return []
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        hit = known[at] == keys
        return list(zip(rows[pick][hit].tolist(), row_of[at[hit]].tolist(), strict=True))

    def _keys(self, ids_NK: Ids, rows: Ints, layers: Ints, in_place: bool) -> Ids:
        place = layers + (self.sides.position_R[rows] + 1) * self.sides.spec.num_moe_layers * in_place
        words = row_words(items_of(np.ascontiguousarray(ids_NK))).astype(np.uint64)
        return words * np.uint64(0x9E3779B97F4A7C15) + place.astype(np.uint64)

    @cached_property
    def _known(self) -> tuple[Ids, Ints]:
        """Sorted keys of all (layer, ids) that stand in one row only, and that row."""
        found, row_of, times = self._looked_up(in_place=False)
        return found[times == 1], row_of[times == 1]

    @cached_property
    def _known_in_place(self) -> tuple[Ids, Ints]:
        """Sorted keys of all (layer, position, ids), and the first row that has them."""
        found, row_of, _ = self._looked_up(in_place=True)
        return found, row_of

    def _looked_up(self, *, in_place: bool) -> tuple[Ids, Ints, Ints]:
        rows, layers = self.sides.want_RLK.shape[:2]
        flat_NK = np.ascontiguousarray(self.sides.want_RLK).reshape(rows * layers, -1)
        keys = self._keys(
            flat_NK, np.repeat(np.arange(rows), layers), np.tile(np.arange(layers), rows), in_place
        )
        found, first, times = np.unique(keys, return_index=True, return_counts=True)
        return found, first // layers, times

    # -- telling ----------------------------------------------------------------------------------------------------------

    def _found(self, name: str, hit_RL: Bools) -> Finding:
        row, place = (int(index[0]) for index in np.nonzero(hit_RL))
        return self._at(name, row, place, cells=int(hit_RL.sum()))

    def _at(self, name: str, row: int, place: int, *, cells: int) -> Finding:
        sample, position = self.sides.place(row)
        found = finding(name, self.sides, sample=sample, cells=cells)
        return replace(
            found,
            position=position,
            layer=self.sides.spec.moe_layers[place],
            expected=tuple(self.sides.want_RLK[row, place].tolist()),
            seen=tuple(self.sides.seen_RLK[row, place].tolist()),
        )


def finding(name: str, sides: AlignedPair, *, sample: str, cells: int = 0, position: int = -1) -> Finding:
    return Finding(
        name=name, verdict=True, what=FAULTS[name], step=sides.ticket.step, sample=sample, position=position,
        cells=cells, of_pass=sides.of_pass,
    )  # fmt: skip


def _same(want: Ids, seen: Ids) -> Bools:
    """Whether two arrays are equal, row by row."""
    return np.all(want == seen, axis=-1)


# -- versions -----------------------------------------------------------------------------------------------------------------


def _versions(sides: AlignedPair) -> Iterator[Finding]:
    """Differences between what the two sides say about who made a row."""
    for name, _, (want_T, made_T), (seen_T, told_T) in _said(sides):
        again_T = (made_T == RowKind.DECODED) & (told_T == RowKind.PREFILLED)
        off = np.flatnonzero((want_T != seen_T) & ~again_T)
        if len(off):
            fewer = len(np.unique(want_T)) > len(np.unique(seen_T))
            by_one = np.unique(np.abs(seen_T[off] - want_T[off])).tolist() == [1]
            fault = "version_off_by_one" if by_one and not fewer else "mixed_versions"
            yield finding(fault, sides, sample=name, position=int(off[0]))


def _decoded_again(sides: AlignedPair) -> Bools:
    """Rows that were decoded by the engines' side and prefilled by the routers'."""
    again_R = np.zeros(len(sides.sample_R), bool)
    for _, begin, (_, made_T), (_, told_T) in _said(sides):
        again_R[begin : begin + len(made_T)] = (made_T == RowKind.DECODED) & (told_T == RowKind.PREFILLED)
    return again_R


def _said(sides: AlignedPair) -> Iterator[tuple[str, int, tuple[Ints, Ints], tuple[Ints, Ints]]]:
    """(sample, its first row, what the engines' side says of its rows, what the routers') where they do not say the same."""
    for name, begin, want, seen in zip(
        sides.names, sides.begin_S, sides.want_spans, sides.seen_spans, strict=False
    ):
        if want and seen and want != seen:
            rows = min(want[-1].end, seen[-1].end)
            yield name, int(begin), spread(want, rows), spread(seen, rows)


def spread(spans: Sequence[ProvenanceSpan], rows: int) -> tuple[Ints, Ints]:
    """(version, kind) of each row; -1 where no span says."""
    version, kind = np.full(rows, -1, np.int64), np.full(rows, -1, np.int64)
    for span in spans:
        version[span.start : span.end], kind[span.start : span.end] = span.weight_version, int(span.kind)
    return version, kind


NOTHING = -1


@dataclass(frozen=True, eq=False)
class Moves:
    """Maps of one step, from its ticket's layout."""

    sides: AlignedPair

    @property
    def ticket(self) -> Ticket:
        return self.sides.ticket

    @cached_property
    def orders(self) -> dict[tuple[int, int, int], Ints]:
        """(dp, cp, micro-batch) -> [TP slot, row of a router] the concatenated row that it is; -1: padding."""
        found, plan = {}, self.ticket.plan
        number = {name: index for index, name in enumerate(self.sides.names)}
        for dp in range(self.ticket.layout.dp):
            for index, batch in enumerate(plan.microbatches[dp]):
                begin = np.asarray([self._begin(number.get(name)) for name in batch.sample_ids] + [NOTHING])
                tokens = np.asarray([*batch.tokens, 0])
                for cp in range(self.ticket.layout.cp):
                    sample, position = plan.table(dp).row_map(cp=cp, microbatch=index)
                    real = (sample >= 0) & (position < tokens[sample] - 1) & (begin[sample] >= 0)
                    found[dp, cp, index] = np.where(real, begin[sample] + position, NOTHING)
        return found

    def _begin(self, sample: int | None) -> int:
        return NOTHING if sample is None else int(self.sides.begin_S[sample])

    def _empty(self) -> Ints:
        return np.full(len(self.sides.sample_R), NOTHING, np.int64)

    def shifted(self, by: int) -> Ints:
        """Row t has the ids of row t + by of its sample."""
        source = np.arange(len(self.sides.sample_R)) + by
        last = len(source) - 1
        inside = (source >= 0) & (source <= last)
        same = self.sides.sample_R[np.clip(source, 0, last)] == self.sides.sample_R
        return np.where(inside & same, source, NOTHING)

    def of_sample(self, sample: int, other: int) -> Ints:
        """The rows of one sample have those of another at the same positions."""
        source, begin = self._empty(), self.sides.begin_S
        count = min(begin[sample + 1] - begin[sample], begin[other + 1] - begin[other])
        source[begin[sample] : begin[sample] + count] = np.arange(begin[other], begin[other] + count)
        return source

    def slots_exchanged(self) -> Iterator[Ints]:
        """Each TP slot has the rows of the next one, or of its mirror."""
        slots = self.ticket.layout.tp_slots
        for order in {*([1] if slots > 1 else []), *([-1] if slots > 2 else [])}:
            source = self._empty()
            for rows in self.orders.values():
                _set(source, rows, np.roll(rows, -1, axis=0) if order == 1 else rows[::-1])
            yield source

    def rotated(self, by: int) -> Ints:
        """The rows of each micro-batch are rotated, in the order in which its routers see them."""
        source = self._empty()
        for rows in self.orders.values():
            flat = rows.reshape(-1)
            _set(source, flat, np.roll(flat, -by))
        return source

    def other_microbatch(self, by: int) -> Ints:
        """Row i of a micro-batch's routers has that of another micro-batch, `by` further on, round about."""
        source = self._empty()
        for (dp, cp, index), rows in self.orders.items():
            count = len(self.ticket.plan.microbatches[dp])
            other = self.orders[dp, cp, (index + by) % count].reshape(-1)
            flat = rows.reshape(-1)[: len(other)]
            _set(source, flat, other[: len(flat)])
        return source

    def zigzag(self) -> Iterator[Ints]:
        """Context parallelism: chunks taken in order where they are in zigzag, and the other way round."""
        cp = self.ticket.layout.cp
        if cp > 1:
            takes = [0] * (2 * cp)
            for rank in range(cp):
                takes[rank], takes[2 * cp - 1 - rank] = 2 * rank, 2 * rank + 1
            yield self._of_chunks(takes)
            yield self._of_chunks([takes.index(chunk) for chunk in range(2 * cp)])

    def _of_chunks(self, takes: list[int]) -> Ints:
        source = self._empty()
        for sample, size in enumerate(self.chunk_S):
            begin, end = self.sides.begin_S[sample : sample + 2]
            position = np.arange(end - begin)
            found = np.asarray(takes)[position // size] * size + position % size
            source[begin:end] = np.where(found < end - begin, begin + found, NOTHING)
        return source

    @cached_property
    def chunk_S(self) -> list[int]:
        """Positions in a context-parallel chunk of each sample."""
        parts = 2 * self.ticket.layout.cp
        padded = {
            name: length
            for rank in self.ticket.plan.microbatches
            for batch in rank
            for name, length in zip(batch.sample_ids, batch.padded, strict=True)
        }
        return [max(1, -(-padded[name] // parts)) for name in self.sides.names]

    # -- layers ----------------------------------------------------------------------------------------------------

    def layers_shifted(self, by: int) -> Ints:
        layers = self.sides.spec.num_moe_layers
        source = np.arange(layers) + by
        return np.where((source >= 0) & (source < layers), source, NOTHING)

    def dense_counted(self) -> Iterator[Ints]:
        """Layers where a decoder layer's number was taken for its place on the MoE axis, or the other way round."""
        spec = self.sides.spec
        if spec.moe_layers != tuple(range(spec.num_moe_layers)):
            layers = np.asarray(spec.moe_layers)
            yield np.where(layers < spec.num_moe_layers, layers, NOTHING)
            place = {layer: index for index, layer in enumerate(spec.moe_layers)}
            yield np.asarray([place.get(index, NOTHING) for index in range(spec.num_moe_layers)])

    def stage_reversed(self) -> Iterator[Ints]:
        """The layers of each stage from the last to the first."""
        layout, spec = self.ticket.layout, self.sides.spec
        source = np.arange(spec.num_moe_layers)
        for pp in range(layout.pp):
            own = [
                spec.moe_index(layer) for layer in layout.stage_layers(spec, pp=pp) if layer < spec.num_layers
            ]
            source[own] = own[::-1]
        yield source


def _set(source: Ints, target: Ints, value: Ints) -> None:
    """Set the map for rows that exist at both ends."""
    both = (target >= 0) & (value >= 0)
    source[target[both]] = value[both]
