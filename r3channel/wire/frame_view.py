"""A received frame: what its bytes say, and its rows on demand. Knows nothing about headers or hashes of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.chunks import Chunk, decode_chunk
from r3channel.wire.codec import CODECS
from r3channel.wire.mixing import Words
from r3channel.wire.routing import Ids, ProvenanceSpan, SampleRouting, raise_unsound
from r3channel.wire.validate import checked

_WORD_BYTES = 16
_NAMED_LAYERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame whose bytes have been verified but for its ids, which are still encoded (see `verify`).

    Holds views of the caller's buffer, no copy.
    """

    spec: RoutingSpec
    rows: int
    first_row: int
    sample_key: int
    weight_version: int
    """The newest weight version among the rows; -1 when there are no rows."""
    where: str
    """Which frame this is, for messages."""
    nbytes: int
    """The frame's bytes as it travels."""
    valid_T: np.ndarray[Any, np.dtype[np.bool_]]
    provenance: tuple[ProvenanceSpan, ...]
    digests_L: Words
    """Per MoE layer, as the engine computed them over the valid rows (see `wire.digest`)."""
    ordered: bool
    """False where a codec has dropped the order of the ids within a row."""
    _chunks: tuple[Chunk, ...]
    _payload: memoryview

    @property
    def raw_nbytes(self) -> int:
        """Bytes that the decoded rows take."""
        return self.rows * self.spec.bytes_per_token

    def verify(self, out_TLK: Ids | None = None) -> Ids:
        """[rows, L, K], every id checked: in range, distinct within its row, and what the engine hashed.

        A read-only view of the frame's bytes where that is possible (see `ids`); else `out_TLK`, or fresh memory, is filled.

        Raises FrameCorrupt for ids that were damaged: another copy of the frame may be whole. ExpertIdInvalid is
        a fault of the engine: another copy is no better. Invalid rows are not judged.
        """
        try:
            ids_TLK = self.ids(out_TLK)
        except errors.FrameCorrupt as error:
            raise error.within(self.where) from error
        valid_T = None if self.valid_T.all() else self.valid_T
        sound, digests_L = checked(
            ids_TLK, num_experts=self.spec.num_experts, first_row=self.first_row, valid_T=valid_T
        )
        differing = np.flatnonzero(digests_L != self.digests_L)
        if len(differing):
            layers = [self.spec.moe_layers[index] for index in differing[:_NAMED_LAYERS]]
            more = f" and {len(differing) - len(layers)} more" * (len(differing) > len(layers))
            raise errors.FrameCorrupt(
                f"{self.where}: layers {layers}{more}: the ids are not those that the engine hashed; damaged on the way or at "
                "rest"
            )
        if not sound:
            raise_unsound(ids_TLK, spec=self.spec, where=self.where, valid_T=valid_T)
        return ids_TLK

    def decode_into(self, out_TLK: Ids) -> None:
        """Fill a C-contiguous array [rows, L, K] of `spec.id_dtype`. Raises `FrameCorrupt` where a chunk does not decode."""
        shape = (self.rows, self.spec.num_moe_layers, self.spec.top_k)
        if out_TLK.shape != shape or out_TLK.dtype != self.spec.id_dtype or not out_TLK.flags.c_contiguous:
            raise errors.UsageError(
                f"decode buffer is {out_TLK.dtype}{list(out_TLK.shape)}, expected {self.spec.id_dtype}{list(shape)}, C-contiguous"
            )
        for chunk in self._chunks:
            decode_chunk(chunk, out_TLK)

    def decode(self) -> Ids:
        """[rows, L, K] in a fresh array of `spec.id_dtype`."""
        out_TLK = np.empty((self.rows, self.spec.num_moe_layers, self.spec.top_k), self.spec.id_dtype)
        self.decode_into(out_TLK)
        return out_TLK

    def ids(self, out_TLK: Ids | None = None) -> Ids:
        """[rows, L, K], not checked: a read-only view of the frame's own bytes where they are stored and aligned, else decoded.

        A view is valid as long as the buffer that was parsed. Ids that start at an odd address are copied once (40 ms per raw
        GB): checking and placing them in 8-byte words where they lie would cost several times as much.
        """
        view = self._view()
        if view is not None:
            return view
        if out_TLK is not None:
            self.decode_into(out_TLK)
            return out_TLK
        out_TLK = self.decode()
        out_TLK.flags.writeable = False
        return out_TLK

    @property
    def stored(self) -> bool:
        """Whether `ids` and `verify` give a view of the frame's own bytes."""
        return self._view() is not None

    def _view(self) -> Ids | None:
        spec = self.spec
        if not all(CODECS[chunk.codec].as_is for chunk in self._chunks):
            return None
        view = np.frombuffer(self._payload, spec.id_dtype).reshape(self.rows, spec.num_moe_layers, spec.top_k)
        return view if view.ctypes.data % _WORD_BYTES == 0 else None

    def routing(self, *, sample_id: str) -> SampleRouting:
        """Decode and check every id, as `verify` does. The ids may be a view of the frame's bytes."""
        return SampleRouting(
            spec=self.spec,
            sample_id=sample_id,
            tokens=self.first_row + self.rows + 1,
            first_row=self.first_row,
            expert_ids_TLK=replace(self, where=f"sample {sample_id}").verify(),
            valid_T=self.valid_T,
            provenance=self.provenance,
            checked=True,
        )
