"""A stored frame that is filled where it lies: the ids are gathered straight into their place on the wire. No I/O.

    unfinished = StoredFrame(spec, runs=[...])
    np.take(..., out=unfinished.ids_TLK)     # whoever has the rows
    unfinished.finish(sample_key=...)        # digests, tables, header: buffer_N holds what encode_frame(codec="stored") gives

For callers that finish thousands of requests on a thread that must not be busy: no copy is made after the gather, and no
object per span. All rows are valid rows; a sample with invalid rows takes `encode_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.wire.chunks import stored_entries
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import Run, frame_head
from r3channel.wire.header import HEADER_BYTES, sections_size
from r3channel.wire.routing import Ids


def prepare(spec: RoutingSpec) -> None:
    """Compile what `finish` needs now, and not while a request waits."""
    layer_digests(np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype), first_row=0)


class StoredFrame:
    """NEW -> (owner fills `ids_TLK`) -> `finish`. One thread at a time; any thread may finish."""

    __slots__ = ("_first_row", "_kept_rows", "_runs", "buffer_N", "ids_TLK", "spec")

    def __init__(
        self, spec: RoutingSpec, *, rows: int, first_row: int, runs: Sequence[Run], kept_rows: int = 0
    ) -> None:
        """`runs` tile [first_row, first_row + rows) in order; the caller made them by run length, so it is not checked."""
        self.spec, self._first_row, self._runs, self._kept_rows = spec, first_row, runs, kept_rows
        payload = HEADER_BYTES + sections_size(rows, spans=len(runs), layers=spec.num_moe_layers)
        self.buffer_N = np.empty(payload + rows * spec.bytes_per_token, np.uint8)
        """The whole frame; complete once `finish` has returned."""
        shape = (rows, spec.num_moe_layers, spec.top_k)
        self.ids_TLK: Ids = np.ndarray(shape, spec.id_dtype, self.buffer_N.data, payload)
        """[rows, L, K] in the id dtype: the payload itself, uninitialised until the owner fills it."""

    def finish(self, *, sample_key: int) -> None:
        """Write digests, tables and header. Nothing may write to `ids_TLK` any more."""
        entries = stored_entries(len(self.ids_TLK), row_bytes=self.spec.bytes_per_token)
        head = frame_head(
            self.spec, entries, first_row=self._first_row, valid_T=None, provenance=self._runs,
            digests_L=layer_digests(self.ids_TLK, first_row=self._first_row), sample_key=sample_key,
            kept_rows=self._kept_rows,
        )  # fmt: skip
        self.buffer_N.data[: len(head)] = head
