"""The known mistakes that move rows or layers, as maps: from where each row of each router has its ids.

A slot is one row of one router, padding included. In slots a wrong order is a permutation, so two mistakes at once are one map
after the other. A mistake names the places where it can be made by itself (micro-batches, samples, chunks); the ids tell where
it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from r3channel.errors import ConfigError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.aligned_pair import AlignedPair, Ints

_VOTED, _PAIRS = 4, 16
"""Parameters of one kind of mistake, and pairs of samples, that are tried, of those that cells vote for."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Micro-batch sizes that are tried."""


class Votes(NamedTuple):
    """Cells, and the cells whose ids they have, where that is known."""

    slot_N: Ints
    layer_N: Ints
    from_slot_N: Ints
    from_layer_N: Ints


@dataclass(frozen=True, eq=False)
class Mistake:
    """Which slot's and which layer's ids each slot and layer has. The last index of each map is no slot, and no layer."""

    name: str
    slots_S: Ints
    layers_L: Ints
    place_S: Ints
    """Number of the place of each slot; 0: it was not made there."""

    def sources(self, slot_N: Ints, layer_N: Ints) -> tuple[Ints, Ints]:
        """Where cells have their ids from."""
        made = self.place_S[slot_N] > 0
        return np.where(made, self.slots_S[slot_N], slot_N), np.where(made, self.layers_L[layer_N], layer_N)

    def votes(self, votes: Votes) -> int:
        """How many cells have their ids from where it says."""
        same = self.slots_S[votes.slot_N] == votes.from_slot_N
        return int(np.count_nonzero(same & (self.layers_L[votes.layer_N] == votes.from_layer_N)))


class Slots:
    """The slots of a step, router call by router call, and one more at the end that is none. Calls are in the order (DP rank,
    micro-batch, part), a part is CP rank x TP parts + TP part."""

    def __init__(self, ticket: Ticket, names: Sequence[str]) -> None:
        self.ticket, self.names = ticket, names
        self.parts = ticket.layout.cp * ticket.layout.tp_slots
        self.rounds = len(ticket.assignment.ranks[0])
        """Micro-batches of each DP rank."""
        sizes, samples, positions = zip(*self._calls(), strict=True)
        self.size_C, self.none = np.asarray(sizes), sum(sizes)
        """Rows of each call, and of all: the slot that is none."""
        self.sample_S, self.position_S = (
            np.append(np.concatenate(samples), -1),
            np.append(np.concatenate(positions), -1),
        )
        """-1 behind a pack, and for samples that are not compared."""
        self.call_S = np.append(np.repeat(np.arange(len(sizes)), sizes), -1)
        self.batch_S = self.call_S // self.parts
        """Micro-batches, counted over all DP ranks."""
        self.round_S = self.batch_S % self.rounds
        """The micro-batch's number on its DP rank."""
        self._begin_C = np.cumsum(self.size_C) - self.size_C
        self.padded_S = np.bincount(self.sample_S + 1, minlength=len(names) + 1)[1:]
        """Positions of each sample, padding included."""
        order = np.lexsort((self.position_S, self.sample_S))
        self._ordered = order[np.count_nonzero(self.sample_S < 0) :]
        """The slots of all samples' positions, sample by sample."""
        self.chunk_size = np.maximum(1, -(-self.padded_S // (2 * ticket.layout.cp)))
        """Positions in a context-parallel chunk of each sample."""
        self.chunk_S = self.position_S // self.chunk_size[self.sample_S]

    def _calls(self) -> Iterator[tuple[int, Ints, Ints]]:
        """(rows, their samples, their positions) of each router call."""
        number, layout = {name: index for index, name in enumerate(self.names)}, self.ticket.layout
        for dp in range(layout.dp):
            for index, batch in enumerate(self.ticket.plan.microbatches[dp]):
                numbers = np.asarray([*(number.get(name, -1) for name in batch.sample_ids), -1])
                for cp in range(layout.cp):
                    parts = self.ticket.plan.table(dp).row_map(cp=cp, microbatch=index)
                    for sample, position in zip(*parts, strict=True):
                        yield len(sample), numbers[sample], position

    def at(self, sample_N: Ints, position_N: Ints) -> Ints:
        """The slot of a sample's position; none outside of it."""
        size_N = self.padded_S[sample_N]
        inside = (sample_N >= 0) & (position_N >= 0) & (position_N < size_N)
        begin_N = np.cumsum(self.padded_S)[sample_N] - size_N
        return np.where(inside, self._ordered[np.where(inside, begin_N + position_N, 0)], self.none)

    # -- maps of all slots -------------------------------------------------------------------------------------------------

    def shifted(self, by: Any) -> Ints:
        """Each row has the ids that stand `by` rows on in its sample; a number, or one for each slot."""
        return self.at(self.sample_S, self.position_S + by)

    def of_calls(self, call_S: Any, by: int = 0) -> Ints:
        """Each call has the rows of another one; `by`: rotated by so many."""
        index_S = np.arange(self.none + 1) - self._begin_C[self.call_S]
        index_S = (index_S + by) % self.size_C[self.call_S] if by else index_S
        source_S = np.where(index_S < self.size_C[call_S], self._begin_C[call_S] + index_S, self.none)
        return np.append(source_S[:-1], self.none)

    def of_parts(self, source: Ints) -> Ints:
        """The routers of each micro-batch have each other's rows: part p those of part `source[p]`."""
        return self.of_calls(self.batch_S * self.parts + source.ravel()[self.call_S % self.parts])

    def of_batches(self, by: int) -> Ints:
        """The routers of each micro-batch have the rows of another one of their DP rank, `by` further on, round about."""
        batch_S = self.batch_S - self.round_S + (self.round_S + by) % self.rounds
        return self.of_calls(batch_S * self.parts + self.call_S % self.parts)

    def of_chunks(self, takes: Ints) -> Ints:
        """Each context-parallel chunk of a sample is chunk `takes[chunk]`."""
        chunk = np.minimum(self.chunk_S, len(takes) - 1)
        return self.shifted((takes[chunk] - chunk) * self.chunk_size[self.sample_S])

    def of_samples(self, source: Mapping[int, int], by: int = 0) -> Ints:
        """Samples have others' rows, `by` positions further on."""
        table = np.arange(len(self.padded_S) + 1)
        table[[*source, -1]] = [*source.values(), -1]
        other_S = table[self.sample_S]
        moved = self.at(other_S, self.position_S + by)
        return np.where(other_S != self.sample_S, moved, np.arange(self.none + 1))

    def of_cut(self, ranks: Sequence[Sequence[Sequence[str]]], layout: TrainerLayout) -> Ints:
        """Each rank's calls read, one after another, what was laid out for other micro-batches or another layout. Raises
        ConfigError."""
        ticket = replace(self.ticket, assignment=Assignment.given(ranks), layout=layout)
        other, source = Slots(ticket, self.names), np.full(self.none + 1, self.none)
        for mine, theirs in zip(self._streams(), other._streams(), strict=True):
            count = min(len(mine), len(theirs))
            source[mine[:count]] = self.at(other.sample_S[theirs[:count]], other.position_S[theirs[:count]])
        return source

    def _streams(self) -> list[Ints]:
        """The slots of each rank's calls in their order."""
        rank_S = (self.batch_S // self.rounds * self.parts + self.call_S % self.parts)[:-1]
        order = np.argsort(rank_S, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(rank_S[order])) + 1)


class Catalogue:
    """All mistakes that could be made in a step; what comes first is named where two are the same."""

    def __init__(self, sides: AlignedPair) -> None:
        self.slots, self._sides = Slots(sides.ticket, sides.names), sides
        self._own_L, self._own_S = np.arange(sides.spec.num_moe_layers + 1), np.arange(self.slots.none + 1)
        self._by_sample, self._by_batch = self.slots.sample_S + 1, self.slots.batch_S + 1
        self._by_rank = self.slots.batch_S // self.slots.rounds + 1

    @cached_property
    def fixed(self) -> list[Mistake]:
        """Those without parameters, that move something."""
        tried = [*self._fixed_layers(), *self._parts(), *self._fixed_rows(), *self._cuts()]
        own_S, own_L = self._own_S, self._own_L
        return [one for one in tried if (one.slots_S != own_S).any() or (one.layers_L != own_L).any()]

    def candidates(self, votes: Votes) -> list[Mistake]:
        """With those whose parameters cells tell."""
        real_N = (votes.slot_N < self.slots.none) & (votes.from_slot_N < self.slots.none)
        real_N &= np.maximum(votes.layer_N, votes.from_layer_N) < self._own_L[-1]
        real = Votes(*(column[real_N] for column in votes))
        return [*self.fixed, *self._rows_voted(real), *self._layers_voted(real), *self._samples_voted(real)]

    def agreed(self, votes: Votes) -> int:
        """How many cells vote for one mistake: one without parameters, or one rotation."""
        by = self._turns(votes)[votes.layer_N == votes.from_layer_N]
        turns = np.unique(by[by != 0], return_counts=True)[1]
        return max(int(turns.max(initial=0)), *(mistake.votes(votes) for mistake in self.fixed))

    def _rows(self, name: str, source_S: Ints, place_S: Ints) -> Mistake:
        return Mistake(name, source_S, self._own_L, place_S)

    def _layers(self, name: str, source: Any) -> Mistake:
        """-1: no layer."""
        source_L, none = np.append(source, -1), self._own_L[-1]
        return Mistake(
            name, self._own_S, np.where((source_L < 0) | (source_L > none), none, source_L), self._by_sample
        )

    # -- those without parameters --------------------------------------------------------------------------------------------

    def _fixed_rows(self) -> Iterator[Mistake]:
        slots = self.slots
        tokens = np.asarray([slots.ticket.sample(name).tokens for name in slots.names])
        padding_S = (slots.padded_S - tokens)[slots.sample_S]
        for by in (1, -1):
            yield self._rows("off_by_one_row", slots.shifted(by), self._by_sample)
            yield self._rows("shifted_padding", slots.shifted(-by * padding_S), self._by_batch)
            yield self._other_microbatch(by)
            yield self._rotated(by)

    def _other_microbatch(self, by: int) -> Mistake:
        name = "recompute_other_microbatch" if self._sides.of_pass == "recompute" else "other_microbatch"
        return self._rows(name, self.slots.of_batches(by), self._by_batch)

    def _rotated(self, by: int) -> Mistake:
        return self._rows("rotated_rows", self.slots.of_calls(self.slots.call_S, by), self._by_batch)

    def _parts(self) -> Iterator[Mistake]:
        """What TP and CP ranks do to each other's rows."""
        slots, cp = self.slots, self.slots.ticket.layout.cp
        parts = np.arange(slots.parts).reshape(cp, -1)
        zigzag = np.stack([np.arange(cp), 2 * cp - 1 - np.arange(cp)], axis=1).ravel()
        for source in (np.roll(parts, -1, axis=1), parts[:, ::-1]):
            yield self._rows("sp_halves_swapped", slots.of_parts(source), self._by_batch)
        for source in (parts.T, np.argsort(parts.T, axis=None)):
            yield self._rows("tp_cp_exchanged", slots.of_parts(source), self._by_batch)
        for takes in (np.argsort(zigzag), zigzag):
            yield self._rows("zigzag_order", slots.of_chunks(takes), self._by_batch)

    def _cuts(self) -> Iterator[Mistake]:
        """What was laid out for another trainer: micro-batches of other sizes, TP and CP the other way round."""
        layout, given = self.slots.ticket.layout, self.slots.ticket.assignment.ranks
        ranks = [[name for batch in rank for name in batch] for rank in given]
        for size in sorted({min(size, len(ranks[0])) for size in _SIZES}):
            cut = [[names[at : at + size] for at in range(0, len(names), size)] for names in ranks]
            yield from self._cut("other_microbatch_size", cut, layout)
        exchanged = replace(layout, tp=layout.cp, cp=layout.tp, sp=None)
        if exchanged.tp_slots * exchanged.cp == self.slots.parts:
            yield from self._cut("tp_cp_exchanged", given, exchanged)

    def _cut(self, name: str, ranks: Any, layout: TrainerLayout) -> Iterator[Mistake]:
        """Nothing where that trainer could not run it."""
        with suppress(ConfigError):
            yield self._rows(name, self.slots.of_cut(ranks, layout), self._by_rank)

    def _fixed_layers(self) -> Iterator[Mistake]:
        spec, layout, places = self._sides.spec, self.slots.ticket.layout, self._own_L[:-1]
        stages = [
            [spec.moe_index(layer) for layer in layout.stage_layers(spec, pp=pp) if layer < spec.num_layers]
            for pp in range(layout.pp)
        ]
        for reversed_stages in (stages, *([stage] for stage in stages)):
            source = places.copy()
            for stage in reversed_stages:
                source[stage] = stage[::-1]
            yield self._layers("stage_reversed", source)
        layers = np.asarray(spec.moe_layers)
        back = np.where(np.isin(places, layers), np.searchsorted(layers, places), -1)
        for source in (np.minimum(layers, places[-1]), layers, back):
            yield self._layers("dense_layer_counted", source)
        extra = self._sides.extra_RLK.shape[1]
        for by in (1, -1, 2, -2):
            for source in (np.roll(places, -by), places + by):
                yield self._layers("mtp_shift" if extra == abs(by) else "shifted_layer", source)

    # -- those whose parameters cells vote for ----------------------------------------------------------------------

    def _turns(self, votes: Votes) -> Ints:
        """By how many rows each cell is rotated, the shorter way round; 0 where it is of another call."""
        a, b = votes.slot_N, votes.from_slot_N
        size, same = self.slots.size_C[self.slots.call_S[a]], self.slots.call_S[a] == self.slots.call_S[b]
        return np.where(same, (b - a + size // 2) % size - size // 2, 0)

    def _rows_voted(self, votes: Votes) -> Iterator[Mistake]:
        slots, a, b = self.slots, votes.slot_N, votes.from_slot_N
        moved = slots.position_S[b] - slots.position_S[a]
        for by in _most(moved[(slots.sample_S[a] == slots.sample_S[b]) & (np.abs(moved) > 1)]):
            name = "missing_prefix" if by > 0 else "shifted_padding"
            yield self._rows(name, slots.shifted(by), self._by_sample)
        yield from map(self._rotated, _most(self._turns(votes)))
        further = (slots.round_S[b] - slots.round_S[a]) % slots.rounds
        yield from map(self._other_microbatch, _most(further[self._by_rank[a] == self._by_rank[b]]))

    def _layers_voted(self, votes: Votes) -> Iterator[Mistake]:
        """Layers that have each other's ids, cycle by cycle."""
        places = self._own_L[:-1]
        for cycle in _cycles(Counter(zip(votes.layer_N.tolist(), votes.from_layer_N.tolist(), strict=True))):
            yield self._layers("swapped_layers", [cycle.get(place, place) for place in places])

    def _samples_voted(self, votes: Votes) -> Iterator[Mistake]:
        """Samples that have others' rows: exchanged at the same positions, or stale in one direction."""
        slots, a, b = self.slots, votes.slot_N, votes.from_slot_N
        moves = np.stack([slots.sample_S[a], slots.sample_S[b], slots.position_S[b] - slots.position_S[a]])
        apart = (moves[0] != moves[1]) & (moves[:2] >= 0).all(0)
        pairs = Counter(dict(Counter(map(tuple, moves[:, apart].T.tolist())).most_common(_PAIRS)))
        exchanged = Counter({(one, other): count for (one, other, by), count in pairs.items() if by == 0})
        cycles = list(_cycles(exchanged))
        together = dict(chain.from_iterable(cycle.items() for cycle in cycles))  # an order that was changed
        yield self._rows("swapped_samples", slots.of_samples(together), self._by_sample)
        for cycle in cycles if slots.ticket.layout.cp > 1 else ():
            place_S = np.where(np.isin(slots.sample_S, [*cycle]), slots.chunk_S + 1, 0)
            yield self._rows("cp_chunks_swapped", slots.of_samples(cycle), place_S)
        for sample, source, by in pairs:
            place_S = np.where(slots.sample_S == sample, self._own_S + 1, 0)
            yield self._rows("stale_row", slots.of_samples({sample: source}, by), place_S)


def _most(values: Ints) -> list[int]:
    return [value for value, _ in Counter(values[values != 0].tolist()).most_common(_VOTED)]


def _cycles(pairs: Counter[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """The closed rounds of two and more, each once, where everyone has its own of whom most say."""
    following = dict(pair for pair, _ in reversed(pairs.most_common()))
    while following:
        way, at = dict[int, int](), next(iter(following))
        while at in following:
            way[at] = following.pop(at)
            at = way[at]
        members = list(way)
        if at in way and at != members[-1]:
            yield {member: way[member] for member in members[members.index(at) :]}
