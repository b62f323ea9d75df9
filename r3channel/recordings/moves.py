"""Index maps of one step: where each row or layer would come from under a known mistake. Knows no ids.

A map gives for each row of the concatenated samples the row whose ids it would hold, -1 where the mistake says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from r3channel.plan.ticket import Ticket
from r3channel.recordings.aligned_pair import Ints, Sides

NOTHING = -1


@dataclass(frozen=True, eq=False)
class Moves:
    """Maps of one step, from its ticket's layout."""

    sides: Sides

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
