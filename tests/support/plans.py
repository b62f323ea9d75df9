"""Random layouts, steps and tickets, and the oracle of placement.

The oracle is the default path's way: everything padded, everything to everyone, then cut for CP, flattened, cut for SP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Microbatch, Shard
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.wire.routing import Ids
from tests.support.samples import random_ids


@st.composite
def specs(draw: st.DrawFn, *, top_k: tuple[int, ...] = (2, 3, 8)) -> RoutingSpec:
    """Eight layers, any of them dense, ids of one or two bytes. Each top-k is a compiled loop of its own."""
    moe = draw(st.sets(st.integers(0, 7), min_size=1))
    experts = draw(st.sampled_from([32, 256, 300]))
    return RoutingSpec(
        num_layers=8, moe_layers=tuple(sorted(moe)), num_experts=experts, top_k=draw(st.sampled_from(top_k))
    )


@st.composite
def layouts(draw: st.DrawFn, *, mtp: tuple[int, ...] = ()) -> TrainerLayout:
    """Layouts of eight layers; `mtp` are the layers that MTP layers may replay."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    uneven = draw(st.booleans()) and (pp, vpp) == (4, 1)
    return TrainerLayout(
        dp=draw(st.integers(1, 3)), tp=tp, pp=pp, vpp=vpp, cp=draw(st.integers(1, 3)),
        sp=draw(st.booleans()) if tp > 1 else None, packing=draw(st.sampled_from(["padded", "thd"])),
        cp_split=draw(st.sampled_from(["zigzag", "contiguous"])), pad_multiple=draw(st.sampled_from([1, 4])),
        uniform=draw(st.sampled_from([None, True, False])), first_layers=1 if uneven else None,
        last_layers=3 if uneven else None,
        mtp=tuple(draw(st.lists(st.sampled_from(mtp), max_size=2))) if mtp else (),
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A sealed step, the ids that engines computed for it, and one DP rank to look at."""

    ticket: Ticket
    ids: dict[str, Ids] = field(repr=False)
    dp: int

    @property
    def shards(self) -> list[Shard]:
        return [shard for shard in self.ticket.plan.shards if shard.dp == self.dp]

    def source(self, stream: Stream) -> Ids:
        """The rows that the relay sends, one after another."""
        columns = list(stream.columns)
        rows = [
            self.ids[stream.samples[sample].sample_id][position : position + rows, columns]
            for sample, position, rows in stream.sends()
        ]
        shape = (0, len(columns), self.ticket.spec.top_k)
        return np.concatenate([np.empty(shape, self.ticket.spec.id_dtype), *rows])

    def valid(self, name: str) -> np.ndarray:
        """[T] bool: the rows of a sample that have routing."""
        sample = self.ticket.sample(name)
        valid_T = np.ones(sample.tokens - 1, bool)
        for start, end in sample.invalid:
            valid_T[start:end] = False
        return valid_T


@st.composite
def steps(draw: st.DrawFn, *, least_samples: int = 1, top_k: tuple[int, ...] = (2, 3, 8)) -> Step:
    """Any layout; samples of which any rows have no routing."""
    spec = draw(specs(top_k=top_k))
    layout = draw(layouts(mtp=spec.moe_layers))
    size, seed = draw(st.integers(least_samples, 3)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    names = [f"s{index}" for index in range(layout.dp * size * 2)]
    samples = [_sample(name, rng) for name in names]
    assignment = Assignment.round_robin(names, dp=layout.dp, microbatch_size=size)
    of = {sample.sample_id: sample for sample in samples}
    ticket = Ticket("run", 1, spec, layout, assignment, [of[name] for name in assignment.sample_ids], 1 << 20)
    ids = {name: random_ids(of[name].tokens - 1, spec=spec, seed=seed + i) for i, name in enumerate(names)}
    return Step(ticket, ids, seed % layout.dp)


def _sample(name: str, rng: np.random.Generator) -> TicketSample:
    tokens = int(rng.integers(2, 40))
    rows = tokens - 1
    if rng.random() < 0.1:  # its frame never came
        return TicketSample(name, tokens, 0, 0, (), ((0, rows),))
    edges = sorted(rng.choice(rows + 1, size=min(rows + 1, 2 * rng.integers(0, 4)), replace=False).tolist())
    invalid = tuple(zip(edges[::2], edges[1::2], strict=False))
    return TicketSample(name, tokens, 0, 0, (), invalid)


# -- the oracle ------------------------------------------------------------------------------------------------------------


def oracle_positions(length: int, layout: TrainerLayout, *, cp: int) -> np.ndarray:
    """Which positions of a sequence (or of a whole pack) a CP rank holds, in its order."""
    if layout.cp_split == "contiguous" or layout.cp == 1:
        return np.array_split(np.arange(length), layout.cp)[cp]
    chunks = np.array_split(np.arange(length), 2 * layout.cp)
    return np.concatenate([chunks[cp], chunks[2 * layout.cp - 1 - cp]])


def oracle_line(values: list[np.ndarray], batch: Microbatch, layout: TrainerLayout, *, cp: int) -> np.ndarray:
    """`values` holds an array [tokens - 1, ...] per sample; gives the rank's rows in its router's order, -1 for pads."""

    def pad(rows: np.ndarray, length: int) -> np.ndarray:
        full = np.full((length, *rows.shape[1:]), -1)
        full[: len(rows)] = rows
        return full

    full = [pad(rows, length) for rows, length in zip(values, batch.padded, strict=True)]
    if not batch.packed:
        cut = [rows[oracle_positions(len(rows), layout, cp=cp)] for rows in full]
        return np.stack(cut, axis=1).reshape(-1, *full[0].shape[1:])
    full.append(pad(full[0][:0], batch.tail))
    if layout.cp_split == "contiguous":
        pack = np.concatenate(full)
        return pack[oracle_positions(len(pack), layout, cp=cp)]
    return np.concatenate([rows[oracle_positions(len(rows), layout, cp=cp)] for rows in full])


def oracle_rows(
    values: list[np.ndarray], batch: Microbatch, layout: TrainerLayout, *, cp: int, tp: int
) -> np.ndarray:
    """The rows of one TP rank."""
    line = oracle_line(values, batch, layout, cp=cp)
    return np.split(line, layout.tp)[tp] if layout.sequence_parallel else line
