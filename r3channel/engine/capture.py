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
from r3channel.wire.codec import written_as_is
from r3channel.wire.frame import Run, encode_frame
from r3channel.wire.inplace import StoredFrame, prepare
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, spans_of

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


class LayerSelection:
    """Takes the MoE layers out of [T, A, K] and narrows them, in as few kernels as the layers allow. Never synchronises."""

    def __init__(self, spec: RoutingSpec, *, device: str | torch.device) -> None:
        first, last = spec.moe_layers[0], spec.moe_layers[-1]
        self._full_byte = spec.num_experts == 256
        self._range = slice(first, last + 1)
        self._picked = None
        if last + 1 - first != spec.num_moe_layers:
            self._picked = torch.tensor(spec.moe_layers, device=device)

    def narrow(self, expert_ids_TAK: torch.Tensor, *, out: torch.Tensor) -> None:
        """Into [T, L, K] in the id dtype, on the same device, in the order of the current stream.

        -1 becomes 255 in uint8, which no relay takes for an expert; where 255 is one, all ids of its layer become 255, which none
        takes for a choice.
        """
        if self._picked is None:
            ids_TLK = expert_ids_TAK[:, self._range]
        else:
            ids_TLK = expert_ids_TAK.index_select(1, self._picked)
        if self._full_byte:
            ids_TLK = ids_TLK.masked_fill((ids_TLK >> 8).any(-1, keepdim=True), -1)
        out.copy_(ids_TLK)


# -- by KV slot ----------------------------------------------------------------------------------------------------------


Maker = tuple[int, int]
"""What made a row: (weight version, kind)."""
MISSING_MAKER: Maker = (NO_VERSION, _MISSING)
MAX_MAKERS = 1 << 15
"""Stamps are int16."""


def runs_of_stamps(stamps_T: Ids, makers: Sequence[Maker], *, first_row: int) -> list[Run]:
    """Run-length form of per-row stamps (indices into `makers`), as plain numbers."""
    if not len(stamps_T):
        return []
    starts = [0, *(np.flatnonzero(stamps_T[1:] != stamps_T[:-1]) + 1).tolist()]
    stamps = stamps_T[starts].tolist()
    ends = [*starts[1:], len(stamps_T)]
    return [
        (first_row + start, first_row + end, *makers[stamp])
        for start, end, stamp in zip(starts, ends, stamps, strict=True)
    ]


class KeptRows(NamedTuple):
    """Rows of a request that are held beside its slots: positions `first_row`, `first_row` + 1, ... and what made them."""

    first_row: int
    ids_TN: Ids
    """[T, bytes of a row]."""
    runs: list[Run]

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
    """The rows that the engine holds, by KV slot: ids [slots, L, K] in the id dtype, and what made each.

    Provenance travels with the slot, because a prefix-cache hit returns rows of an older request (SGLang's own version
    spans cover output tokens only). Host memory: the ids and 2 bytes per slot. One thread at a time: the scheduler's.
    """

    def __init__(self, spec: RoutingSpec, *, slots: int) -> None:
        self.spec = spec
        prepare(spec)
        # By rows of bytes: numpy moves one with a memcpy, a sixth of what torch's index_put takes for int32 ids.
        self._ids_SN = np.zeros((slots, spec.bytes_per_token), np.uint8)
        self._stamps_S = np.zeros(slots, np.int16)
        self._makers: list[Maker] = [MISSING_MAKER]
        self._stamp_of: dict[Maker, int] = {MISSING_MAKER: 0}

    @property
    def nbytes(self) -> int:
        return self._ids_SN.nbytes + self._stamps_S.nbytes

    def write(self, slots_T: Ids, expert_ids_TLK: Ids, *, weight_version: int, kind: RowKind) -> None:
        """Rows of one forward pass, in the id dtype."""
        self._put(slots_T, _row_bytes(expert_ids_TLK), (weight_version, int(kind)))

    def put_back(self, slots_T: Ids, kept: KeptRows) -> None:
        """Rows that were kept, into the slots of the same positions; where none was known, the slots' own stay."""
        for at, maker, ids_TN in kept.known():
            self._put(slots_T[at.start - kept.first_row : at.stop - kept.first_row], ids_TN, maker)

    def _put(self, slots_T: Ids, ids_TN: Ids, maker: Maker) -> None:
        self._ids_SN[slots_T] = ids_TN
        self._stamps_S[slots_T] = self._stamp(maker)

    def forget(self, slots_T: Ids) -> None:
        """What lies in these slots now was not computed here: the rows that they held are no longer theirs."""
        self._stamps_S[slots_T] = self._stamp_of[MISSING_MAKER]

    def keep(self, slots_T: Ids, *, first_row: int) -> KeptRows:
        """A copy of a request's rows."""
        runs = runs_of_stamps(self._stamps_S[slots_T], self._makers, first_row=first_row)
        return KeptRows(first_row, self._ids_SN[slots_T], runs)

    def unfinished(
        self, slots_T: Ids, *, first_row: int, sample_key: int, kept: Sequence[KeptRows] = ()
    ) -> UnfinishedFrame:
        """Gather a request's rows, once, into the memory that becomes its frame; those of `kept` win over the slots'."""
        runs = runs_of_stamps(self._stamps_S.take(slots_T), self._makers, first_row=first_row)
        parts = [part for each in kept if (part := each.of(first_row, first_row + len(slots_T)))]
        known = [run for part in parts for run in part.known()]
        unfinished = UnfinishedFrame(
            self.spec,
            rows=len(slots_T),
            runs=_overlaid(runs, known) if known else runs,
            first_row=first_row,
            sample_key=sample_key,
            kept_rows=sum(len(ids_TN) for _, _, ids_TN in known),
        )
        frame_TN = _row_bytes(unfinished.ids_TLK)
        self._ids_SN.take(slots_T, axis=0, out=frame_TN, mode="clip")  # without a mode it makes a copy first
        for at, _, ids_TN in known:
            frame_TN[at.start - first_row : at.stop - first_row] = ids_TN
        return unfinished

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


def _row_bytes(ids_TLK: Ids) -> Ids:
    """[T, bytes of a row], a view."""
    rows, layers, top_k = ids_TLK.shape
    return ids_TLK.reshape(rows, layers * top_k).view(np.uint8)


def _overlaid(runs: Sequence[Run], known: Sequence[tuple[slice, Maker, Ids]]) -> list[Run]:
    """The runs of a request's rows where those of `known` win."""
    first_row = runs[0][0]
    versions_T, kinds_T = _columns(runs)
    for at, (version, kind), _ in known:
        rows = slice(at.start - first_row, at.stop - first_row)
        versions_T[rows], kinds_T[rows] = version, kind
    return [(*span[:3], int(span.kind)) for span in spans_of(versions_T, kinds_T, first_row=first_row)]


def _columns(runs: Sequence[Run]) -> tuple[Ids, Ids]:
    """(weight version, kind) of each row."""
    lengths = [end - start for start, end, _, _ in runs]
    versions_T = np.repeat(np.array([run[2] for run in runs], np.int64), lengths)
    return versions_T, np.repeat(np.array([run[3] for run in runs], np.uint8), lengths)


# -- one request ---------------------------------------------------------------------------------------------------------


class UnfinishedFrame:
    """A finished request's rows between the gather and the frame. `encode` may run on another thread than the gather."""

    __slots__ = ("_kept_rows", "_runs", "_stored", "first_row", "ids_TLK", "rows", "sample_key", "spec")

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        rows: int,
        runs: Sequence[Run],
        first_row: int = 0,
        sample_key: int = 0,
        kept_rows: int = 0,
    ) -> None:
        """`runs` tile [first_row, first_row + rows); `kept_rows`: how many of the rows a retraction did not lose."""
        self.spec, self.rows, self.first_row, self.sample_key = spec, rows, first_row, sample_key
        self._runs, self._kept_rows = runs, kept_rows
        self._stored = StoredFrame(spec, rows=rows, first_row=first_row, runs=runs, kept_rows=kept_rows)
        self.ids_TLK = self._stored.ids_TLK
        """[T, L, K] in the id dtype; whoever made it fills it before `encode`."""

    @property
    def nbytes(self) -> int:
        return len(self._stored.buffer_N)

    def encode(self, *, codec: str = "auto") -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The frame's bytes. In place where every row is known and the codec stores them as they are.

        Rows that no pass has written become invalid rows of kind MISSING; whether ids can come from a router, the relay looks.
        Raises RoutingError for rows of an unreadable weight version.
        """
        if any(run[2] == UNREADABLE_VERSION for run in self._runs):
            raise RoutingError(
                "rows were made while the engine's weight version was not a number; count versions up from '0'"
            )
        missing = any(run[3] == _MISSING for run in self._runs)
        if not missing and written_as_is(codec, num_experts=self.spec.num_experts):
            self._stored.finish(sample_key=self.sample_key)
            return self._stored.buffer_N
        data = encode_frame(
            self.spec,
            expert_ids_TLK=self.ids_TLK,
            first_row=self.first_row,
            valid_T=_columns(self._runs)[1] != _MISSING if missing else None,
            provenance=[ProvenanceSpan(*run[:3], RowKind(run[3])) for run in self._runs],
            sample_key=self.sample_key,
            kept_rows=self._kept_rows,
            codec=codec,
        )
        return np.frombuffer(bytearray(data), np.uint8)  # torch wants it writable
