"""Rows that several samples share, sent once. Pure: who keeps and who asks for what is said here, not how it travels.

A prefix is keyed by the digest of its rows. Token ids and weight version only find candidates: siblings that were prefilled
separately may have chosen other experts, and are then sent in full.

    engine   cache = PrefixCache(spec, max_bytes=64 << 20)
             shared = cache.share(ids_TLK[:prompt], token_ids=prompt_ids, weight_version=7)
             if shared.frame: deliver(shared.frame)              # the first of its group
             deliver(encode_frame(spec, expert_ids_TLK=ids_TLK, prefix=shared.ref, ...))
    relay    prefix = parse_prefix(data, spec=spec)              # keep prefix.ids_TLK under prefix.digest
             frame = resolve(parse_frame(data, spec=spec), kept.get)

For direct delivery only: in-band there is no way to ask again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.chunks import encode_chunks, table_of
from r3channel.wire.codec import bytes_of
from r3channel.wire.frame import read_body
from r3channel.wire.frame_view import Frame, PrefixRef
from r3channel.wire.header import (
    FLAG_PREFIX,
    HEADER_BYTES,
    KIND_PREFIX,
    MAX_ROWS,
    Header,
    assemble,
    check_fields,
    check_kind,
    check_sections,
    padding,
    read_header,
)
from r3channel.wire.routing import Ids, check_ids, check_shape

MIN_ROWS = 16
"""Fewer rows are not worth a second frame: its header and tables cost about as much as one row of a small model."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Received rows that later frames refer to."""

    digest: bytes
    ids_TLK: Ids
    """[rows, L, K] in `spec.id_dtype`, checked, read-only, its own memory."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What to do with a sample's leading rows."""

    ref: PrefixRef | None
    """Give it to `encode_frame`; None: send the rows in full."""
    frame: bytes | None = None
    """The PREFIX frame to deliver before, when the rows are new to the cache."""


def prefix_digest(spec: RoutingSpec, expert_ids_TLK: Ids) -> bytes:
    """16 bytes that stand for rows of this model: xxh3_128 of spec digest and ids."""
    state = xxhash.xxh3_128(spec.digest.to_bytes(8, "little"))
    state.update(bytes_of(np.ascontiguousarray(expert_ids_TLK)))
    return state.digest()


def encode_prefix(spec: RoutingSpec, *, expert_ids_TLK: Ids, layers_per_chunk: int | None = None) -> bytes:
    """The PREFIX frame of rows whose ids are all valid. Order is kept, whatever codec the samples use."""
    check_shape(expert_ids_TLK, spec=spec, where="encode_prefix")
    rows, width = len(expert_ids_TLK), min(layers_per_chunk or spec.num_moe_layers, spec.num_moe_layers)
    chunks = encode_chunks(expert_ids_TLK, codec="auto", layers_per_chunk=width)
    sections = prefix_digest(spec, expert_ids_TLK) + table_of(chunks)
    sections += bytes(padding(len(sections)))
    header = Header(
        kind=KIND_PREFIX,
        codec=max((chunk.codec for chunk in chunks), default=0),
        flags=FLAG_PREFIX,
        spec_digest=spec.digest,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_moe_layers=spec.num_moe_layers,
        id_width=spec.id_dtype.itemsize,
        layers_per_chunk=width,
        rows=rows,
        chunks=len(chunks),
        sections_bytes=len(sections),
        raw_bytes=rows * spec.bytes_per_token,
        wire_bytes=sum(len(chunk.wire) for chunk in chunks),
        weight_version=-1,
    )
    return assemble(header, sections, [chunk.wire for chunk in chunks])


def parse_prefix(
    data: bytes | memoryview, *, spec: RoutingSpec, engine: str = "?", max_rows: int = MAX_ROWS
) -> Prefix:
    """Verify a PREFIX frame as strictly as any other, ids and digest included. Copies the rows."""
    where = f"prefix from engine {engine}"
    view = memoryview(data).cast("B")
    header = read_header(view, where=where)
    body = view[HEADER_BYTES:]
    check_kind(header, kind=KIND_PREFIX, where=where)
    check_fields(header, spec=spec, max_rows=max_rows, where=where)
    check_sections(header, body, where=where)
    frame = read_body(header, body, spec=spec, where=where)
    assert frame.prefix is not None  # check_fields demands the flag of this kind
    ids_TLK = replace(frame, prefix=None).decode()
    if prefix_digest(spec, ids_TLK) != frame.prefix.digest:
        raise errors.FrameCorrupt(f"{where}: the rows are not those of digest {frame.prefix.digest.hex()}")
    check_ids(ids_TLK, spec=spec, where=where)
    ids_TLK.flags.writeable = False
    return Prefix(frame.prefix.digest, ids_TLK)


def resolve(frame: Frame, lookup: Callable[[bytes], Ids | None]) -> Frame:
    """The frame with its prefix's rows in place; the same frame where it needs none.

    `lookup` gives the rows kept under a digest, or None: then `PrefixMissing` names what to ask the engine for.
    """
    if frame.prefix is None:
        return frame
    rows_TLK = lookup(frame.prefix.digest)
    if rows_TLK is None:
        raise errors.PrefixMissing(
            f"prefix {frame.prefix.digest.hex()} with rows {frame.first_row}..{frame.first_row + frame.prefix.rows} is not here; "
            "lost on the way, or released too early?"
        )
    check_shape(rows_TLK, spec=frame.spec, where=f"prefix {frame.prefix.digest.hex()}")
    if len(rows_TLK) != frame.prefix.rows:
        raise errors.FrameCorrupt(
            f"prefix {frame.prefix.digest.hex()} has {len(rows_TLK)} rows, the frame refers to {frame.prefix.rows}"
        )
    return replace(frame, prefix=None, _prefix_ids=rows_TLK)


class PrefixCache:
    """What the engine has sent as prefixes, least recently used last. Not thread safe: one delivery thread uses it.

    Holds a copy of the rows, at most `max_bytes` in all, to compare with and to send again when asked.

    >>> spec = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=8, top_k=2)
    >>> rows = np.tile(np.array([[[3, 1]]], np.uint8), (20, 1, 1))
    >>> cache = PrefixCache(spec, max_bytes=1 << 20)
    >>> [cache.share(rows, token_ids=range(20), weight_version=0).frame is not None for _ in range(3)]
    [True, False, False]
    """

    def __init__(self, spec: RoutingSpec, *, max_bytes: int, layers_per_chunk: int | None = None) -> None:
        self._spec, self._max_bytes, self._layers_per_chunk = spec, max_bytes, layers_per_chunk
        self._rows: OrderedDict[bytes, tuple[bytes, Ids]] = OrderedDict()  # candidate -> (digest, ids)
        self._candidate_of: dict[bytes, bytes] = {}
        self.nbytes = 0

    def share(
        self,
        expert_ids_TLK: Ids,
        *,
        token_ids: Sequence[int] | np.ndarray[Any, Any],
        weight_version: int,
        valid_T: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    ) -> Shared:
        """How to send these leading rows of a sample; `token_ids` and `weight_version` are those that made them.

        Rows are shared only when they equal the kept ones, id by id; rows with an invalid one never are.
        """
        rows = len(expert_ids_TLK)
        if (
            rows < MIN_ROWS
            or expert_ids_TLK.nbytes > self._max_bytes
            or not (valid_T is None or valid_T.all())
        ):
            return Shared(None)
        candidate = _candidate(token_ids, weight_version)
        kept = self._rows.get(candidate)
        if kept is None:
            return self._keep(candidate, np.array(expert_ids_TLK))
        self._rows.move_to_end(candidate)
        digest, kept_TLK = kept
        return Shared(PrefixRef(digest, rows) if np.array_equal(kept_TLK, expert_ids_TLK) else None)

    def frame(self, digest: bytes) -> bytes | None:
        """The PREFIX frame of kept rows once more, for a relay that asks; None when they were evicted."""
        candidate = self._candidate_of.get(digest)
        return None if candidate is None else self._encode(self._rows[candidate][1])

    def clear(self) -> None:
        """Forget everything: the relay is another one."""
        self._rows.clear()
        self._candidate_of.clear()
        self.nbytes = 0

    def _keep(self, candidate: bytes, ids_TLK: Ids) -> Shared:
        digest = prefix_digest(self._spec, ids_TLK)
        if digest in self._candidate_of:  # other tokens, the same rows: nothing to send, nothing more to keep
            return Shared(PrefixRef(digest, len(ids_TLK)))
        while self.nbytes + ids_TLK.nbytes > self._max_bytes:
            _, (oldest, oldest_TLK) = self._rows.popitem(last=False)
            del self._candidate_of[oldest]
            self.nbytes -= oldest_TLK.nbytes
        self._rows[candidate] = (digest, ids_TLK)
        self._candidate_of[digest] = candidate
        self.nbytes += ids_TLK.nbytes
        return Shared(PrefixRef(digest, len(ids_TLK)), self._encode(ids_TLK))

    def _encode(self, ids_TLK: Ids) -> bytes:
        return encode_prefix(self._spec, expert_ids_TLK=ids_TLK, layers_per_chunk=self._layers_per_chunk)


def _candidate(token_ids: Sequence[int] | np.ndarray[Any, Any], weight_version: int) -> bytes:
    state = xxhash.xxh3_128(weight_version.to_bytes(8, "little", signed=True))
    state.update(np.ascontiguousarray(token_ids, dtype=np.int64).tobytes())
    return state.digest()
