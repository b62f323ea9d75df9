"""The routing of one sample as plain checked values, and token ids with their hash.

Two sequences with one hash are the same. This module knows nothing about wires, ranks or engines.

Shape legend, for the whole package: S samples, T rows, L MoE layers, K top-k, E experts, N bytes.
A row is one token with routing; a sample of n tokens has n-1 rows, because the last sampled token never enters the model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from r3channel.errors import ExpertIdInvalid, RoutingError, RowCountMismatch, SpecMismatch, UsageError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.digest import sound, sound_rows
from r3channel.wire.mixing import Ids, Valid


class RowKind(IntEnum):
    """What made a row."""

    DECODED = 0
    PREFILLED = 1
    MISSING = 2
    UNKNOWN = 3
    """Decoded or prefilled, in a pass that had rows of both."""


class ProvenanceSpan(NamedTuple):
    """Rows [start, end) of a sample that one weight version made, in one way. The fields have the order of the wire."""

    start: int
    end: int
    weight_version: int
    kind: RowKind


Run = tuple[int, int, int, int]
"""A provenance span as plain numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRouting:
    """Expert ids of one sample's rows; checks itself when built.

    The arrays are not copied; whoever built the object keeps them unchanged.
    """

    spec: RoutingSpec
    sample_id: str
    tokens: int
    """Tokens of the whole sample; `first_row + T` is `tokens - 1`."""
    expert_ids_TLK: Ids
    """[T, L, K], dtype `spec.id_dtype`, the engine's order within a row."""
    valid_T: Valid
    """False where the engine holds no routing for the row; such ids are meaningless."""
    provenance: tuple[ProvenanceSpan, ...]
    """Tiles [first_row, first_row + T) in order. Positions are absolute."""
    first_row: int = 0
    checked: InitVar[bool] = False
    """The ids have been checked by whoever builds this."""

    def __post_init__(self, checked: bool) -> None:
        check_shape(self.expert_ids_TLK, spec=self.spec, where=f"sample {self.sample_id}")
        rows = len(self.expert_ids_TLK)
        if self.first_row + rows != self.tokens - 1:
            raise RowCountMismatch(
                f"sample {self.sample_id}: rows {self.first_row}..{self.first_row + rows} for {self.tokens} tokens; "
                f"expected to end at row {self.tokens - 1}. The last token has no row; was a start offset set?"
            )
        if self.valid_T.shape != (rows,) or self.valid_T.dtype != np.bool_:
            raise RoutingError(
                f"sample {self.sample_id}: valid_T is {self.valid_T.shape}, expected ({rows},) bool"
            )
        check_spans(self.provenance, first_row=self.first_row, rows=rows, where=f"sample {self.sample_id}")
        valid_T = None if self.valid_T.all() else self.valid_T
        if not (checked or sound(self.expert_ids_TLK, num_experts=self.spec.num_experts, valid_T=valid_T)):
            raise_unsound(
                self.expert_ids_TLK, spec=self.spec, where=f"sample {self.sample_id}", valid_T=valid_T
            )


def check_shape(expert_ids_TLK: Ids, *, spec: RoutingSpec, where: str) -> None:
    """Check shape and dtype of expert ids against the spec.

    Raises:
        RoutingError: The ids are of another dtype or have other than three axes.
        SpecMismatch: The ids have another number of layers, or another top-k.
    """
    if expert_ids_TLK.ndim != 3 or expert_ids_TLK.dtype != spec.id_dtype:
        raise RoutingError(
            f"{where}: ids are {expert_ids_TLK.dtype}{list(expert_ids_TLK.shape)}, expected {spec.id_dtype}[rows, "
            f"{spec.num_moe_layers}, {spec.top_k}]"
        )
    _, layers, top_k = expert_ids_TLK.shape
    if layers != spec.num_moe_layers:
        raise SpecMismatch(f"{where}: {layers} layers per row, expected the {spec.num_moe_layers} MoE layers")
    if top_k != spec.top_k:
        raise SpecMismatch(f"{where}: top-k {top_k}, expected {spec.top_k}")


def raise_unsound(expert_ids_TLK: Ids, *, spec: RoutingSpec, where: str, valid_T: Ids | None) -> NoReturn:
    """Raise an error that names the first valid row with wrong ids.

    A wrong id is outside of [0, E), or stands twice in one layer of a row. Some row must have such ids.

    Args:
        expert_ids_TLK: The ids.
        spec: The model's spec.
        where: Names the sample or the frame in the error text.
        valid_T: Which rows are valid; None where all are.

    Raises:
        ExpertIdInvalid: Always.
    """
    unsound_TL = ~sound_rows(expert_ids_TLK, num_experts=spec.num_experts)
    row, moe_index = np.argwhere(unsound_TL if valid_T is None else unsound_TL & valid_T[:, None])[0]
    ids, place = expert_ids_TLK[row, moe_index].tolist(), f"row {row}, layer {spec.moe_layers[moe_index]}"
    for slot, expert in enumerate(ids):
        if not 0 <= expert < spec.num_experts:
            raise ExpertIdInvalid(
                f"{where}: {place}, slot {slot} has id {expert}; expected 0..{spec.num_experts - 1}"
            )
    raise ExpertIdInvalid(
        f"{where}: {place} repeats an expert: {ids}; expected {spec.top_k} distinct ids. A zero-filled row looks like this"
    )


def check_spans(spans: Iterable[ProvenanceSpan], *, first_row: int, rows: int, where: str) -> None:
    """Check that spans tile [first_row, first_row + rows) in order.

    Raises:
        RoutingError: The spans leave a gap, overlap, or one is empty.
    """
    at = first_row
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise RoutingError(f"{where}: provenance span {span} does not start at row {at} or is empty")
        at = span.end
    if at != first_row + rows:
        raise RoutingError(f"{where}: provenance ends at row {at}, expected {first_row + rows}")


def spans_of(versions_T: Ids, kinds_T: Ids, *, first_row: int = 0) -> tuple[ProvenanceSpan, ...]:
    """Return the provenance spans of per-row versions and kinds.

    Args:
        versions_T: The weight version of each row, int64.
        kinds_T: The kind of each row, uint8.
        first_row: Position of the first row.
    """
    if not len(versions_T):
        return ()
    change = np.flatnonzero((np.diff(versions_T) != 0) | (np.diff(kinds_T.astype(np.int16)) != 0)) + 1
    edges = [0, *change.tolist(), len(versions_T)]
    return tuple(
        ProvenanceSpan(first_row + a, first_row + b, int(versions_T[a]), RowKind(int(kinds_T[a])))
        for a, b in pairwise(edges)
    )


def columns_of(spans: Iterable[ProvenanceSpan] | Iterable[Run]) -> tuple[Ids, Ids]:
    """Return the weight version and the kind of each row.

    This is the inverse of `spans_of`: versions are int64, kinds uint8.
    """
    starts, ends, versions, kinds = np.array([*spans], np.int64).reshape(-1, 4).T
    return np.repeat(versions, ends - starts), np.repeat(kinds.astype(np.uint8), ends - starts)


def marked_missing(spans: Iterable[ProvenanceSpan], missing: Ids) -> tuple[ProvenanceSpan, ...]:
    """Return the spans with some rows marked as MISSING.

    Args:
        spans: At least one span.
        missing: Numbers of the rows, counted from the first row on; they get no version (-1).
    """
    (first_row, *_), *_ = spans = [*spans]
    versions_T, kinds_T = columns_of(spans)
    versions_T[missing], kinds_T[missing] = -1, RowKind.MISSING
    return spans_of(versions_T, kinds_T, first_row=first_row)


Tokens = np.ndarray[Any, np.dtype[np.int32]]


def as_tokens(tokens: Any) -> Tokens:
    """Return a copy of token ids as int32.

    A later change of `tokens` does not change the copy.

    Args:
        tokens: A sequence, a range or an array of integers.

    Raises:
        UsageError: `tokens` are no token ids: other numbers than integers of 32 bits, or something that has no order.
    """
    kind = tokens.__class__
    if kind is list:  # as nearly all are
        return _pack(tokens)
    if isinstance(tokens, range):
        tokens = np.arange(tokens.start, tokens.stop, tokens.step)
    if hasattr(tokens, "__array__"):
        found = np.asarray(tokens)
        ids = found.astype(np.int32)
        if found.dtype.kind not in "iu" or found.ndim != 1 or (ids != found).any():
            raise UsageError(
                f"tokens of {found.dtype}, shape {found.shape}: expected int32 ids in one dimension"
            )
        return ids
    if not issubclass(kind, Sequence) or issubclass(kind, str | bytes | bytearray | memoryview):
        raise UsageError(f"tokens are a {kind.__name__}, expected a sequence of int32 ids")
    return _pack(tokens)


def _pack(tokens: Sequence[int]) -> Tokens:
    try:
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)  # half the time of np.array
    except struct.error as error:
        raise UsageError(f"{len(tokens)} tokens that are not all int32 ids: {error}") from error


def hash_tokens(tokens: Tokens) -> int:
    """Return xxh3_64 of the ids as little-endian int32.

    >>> hash_tokens(as_tokens([1, 2])) == hash_tokens(as_tokens(range(1, 3)))
    True
    """
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, "<i4").data)


def hashes_of(tokens_T: Tokens) -> tuple[int, int]:
    """Return the hash of all tokens, and of all but the last.

    The last token has no row.
    """
    data = tokens_T.data.cast("B")
    return xxhash.xxh3_64_intdigest(data), xxhash.xxh3_64_intdigest(data[:-4])
