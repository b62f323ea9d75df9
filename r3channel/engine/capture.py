"""From captured expert ids to the frame of one finished request. Knows tensors and frames, and no engine.

Shape letters: T rows, L MoE layers, A all decoder layers (dense ones included), K top-k; `slots_T` are KV-cache slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from r3channel.errors import RoutingError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CHUNK_ROWS, chunk_count, written_as_is
from r3channel.wire.digest import item_bytes_of, kernels, layer_digests
from r3channel.wire.frame import encode_frame
from r3channel.wire.header import HEADER_BYTES, MAX_SPANS, SPAN, SPAN_BYTES, seal, sections_size
from r3channel.wire.mixing import coefficients, multipliers
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, Run, columns_of, spans_of
from r3channel.wire.token_tensors import LENGTH_BYTES

NO_VERSION = -1
"""Weight version of a slot that was never written; its rows are MISSING."""
UNREADABLE_VERSION = -2
"""Stamped while the engine's version is not a number; a request with such rows gets an error frame."""
_MISSING = int(RowKind.MISSING)


def torch_id_dtype(spec: RoutingSpec) -> torch.dtype:
    """Return the torch dtype that corresponds to `spec.id_dtype`."""
    return torch.uint8 if spec.id_dtype == np.uint8 else torch.int16


def pair(ids_TK: torch.Tensor, weights_TK: torch.Tensor, *, out_TK: torch.Tensor) -> None:
    """Pack each id and its weight into one int64.

    The lower half holds the id as int32; the upper half holds the bits of the weight as float32. The call launches one kernel,
    because each layer of a pass pays for it.

    Args:
        ids_TK: Expert ids.
        weights_TK: The weights of these ids. Columns beyond those of `ids_TK` are ignored.
        out_TK: The int64 tensor that is written.
    """
    # A complex number is such a pair; torch has no other kernel that writes two inputs beside each other into strided memory.
    low_TK, high_TK = ids_TK.int().view(torch.float32), weights_TK[:, : ids_TK.shape[1]].float()
    torch.complex(low_TK, high_TK, out=out_TK.view(torch.complex64))


def weights_offset(spec: RoutingSpec) -> int:
    """Return the byte offset of the weights in a row.

    The weights lie behind the ids; the offset is even.
    """
    return spec.bytes_per_token + spec.bytes_per_token % 2


class LayerSelection:
    """Selects the MoE layers of [T, A, K] and narrows their ids, in as few kernels as the layers allow. It never synchronises."""

    def __init__(self, spec: RoutingSpec, *, device: str | torch.device) -> None:
        first, last = spec.moe_layers[0], spec.moe_layers[-1]
        self._spec, self._full_byte = spec, spec.num_experts == 256
        self._layers: Any = slice(first, last + 1)
        if last + 1 - first != spec.num_moe_layers:
            self._layers = torch.tensor(spec.moe_layers, device=device)

    def targets(self, rows_RN: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the ids and the weights in rows of bytes.

        Args:
            rows_RN: [R, bytes of a row] uint8.

        Returns:
            A view of the ids, [R, L, K] in the id dtype. If the rows have room for weights, also a view of the
            weights, [R, L, K] float16.
        """
        spec, shape = self._spec, (self._spec.num_moe_layers, self._spec.top_k)
        ids_RLK = rows_RN[:, : spec.bytes_per_token].view(torch_id_dtype(spec)).unflatten(1, shape)
        if rows_RN.shape[1] == spec.bytes_per_token:
            return (ids_RLK,)
        return ids_RLK, rows_RN[:, weights_offset(spec) :].view(torch.float16).unflatten(1, shape)

    def fill(self, targets: Sequence[torch.Tensor], captured_TAK: torch.Tensor) -> None:
        """Write a pass's rows into `targets`.

        Args:
            targets: Views of the same rows, as `targets` returns them.
            captured_TAK: Expert ids; pairs of ids and weights (`pair`) if `targets` has weights.
        """
        ids_TLK, *weights = targets
        if weights:
            weights[0].copy_(captured_TAK.view(torch.float32)[:, self._layers, 1::2])
            # Narrowing a pair keeps its lower bits. On a CPU this is four times faster than copying every other half.
            captured_TAK = captured_TAK.view(torch.int32)[..., ::2] if self._full_byte else captured_TAK
        self.narrow(captured_TAK, out=ids_TLK)

    def narrow(self, expert_ids_TAK: torch.Tensor, *, out: torch.Tensor) -> None:
        """Write the ids of the MoE layers in the id dtype.

        The copy runs on the device of `out`, in the order of the current stream. In uint8, -1 becomes 255, which no relay takes
        for an expert. With 256 experts 255 is an expert; there a -1 turns all ids of its row and layer into 255, which no relay
        takes for a choice.

        Args:
            expert_ids_TAK: Ids of all decoder layers.
            out: [T, L, K] in the id dtype, on the same device.
        """
        ids_TLK = expert_ids_TAK[:, self._layers]
        if self._full_byte:
            ids_TLK = ids_TLK.masked_fill((ids_TLK >> 8).any(-1, keepdim=True), -1)
        out.copy_(ids_TLK)


# -- by KV slot ----------------------------------------------------------------------------------------------------------


Maker = tuple[int, int]
"""What made a row: (weight version, kind)."""
MISSING_MAKER: Maker = (NO_VERSION, _MISSING)
MAX_MAKERS = 1 << 15
"""Stamps are int16, so this many makers fit."""
_SPANS_IN_PLACE = 128
"""Provenance spans that have room before the ids, 3 kB; a request with more is gathered again."""
_LINE_BYTES = 64


class KeptRows(NamedTuple):
    """Rows of a request that are stored outside its slots: positions `first_row`, `first_row` + 1, ... and what made each row."""

    first_row: int
    ids_TN: Ids
    """[T, bytes of a row], with its weights."""
    runs: Sequence[Run]

    def rows_between(self, start: int, end: int) -> KeptRows | None:
        """Return the rows among positions [start, end), a view.

        Returns:
            The rows, or None if there are none.
        """
        start, end = max(start, self.first_row), min(end, self.first_row + len(self.ids_TN))
        if start >= end:
            return None
        runs = [(max(a, start), min(b, end), v, kind) for a, b, v, kind in self.runs if a < end and b > start]
        return KeptRows(start, self.ids_TN[start - self.first_row : end - self.first_row], runs)

    def known_runs(self) -> Iterator[tuple[slice, Maker, Ids]]:
        """Yield each run of rows that a pass has made.

        Returns:
            An iterator of (positions, what made the rows, their ids).
        """
        for start, end, version, kind in self.runs:
            if kind != _MISSING:
                ids_TN = self.ids_TN[start - self.first_row : end - self.first_row]
                yield slice(start, end), (version, kind), ids_TN


class SlotRows:
    """The rows that the engine holds, by KV slot: ids [slots, L, K] in the id dtype, weights if requested, and what made each
    row.

    Provenance is stored with the slot, because a prefix-cache hit returns rows of an older request (SGLang's own version
    spans cover output tokens only). Host memory: the rows and 2 bytes per slot. One thread at a time: the scheduler's.
    """

    def __init__(self, spec: RoutingSpec, *, slots: int, weights: bool = False) -> None:
        """Allocate the rows and compile everything that will be compiled.

        Args:
            spec: The model's routing.
            slots: Number of KV slots.
            weights: Whether each row also stores the weight of each id, 16 bits each, behind all ids.
        """
        self.spec, self._weights_at = spec, weights_offset(spec) if weights else spec.bytes_per_token
        self.row_bytes = row_bytes = self._weights_at + 2 * spec.num_moe_layers * spec.top_k * weights
        # Rows are bytes, and the first one begins at a cache line: most models' rows are whole lines, which are written past
        # the cache.
        memory_N = np.zeros(slots * row_bytes + _LINE_BYTES, np.uint8)
        begin = -memory_N.ctypes.data % _LINE_BYTES
        self._ids_SN = memory_N[begin : begin + slots * row_bytes].reshape(slots, row_bytes)
        self._stamps_S = np.zeros(slots, np.int16)
        # Compile everything now, and not while a request waits.
        one_TLK = np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype)
        layer_digests(one_TLK, first_row=0)
        item, compiled = item_bytes_of(spec), kernels()
        self._weight_bytes = row_bytes - self._weights_at
        self._gather = compiled and compiled.gather_frame(
            item, row_bytes=spec.bytes_per_token, weights_at=self._weights_at, weight_bytes=self._weight_bytes,
            chunk_rows=CHUNK_ROWS,
        )  # fmt: skip
        self._scatter = compiled and compiled.scatter_rows(row_bytes)
        # Arrays that each gather reads and writes beside its rows; they are made once.
        factors_I = multipliers(spec.top_k * spec.id_dtype.itemsize // item)
        begin_N = np.frombuffer(
            encode_frame(spec, expert_ids_TLK=one_TLK[:0], codec="stored"), np.uint64, HEADER_BYTES // 8
        )
        self._fixed_W = np.concatenate((begin_N, factors_I))
        self._words_W = np.empty(spec.num_moe_layers * (1 + len(factors_I)), np.uint64)
        self._makers_M2 = np.empty((MAX_MAKERS, 2), np.int64)
        self._makers_M2[0] = MISSING_MAKER
        self._stamp_of: dict[Maker, int] = {MISSING_MAKER: 0}

    @property
    def nbytes(self) -> int:
        return self._ids_SN.nbytes + self._stamps_S.nbytes

    def write(self, slots_T: Ids, expert_ids_TLK: Ids, *, weight_version: int, kind: RowKind) -> None:
        """Write the rows of one forward pass into their slots.

        Args:
            slots_T: Slots, int64, contiguous.
            expert_ids_TLK: Ids in the id dtype, contiguous; or whole rows as bytes, each contiguous.
            weight_version: The version that made the rows.
            kind: The kind of all these rows.
        """
        if expert_ids_TLK.ndim > 2:
            expert_ids_TLK = expert_ids_TLK.view(np.uint8).reshape(len(slots_T), self.row_bytes)
        self._put(slots_T, expert_ids_TLK, (weight_version, int(kind)))

    def put_back(self, slots_T: Ids, kept: KeptRows) -> None:
        """Write kept rows into the slots of the same positions.

        A slot keeps its own row where the kept row is MISSING.

        Args:
            slots_T: The slots of the positions of the kept rows.
            kept: The rows to write.
        """
        for at, maker, ids_TN in kept.known_runs():
            self._put(slots_T[at.start - kept.first_row : at.stop - kept.first_row], ids_TN, maker)

    def _put(self, slots_T: Ids, ids_TN: Ids, maker: Maker) -> None:
        stamp = self._stamp_of.get(maker)
        if stamp is None:
            stamp = self._new_stamp(maker)
        if self._scatter:
            self._scatter(ids_TN, slots_T, self._ids_SN, self._stamps_S, stamp)
        else:
            self._ids_SN[slots_T], self._stamps_S[slots_T] = ids_TN, stamp

    def forget(self, slots_T: Ids) -> None:
        """Mark these slots' rows as MISSING.

        The keys and values that lie in these slots now were not computed here, so the stored rows do not belong to them.
        """
        self._stamps_S[slots_T] = self._stamp_of[MISSING_MAKER]

    def keep(self, slots_T: Ids, *, first_row: int) -> KeptRows:
        """Return a copy of a request's rows.

        Args:
            slots_T: The slots of the rows.
            first_row: Position of the first row.
        """
        made = self.gather_frame(slots_T, first_row=first_row, sample_key=0)
        return KeptRows(first_row, self._ids_SN[slots_T], made.runs)

    def gather_frame(
        self, slots_T: Ids, *, first_row: int, sample_key: int, kept: Sequence[KeptRows] = (), hashed: bool = False,
        spans: int = _SPANS_IN_PLACE,
    ) -> UnfinishedFrame:  # fmt: skip
        """Gather a request's rows once, into the memory that becomes its frame.

        Args:
            slots_T: The slots of the rows.
            first_row: Position of the first row.
            sample_key: The key of the request in its frame.
            kept: Rows that replace those of the slots at the same positions.
            hashed: Whether the rows' digests are computed too, if that is compiled. Set it for a frame that this thread encodes.
            spans: Number of provenance spans to leave room for. Rows that have more are gathered twice.
        """
        rows = slots_T.size
        made = UnfinishedFrame(
            self.spec, rows=rows, first_row=first_row, sample_key=sample_key, spans=spans, weight_bytes=self._weight_bytes
        )  # fmt: skip
        if self._gather:
            slots_T = slots_T if slots_T.dtype == np.int32 else slots_T.astype(np.int32)
            made.hashed = hashed
            made.begin, made.spans, made.oldest = self._gather(
                self._ids_SN, self._stamps_S, self._makers_M2, slots_T, coefficients(first_row, rows * hashed),
                self._fixed_W, self._words_W, made.memory_N, made.payload, first_row, sample_key, spans,
            )  # fmt: skip
            if made.spans > spans:
                return self.gather_frame(
                    slots_T, first_row=first_row, sample_key=sample_key, kept=kept, hashed=hashed, spans=made.spans
                )  # fmt: skip
        else:
            stamps_T = self._stamps_S.take(slots_T)
            # Whole rows are taken: with a slice of columns `take` would copy the rows of all slots first.
            self._copy_rows(self._ids_SN.take(slots_T, axis=0), made, slice(None))
            made.runs = spans_of(*self._makers_M2[stamps_T].T, first_row=first_row)
        if kept:
            self._replace_rows(made, kept)
        return made

    def _replace_rows(self, made: UnfinishedFrame, kept: Sequence[KeptRows]) -> None:
        first_row, (versions_T, kinds_T) = made.first_row, columns_of(made.runs)
        parts = [part for each in kept if (part := each.rows_between(first_row, first_row + made.rows))]
        for at, (version, kind), ids_TN in chain.from_iterable(part.known_runs() for part in parts):
            rows = slice(at.start - first_row, at.stop - first_row)
            versions_T[rows], kinds_T[rows] = version, kind
            self._copy_rows(ids_TN, made, rows)
            made.kept_rows += len(ids_TN)
        made.runs = spans_of(versions_T, kinds_T, first_row=first_row)

    def _copy_rows(self, ids_TN: Ids, made: UnfinishedFrame, rows: slice) -> None:
        made.bytes_TN[rows] = ids_TN[:, : self.spec.bytes_per_token]
        made.weights_TN[rows] = ids_TN[:, self._weights_at :]

    def _new_stamp(self, maker: Maker) -> int:
        if len(self._stamp_of) == MAX_MAKERS:
            self._forget_unused()  # after some 16 thousand weight versions, with two kinds each
        stamp = self._stamp_of[maker] = len(self._stamp_of)
        self._makers_M2[stamp] = maker
        return stamp

    def _forget_unused(self) -> None:
        used, stamps_S = np.unique(self._stamps_S, return_inverse=True)
        shift = int(used[0] != 0)  # MISSING stays, and stays first
        self._makers_M2[shift : shift + len(used)] = self._makers_M2[used]
        self._makers_M2[0] = MISSING_MAKER
        makers = self._makers_M2[: shift + len(used)].tolist()
        self._stamp_of = {(version, kind): stamp for stamp, (version, kind) in enumerate(makers)}
        self._stamps_S = (stamps_S + shift).astype(np.int16)


# -- one request ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _head_bytes(layers: int, chunks: int, spans: int) -> int:
    return HEADER_BYTES + sections_size(chunks * CHUNK_ROWS, spans=spans, layers=layers)


class UnfinishedFrame:
    """A finished request's rows between the gather and the frame. `encode` may run on another thread than the gather."""

    def __init__(
        self, spec: RoutingSpec, *, rows: int, first_row: int, sample_key: int, spans: int = _SPANS_IN_PLACE,
        weight_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Allocate the memory of the frame.

        Args:
            spec: The model's routing.
            rows: Number of rows.
            first_row: Position of the first row.
            sample_key: The key of the request in its frame.
            spans: Number of provenance spans that have room before the ids.
            weight_bytes: Size of a row's weights in bytes; 0 without weights.
        """
        self.spec, self.rows, self.first_row, self.sample_key = spec, rows, first_row, sample_key
        self.shape = (rows,)
        """SGLang counts the rows here."""
        self.begin: int | None = None
        """The byte at which the frame begins; None if only `runs` are known."""
        self.spans, self.oldest, self.hashed = 0, 0, False
        """Provenance spans, their oldest weight version, and whether the gather has computed the digests, too."""
        self.kept_rows = 0
        """Number of rows that were kept over a retraction."""
        # Ids are gathered to their final place. Only the gather finds out how long the head before them is. Weights follow the
        # ids, with room for the header of their own frame and for its row lengths.
        self._runs: Sequence[Run] = ()
        self.payload = _head_bytes(spec.num_moe_layers, chunk_count(rows), spans)
        self._ids_end = self.payload + rows * spec.bytes_per_token
        self._weight_bytes, behind = weight_bytes, HEADER_BYTES + rows * (weight_bytes + LENGTH_BYTES)
        self.memory_N = np.empty(self._ids_end + behind * (weight_bytes > 0), np.uint8)

    @property
    def runs(self) -> Sequence[Run]:
        """Return the provenance runs. They tile [first_row, first_row + rows)."""
        if self.begin is None:
            return self._runs
        at = self.begin + HEADER_BYTES
        return [*SPAN.iter_unpack(self.memory_N.data[at : at + self.spans * SPAN_BYTES])]

    @runs.setter
    def runs(self, runs: Sequence[Run]) -> None:
        """Set the provenance runs.

        The caller that fills in the rows sets the runs before `encode`, if the gather did not.
        """
        self.begin, self._runs, self.oldest = None, runs, min([run[2] for run in runs], default=0)

    @property
    def bytes_TN(self) -> Ids:
        """Return the rows' ids as bytes, a view.

        The caller that made the frame fills in the ids before `encode`.
        """
        return self.memory_N[self.payload : self._ids_end].reshape(self.rows, self.spec.bytes_per_token)

    @property
    def weights_TN(self) -> Ids:
        """Return the weights, [T, bytes of a row's weights], a view."""
        rows, size = self.rows, self._weight_bytes
        return self.weights_frame_N[HEADER_BYTES : HEADER_BYTES + rows * size].reshape(rows, size)

    @property
    def ids_TLK(self) -> Ids:
        """Return the ids, [T, L, K] in the id dtype, a view."""
        return self.bytes_TN.view(self.spec.id_dtype).reshape(
            self.rows, self.spec.num_moe_layers, self.spec.top_k
        )

    @property
    def weights_frame_N(self) -> Ids:
        """Return the memory of the weights' own frame, right behind the ids."""
        return self.memory_N[self._ids_end :]

    @property
    def nbytes(self) -> int:
        return len(self.memory_N)

    def encode(self, *, codec: str = "auto") -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the frame's bytes.

        The frame is encoded in place if the gather found every row and the codec stores rows as they are. Rows that no pass has
        written become invalid rows of kind MISSING. The relay, not this call, checks whether a router can have chosen the ids.

        Args:
            codec: Name of the codec, or "auto".

        Returns:
            Writable bytes, because torch wants writable memory. In place, a view of the memory that this object owns.

        Raises:
            RoutingError: If a row has an unreadable weight version.
        """
        if self.oldest == UNREADABLE_VERSION:
            raise RoutingError(
                "rows were made while the engine's weight version was not a number; count versions up from '0'"
            )
        as_is = self.oldest != NO_VERSION and written_as_is(codec, num_experts=self.spec.num_experts)
        if not as_is or self.begin is None or self.spans > MAX_SPANS:
            return self._encode_anew("stored" if as_is else codec)
        if not self.hashed:
            digests_L = layer_digests(self.ids_TLK, first_row=self.first_row)
            at = self.begin + HEADER_BYTES + self.spans * SPAN_BYTES
            self.memory_N[at : at + digests_L.nbytes] = digests_L.view(np.uint8)
        seal(self.memory_N.data[self.begin : self.payload])
        return self.memory_N[self.begin : self._ids_end]

    def _encode_anew(self, codec: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        runs = self.runs
        data = encode_frame(
            self.spec, expert_ids_TLK=self.ids_TLK, first_row=self.first_row, sample_key=self.sample_key,
            valid_T=columns_of(runs)[1] != _MISSING if self.oldest == NO_VERSION else None,
            provenance=[ProvenanceSpan(*run[:3], RowKind(run[3])) for run in runs],
            kept_rows=self.kept_rows, codec=codec,
        )  # fmt: skip
        return np.frombuffer(bytearray(data), np.uint8)
