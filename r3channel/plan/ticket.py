"""The small record of a sealed step. It travels with the ordinary rollout data, and a trainer can refuse it before a byte moves.

Bytes (little endian): a head, a column for each field of all samples (`_COLUMNS`), canonical JSON of what is not per sample, the
samples' names, and the xxh3_128 of all that. Samples lie in the order of the assignment, so of the assignment a ticket holds only
the number of samples of each micro-batch. Nothing is sized by a number that was not compared with the bytes that are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

import numpy as np
import xxhash

from r3channel.errors import ConfigError, R3Error, SampleUnknown, TicketMismatch
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import PLAN_VERSION, Plan, check_plan
from r3channel.wire.header import MAX_ROWS
from r3channel.wire.routing import ProvenanceSpan, RowKind
from r3channel.wire.token_tensors import TokenTensor, tensors_of

Column = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"R3K\x05"
"""The last byte is the format. Format 4 said which of several relays had which rows."""
_HEAD = Struct("<4s8I")
"""Magic, plan version, DP ranks, micro-batches of each, bytes of JSON, bytes of names, and the three lengths of columns."""
_HASH_BYTES = 16
_LENGTHS = ("samples", "spans", "invalid")
_COLUMNS = {
    "tokens_hash": ("<u8", "samples", ()),
    "digest": ("<u8", "samples", ()),
    "version": ("<i8", "spans", ()),
    "tokens": ("<u4", "samples", ()),
    "name_chars": ("<u4", "samples", ()),
    "span_count": ("<u4", "samples", ()),
    "invalid_count": ("<u4", "samples", ()),
    "span": ("<u4", "spans", (2,)),
    "invalid": ("<u4", "invalid", (2,)),
    "kind": ("<u1", "spans", ()),
}
"""Item, length and width of each column, in the order in which they lie: the widest items first, so that all are aligned."""
_COUNTS = {"spans": "span_count", "invalid": "invalid_count", "chars": "name_chars"}
"""The columns that hold how many items of each length a sample has."""
_NO_TICKET = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, R3Error)
"""The errors that JSON of another shape raises when it is read, JSON with `Infinity` as a count or deep nesting included."""

_MOST_LAYERS = 4096
_MOST_RANKS = 4096
"""CP times TP ranks of one stage."""
_MOST_UNIT = 1 << 24
"""Largest number of rows that a micro-batch's rows may have to be a multiple of."""
_MOST_BUCKET = 1 << 40
_MOST_STEP = 1 << 62


class TicketSample(NamedTuple):
    """One sample of a sealed step."""

    sample_id: str
    tokens: int
    tokens_hash: int
    """64 bits, of the whole token sequence."""
    digest: int
    """64 bits, the fold of its engine's digests."""
    provenance: tuple[ProvenanceSpan, ...]
    """Ascending; it is not known what made rows that no span names."""
    invalid: tuple[tuple[int, int], ...] = ()
    """Row ranges [start, end) without routing; ascending."""


PackedSample = tuple[bytes, bytes, bytes]
"""A sample's part of all columns: the values that each sample has once, its provenance spans, its ranges without routing."""
_PACKED = [
    np.dtype([(name, dtype, shape) for name, (dtype, own, shape) in _COLUMNS.items() if own == length])
    for length in _LENGTHS
]
_PACKERS = Struct("<2Q4I"), Struct("<q2IB"), Struct("<2I")


def pack_sample(sample: TicketSample) -> PackedSample:
    """Pack one sample into its part of all columns.

    This may be done before the sample's step is sealed.

    Raises:
        struct.error: No column can hold a number of the sample.
    """
    (sample_id, tokens, tokens_hash, digest, provenance, invalid), (one, span, lost) = sample, _PACKERS
    spans = [span.pack(own.weight_version, own.start, own.end, own.kind) for own in provenance]
    ranges = [lost.pack(*pair) for pair in invalid]
    counts = tokens, len(sample_id), len(provenance), len(invalid)
    return one.pack(tokens_hash, digest, *counts), b"".join(spans), b"".join(ranges)


@dataclass(frozen=True, eq=False)
class Samples(Sequence[TicketSample]):
    """The samples of a ticket as columns; a `TicketSample` is made when one is asked for."""

    columns: dict[str, Column]
    text: str
    """All names, one after another."""

    @classmethod
    def of(cls, samples: Sequence[TicketSample]) -> Samples:
        """Return the samples as columns.

        Raises:
            ConfigError: No column can hold a number of a sample.
        """
        if isinstance(samples, Samples):
            return samples
        try:
            packed = [pack_sample(sample) for sample in samples]
        except (StructError, TypeError) as error:
            raise ConfigError(f"a sample does not fit a ticket: {error!r}") from error
        return cls.of_packed([sample.sample_id for sample in samples], packed)

    @classmethod
    def of_packed(cls, names: Sequence[str], packed: Sequence[PackedSample]) -> Samples:
        """Build the columns from packed samples.

        Args:
            names: The name of each sample.
            packed: What `pack_sample` made of each sample.
        """
        tables = [np.frombuffer(b"".join([own[at] for own in packed]), _PACKED[at]) for at in range(3)]
        columns = {name: table[name] for table in tables for name in table.dtype.names or ()}
        found = cls(columns, "".join(names))
        found.__dict__["names"] = tuple(names)  # so that they are not cut out of the text again
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        text, ends = self.text, self.edges["name_chars"].tolist()
        return tuple([text[a:b] for a, b in pairwise(ends)])

    @property
    def tokens(self) -> Column:
        return self.columns["tokens"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        if not isinstance(numbers, range):
            return next(iter(self.part(numbers, numbers + 1)))
        if numbers.step == 1:
            return self.part(numbers.start, max(numbers.start, numbers.stop))
        return tuple(self[number] for number in numbers)

    def part(self, first: int, end: int) -> Samples:
        """Return the samples [first, end) with their columns.

        Only their names are copied.

        Args:
            first: Index of the first sample.
            end: Index behind the last sample.
        """
        edges = {length: self.edges[count] for length, count in _COUNTS.items()}
        bounds = {length: slice(known[first], known[end]) for length, known in edges.items()}
        bounds["samples"] = slice(first, end)
        columns = {name: self.columns[name][bounds[length]] for name, (_, length, _) in _COLUMNS.items()}
        return Samples(columns, self.text[bounds["chars"]])

    def __iter__(self) -> Iterator[TicketSample]:
        values = {name: column.tolist() for name, column in self.columns.items()}
        made = zip(values["span"], values["version"], values["kind"], strict=True)
        spans = (ProvenanceSpan(start, end, number, RowKind(kind)) for (start, end), number, kind in made)
        lost: Iterator[tuple[int, int]] = map(tuple, values["invalid"])
        names = ("tokens", "tokens_hash", "digest", "span_count", "invalid_count")
        for *told, count, holes in zip(self.names, *(values[name] for name in names), strict=True):
            yield TicketSample._make((*told, tuple(islice(spans, count)), tuple(islice(lost, holes))))

    @cached_property
    def edges(self) -> dict[str, Column]:
        """Return the items before each sample, and those of all."""
        sums = {count: np.cumsum(self.columns[count], dtype=np.int64) for count in _COUNTS.values()}
        return {count: np.concatenate(([0], sum_S)) for count, sum_S in sums.items()}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Samples):
            same = (np.array_equal(self.columns[name], other.columns[name]) for name in _COLUMNS)
            return self.text == other.text and all(same)
        return isinstance(other, Sequence) and (*self,) == (*other,)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def check(self) -> None:
        """Check all samples at once.

        The names are checked with the assignment.

        Raises:
            ValueError: Names the first rule that does not hold.
        """
        columns, rows = self.columns, self.tokens.astype(np.int64) - 1
        _hold(len(rows) > 0 and rows.min() >= 1 and rows.max() <= MAX_ROWS, "tokens of a sample")
        _hold(columns["kind"].max(initial=0) <= max(RowKind), "the kind of a provenance span")
        for ranges in ("span", "invalid"):
            self._check_ranges(f"{ranges}_count", rows, *columns[ranges].T.astype(np.int64))

    def _check_ranges(self, count: str, rows: Column, start: Column, end: Column) -> None:
        edges = self.edges[count]
        _hold(int(edges[-1]) == len(end), f"the sum of {count}")
        begin = np.repeat(np.cumsum(rows) - rows, self.columns[count])  # all samples on one line
        bounds = np.stack((start + begin, end + begin), axis=1).ravel()
        inside = (start >= 0) & (start < end) & (end <= np.repeat(rows, self.columns[count]))
        _hold(bool(inside.all() and (bounds[1:] >= bounds[:-1]).all()), f"the ranges that {count} counts")


@dataclass(frozen=True)
class Ticket:
    """The step, spec, layout, assignment and sizes; everything that a receiver needs to post matching receives.

    Equal tickets are equal bytes. `from_bytes` refuses every changed bit, and a ticket of a version that plans differently.
    """

    run: str
    """Identity of the relay's life; a ticket of another run is refused."""
    step: int
    spec: RoutingSpec
    layout: TrainerLayout
    assignment: Assignment
    """Order, micro-batches and optimizer steps."""
    samples: Sequence[TicketSample]
    """In the order of `assignment.sample_ids`."""
    bucket_bytes: int
    token_tensors: tuple[str, ...] = ()
    """Names of the tensors that travel with this step, beside expert ids."""
    seal: int = 0
    """How often the step was sealed and abandoned before; a message about another (run, step, seal) is stale."""

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the step.

        This is cheap: the shards of a DP rank are cut when first asked for. It raises what `plan_shards` raises.
        """
        plan = Plan(self.spec, self.layout, self.assignment, tuple(self.sample_columns.tokens.tolist()))
        check_plan(plan)
        return plan

    @cached_property
    def tensors(self) -> tuple[TokenTensor, ...]:
        """Return the declarations of `token_tensors`.

        Raises:
            ConfigError: A name is unknown, or comes twice.
        """
        return tensors_of(self.token_tensors, self.spec)

    @property
    def identity(self) -> tuple[str, int, int]:
        """Return (run, step, seal), as READY, DAMAGED and DONE name it."""
        return self.run, self.step, self.seal

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Return all weight versions that made rows of this step, ascending."""
        return tuple(np.unique(self.sample_columns.columns["version"]).tolist())

    def sample(self, sample_id: str) -> TicketSample:
        """Return the sample of this name.

        Raises:
            SampleUnknown: The ticket has no such sample.
        """
        if sample_id not in self._places:
            raise SampleUnknown(
                f"sample {sample_id} is not in the ticket of step {self.step}", samples=[sample_id]
            )
        return self.samples[self._places[sample_id]]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.sample_columns.names)}

    @cached_property
    def sample_columns(self) -> Samples:
        """Return the samples as columns, in the order of the assignment.

        Raises:
            ConfigError: The samples are not those of the assignment, in its order.
        """
        found = Samples.of(self.samples)
        if found.names != self.assignment.sample_ids:
            raise ConfigError(
                f"step {self.step}: the samples of a ticket are not those of its assignment, in its order"
            )
        return found

    def check(self) -> None:
        """Check that `from_bytes` would accept this ticket.

        What was checked once is not checked again.

        Raises:
            ConfigError: `from_bytes` would refuse the ticket.
        """
        try:
            self._checked  # noqa: B018
        except ValueError as error:
            raise ConfigError(f"step {self.step} cannot be sealed: {error}") from error

    def to_bytes(self) -> bytes:
        """Return the ticket as bytes.

        Raises:
            ConfigError: `from_bytes` would refuse the ticket.
        """
        self.check()
        columns = self.sample_columns
        values = {
            "run": self.run,
            "step": int(self.step),
            "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(),
            "steps": self.assignment.steps,
            "bucket_bytes": int(self.bucket_bytes),
        }  # the next two only where they are set: tickets of recordings may lack them
        values |= {"token_tensors": list(self.token_tensors)} if self.token_tensors else {}
        values |= {"seal": int(self.seal)} if self.seal else {}
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        names = columns.text.encode("utf-8", "surrogatepass")
        ranks = self.assignment.ranks
        widths = np.asarray([len(batch) for rank in ranks for batch in rank], "<u4")
        lengths = {length: len(columns.columns[name]) for name, (_, length, _) in _COLUMNS.items()}
        counts = [lengths[name] for name in _LENGTHS]
        head = _HEAD.pack(_MAGIC, PLAN_VERSION, len(ranks), len(ranks[0]), len(text), len(names), *counts)
        columns_N = [columns.columns[name].tobytes() for name in _COLUMNS]
        body = b"".join([head, *columns_N, widths.tobytes(), text, names])
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Read a ticket.

        Raises:
            TicketMismatch: `data` is no ticket, is damaged, or was made by a version that plans differently.
        """
        whole = memoryview(bytes(data))
        body, found = whole[:-_HASH_BYTES], whole[-_HASH_BYTES:]
        if len(body) < _HEAD.size or xxhash.xxh3_128_digest(body) != bytes(found):
            raise TicketMismatch(
                f"{len(data)} bytes are damaged or no ticket: their hash is not the one at their end. Was a ticket of "
                "another r3channel version given?"
            )
        magic, version = _HEAD.unpack_from(body)[:2]
        if (magic, version) != (_MAGIC, PLAN_VERSION):
            raise TicketMismatch(
                f"a ticket of format {magic!r} and plan version {version}, expected {_MAGIC!r} and {PLAN_VERSION}: "
                "do both sides run the same r3channel version?"
            )
        try:
            ticket = cls._read(body)
            ticket._checked  # noqa: B018
        except _NO_TICKET as error:
            raise TicketMismatch(f"{len(data)} bytes are no ticket that can be used: {error!r}") from error
        return ticket

    @classmethod
    def _read(cls, body: memoryview) -> Ticket:
        dp, count, text_bytes, name_bytes, *counts = _HEAD.unpack_from(body)[2:]
        lengths: dict[str, int] = dict(zip(_LENGTHS, counts, strict=True))
        items = {name: lengths[length] * (*pair, 1)[0] for name, (_, length, pair) in _COLUMNS.items()}
        sizes = [np.dtype(dtype).itemsize * items[name] for name, (dtype, _, _) in _COLUMNS.items()]
        edges = list(accumulate([_HEAD.size, *sizes, 4 * dp * count, text_bytes, name_bytes]))
        _hold(dp > 0 and count > 0 and edges[-1] == len(body), "the sum of all lengths")
        columns = {
            name: np.frombuffer(body, dtype, items[name], offset=at).reshape(-1, *pair)
            for at, (name, (dtype, _, pair)) in zip(edges, _COLUMNS.items(), strict=False)
        }
        widths_at, text_at, names_at = edges[-4:-1]
        samples = Samples(columns, str(body[names_at:], "utf-8", "surrogatepass"))
        values = json.loads(bytes(body[text_at:names_at]))
        widths = np.frombuffer(body, "<u4", dp * count, offset=widths_at)
        return cls(
            run=_of_type(str, values["run"]),
            step=_of_type(int, values["step"]),
            spec=RoutingSpec.from_dict(values["spec"]),
            layout=TrainerLayout.from_dict(values["layout"]),
            assignment=_assignment(
                samples, widths, dp=dp, steps=[_of_type(int, size) for size in values["steps"]]
            ),
            samples=samples,
            bucket_bytes=_of_type(int, values["bucket_bytes"]),
            token_tensors=tuple(_of_type(str, name) for name in values.get("token_tensors", ())),
            seal=_of_type(int, values.get("seal", 0)),
        )

    @cached_property
    def _checked(self) -> tuple[Plan, tuple[TokenTensor, ...]]:
        # no number beyond any model or cluster, so that what is computed from them stays small
        layout = self.layout
        unit = layout.cp * layout.tp * layout.pad_multiple
        _hold(self.spec.num_layers <= _MOST_LAYERS, "num_layers")
        _hold(
            layout.cp * layout.tp <= _MOST_RANKS and unit <= _MOST_UNIT, "the layout's cp, tp or pad_multiple"
        )
        _hold(abs(self.step) < _MOST_STEP and 1 <= self.bucket_bytes <= _MOST_BUCKET, "step or bucket_bytes")
        _hold(0 <= self.seal < _MOST_STEP, "seal")
        self.sample_columns.check()
        return self.plan, self.tensors


def _assignment(samples: Samples, widths: Column, *, dp: int, steps: list[int]) -> Assignment:
    """Cut names, in their order, into `dp` ranks and micro-batches.

    `widths` has the number of samples of each micro-batch.
    """
    _hold(int(widths.sum(dtype=np.int64)) == len(samples), "the sum of the samples of all micro-batches")
    _hold(int(samples.edges["name_chars"][-1]) == len(samples.text), "the sum of name_chars")
    edges, names, count = list(accumulate(widths.tolist(), initial=0)), samples.names, len(widths) // dp
    batches = [names[a:b] for a, b in pairwise(edges)]
    ranks = tuple(tuple(batches[at : at + count]) for at in range(0, len(batches), count))
    return Assignment(ranks, tuple(steps))


def _hold(rule: bool, what: str) -> None:
    if not rule:
        raise ValueError(f"{what} cannot be")


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
