"""A step's rows from the engines and from the routers, row beside row: all samples of the ticket, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.ticket import Ticket
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids, ProvenanceSpan

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignedPair:
    """One pass of one step. Row r of `want_RLK` and of `seen_RLK` are the same token of the same sample."""

    ticket: Ticket
    spec: RoutingSpec
    """The engines' routing shape."""
    names: tuple[str, ...]
    want_RLK: Ids
    seen_RLK: Ids
    """The routers' ids for the engines' layers; they may have more columns."""
    extra_RLK: Ids
    """The ids of MTP layers, which only the routers' side has."""
    valid_R: Bools
    """Rows that have routing on the engines' side, and that the routers' side must have."""
    there_R: Bools
    """Rows that the routers' side has."""
    want_spans: Sequence[tuple[ProvenanceSpan, ...]]
    seen_spans: Sequence[tuple[ProvenanceSpan, ...]]
    of_pass: str

    @classmethod
    def align(cls, want: RecordedStep, seen: RecordedStep) -> Iterator[AlignedPair]:
        """Yield a pair for each pass of the routers' side.

        A pair has the samples that are whole on both sides. Without such samples there is no pair.

        Args:
            want: the engines' side.
            seen: the routers' side.

        Raises:
            RecordingInvalid: the sides are not of one step and model.
        """
        _check_pair(want, seen)
        names = tuple(sample.sample_id for sample in want.samples if sample.sample_id not in seen.cut)
        if not names:
            return
        engine = [want.ids(name) for name in names]
        want_RLK = np.concatenate([ids for ids, _ in engine])
        for of_pass in sorted({part for part, _ in seen.passes} or {"forward"}):
            router = [seen.ids(name, of_pass=of_pass) for name in names]
            seen_RLK = np.concatenate([ids for ids, _ in router])
            layers_L = np.asarray(seen.spec.moe_layers)
            shared = np.flatnonzero(np.isin(layers_L, want.spec.moe_layers))
            plain = len(shared) == seen.spec.num_moe_layers
            yield cls(
                ticket=want.ticket, spec=want.spec, names=names, want_RLK=want_RLK,
                seen_RLK=seen_RLK if plain else seen_RLK[:, shared],
                extra_RLK=seen_RLK[:, np.flatnonzero(layers_L >= want.spec.num_layers)],
                valid_R=np.concatenate([there for _, there in engine]),
                there_R=np.concatenate([there for _, there in router]), want_spans=[_spans(want, name) for name in names],
                seen_spans=[_spans(seen, name, of_pass) for name in names], of_pass=of_pass,
            )  # fmt: skip

    @cached_property
    def begin_S(self) -> Ints:
        """Return the row of each sample's first token, then the row count."""
        return np.cumsum([0, *(self.ticket.sample(name).tokens - 1 for name in self.names)])

    @cached_property
    def sample_R(self) -> Ints:
        return np.repeat(np.arange(len(self.names)), np.diff(self.begin_S))

    @cached_property
    def position_R(self) -> Ints:
        return np.arange(len(self.sample_R)) - self.begin_S[self.sample_R]

    @cached_property
    def differs_RL(self) -> Bools:
        """Return the cells whose ids, or their order, differ.

        Only rows that both sides have count.
        """
        if self.seen_RLK.shape[2] != self.spec.top_k:
            return np.ones(self.want_RLK.shape[:2], bool) & self.both_R[:, None]
        if np.array_equal(self.want_RLK, self.seen_RLK):  # the common case, in one pass over the bytes
            return np.zeros(self.want_RLK.shape[:2], bool)
        return (self.want_RLK != self.seen_RLK).any(-1) & self.both_R[:, None]

    @property
    def both_R(self) -> Bools:
        return self.valid_R & self.there_R

    def example(self, hit_RL: Bools) -> dict[str, Any]:
        """Return the first cell's place, and both sides' ids there."""
        row, place = (int(index[0]) for index in np.nonzero(hit_RL))
        return {
            "sample": self.names[self.sample_R[row]], "position": int(self.position_R[row]),
            "layer": self.spec.moe_layers[place],
            "expected": tuple(self.want_RLK[row, place].tolist()), "seen": tuple(self.seen_RLK[row, place].tolist()),
        }  # fmt: skip


def _check_pair(want: RecordedStep, seen: RecordedStep) -> None:
    sides = [{(s.sample_id, s.tokens, s.tokens_hash) for s in step.ticket.samples} for step in (want, seen)]
    if other := sorted({name for name, *_ in sides[0] ^ sides[1]}):
        raise RecordingInvalid(
            f"step {want.number}: {len(other)} samples are not the same on both sides, the first is {other[0]}; expected two "
            "sides of one run's step", step=want.number,
        )  # fmt: skip
    if not set(want.spec.moe_layers) <= set(seen.spec.moe_layers):
        raise RecordingInvalid(
            f"the routers' side has MoE layers {seen.spec.moe_layers}, the engines' {want.spec.moe_layers}: another model?"
        )


def _spans(step: RecordedStep, name: str, of_pass: str = "forward") -> tuple[ProvenanceSpan, ...]:
    return tuple(span for frame in step.parse(name, of_pass=of_pass) for span in frame.provenance)
