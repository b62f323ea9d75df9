"""Sampling masks on the wire: the token ids that sampling could choose, a row per generated token. Arrays in, bytes out.

    header         as of every frame (see `wire.header`), kind 3: `rows` masks from `first_row` on, `raw_bytes` of token ids
    token ids      u32, row after row
    row lengths    u16 x rows

The header's second hash covers both. A row lies at the position of the logits that made the token: that of the token before it.
In a reply the frame of masks follows the frame of expert ids, or its frame reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from r3channel import errors
from r3channel.wire.header import (
    HEADER_BYTES,
    KIND_SAMPLING_MASKS,
    MAX_ROWS,
    Header,
    assemble,
    check_kind,
    check_sections,
    read_header,
)
from r3channel.wire.source import InHand

Numbers = np.ndarray[Any, np.dtype[Any]]
MOST_IDS = 0xFFFF
"""Token ids of one row at most."""
_ID_BYTES, _LENGTH_BYTES = 4, 2


class Masks(NamedTuple):
    """Rows [first_row, first_row + T) of one request, views of the bytes that were parsed."""

    first_row: int
    lengths_T: Numbers
    """uint16"""
    token_ids_N: Numbers
    """uint32, row after row"""
    sample_key: int

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.lengths_T)


def encode_masks(*, first_row: int, lengths_T: Numbers, token_ids_N: Numbers, sample_key: int = 0) -> bytes:
    """A frame of masks. Raises RoutingError for a row that its length cannot say."""
    if len(lengths_T) and int(lengths_T.max()) > MOST_IDS:
        raise errors.RoutingError(
            f"a sampling mask of {lengths_T.max()} tokens, expected at most {MOST_IDS}; lower --sampling-mask-max-tokens, "
            "top-k or top-p"
        )
    ids = np.ascontiguousarray(token_ids_N, "<u4").tobytes()
    sections = ids + np.ascontiguousarray(lengths_T, "<u2").tobytes()
    header = Header(
        kind=KIND_SAMPLING_MASKS, rows=len(lengths_T), first_row=first_row, sections_bytes=len(sections), raw_bytes=len(ids),
        sample_key=sample_key,
    )  # fmt: skip
    return assemble(header[:-2], sections)


def parse_masks(data: bytes | memoryview, *, where: str) -> Masks:
    """Raises what `parse_frame` raises for a frame that is damaged, or of another kind."""
    source = InHand(data)
    header = read_header(source.take(HEADER_BYTES), nbytes=memoryview(data).nbytes, where=where)
    check_kind(header, source, kind=KIND_SAMPLING_MASKS, where=where)
    sizes = (header.raw_bytes + header.rows * _LENGTH_BYTES, 0)
    if (header.sections_bytes, header.wire_bytes) != sizes or header.raw_bytes % _ID_BYTES:
        raise errors.FrameCorrupt(f"{where}: impossible numbers in the header: {header._asdict()}")
    if max(header.first_row, header.rows) > MAX_ROWS:
        raise errors.FrameCorrupt(f"{where}: masks {header.first_row} + {header.rows}, expected {MAX_ROWS}")
    sections = source.take(header.sections_bytes)
    check_sections(header, sections, where=where)
    ids, lengths = sections[: header.raw_bytes], sections[header.raw_bytes :]
    found = Masks(
        header.first_row, np.frombuffer(lengths, "<u2"), np.frombuffer(ids, "<u4"), header.sample_key
    )
    if int(found.lengths_T.sum(dtype=np.int64)) != len(found.token_ids_N):
        raise errors.FrameCorrupt(
            f"{where}: {len(found.token_ids_N)} token ids, the lengths of the {header.rows} masks add up to "
            f"{found.lengths_T.sum(dtype=np.int64)}"
        )
    return found
