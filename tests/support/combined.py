"""Mistakes made in what each rank's routers have, one after another: independent of how the search maps them.

`State` is the ids of every router of a step as the plan lays them out, call by call: (DP rank, micro-batch, CP rank, TP part).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from r3channel.plan.assignment import Assignment
from r3channel.plan.placement import spread_ids
from r3channel.recordings.consumed import ConsumedRows
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids

Call = tuple[int, int, int, int]


class State:
    """`ids_SLK`: what the routers have, padding's ids where no row is. Mistakes change it."""

    def __init__(self, step: RecordedStep, seed: int = 0) -> None:
        self.step, self.rng, ticket = step, np.random.default_rng(seed), step.ticket
        self.layout, self.names = ticket.layout, list(ticket.assignment.sample_ids)
        self.calls: dict[Call, Ids] = {}
        """The slots of each."""
        samples, positions, at = list[Ids](), list[Ids](), 0
        counts = self.layout.dp, len(ticket.assignment.ranks[0]), self.layout.cp
        for dp, batch, cp in product(*map(range, counts)):
            first = self.names.index(ticket.assignment.ranks[dp][batch][0])
            parts = ticket.plan.table(dp).row_map(cp=cp, microbatch=batch)
            for part, (sample, position) in enumerate(zip(*parts, strict=True)):
                self.calls[dp, batch, cp, part] = np.arange(at, at + len(sample))
                samples.append(np.where(sample >= 0, sample + first, -1))
                positions.append(position)
                at += len(sample)
        self.sample_S, self.position_S = np.concatenate(samples), np.concatenate(positions)
        index_S = np.concatenate([np.arange(len(slots)) for slots in self.calls.values()])
        pads_SK = spread_ids(step.spec, positions_T=index_S)
        self.pads_SLK = np.repeat(pads_SK[:, None], step.spec.num_moe_layers, axis=1)
        self.ids_SLK = self.pads_SLK.copy()
        for name in self.names:
            rows_TLK = step.rows(name)
            self.ids_SLK[self.slots(name)[: len(rows_TLK)]] = rows_TLK

    def slots(self, name: str) -> Ids:
        """The slots of a sample's positions, padding included."""
        own = np.flatnonzero(self.sample_S == self.names.index(name))
        return own[np.argsort(self.position_S[own])]

    def used(self) -> RecordedStep:
        """The routers' side."""
        found = ConsumedRows(self.step.ticket, self.step.spec)
        for (dp, batch, cp, part), slots in self.calls.items():
            shard = self.step.ticket.plan.shard(dp=dp, pp=0, cp=cp)
            for place, layer in enumerate(self.step.spec.moe_layers):
                found.add_call(shard, self.ids_SLK[slots, place], microbatch=batch, layer=layer, tp=part)
        return found.step()

    def take(self, slots: Ids, ids_SLK: Ids) -> None:
        """As many as there are, padding's in the rest."""
        count = min(len(slots), len(ids_SLK))
        self.ids_SLK[slots] = self.pads_SLK[slots]
        self.ids_SLK[slots[:count]] = ids_SLK[:count]

    def swap(self, one: Ids, other: Ids) -> None:
        count = min(len(one), len(other))
        both = np.concatenate([one[:count], other[:count]])
        self.ids_SLK[both] = self.ids_SLK[np.roll(both, count)]

    def take_calls(self, source: Callable[[int, int, int, int], Call]) -> None:
        kept = self.ids_SLK.copy()
        for call, slots in self.calls.items():
            self.take(slots, kept[self.calls[source(*call)]])

    def take_parts(self, source: Sequence[int]) -> None:
        """Each of a micro-batch's routers, counted CP rank x TP parts + TP part, has another's rows."""
        tp = self.layout.tp_slots
        self.take_calls(lambda dp, batch, cp, part: (dp, batch, *divmod(source[cp * tp + part], tp)))

    def relay(self, **changes: Any) -> None:
        """Each rank's calls read, one after another, what another ticket would lay out."""
        other = State(replace(self.step, ticket=replace(self.step.ticket, **changes)))
        for name in self.names:
            other.take(other.slots(name), self.ids_SLK[self.slots(name)])
        theirs = other._streams()
        for rank, slots in self._streams().items():
            self.take(slots, other.ids_SLK[theirs[rank]])

    def _streams(self) -> dict[tuple[int, int], Ids]:
        """The slots of each rank's calls."""
        found: dict[tuple[int, int], Ids] = {}
        for (dp, _, cp, part), slots in self.calls.items():
            rank = dp, cp * self.layout.tp_slots + part
            found[rank] = np.concatenate([found.get(rank, slots[:0]), slots])
        return found


def made(change: Callable[[State], object]) -> Callable[[RecordedStep], RecordedStep]:
    """A mistake in what the routers have."""

    def mistake(step: RecordedStep) -> RecordedStep:
        change(state := State(step))
        return state.used()

    return mistake


# -- random mistakes: each changes the state, and says its name -------------------------------------------------------------


def roll(state: State) -> str:
    """The rows of each router call, of one micro-batch or of all; by whole positions it is a shift of each sample."""
    ranks = state.step.ticket.assignment.ranks
    width = 1 if state.layout.packing == "thd" else len(ranks[0][0])
    ways = [by for by in (-7, -5, -3, -2, -1, 1, 2, 3, 5, 7) if (abs(by) > 1 if width == 1 else by % width)]
    by, only = state.rng.choice(ways), state.rng.integers(len(ranks[0])) if state.rng.random() < 0.3 else None
    for call, slots in state.calls.items():
        if only in (None, call[1]):
            state.ids_SLK[slots] = np.roll(state.ids_SLK[slots], by, axis=0)
    return "rotated_rows"


def swap(state: State) -> str:
    """All rows of two samples that both have."""
    state.swap(*(state.slots(name) for name in state.rng.choice(state.names, 2, replace=False)))
    return "swapped_samples"


def stale(state: State) -> str:
    """A stretch of one sample has rows of another, from the same positions or others."""
    name, source = state.rng.choice(state.names, 2, replace=False)
    one, other = state.slots(name), state.slots(source)[: state.step.ticket.sample(source).tokens - 1]
    begin, by = int(state.rng.integers(len(one) // 2)), int(state.rng.choice([0, 0, 3, -2]))
    at = np.arange(begin, min(begin + int(state.rng.integers(4, max(5, len(one) // 2))), len(one)))
    at = at[(at + by >= 0) & (at + by < len(other))]
    state.ids_SLK[one[at]] = state.ids_SLK[other[at + by]]
    return "stale_row"


def layers_reversed(state: State) -> str:
    """In each stage, or in one."""
    spec, order = state.step.spec, np.arange(state.step.spec.num_moe_layers)
    only = state.rng.integers(state.layout.pp) if state.rng.random() < 0.5 else None
    for pp in range(state.layout.pp):
        own = [spec.moe_index(layer) for layer in state.layout.stage_layers(spec, pp=pp)]
        order[own] = own[::-1] if only in (None, pp) else own
    state.ids_SLK = state.ids_SLK[:, order]
    return "stage_reversed"


def layers_exchanged(state: State) -> str:
    """Two beside each other: the ends of a stage of three would be that stage reversed."""
    first = int(state.rng.integers(state.step.spec.num_moe_layers - 1))
    state.ids_SLK[:, [first, first + 1]] = state.ids_SLK[:, [first + 1, first]]
    return "swapped_layers"


def padding_shifted(state: State) -> str:
    """Padding stands before each sample's rows, not behind them."""
    for name in state.names:
        slots = state.slots(name)
        by = len(slots) - state.step.ticket.sample(name).tokens
        state.ids_SLK[slots] = state.ids_SLK[np.roll(slots, by)]
    return "shifted_padding"


def size_changed(state: State) -> str:
    ranks, layout = state.step.ticket.assignment.ranks, state.layout
    count, even = sum(map(len, ranks[0])), layout.pp > 1 and layout.packing == "padded"
    sizes = [s for s in range(1, count + 1) if s != len(ranks[0][0]) and not (even and count % s)]
    size, names = int(state.rng.choice(sizes)), [[name for batch in rank for name in batch] for rank in ranks]
    cut = [[own[at : at + size] for at in range(0, count, size)] for own in names]
    state.relay(assignment=Assignment.given(cut))
    return "other_microbatch_size"


def tp_cp_exchanged(state: State) -> str:
    """Ranks are counted in the other order, or the sizes are exchanged."""
    tp, cp = state.layout.tp_slots, state.layout.cp
    if tp == 1 or cp == 1 or state.rng.random() < 0.3:
        state.relay(layout=replace(state.layout, tp=cp, cp=tp))
    else:
        state.take_parts([rank % cp * tp + rank // cp for rank in range(tp * cp)])
    return "tp_cp_exchanged"


MISTAKES: tuple[Callable[[State], str], ...] = (
    roll, swap, stale, layers_reversed, layers_exchanged, padding_shifted, size_changed, tp_cp_exchanged,
)  # fmt: skip


def _stretch(state: State) -> Ids:
    """The slots of some rows of a sample."""
    own = state.slots(state.rng.choice(state.names))[:-1]
    begin = int(state.rng.integers(len(own) // 2))
    return own[begin : begin + int(state.rng.integers(2, max(3, len(own) // 2)))]


def zero(state: State) -> str:
    state.ids_SLK[_stretch(state)] = 0
    return "zero_rows"


def duplicate(state: State) -> str:
    rows, layers = _stretch(state), state.step.spec.num_moe_layers
    own = slice(None) if state.rng.random() < 0.5 else int(state.rng.integers(layers))
    state.ids_SLK[rows, own, 1] = state.ids_SLK[rows, own, 0]
    return "duplicated_ids"


def relabel(state: State) -> str:
    """One map of all ids, or one for each layer."""
    spec = state.step.spec
    table = np.tile(state.rng.permutation(spec.num_experts), (spec.num_moe_layers, 1))
    table = state.rng.permuted(table, axis=1) if state.rng.random() < 0.5 else table
    state.ids_SLK = table[np.arange(len(table))[:, None], state.ids_SLK].astype(spec.id_dtype)
    return "physical_ids"


def reorder(state: State) -> str:
    """The ids of all rows: turned round, sorted, in one other order, or in one of its own for each."""
    ids, count = state.ids_SLK, state.step.spec.top_k
    orders = (
        ids[..., ::-1],
        np.sort(ids, -1),
        ids[..., np.roll(np.arange(count), 1)],
        state.rng.permuted(ids, axis=-1),
    )
    state.ids_SLK = orders[state.rng.integers(4)].copy()
    return "row_order"


CHANGES = {"zero": zero, "duplicate": duplicate, "relabel": relabel, "reorder": reorder}
"""Mistakes that change ids, not rows."""


def combination(step: RecordedStep, seed: int, kind: str = "") -> tuple[set[str], RecordedStep]:
    """One to three different mistakes, one after another, or two moves, or a move and a change of `kind`, in either order: (names
    of those that change ids, the routers' side)."""
    state, names = State(step, seed), set[str]()
    parts = state.layout.tp_slots * state.layout.cp
    ways = [way for way in MISTAKES if way is not tp_cp_exchanged or parts > 1]
    count = {"": 1 + seed % 3, "two moves": 2}.get(kind, 1)
    made, seen = [ways[index] for index in state.rng.permutation(len(ways))[:count]], state.used()
    made[seed % 2 : seed % 2] = [CHANGES[kind]] if kind in CHANGES else []
    for way in made:
        name, before, seen = way(state), seen, state.used()
        if any((before.ids(own)[0] != seen.ids(own)[0]).any() for own in state.names):
            names.add(name)
    return names, seen
