"""Frames of the tensors that tokens bring beside expert ids. Arrays in, bytes out; `token_tensors` says what they are.

    header         as of every frame (see `wire.header`): the tensor's kind, `rows` rows from `first_row` on, `raw_bytes` of
                   values
    values         the entries, row after row
    row lengths    u16 x rows: entries of each row

The header's second hash covers all. In a reply these frames follow the frame of expert ids, or its frame reference, in the order
of the option `token_tensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from r3channel import errors
from r3channel.wire import header as head
from r3channel.wire.header import HEADER_BYTES
from r3channel.wire.source import InHand
from r3channel.wire.token_tensors import LENGTH_BYTES, MOST_ENTRIES, TokenTensor, Values


class TensorRows(NamedTuple):
    """Rows [first_row, end_row) of one request; views of the bytes that were parsed."""

    tensor: TokenTensor
    first_row: int
    lengths_T: Values
    """uint16"""
    entries_N: Values
    """Row after row, of the tensor's dtype."""
    sample_key: int = 0

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.lengths_T)

    def part(self, rows: slice) -> TensorRows:
        """Return some of the rows as if they were a whole request's.

        Args:
            rows: Which rows; they are counted from the first row of this object.
        """
        begin, own_T = int(self.lengths_T[: rows.start].sum()), self.lengths_T[rows]
        return self._replace(lengths_T=own_T, entries_N=self.entries_N[begin : begin + int(own_T.sum())])

    @property
    def nbytes(self) -> int:
        return self.entries_N.nbytes + self.lengths_T.nbytes


def row_lengths(turns: Sequence[TensorRows], rows: int) -> Values:
    """Return the number of entries of each row of a sample.

    Args:
        turns: The rows of all turns of the sample.
        rows: The number of rows.

    Returns:
        [rows] int64; 0 where no turn brought the row.
    """
    length_T = np.zeros(rows, np.int64)
    for turn in turns:
        length_T[turn.first_row : turn.end_row] = turn.lengths_T
    return length_T


def entries_of(tensor: TokenTensor, turns: Sequence[TensorRows]) -> Values:
    """Return the entries of all turns, copied."""
    return np.concatenate([np.empty(0, tensor.entry), *(turn.entries_N for turn in turns)])


def encode_tensor(rows: TensorRows) -> bytes:
    """Return the frame of a request's rows.

    Raises:
        RoutingError: A row has more entries than its length can say.
    """
    name, lengths_T = rows.tensor.name, rows.lengths_T
    if len(lengths_T) and int(lengths_T.max()) > MOST_ENTRIES:
        raise errors.RoutingError(
            f"{name}: a row of {lengths_T.max()} entries, expected at most {MOST_ENTRIES}; ask for "
            f"less: {rows.tensor.asked_by}"
        )
    values_N = np.ascontiguousarray(rows.entries_N, rows.tensor.entry)
    lengths_T = np.ascontiguousarray(lengths_T, "<u2")
    memory_N = np.empty(HEADER_BYTES + values_N.nbytes + lengths_T.nbytes, np.uint8)
    behind = len(memory_N) - lengths_T.nbytes
    memory_N[HEADER_BYTES:behind], memory_N[behind:] = values_N.view(np.uint8), lengths_T.view(np.uint8)
    seal_tensor(
        rows.tensor, memory_N, rows=len(lengths_T), first_row=rows.first_row, sample_key=rows.sample_key
    )
    return memory_N.tobytes()


def seal_tensor(tensor: TokenTensor, memory_N: Values, *, rows: int, first_row: int, sample_key: int) -> None:
    """Write the header of a frame whose values are in place.

    Args:
        tensor: What the values are.
        memory_N: The memory of the frame; values and row lengths lie in it.
        rows: Number of its rows.
        first_row: Position of the first row in its sample.
        sample_key: Key of the request.
    """
    nbytes = len(memory_N) - HEADER_BYTES
    fields = head.Header(
        kind=tensor.kind, spec_digest=tensor.digest, rows=rows, first_row=first_row, sample_key=sample_key,
        sections_bytes=nbytes, raw_bytes=nbytes - rows * LENGTH_BYTES,
    )  # fmt: skip
    head.seal(memory_N.data, fields[:-2])


def parse_tensors(data: Any, tensors: Sequence[TokenTensor], *, where: str) -> tuple[TensorRows, ...]:
    """Read the frames of tensors, which lie one after the other.

    A damaged frame, or one of another kind, raises what `parse_frame` raises.

    Args:
        data: The frames.
        tensors: The tensors in the order of their frames.
        where: Names the reply in error texts.

    Raises:
        RoutingMissing: A tensor has no frame.
    """
    rest, found = memoryview(data), list[TensorRows]()
    for tensor in tensors:
        if not rest:
            raise errors.RoutingMissing(
                f"{where}: no {tensor.name} behind the routing, expected some (token_tensors names it). Did the request set "
                f"{tensor.asked_by}, and did the engine start with R3CHANNEL_TOKEN_TENSORS={tensor.option}?"
            )
        nbytes = (tensor is not tensors[-1] and head.announced_bytes(rest)) or len(rest)
        found.append(_parse(rest[:nbytes], tensor, where=f"{where}: {tensor.name}"))
        rest = rest[nbytes:]
    return tuple(found)


def _parse(data: memoryview, tensor: TokenTensor, *, where: str) -> TensorRows:
    source = InHand(data)
    header = head.read_header(source.take(HEADER_BYTES), nbytes=len(data), where=where)
    head.check_kind(header, source, kind=tensor.kind, where=where)
    if header.spec_digest != tensor.digest:
        raise errors.SpecMismatch(
            f"{where}: not {tensor.option}; do engine and relay name the same token_tensors?"
        )
    entries, odd = divmod(header.raw_bytes, tensor.entry.itemsize)
    sizes = header.raw_bytes + header.rows * LENGTH_BYTES, 0
    bounded = header.first_row + header.rows <= head.MAX_ROWS
    if (header.sections_bytes, header.wire_bytes) != sizes or odd or not bounded:
        raise errors.FrameCorrupt(f"{where}: impossible numbers in the header: {header._asdict()}")
    sections = source.take(header.sections_bytes)
    head.check_sections(header, sections, where=where)
    lengths_T = np.frombuffer(sections[header.raw_bytes :], "<u2")
    if int(lengths_T.sum(dtype=np.int64)) != entries:
        raise errors.FrameCorrupt(
            f"{where}: {entries} entries, the lengths of the {header.rows} rows add up to {lengths_T.sum(dtype=np.int64)}"
        )
    values_N = np.frombuffer(sections, tensor.entry, entries)
    return TensorRows(tensor, header.first_row, lengths_T, values_N, header.sample_key)
