"""From captured expert ids to the frame of one finished request. Knows tensors and frames, and no engine.

Shape letters: T rows, L MoE layers, A all decoder layers (dense ones included), K top-k; `slots_T` are KV-cache slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from r3channel.errors import ConfigError, RoutingError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.chunks import stored_entries
from r3channel.wire.codec import written_as_is
from r3channel.wire.digest import item_bytes_of, layer_digests
from r3channel.wire.frame import encode_frame, frame_head
from r3channel.wire.header import HEADER_BYTES, sections_size
from r3channel.wire.mixing import coefficients, multipliers
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, Run, columns_of, spans_of
from r3channel.wire.validate import kernels

NO_VERSION = -1
"""Weight version of a slot that was never written; its rows are MISSING."""
UNREADABLE_VERSION = -2
"""Stamped while the engine's version is not a number; a request with such rows gets an error frame."""
_MISSING = int(RowKind.MISSING)


def parse_weight_version(text: str) -> int:
    """SGLang's version string as a count: "0", "7"; "default" (never set) is 0. Anything else is refused.

    >>> parse_weight_version("7"), parse_weight_version("default")
    (7, 0)
    """
    if text == "default":
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ConfigError(
            f"weight version {text!r}: expected a decimal count such as '0' or '7'. Rows are told apart by it; start the engine "
            "with --weight-version 0 and count up with each update"
        )
    return int(text)


def check_representable(spec: RoutingSpec) -> None:
    """Refuse the one shape in which a padding id (-1) could pass for a real one after narrowing."""
    if spec.num_experts == 256 and spec.top_k == 1:
        raise ConfigError(
            "256 experts with top-1: -1 and expert 255 are the same byte, so a missing row would look real"
        )


def torch_id_dtype(spec: RoutingSpec) -> torch.dtype:
    """`spec.id_dtype` for tensors."""
    return torch.uint8 if spec.id_dtype == np.uint8 else torch.int16


def pair(ids_TK: torch.Tensor, weights_TK: torch.Tensor, *, out_TK: torch.Tensor) -> None:
    """Into int32: each id in the lower half, the bits of its weight as float16 in the upper. Further weights are left out.

    Two kernels, since a layer's pass pays for each."""
    halves_TK2 = out_TK.view(torch.int16).unflatten(-1, (-1, 2))
    halves_TK2[..., 0].copy_(ids_TK)
    halves_TK2.view(torch.float16)[..., 1].copy_(weights_TK[:, : ids_TK.shape[1]])


def weights_offset(spec: RoutingSpec) -> int:
    """Where weights begin in a row that has them behind its ids."""
    return spec.bytes_per_token + spec.bytes_per_token % 2


class LayerSelection:
    """Takes the MoE layers out of [T, A, K] and narrows them, in as few kernels as the layers allow. Never synchronises."""

    def __init__(self, spec: RoutingSpec, *, device: str | torch.device) -> None:
        first, last = spec.moe_layers[0], spec.moe_layers[-1]
        self._spec, self._full_byte = spec, spec.num_experts == 256
        self._layers: Any = slice(first, last + 1)
        if last + 1 - first != spec.num_moe_layers:
            self._layers = torch.tensor(spec.moe_layers, device=device)

    def fill(self, rows_TN: torch.Tensor, captured_TAK: torch.Tensor) -> None:
        """Rows of bytes, with weights where they have room for them: then `captured_TAK` are pairs (`pair`)."""
        spec, shape = self._spec, (self._spec.num_moe_layers, self._spec.top_k)
        ids_TLK = rows_TN[:, : spec.bytes_per_token].view(torch_id_dtype(spec)).unflatten(1, shape)
        if rows_TN.shape[1] == spec.bytes_per_token:
            return self.narrow(captured_TAK, out=ids_TLK)
        halves_TAH = captured_TAK.view(torch.int16)
        self.narrow(halves_TAH[..., ::2], out=ids_TLK)
        bits_TLK = rows_TN[:, weights_offset(spec) :].view(torch.int16).unflatten(1, shape)
        bits_TLK.copy_(halves_TAH[:, self._layers, 1::2])
        return None

    def narrow(self, expert_ids_TAK: torch.Tensor, *, out: torch.Tensor) -> None:
        """Into [T, L, K] in the id dtype, on the same device, in the order of the current stream.

        -1 becomes 255 in uint8, which no relay takes for an expert; where 255 is one, all ids of its layer become 255, which none
        takes for a choice.
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
"""Stamps are int16."""
_SPANS_IN_PLACE = 128
"""Provenance spans that have room before the ids, 3 kB; the frame of a request with more is copied."""
_LINE_BYTES = 64


class KeptRows(NamedTuple):
    """Rows of a request that are held beside its slots: positions `first_row`, `first_row` + 1, ... and what made them."""

    first_row: int
    ids_TN: Ids
    """[T, bytes of a row], with its weights."""
    runs: Sequence[Run]

    def of(self, start: int, end: int) -> KeptRows | None:
        """The rows among positions [start, end), if any; a view."""
        start, end = max(start, self.first_row), min(end, self.first_row + len(self.ids_TN))
        if start >= end:
            return None
        runs = [(max(a, start), min(b, end), v, kind) for a, b, v, kind in self.runs if a < end and b > start]
        return KeptRows(start, self.ids_TN[start - self.first_row : end - self.first_row], runs)

    def known(self) -> Iterator[tuple[slice, Maker, Ids]]:
        """(positions, what made them, their ids) of each run of rows that some pass has made."""
        for start, end, version, kind in self.runs:
            if kind != _MISSING:
                ids_TN = self.ids_TN[start - self.first_row : end - self.first_row]
                yield slice(start, end), (version, kind), ids_TN


class SlotRows:
    """The rows that the engine holds, by KV slot: ids [slots, L, K] in the id dtype, weights if asked for, and what made each.

    Provenance travels with the slot, because a prefix-cache hit returns rows of an older request (SGLang's own version
    spans cover output tokens only). Host memory: the rows and 2 bytes per slot. One thread at a time: the scheduler's.
    """

    def __init__(self, spec: RoutingSpec, *, slots: int, weights: bool = False) -> None:
        """`weights`: rows have the weight of each id, 16 bits, behind all ids."""
        self.spec, self._weights_at = spec, weights_offset(spec) if weights else spec.bytes_per_token
        self.row_bytes = row_bytes = self._weights_at + 2 * spec.num_moe_layers * spec.top_k * weights
        # By rows of bytes that begin with a line of the cache: most models' have whole ones, which are written past it.
        memory_N = np.zeros(slots * row_bytes + _LINE_BYTES, np.uint8)
        begin = -memory_N.ctypes.data % _LINE_BYTES
        self._ids_SN = memory_N[begin : begin + slots * row_bytes].reshape(slots, row_bytes)
        self._stamps_S = np.zeros(slots, np.int16)
        item = item_bytes_of(spec)
        self._factors_I = multipliers(spec.top_k * spec.id_dtype.itemsize // item)
        # All that is compiled is compiled now, and not while a request waits.
        layer_digests(np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype), first_row=0)
        compiled = kernels()
        self._gather = compiled and compiled.gather_rows(item, row_bytes=spec.bytes_per_token)
        self._scatter = compiled and compiled.scatter_rows(row_bytes)
        self._makers: list[Maker] = [MISSING_MAKER]
        self._stamp_of: dict[Maker, int] = {MISSING_MAKER: 0}

    @property
    def nbytes(self) -> int:
        return self._ids_SN.nbytes + self._stamps_S.nbytes

    def write(self, slots_T: Ids, expert_ids_TLK: Ids, *, weight_version: int, kind: RowKind) -> None:
        """Rows of one forward pass, ids in the id dtype or whole rows as bytes; int64 slots. Both are contiguous."""
        ids_TN = expert_ids_TLK.view(np.uint8).reshape(len(slots_T), self.row_bytes)
        self._put(slots_T, ids_TN, (weight_version, int(kind)))

    def put_back(self, slots_T: Ids, kept: KeptRows) -> None:
        """Rows that were kept, into the slots of the same positions; where none was known, the slots' own stay."""
        for at, maker, ids_TN in kept.known():
            self._put(slots_T[at.start - kept.first_row : at.stop - kept.first_row], ids_TN, maker)

    def _put(self, slots_T: Ids, ids_TN: Ids, maker: Maker) -> None:
        stamp = self._stamp(maker)
        if self._scatter:
            self._scatter(ids_TN, slots_T, self._ids_SN, self._stamps_S, stamp)
        else:
            self._ids_SN[slots_T], self._stamps_S[slots_T] = ids_TN, stamp

    def forget(self, slots_T: Ids) -> None:
        """What lies in these slots now was not computed here: the rows that they held are no longer theirs."""
        self._stamps_S[slots_T] = self._stamp_of[MISSING_MAKER]

    def keep(self, slots_T: Ids, *, first_row: int) -> KeptRows:
        """A copy of a request's rows."""
        made = self.unfinished(slots_T, first_row=first_row, sample_key=0)
        return KeptRows(first_row, self._ids_SN[slots_T], made.runs)

    def unfinished(
        self, slots_T: Ids, *, first_row: int, sample_key: int, kept: Sequence[KeptRows] = (), hashed: bool = False
    ) -> UnfinishedFrame:  # fmt: skip
        """Gather a request's rows, once, into the memory that becomes its frame; those of `kept` win over the slots'.

        `hashed`: with their digests, where that is compiled: for a frame that this thread encodes.
        """
        made = UnfinishedFrame(self.spec, rows=len(slots_T), first_row=first_row, sample_key=sample_key)
        made.runs = [
            (first_row + start, first_row + end, *self._makers[stamp])
            for start, end, stamp in self._gathered(slots_T, made, hashed=hashed)
        ]
        if self._weights_at < self.row_bytes:
            made.weights_TN = self._ids_SN[slots_T, self._weights_at :]
        if kept:
            end, (versions_T, kinds_T) = first_row + made.rows, columns_of(made.runs)
            known = [run for each in kept if (part := each.of(first_row, end)) for run in part.known()]
            for at, (version, kind), ids_TN in known:
                rows = slice(at.start - first_row, at.stop - first_row)
                versions_T[rows], kinds_T[rows] = version, kind
                made.bytes_TN[rows] = ids_TN[:, : self.spec.bytes_per_token]
                made.weights_TN[rows] = ids_TN[:, self._weights_at :]
                made.kept_rows += len(ids_TN)
            made.runs, made.digests_L = spans_of(versions_T, kinds_T, first_row=first_row), None
        return made

    def _gathered(
        self, slots_T: Ids, made: UnfinishedFrame, *, hashed: bool
    ) -> Iterator[tuple[int, int, int]]:
        """Copy the rows of these slots to where they stay; (first row, end, stamp) of each run of stamps."""
        if self._gather:
            layers, runs_T2 = self.spec.num_moe_layers, np.empty((made.rows, 2), np.int32)
            words_W = np.empty(layers * (1 + len(self._factors_I)), np.uint64)
            count = self._gather(
                self._ids_SN, self._stamps_S, slots_T.astype(np.int32, copy=False),
                coefficients(made.first_row, made.rows * hashed), self._factors_I, made.bytes_TN, words_W, runs_T2,
            )  # fmt: skip
            starts, stamps = runs_T2[:count].T.tolist()
            made.digests_L = words_W[:layers] if hashed else None
        else:
            stamps_T = self._stamps_S.take(slots_T)
            # Whole rows: of a part of each `take` would copy those of all slots first.
            made.bytes_TN[:] = self._ids_SN.take(slots_T, axis=0)[:, : self.spec.bytes_per_token]
            starts = np.flatnonzero(np.diff(stamps_T, prepend=-1)).tolist()
            stamps = stamps_T[starts].tolist()
        return zip(starts, [*starts[1:], made.rows], stamps, strict=False)

    def _stamp(self, maker: Maker) -> int:
        stamp = self._stamp_of.get(maker)
        if stamp is None:
            if len(self._makers) == MAX_MAKERS:
                self._forget_unused()
            stamp = self._stamp_of[maker] = len(self._makers)
            self._makers.append(maker)
        return stamp

    def _forget_unused(self) -> None:
        """After 16 thousand weight versions: keep the makers of slots."""
        used, stamps_S = np.unique(self._stamps_S, return_inverse=True)
        kept = [self._makers[stamp] for stamp in used.tolist()]
        shift = int(kept[:1] != [MISSING_MAKER])
        self._makers = [MISSING_MAKER] * shift + kept
        self._stamp_of = {maker: stamp for stamp, maker in enumerate(self._makers)}
        self._stamps_S = (stamps_S + shift).astype(np.int16)


# -- one request ---------------------------------------------------------------------------------------------------------


class UnfinishedFrame:
    """A finished request's rows between the gather and the frame. `encode` may run on another thread than the gather."""

    def __init__(self, spec: RoutingSpec, *, rows: int, first_row: int, sample_key: int) -> None:
        self.spec, self.rows, self.first_row, self.sample_key = spec, rows, first_row, sample_key
        self.runs: Sequence[Run] = ()
        """They tile [first_row, first_row + rows); whoever made this sets them before `encode`."""
        self.kept_rows = 0
        """How many of the rows a retraction did not lose."""
        self.digests_L: Ids | None = None
        """Those of `ids_TLK`, where they are known."""
        self.weights_TN: Ids = np.empty((rows, 0), np.uint8)
        """[T, bytes of a row's weights], none where slots have none."""
        # Ids are gathered to where they stay; how long the head before them gets, only the gather finds out.
        payload = HEADER_BYTES + sections_size(rows, spans=_SPANS_IN_PLACE, layers=spec.num_moe_layers)
        self._buffer_N = np.empty(payload + rows * spec.bytes_per_token, np.uint8)
        self.bytes_TN: Ids = self._buffer_N[payload:].reshape(rows, spec.bytes_per_token)
        """The rows' ids; whoever made this fills them in before `encode`."""

    @property
    def ids_TLK(self) -> Ids:
        """The same as [T, L, K] in the id dtype, a view."""
        return self.bytes_TN.view(self.spec.id_dtype).reshape(
            self.rows, self.spec.num_moe_layers, self.spec.top_k
        )

    @property
    def nbytes(self) -> int:
        return len(self._buffer_N)

    def encode(self, *, codec: str = "auto") -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The frame's bytes. In place where every row is known and the codec stores them as they are.

        Rows that no pass has written become invalid rows of kind MISSING; whether ids can come from a router, the relay looks.
        Raises RoutingError for rows of an unreadable weight version.
        """
        if UNREADABLE_VERSION in [run[2] for run in self.runs]:
            raise RoutingError(
                "rows were made while the engine's weight version was not a number; count versions up from '0'"
            )
        missing = _MISSING in [run[3] for run in self.runs]
        as_is = written_as_is(codec, num_experts=self.spec.num_experts)
        if as_is and not missing and len(self.runs) <= _SPANS_IN_PLACE:
            return self._encode_in_place()
        data = encode_frame(
            self.spec, expert_ids_TLK=self.ids_TLK, first_row=self.first_row, sample_key=self.sample_key,
            valid_T=columns_of(self.runs)[1] != _MISSING if missing else None,
            provenance=[ProvenanceSpan(*run[:3], RowKind(run[3])) for run in self.runs],
            kept_rows=self.kept_rows, codec=codec,
        )  # fmt: skip
        return np.frombuffer(bytearray(data), np.uint8)  # torch wants it writable

    def _encode_in_place(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        digests_L = self.digests_L
        if digests_L is None:
            digests_L = layer_digests(self.ids_TLK, first_row=self.first_row)
        head = frame_head(
            self.spec, stored_entries(self.rows, row_bytes=self.spec.bytes_per_token), first_row=self.first_row,
            valid_T=None, provenance=self.runs, digests_L=digests_L, sample_key=self.sample_key, kept_rows=self.kept_rows,
        )  # fmt: skip
        payload = len(self._buffer_N) - self.bytes_TN.nbytes
        begin = payload - len(head)
        self._buffer_N.data[begin:payload] = head
        return self._buffer_N[begin:]
