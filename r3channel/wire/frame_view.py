"""A received frame: what its sections say, and its rows as they are read. Knows nothing about headers or hashes of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CODECS, Entry
from r3channel.wire.digest import check, sound_rows
from r3channel.wire.mixing import Valid, Words
from r3channel.wire.routing import Ids, ProvenanceSpan, SampleRouting, marked_missing, raise_unsound
from r3channel.wire.source import InHand, Source

_WORD_BYTES = 16
_NAMED_LAYERS = 5
_NO_EDGES = np.zeros(0, np.int64)
_SLICE_BYTES = 512 << 10
"""Ids that are written and then checked: within a level-2 cache, and few enough calls (measured: 256 kB to 4 MB)."""
_MOST_NEW_RUNS = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """A frame whose bytes have been verified but for its ids, which are still encoded (see `fill` and `verify`)."""

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
    partly_valid_T: Valid | None
    """None where every row is valid."""
    provenance: tuple[ProvenanceSpan, ...]
    digests_L: Words
    """Per MoE layer, as the engine computed them over the valid rows (see `wire.digest`)."""
    ordered: bool
    """False where a codec has dropped the order of the ids within a row."""
    entries: tuple[Entry, ...]
    """The table of its chunks."""
    kept_rows: int = 0
    """How many rows a retraction did not lose."""
    payload: memoryview | bytes = b""
    """The chunks of a frame that is in hand: a view of the caller's buffer, no copy."""

    @property
    def valid_T(self) -> Valid:
        """Return for each row whether it is valid, [rows] bool."""
        return np.ones(self.rows, bool) if self.partly_valid_T is None else self.partly_valid_T

    @property
    def invalid_edges(self) -> Ids:
        """Return the positions where rows without routing begin and end.

        The positions ascend: a begin, its end, the next begin, and so on.
        """
        if self.partly_valid_T is None:
            return _NO_EDGES
        beside_T = np.concatenate([[True], self.partly_valid_T, [True]])
        return np.flatnonzero(beside_T[1:] != beside_T[:-1]) + self.first_row

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the largest coded chunk.

        This is 0 where all rows lie in the frame as they are.
        """
        return max((entry.nbytes for entry in self.entries if not CODECS[entry.codec].as_is), default=0)

    def fill(self, source: Source, out_TLK: Ids, scratch_N: memoryview | None = None) -> None:
        """Read the ids and check every one of them.

        Ids are checked while they are in a cache. Errors of `source` pass through.

        Args:
            source: Its next bytes are the frame's ids.
            out_TLK: [rows, L, K], filled with the ids.
            scratch_N: `scratch_bytes` that coded chunks go through, where it is given.

        Raises:
            FrameCorrupt: As in `verify`.
            ExpertIdInvalid: As in `verify`.
        """
        sound, digests_L = True, np.zeros(self.spec.num_moe_layers, np.uint64)
        most = max(1, _SLICE_BYTES // self.spec.bytes_per_token)
        for entry in self.entries:
            as_is, end = CODECS[entry.codec].as_is, entry.row + entry.rows
            if not as_is:
                self._decode(entry, source, out_TLK, scratch_N)
            for row in range(entry.row, end, most):
                ids_TLK = out_TLK[row : min(row + most, end)]
                if as_is:
                    source.fill(ids_TLK.reshape(-1).view(np.uint8).data)
                found, found_L = self._check(ids_TLK, row)
                sound &= found
                digests_L += found_L
        self._judge(out_TLK, sound, digests_L)

    def verify(self) -> Ids:
        """Check every id of a frame in hand, and return the ids.

        An id must be in range, distinct within its row, and what the engine hashed. Invalid rows are not judged.

        Returns:
            [rows, L, K], read-only: a view of the frame's bytes where that is possible (see `ids`), else an array.

        Raises:
            FrameCorrupt: The ids were damaged; another copy of the frame may be whole.
            ExpertIdInvalid: It is a fault of the engine; another copy is no better.
        """
        ids_TLK = self._view()
        if ids_TLK is not None:
            self._judge(ids_TLK, *self._check(ids_TLK, 0))
            return ids_TLK
        self.fill(InHand(self.payload), out_TLK := self._empty())
        out_TLK.flags.writeable = False
        return out_TLK

    def leave_out_unsound(self, ids_TLK: Ids) -> bool:
        """Make rows with impossible ids invalid rows of kind MISSING.

        Call this after `fill` has raised ExpertIdInvalid. No router can have chosen such ids: they are padding, or memory that
        nobody wrote. The digests become those of the other rows.

        Args:
            ids_TLK: The array that `fill` filled.

        Returns:
            False where too many runs are left to keep the frame.
        """
        sound_T = sound_rows(ids_TLK, num_experts=self.spec.num_experts).all(1)
        self.partly_valid_T = self.valid_T & sound_T
        before = len(self.provenance)
        self.provenance = marked_missing(self.provenance, np.flatnonzero(~sound_T))
        self.digests_L = self._check(ids_TLK, 0)[1]
        return len(self.provenance) <= before + _MOST_NEW_RUNS

    def decode_into(self, out_TLK: Ids) -> None:
        """Fill a C-contiguous array [rows, L, K] with unchecked ids.

        Args:
            out_TLK: The array to fill.

        Raises:
            FrameCorrupt: A chunk does not decode.
        """
        source = InHand(self.payload)
        for entry in self.entries:
            self._decode(entry, source, out_TLK)

    def ids(self) -> Ids:
        """Return the ids of a frame in hand, not checked.

        Ids that are not aligned are copied once (40 ms per raw GB): checking and placing them in 8-byte words where they lie
        would cost several times as much.

        Returns:
            [rows, L, K], read-only: a view of the frame's bytes where ids are stored and aligned, else a decoded copy. A view is
            valid as long as the buffer that was parsed.
        """
        view_TLK = self._view()
        if view_TLK is None:
            self.decode_into(view_TLK := self._empty())
            view_TLK.flags.writeable = False
        return view_TLK

    def _empty(self) -> Ids:
        return np.empty((self.rows, self.spec.num_moe_layers, self.spec.top_k), self.spec.id_dtype)

    def _decode(
        self, entry: Entry, source: Source, out_TLK: Ids, scratch_N: memoryview | None = None
    ) -> None:
        if scratch_N is None:
            wire = source.take(entry.nbytes)
        else:
            source.fill(wire := scratch_N[: entry.nbytes])
        try:
            CODECS[entry.codec].decode_into(wire, out_TLK[entry.row : entry.row + entry.rows])
        except errors.FrameCorrupt as error:
            raise error.prefix(self.where) from error

    def _check(self, ids_TLK: Ids, row: int) -> tuple[bool, Words]:
        valid_T, first_row = self.partly_valid_T, self.first_row + row
        own_T = None if valid_T is None else valid_T[row : row + len(ids_TLK)]
        return check(ids_TLK, num_experts=self.spec.num_experts, first_row=first_row, valid_T=own_T)

    def _judge(self, ids_TLK: Ids, sound: bool, digests_L: Words) -> None:
        if digests_L.tobytes() != self.digests_L.tobytes():
            differing = np.flatnonzero(digests_L != self.digests_L).tolist()
            layers = [self.spec.moe_layers[index] for index in differing[:_NAMED_LAYERS]]
            more = f" and {len(differing) - len(layers)} more" * (len(differing) > len(layers))
            raise errors.FrameCorrupt(
                f"{self.where}: layers {layers}{more}: the ids are not those that the engine hashed; damaged on the way or at "
                "rest"
            )
        if not sound:
            raise_unsound(ids_TLK, spec=self.spec, where=self.where, valid_T=self.partly_valid_T)

    def _view(self) -> Ids | None:
        spec = self.spec
        if not all(CODECS[entry.codec].as_is for entry in self.entries):
            return None
        view = np.frombuffer(self.payload, spec.id_dtype).reshape(self.rows, spec.num_moe_layers, spec.top_k)
        return view if view.ctypes.data % _WORD_BYTES == 0 else None

    def routing(self, *, sample_id: str) -> SampleRouting:
        """Decode and check every id, and return the sample's routing.

        This checks as `verify` does. The ids may be a view of the frame's bytes.

        Args:
            sample_id: Names the sample, in error texts too.
        """
        self.where = f"sample {sample_id}"
        return SampleRouting(
            spec=self.spec, sample_id=sample_id, tokens=self.first_row + self.rows + 1, first_row=self.first_row,
            expert_ids_TLK=self.verify(), valid_T=self.valid_T, provenance=self.provenance, checked=True,
        )  # fmt: skip
