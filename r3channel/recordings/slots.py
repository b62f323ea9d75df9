"""The slots of a step, and maps of them: from where each row of each router has its ids.

A slot is one row of one router, padding included. In slots a wrong order is a permutation. So two mistakes at once are one map
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from r3channel.errors import ConfigError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.wire.routing import Ids


class Votes(NamedTuple):
    """Cells (slots and layers), and the cells whose ids they have, for cells where these are known."""

    slot_N: Ints
    layer_N: Ints
    from_slot_N: Ints
    from_layer_N: Ints


@dataclass(frozen=True, eq=False)
class Move:
    """For each slot and layer, the slot and layer whose ids it has.

    The last index of each map is no slot, and no layer.
    """

    name: str
    slots_S: Ints
    layers_L: Ints
    place_S: Ints
    """For each slot, the number of the place where the mistake can be made alone; 0: it was not made there."""

    def moves(self, own_S: Ints, own_L: Ints) -> bool:
        return not (np.array_equal(self.slots_S, own_S) and np.array_equal(self.layers_L, own_L))

    def sources(self, cell_N: Ints) -> Ints:
        """Return the cells that these cells have their ids from."""
        slot_N, layer_N = np.divmod(cell_N, len(self.layers_L))
        moved_N = self.slots_S[slot_N] * len(self.layers_L) + self.layers_L[layer_N]
        return np.where(self.place_S[slot_N] > 0, moved_N, cell_N)


class Slots:
    """The slots of both sides of a step, router call by router call. One more at the end is no slot.

    Calls are in the order (DP rank, micro-batch, part). A part's number is CP rank x TP parts + TP part.
    """

    def __init__(self, sides: AlignedPair) -> None:
        self.sides, self.ticket, self.names = sides, sides.ticket, sides.names
        self.parts = self.ticket.layout.cp * self.ticket.layout.tp_slots
        self.part_CT = np.arange(self.parts).reshape(self.ticket.layout.cp, -1)
        """[CP rank, TP part]: the number of each part of a micro-batch."""
        self.rounds = len(self.ticket.assignment.ranks[0])
        """Micro-batches of each DP rank."""
        sizes, *columns = zip(*self._calls(), strict=True)
        self.size_C, self.none = np.asarray(sizes), sum(sizes)
        """Rows of each call; and rows of all calls, the index that is no slot."""
        self.sample_S, self.position_S = (np.append(np.concatenate(parts), -1) for parts in columns)
        """-1 behind a pack, and for samples that are not compared."""
        self.call_S = np.append(np.repeat(np.arange(len(sizes)), sizes), -1)
        self.batch_S = self.call_S // self.parts
        """Micro-batches, counted over all DP ranks."""
        self.round_S = self.batch_S % self.rounds
        """The micro-batch's number on its DP rank."""
        self.by_sample, self.by_batch = self.sample_S + 1, self.batch_S + 1
        self.by_rank = self.batch_S // self.rounds + 1
        """Numbers of the places where a mistake can be made alone."""
        self.own_S, self.own_L = np.arange(self.none + 1), np.arange(sides.spec.num_moe_layers + 1)
        self._begin_C = np.cumsum(self.size_C) - self.size_C
        self.padded_S = np.bincount(self.sample_S + 1, minlength=len(self.names) + 1)[1:]
        """Positions of each sample, padding included."""
        order = np.lexsort((self.position_S, self.sample_S))
        self._ordered = order[np.count_nonzero(self.sample_S < 0) :]
        """The slots of all samples' positions, sample by sample."""
        self.chunk_size = np.maximum(1, -(-self.padded_S // (2 * self.ticket.layout.cp)))
        """Positions in a context-parallel chunk of each sample."""
        self.chunk_S = self.position_S // self.chunk_size[self.sample_S]
        self.slot_R, self.width = self.slots_at(sides.sample_R, sides.position_R), len(self.own_L)
        """The slot of each row; and the number of layers with the one that is none: cell = slot * width + layer."""
        self.cell_RL = self.slot_R[:, None] * self.width + self.own_L[:-1]
        self.row_S = np.zeros(self.none + 1, np.int64)
        self.row_S[self.slot_R] = np.arange(len(self.slot_R))
        self.known_C = np.zeros((self.none + 1) * self.width, bool)
        """Cells that have ids on the engines' side."""
        self.known_C[self.cell_RL[sides.valid_R]] = True

    def _calls(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield the rows, their samples and their positions of each call."""
        number, layout = {name: index for index, name in enumerate(self.names)}, self.ticket.layout
        for dp in range(layout.dp):
            for index, batch in enumerate(self.ticket.plan.microbatches[dp]):
                numbers = np.asarray([*(number.get(name, -1) for name in batch.sample_ids), -1])
                for cp in range(layout.cp):
                    parts = self.ticket.plan.table(dp).row_map(cp=cp, microbatch=index)
                    for sample, position in zip(*parts, strict=True):
                        yield len(sample), numbers[sample], position

    def slots_at(self, sample_N: Ints, position_N: Ints) -> Ints:
        """Return the slots of samples' positions; outside of a sample, no slot."""
        size_N = self.padded_S[sample_N]
        inside = (sample_N >= 0) & (position_N >= 0) & (position_N < size_N)
        begin_N = np.cumsum(self.padded_S)[sample_N] - size_N
        return np.where(inside, self._ordered[np.where(inside, begin_N + position_N, 0)], self.none)

    def votes(self, cell_N: Ints, from_N: Ints) -> Votes:
        """Return the votes of cells; only cells of real slots vote.

        A cell without a slot or without a layer is dropped.
        """
        columns = *np.divmod(cell_N, self.width), *np.divmod(from_N, self.width)
        real_N = (columns[0] < self.none) & (columns[1] < self.width - 1)
        return Votes(*(column[real_N] for column in columns))

    def ids_at(self, cell_N: Ints) -> tuple[Bools, Ids]:
        """Return which cells have known engines' ids, and those ids."""
        known = self.known_C[cell_N]
        slot_N, layer_N = np.divmod(cell_N[known], self.width)
        return known, self.sides.want_RLK[self.row_S[slot_N], layer_N]

    # -- maps of all slots -------------------------------------------------------------------------------------------------

    def shift(self, by: Any) -> Ints:
        """Return the map that gives each row the ids `by` rows on.

        Args:
            by: rows within the sample: a number, or one for each slot.
        """
        return self.slots_at(self.sample_S, self.position_S + by)

    def of_calls(self, call_S: Any, by: int = 0) -> Ints:
        """Return the map that gives each call another call's rows.

        Args:
            call_S: for each slot, the call whose rows its own call gets.
            by: rows by which these are rotated.
        """
        index_S = np.arange(self.none + 1) - self._begin_C[self.call_S]
        index_S = (index_S + by) % self.size_C[self.call_S] if by else index_S
        source_S = np.where(index_S < self.size_C[call_S], self._begin_C[call_S] + index_S, self.none)
        return np.append(source_S[:-1], self.none)

    def of_parts(self, source: Ints) -> Ints:
        """Return the map that exchanges parts within each micro-batch.

        Args:
            source: part p gets the rows of part `source[p]`.
        """
        return self.of_calls(self.batch_S * self.parts + source.ravel()[self.call_S % self.parts])

    def of_samples(self, source: Mapping[int, int], by: int = 0) -> Ints:
        """Return the map that gives samples other samples' rows.

        Args:
            source: sample -> the sample whose rows it gets.
            by: positions by which these are further on.
        """
        table = np.arange(len(self.padded_S) + 1)
        table[[*source, -1]] = [*source.values(), -1]
        other_S = table[self.sample_S]
        moved = self.slots_at(other_S, self.position_S + by)
        return np.where(other_S != self.sample_S, moved, self.own_S)

    def of_cut(self, ranks: Sequence[Sequence[Sequence[str]]], layout: TrainerLayout) -> Iterator[Ints]:
        """Yield the map that reads rows laid out for another trainer.

        Each rank's calls read, one after another, the rows of other micro-batches or of another layout. A trainer that could not
        run has no map.

        Args:
            ranks: sample ids of each micro-batch of each DP rank of that trainer.
            layout: that trainer's layout.
        """
        with suppress(ConfigError):
            ticket = replace(self.ticket, assignment=Assignment.given(ranks), layout=layout)
            other, source = Slots(replace(self.sides, ticket=ticket)), np.full(self.none + 1, self.none)
            for mine, theirs in zip(self._streams(), other._streams(), strict=True):
                at = theirs[: len(mine)]
                source[mine[: len(at)]] = self.slots_at(other.sample_S[at], other.position_S[at])
            yield source

    def _streams(self) -> list[Ints]:
        """Return each rank's slots in the order of its calls."""
        rank_S = (self.batch_S // self.rounds * self.parts + self.call_S % self.parts)[:-1]
        order = np.argsort(rank_S, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(rank_S[order])) + 1)
