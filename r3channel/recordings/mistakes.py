"""The known mistakes in one table: what each is, and from where it gives each row of each router its ids.

A mistake is made of maps (`slots.Move`). Some maps are all that can be made of a step at once. Other maps have parameters that
cells vote for: cells whose ids were found elsewhere. `search` uses the maps, `diagnose` the names and sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair, Ints
from r3channel.recordings.slots import Move, Slots, Votes

_VOTED, _PAIRS = 4, 16
"""Most parameters of one mistake, and most pairs of samples, that are tried. Cells vote for them."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Micro-batch sizes that are tried."""

Maps = Iterable[Any]
"""The source of each slot's, or each layer's, ids (-1: none). Some maps come with the places of slots."""


class Mistake(NamedTuple):
    """One line of the table."""

    what: str
    """The mistake in a sentence, and its usual cause."""
    places: str = "by_batch"
    """The places where it can be made alone: an attribute of `Slots`, "layers" for a map of layers, "own": the map has them."""
    maps: Callable[[Slots], Maps] = lambda _: ()
    """The maps without parameters."""
    voted: Callable[[Slots, Votes], Maps] = lambda *_: ()
    """The maps whose parameters cells vote for."""


# -- maps of layers ------------------------------------------------------------------------------------------------------------


def _stage_reversed(slots: Slots) -> Maps:
    spec, layout = slots.sides.spec, slots.ticket.layout
    layers = (layout.stage_layers(spec, pp=pp) for pp in range(layout.pp))
    stages = [[spec.moe_index(layer) for layer in own if layer < spec.num_layers] for own in layers]
    for reversed_stages in (stages, *([stage] for stage in stages)):
        source = slots.own_L[:-1].copy()
        for stage in reversed_stages:
            source[stage] = stage[::-1]
        yield source


def _dense_layer_counted(slots: Slots) -> Maps:
    layers, places = np.asarray(slots.sides.spec.moe_layers), slots.own_L[:-1]
    back = np.where(np.isin(places, layers), np.searchsorted(layers, places), -1)
    return np.minimum(layers, places[-1]), layers, back


def _layer_shifts(slots: Slots, *, mtp: bool) -> Maps:
    """Yield shifts of all layers by one and by two.

    With `mtp`, only those by the number of MTP layers, which are these layers' fault; without it, only the others.
    """
    places, extra = slots.own_L[:-1], slots.sides.extra_RLK.shape[1]
    for by in (1, -1, 2, -2):
        if mtp == (abs(by) == extra):
            yield from (np.roll(places, -by), places + by)


def _swapped_layers(slots: Slots, votes: Votes) -> Maps:
    for cycle in _cycles(Counter(zip(votes.layer_N.tolist(), votes.from_layer_N.tolist(), strict=True))):
        yield [cycle.get(place, place) for place in slots.own_L[:-1].tolist()]


# -- maps of rows --------------------------------------------------------------------------------------------------------------


def _shifted_padding(slots: Slots) -> Maps:
    tokens = np.asarray([slots.ticket.sample(name).tokens for name in slots.names])
    padding_S = (slots.padded_S - tokens)[slots.sample_S]
    return slots.shift(-padding_S), slots.shift(padding_S)


def _row_moves(slots: Slots, votes: Votes, sign: int) -> Maps:
    a, b = votes.slot_N, votes.from_slot_N
    moved = (slots.position_S[b] - slots.position_S[a])[slots.sample_S[a] == slots.sample_S[b]]
    return map(slots.shift, _most_common(moved[moved * sign > 1]))


def _turns(slots: Slots, votes: Votes) -> Ints:
    """Return by how many rows each cell is rotated in its call.

    The rotation is the shorter way round. It is 0 if the ids come from another call.
    """
    a, b = votes.slot_N, votes.from_slot_N
    size, same = slots.size_C[slots.call_S[a]], slots.call_S[a] == slots.call_S[b]
    return np.where(same, (b - a + size // 2) % size - size // 2, 0)


def _call_rotations(slots: Slots, votes: Votes | None = None) -> Maps:
    ways = _most_common(_turns(slots, votes)) if votes else (1, -1)
    return [slots.of_calls(slots.call_S, by) for by in ways]


def _other_microbatch(slots: Slots, votes: Votes | None = None) -> Maps:
    further = np.asarray((1, -1))
    if votes:
        a, b = votes.slot_N, votes.from_slot_N
        further = ((slots.round_S[b] - slots.round_S[a]) % slots.rounds)[slots.by_rank[a] == slots.by_rank[b]]
    for by in _most_common(further):
        batch_S = slots.batch_S - slots.round_S + (slots.round_S + by) % slots.rounds
        yield slots.of_calls(batch_S * slots.parts + slots.call_S % slots.parts)


def _sp_halves_swapped(slots: Slots) -> Maps:
    return map(slots.of_parts, (np.roll(slots.part_CT, -1, axis=1), slots.part_CT[:, ::-1]))


def _tp_cp_exchanged(slots: Slots) -> Maps:
    turned, layout = slots.part_CT.T, slots.ticket.layout
    yield from map(slots.of_parts, (turned, np.argsort(turned, axis=None)))
    exchanged = replace(layout, tp=layout.cp, cp=layout.tp, sp=None)
    if exchanged.tp_slots * exchanged.cp == slots.parts:
        yield from slots.of_cut(slots.ticket.assignment.ranks, exchanged)


def _zigzag_order(slots: Slots) -> Maps:
    first = np.arange(cp := slots.ticket.layout.cp)
    zigzag = np.stack([first, 2 * cp - 1 - first], axis=1).ravel()
    for takes in (np.argsort(zigzag), zigzag):
        chunk_S = np.minimum(slots.chunk_S, len(takes) - 1)
        yield slots.shift((takes[chunk_S] - chunk_S) * slots.chunk_size[slots.sample_S])


def _other_microbatch_size(slots: Slots) -> Maps:
    ranks = [[name for batch in rank for name in batch] for rank in slots.ticket.assignment.ranks]
    for size in sorted({min(size, len(ranks[0])) for size in _SIZES}):
        cut = [[names[at : at + size] for at in range(0, len(names), size)] for names in ranks]
        yield from slots.of_cut(cut, slots.ticket.layout)


def _exchanges(slots: Slots, votes: Votes) -> tuple[list[dict[int, int]], Counter[tuple[int, int, int]]]:
    """Count exchanges of rows between samples.

    Returns:
        The cycles of samples with each other's rows at the same positions, and (sample, other sample, positions on) -> cells.
    """
    a, b = votes.slot_N, votes.from_slot_N
    moves = np.stack([slots.sample_S[a], slots.sample_S[b], slots.position_S[b] - slots.position_S[a]])
    apart = (moves[0] != moves[1]) & (moves[:2] >= 0).all(0)
    pairs = Counter(dict(Counter(map(tuple, moves[:, apart].T.tolist())).most_common(_PAIRS)))
    exchanged = Counter({(one, other): count for (one, other, by), count in pairs.items() if by == 0})
    return list(_cycles(exchanged)), pairs


def _swapped_samples(slots: Slots, votes: Votes) -> Maps:
    # One map with all exchanges together, as a changed order of samples makes it.
    together = chain.from_iterable(cycle.items() for cycle in _exchanges(slots, votes)[0])
    return [slots.of_samples(dict(together))]


def _cp_chunks_swapped(slots: Slots, votes: Votes) -> Maps:
    for cycle in _exchanges(slots, votes)[0] if slots.ticket.layout.cp > 1 else ():
        yield slots.of_samples(cycle), np.where(np.isin(slots.sample_S, [*cycle]), slots.chunk_S + 1, 0)


def _stale_row(slots: Slots, votes: Votes) -> Maps:
    for sample, source, by in _exchanges(slots, votes)[1]:
        yield slots.of_samples({sample: source}, by), np.where(slots.sample_S == sample, slots.own_S + 1, 0)


def _most_common(values: Ints) -> list[int]:
    return [value for value, _ in Counter(values[values != 0].tolist()).most_common(_VOTED)]


def _cycles(pairs: Counter[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """Yield the cycles of two and more members, each cycle once.

    Each member is followed by the one that most cells name.
    """
    following = dict(pair for pair, _ in reversed(pairs.most_common()))
    while following:
        way, at = dict[int, int](), next(iter(following))
        while at in following:
            way[at] = following.pop(at)
            at = way[at]
        members = list(way)
        if at in way and at != members[-1]:
            yield {member: way[member] for member in members[members.index(at) :]}


MISTAKES = {
    "stage_reversed": Mistake("the layers of a pipeline stage are bound from the last to the first", "layers", _stage_reversed),
    "dense_layer_counted": Mistake(
        "decoder layers and MoE layers were counted alike: dense layers have no routing", "layers", _dense_layer_counted),
    "mtp_shift": Mistake(
        "an MTP layer took a decoder layer's ids, or pushed all others on: layer numbers collide", "layers",
        partial(_layer_shifts, mtp=True)),
    "shifted_layer": Mistake(
        "each layer has its neighbour's ids: layers are bound by the order of construction", "layers",
        partial(_layer_shifts, mtp=False)),
    "sp_halves_swapped": Mistake("sequence-parallel parts are exchanged between TP ranks", maps=_sp_halves_swapped),
    "tp_cp_exchanged": Mistake("TP and CP are exchanged: ranks are counted in the other order", maps=_tp_cp_exchanged),
    "zigzag_order": Mistake("context-parallel chunks are in the other order, zigzag against contiguous", maps=_zigzag_order),
    "off_by_one_row": Mistake(
        "each row has its neighbour's ids: a last token without a row, padding or shifted labels", "by_sample",
        lambda slots: map(slots.shift, (1, -1))),
    "shifted_padding": Mistake(
        "rows stand before or behind their places, as far as padding goes: it is on the other side",
        maps=_shifted_padding, voted=partial(_row_moves, sign=-1)),
    "other_microbatch": Mistake(
        "a micro-batch's routers have another one's rows", maps=_other_microbatch, voted=_other_microbatch),
    "recompute_other_microbatch": Mistake(
        "the recompute took another micro-batch's ids than its forward pass: one queue for all"),
    "rotated_rows": Mistake(
        "the rows of a micro-batch are rotated: a start offset within the pack", maps=_call_rotations, voted=_call_rotations),
    "other_microbatch_size": Mistake("rows were laid out for micro-batches of another size", "by_rank", _other_microbatch_size),
    "missing_prefix": Mistake(
        "the leading rows are not there: a start offset, or a cached prompt that was not returned", "by_sample",
        voted=partial(_row_moves, sign=1)),
    "swapped_layers": Mistake(
        "layers have each other's ids: an order or a table of layers is wrong", "layers", voted=_swapped_layers),
    "swapped_samples": Mistake(
        "two samples have each other's rows: an order was changed on one side only", "by_sample",
        voted=_swapped_samples),
    "cp_chunks_swapped": Mistake(
        "context-parallel chunks of two sequences are exchanged: a pack's offsets", "own", voted=_cp_chunks_swapped),
    "stale_row": Mistake("rows are those of another request: a cached slot was not written again", "own", voted=_stale_row),
    "zero_rows": Mistake("rows of zeros: memory that nobody wrote, or a path that never captures"),
    "duplicated_ids": Mistake("an expert stands twice in a row: zero-filled, stale or overlapping memory"),
    "padding_rows": Mistake("rows hold padding's made-up ids: the end of the padding was taken for rows"),
    "out_of_range": Mistake("ids that the model does not have"),
    "row_order": Mistake("the same experts in another order: nothing is lost unless weights travel in that order"),
    "int16_as_uint8": Mistake("ids above 8 bits were read as single bytes: another id type than the sender's"),
    "fused_shared_expert": Mistake("the shared expert's column is among the routed ones: cut it off"),
    "physical_ids": Mistake("ids are mapped one to one: physical experts (after load balancing), not logical ones"),
    "retraction_overwrite": Mistake(
        "rows that were decoded came back prefilled: a retracted request was computed again over its own"),
    "mixed_versions": Mistake("one range of rows is said to be of one weight version, and is of several"),
    "version_off_by_one": Mistake("weight versions are one off: stamped before instead of after the update"),
    "replay_hurts": Mistake("log-probs are further from the engine's with replay than without: rows of other tokens or layers"),
    "tensor_row": Mistake(
        "rows of a tensor beside the ids do not have the token that they sampled: rows of another position or sample"),
    "unexplained": Mistake("rows differ, and no known mistake explains them"),
}  # fmt: skip
"""Mistakes by name. If two make the same move, the first is named."""
NOTES = frozenset({"row_order"})
"""Names that are reported and are no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault, named as in `MISTAKES`, with the first cell that shows it as an example of `cells`."""

    name: str
    verdict: bool
    """True: the bytes show the fault. False: a suspicion, from statistics."""
    what: str
    """The fault in a sentence, and its usual cause."""
    step: int
    sample: str
    position: int = -1
    layer: int = -1
    expected: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    cells: int = 0
    """Number of (row, layer) pairs that the fault explains."""
    of_pass: str = "forward"

    def __str__(self) -> str:
        kind = "" if self.verdict else "suspicion: "
        where = {"step": self.step, "sample": self.sample, "position": self.position, "layer": self.layer}
        place = ", ".join(f"{name} {value}" for name, value in where.items() if value != -1)
        ids = f": expected {list(self.expected)}, seen {list(self.seen)}" if self.seen else ""
        count = f" ({self.cells:,} rows of layers)" if self.cells else ""
        passed = f" in the {self.of_pass} pass" if self.of_pass != "forward" else ""
        return f"{kind}{self.name}{count}{passed}: {place}{ids}. {self.what}"


class Catalogue:
    """All moves that mistakes can make of a step's rows and layers."""

    def __init__(self, sides: AlignedPair) -> None:
        self.slots = slots = Slots(sides)
        moves = [self._move(name, of) for name, mistake in MISTAKES.items() for of in mistake.maps(slots)]
        self._fixed = [move for move in moves if move.moves(slots.own_S, slots.own_L)]
        """Moves without parameters that move something."""

    def candidates(self, cell_N: Ints, from_N: Ints) -> list[Move]:
        """Return all moves, with those that cells vote for.

        Args:
            cell_N: cells of the routers.
            from_N: the cells whose ids they have.
        """
        votes = self.slots.votes(cell_N, from_N)
        told = ((name, of) for name, mistake in MISTAKES.items() for of in mistake.voted(self.slots, votes))
        return [*self._fixed, *(self._move(*one) for one in told)]

    def count_votes(self, cell_N: Ints, from_N: Ints) -> int:
        """Return how many cells vote for one mistake.

        The mistake is one without parameters, or one rotation.
        """
        votes = self.slots.votes(cell_N, from_N)
        by = _turns(self.slots, votes)[votes.layer_N == votes.from_layer_N]
        turns = np.unique(by[by != 0], return_counts=True)[1]
        same = (int(np.count_nonzero(move.sources(cell_N) == from_N)) for move in self._fixed)
        return max(int(turns.max(initial=0)), *same)

    def _move(self, name: str, source: Any) -> Move:
        slots, places, none = self.slots, MISTAKES[name].places, self.slots.own_L[-1]
        if name == "other_microbatch" and slots.sides.of_pass == "recompute":
            name = "recompute_other_microbatch"
        if places == "layers":
            source_L = np.append(source, -1)
            source_L[(source_L < 0) | (source_L > none)] = none
            return Move(name, slots.own_S, source_L, slots.by_sample)
        source_S, place_S = source if places == "own" else (source, getattr(slots, places))
        return Move(name, source_S, slots.own_L, place_S)
