"""The small record of a sealed step. Travels with the ordinary rollout data; lets a trainer refuse before a byte moves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from r3channel.errors import R3Error, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.parts import Parts
from r3channel.plan.shards import Plan, plan_shards
from r3channel.routing import ProvenanceSpan, RowKind
from r3channel.spec import RoutingSpec

_FORMAT = 3
"""2: one relay only."""
_NO_TICKET = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    R3Error,
)
"""What reading JSON of another shape raises: `Infinity` as a count and deep nesting among it."""


@dataclass(frozen=True)
class TicketSample:
    """One sample of a sealed step."""

    sample_id: str
    tokens: int
    frame_hash: int
    provenance: tuple[ProvenanceSpan, ...]
    invalid: tuple[tuple[int, int], ...] = ()
    """Row ranges [start, end) for which the engine holds no routing; ascending."""
    relay: int = 0
    """The relay that holds its frame and sends its rows."""

    def to_values(self) -> list[Any]:
        """Plain values, for JSON and for calls between relays."""
        spans = [[span.end, span.weight_version, int(span.kind)] for span in self.provenance]
        invalid = [list(span) for span in self.invalid]
        return [self.sample_id, self.tokens, self.frame_hash, spans, invalid, self.relay]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> TicketSample:
        """Raises ValueError or TypeError for anything else than `to_values` gives."""
        name, tokens, frame_hash, spans, invalid, relay = values
        ranges = tuple((int(start), int(end)) for start, end in invalid)
        return cls(str(name), int(tokens), int(frame_hash), _spans(spans), ranges, int(relay))


@dataclass(frozen=True)
class Ticket:
    """Step, spec, layout, assignment and sizes; everything a receiver needs to post matching receives.

    `to_bytes` is canonical JSON, so equal tickets are equal bytes; `from_bytes` recomputes the plan and refuses a ticket
    whose digest does not match it.
    """

    run: str
    """Identity of the relay's life (of relay 0's, the coordinator); a ticket of another run is refused."""
    step: int
    spec: RoutingSpec
    layout: TrainerLayout
    assignment: Assignment
    """Order, micro-batches and optimizer steps."""
    samples: tuple[TicketSample, ...]
    """In the order of `assignment.sample_ids`."""
    bucket_bytes: int
    peers: tuple[str, ...] = ()
    """Runs of relays 1, 2, ...; empty with one relay."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The run of each relay, in the order in which a trainer receives their parts."""
        return (self.run, *self.peers)

    @cached_property
    def parts(self) -> Parts:
        """Which relay sends which rows of each shard."""
        return Parts(self.plan, len(self.runs), {sample.sample_id: sample.relay for sample in self.samples})

    @cached_property
    def plan(self) -> Plan:
        tokens = {sample.sample_id: sample.tokens for sample in self.samples}
        return plan_shards(self.assignment, tokens=tokens, spec=self.spec, layout=self.layout)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """All weight versions that made rows of this step, ascending."""
        return tuple(sorted({span.weight_version for sample in self.samples for span in sample.provenance}))

    def sample(self, sample_id: str) -> TicketSample:
        return self._by_id[sample_id]

    @cached_property
    def _by_id(self) -> dict[str, TicketSample]:
        return {sample.sample_id: sample for sample in self.samples}

    def to_bytes(self) -> bytes:
        indexes = {sample.sample_id: index for index, sample in enumerate(self.samples)}
        values = {
            "ticket": _FORMAT,
            "run": self.run,
            "step": self.step,
            "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(),
            "ranks": [[[indexes[s] for s in batch] for batch in rank] for rank in self.assignment.ranks],
            "samples": [sample.to_values() for sample in self.samples],
            "steps": list(self.assignment.steps),
            "bucket_bytes": self.bucket_bytes,
            "peers": list(self.peers),
            "plan_digest": self.parts.digest,
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Raise `TicketMismatch` for anything that is not a ticket or whose plan digest differs from its content."""
        try:
            values = json.loads(data)
            ticket = cls._from_values(values)
            announced = values["plan_digest"]
            found = ticket.parts.digest
        except _NO_TICKET as error:
            raise TicketMismatch(f"{len(data)} bytes are not a ticket: {error!r}") from error
        if found != announced:
            raise TicketMismatch(
                f"ticket of step {ticket.step}: plan digest {announced:#x}, recomputed {found:#x}. Do both sides "
                "run the same r3channel version?"
            )
        return ticket

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Ticket:
        if values.get("ticket") != _FORMAT:
            raise TicketMismatch(f"ticket format {values.get('ticket')!r}, expected {_FORMAT}")
        if int(values["bucket_bytes"]) < 1:
            raise TicketMismatch(f"buckets of {values['bucket_bytes']} bytes, expected at least 1")
        samples = tuple(TicketSample.from_values(sample) for sample in values["samples"])
        ranks = [[[samples[i].sample_id for i in batch] for batch in rank] for rank in values["ranks"]]
        return cls(
            run=str(values["run"]),
            step=int(values["step"]),
            spec=RoutingSpec.from_dict(values["spec"]),
            layout=TrainerLayout.from_dict(values["layout"]),
            assignment=Assignment.given(ranks, steps=[int(count) for count in values["steps"]]),
            samples=samples,
            bucket_bytes=int(values["bucket_bytes"]),
            peers=tuple(str(run) for run in values["peers"]),
        )


def _spans(values: Sequence[Sequence[int]]) -> tuple[ProvenanceSpan, ...]:
    spans, start = [], 0
    for end, version, kind in values:
        spans.append(
            ProvenanceSpan(start=start, end=int(end), weight_version=int(version), kind=RowKind(kind))
        )
        start = int(end)
    return tuple(spans)
