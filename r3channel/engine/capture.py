"""From captured expert ids to the frame of one finished request. Knows tensors and frames, and no engine.

Shape letters: T rows, L MoE layers, A all decoder layers (dense ones included), K top-k; `slots_T` are KV-cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from r3channel.errors import ConfigError, RoutingError
from r3channel.routing import Ids, ProvenanceSpan, RowKind
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_frame
from r3channel.wire.inplace import StoredFrame
from r3channel.wire.received import PrefixRef

NO_VERSION = -1
"""Weight version of a slot that was never written; its rows are MISSING."""
UNREADABLE_VERSION = -2
"""Stamped while the engine's version is not a number; a request with such rows gets an error frame."""
_LOOKED_AT = 16
"""Rows of a request that are searched for a layer that nobody wrote. Such a layer is missing in every row that its model
makes, and the relay checks every id; this only gives the better reason."""


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
        self._dtype = torch_id_dtype(spec)
        self._range = slice(first, last + 1)
        self._picked = None
        if last + 1 - first != spec.num_moe_layers:
            self._picked = torch.tensor(spec.moe_layers, device=device)

    def narrow(self, expert_ids_TAK: torch.Tensor) -> torch.Tensor:
        """[T, L, K] in the id dtype, a new tensor on the same device, ordered on the current stream.

        -1 becomes 255 in uint8; `captured_rows` recognises it.
        """
        if self._picked is None:
            return expert_ids_TAK[:, self._range].to(self._dtype)
        return expert_ids_TAK.index_select(1, self._picked).to(self._dtype)


# -- by KV slot ----------------------------------------------------------------------------------------------------------


def stamp_of(*, weight_version: int, kind: RowKind) -> int:
    """Weight version and kind as one int64, so that one gather brings both."""
    return weight_version * 4 + int(kind)


MISSING_STAMP = stamp_of(weight_version=NO_VERSION, kind=RowKind.MISSING)


def spans_of_stamps(stamps_T: Ids, *, first_row: int) -> tuple[ProvenanceSpan, ...]:
    """Run-length form of per-row stamps."""
    if not len(stamps_T):
        return ()
    edges = [0, *(np.flatnonzero(stamps_T[1:] != stamps_T[:-1]) + 1).tolist(), len(stamps_T)]
    return tuple(
        ProvenanceSpan(
            start=first_row + start,
            end=first_row + end,
            weight_version=int(stamps_T[start]) >> 2,
            kind=RowKind(int(stamps_T[start]) & 3),
        )
        for start, end in pairwise(edges)
    )


class SlotRows:
    """The rows that the engine holds, by KV slot: ids [slots, L, K] in the id dtype, and what made each.

    Provenance travels with the slot, because a prefix-cache hit returns rows of an older request (SGLang's own version
    spans cover output tokens only). Host memory: the ids and 8 bytes per slot. One thread at a time: the scheduler's.
    """

    def __init__(self, spec: RoutingSpec, ids: torch.Tensor) -> None:
        """`ids` is the host memory to keep ids in, [slots, L, K] in the id dtype, pinned where there is a GPU."""
        self.spec, self.ids = spec, ids
        self.stamps = torch.full((len(ids),), MISSING_STAMP, dtype=torch.int64)

    def write(
        self, slots_T: torch.Tensor, expert_ids_TLK: torch.Tensor, *, weight_version: int, kind: RowKind
    ) -> None:
        """Rows of one forward pass; host tensors whose copy has completed."""
        self.ids[slots_T] = expert_ids_TLK
        self.stamps[slots_T] = stamp_of(weight_version=weight_version, kind=kind)

    def draft(
        self, slots_T: torch.Tensor, *, first_row: int, sample_key: int, row_digests: bool = False
    ) -> FrameDraft:
        """Gather a request's rows, once, into the memory that becomes its frame."""
        stamps_T = self.stamps.index_select(0, slots_T).numpy()
        draft = FrameDraft(
            self.spec, stamps_T=stamps_T, first_row=first_row, sample_key=sample_key, row_digests=row_digests
        )
        # 10 times as fast as ids[slots_T] on uint8
        torch.index_select(self.ids, 0, slots_T, out=torch.from_numpy(draft.ids_TLK))
        return draft


# -- one request ---------------------------------------------------------------------------------------------------------


class FrameDraft:
    """A finished request's rows between the gather and the frame. `encode` may run on another thread than the gather."""

    __slots__ = (
        "_first_row",
        "_row_digests",
        "_stamps_T",
        "_stored",
        "ids_TLK",
        "prompt",
        "sample_key",
        "spec",
    )

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        stamps_T: Ids,
        first_row: int = 0,
        sample_key: int = 0,
        row_digests: bool = False,
    ) -> None:
        self.spec, self.sample_key = spec, sample_key
        self._stamps_T, self._first_row, self._row_digests = stamps_T, first_row, row_digests
        self._stored = StoredFrame(
            spec,
            rows=len(stamps_T),
            first_row=first_row,
            provenance=spans_of_stamps(stamps_T, first_row=first_row),
            sample_key=sample_key,
            row_digests=row_digests,
        )
        self.ids_TLK = self._stored.ids_TLK
        """[T, L, K] in the id dtype; whoever made the draft fills it before `encode`."""
        self.prompt: Sequence[int] = ()
        """The prompt's token ids where they are known: they find samples that may share rows. Not copied."""

    @property
    def first_row(self) -> int:
        return self._first_row

    @property
    def rows(self) -> int:
        return len(self._stamps_T)

    @property
    def nbytes(self) -> int:
        return len(self._stored.buffer_N)

    def name(self, sample_key: int) -> None:
        """Tie the rows to their request; before `encode`."""
        self.sample_key = self._stored.sample_key = sample_key

    @property
    def shared_rows(self) -> int:
        """Leading rows that samples of one prompt may share: all but the prompt's last, which each computes itself."""
        return min(len(self.prompt) - 1, self.rows) if self.prompt and not self._first_row else 0

    @property
    def weight_version(self) -> int:
        """Of the first row."""
        return int(self._stamps_T[0]) >> 2 if self.rows else NO_VERSION

    def complete(self) -> bool:
        """Does every row have ids that can come from a router, and a weight version?"""
        spans = self._stored.provenance
        known = all(span.kind is not RowKind.MISSING and span.weight_version >= 0 for span in spans)
        return known and not (self.rows and _looks_wrong(self.ids_TLK, spec=self.spec))

    def encode(
        self, *, codec: str = "auto", prefix: PrefixRef | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The frame's bytes. In place where all rows are there and the codec stores them as they are.

        Rows without usable ids become invalid rows of kind MISSING. Raises RoutingError for rows of an unreadable weight
        version.
        """
        # On real ids lz4 gains nothing where they fill their bytes; on missing rows and above 256 experts `auto` decides.
        as_they_are = codec == "stored" or (codec == "auto" and self.spec.num_experts <= 256)
        if as_they_are and prefix is None and self.complete():
            self._stored.finish()
            return self._stored.buffer_N
        data = self._encode_with(codec=codec, prefix=prefix)
        return np.frombuffer(bytearray(data), np.uint8)  # torch wants it writable

    def _encode_with(self, *, codec: str, prefix: PrefixRef | None) -> bytes:
        valid_T = captured_rows(self.ids_TLK, spec=self.spec)
        valid_T &= (self._stamps_T & 3) != RowKind.MISSING
        if ((self._stamps_T >> 2)[valid_T] == UNREADABLE_VERSION).any():
            raise RoutingError(
                "rows were made while the engine's weight version was not a number; count versions up from '0'"
            )
        return encode_frame(
            self.spec,
            expert_ids_TLK=self.ids_TLK,
            first_row=self._first_row,
            valid_T=valid_T,
            provenance=spans_of_stamps(
                np.where(valid_T, self._stamps_T, MISSING_STAMP), first_row=self._first_row
            ),
            sample_key=self.sample_key,
            codec=codec,
            row_digests=self._row_digests,
            prefix=prefix,
        )


def captured_rows(expert_ids_TLK: Ids, *, spec: RoutingSpec) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[T] bool: False where a layer's ids cannot come from a router: padding (-1) or memory that was never written.

    The relay checks every id; this tells rows that the engine does not have from rows that were damaged later. One pass
    over the ids when all is well.
    """
    rows = len(expert_ids_TLK)
    if not expert_ids_TLK.size or not _looks_wrong(expert_ids_TLK, spec=spec):
        return np.ones(rows, dtype=bool)
    bad_T = np.zeros(rows, dtype=bool)
    bad_T |= ((expert_ids_TLK >= spec.num_experts) | (expert_ids_TLK < 0)).any(axis=(1, 2))
    if spec.top_k > 1:  # unwritten memory is all zero, padding all equal
        bad_T |= (expert_ids_TLK[:, :, 0] == expert_ids_TLK[:, :, 1]).any(axis=1)
    return ~bad_T


def _looks_wrong(expert_ids_TLK: Ids, *, spec: RoutingSpec) -> bool:
    largest = int(expert_ids_TLK.max())
    if largest >= spec.num_experts or (spec.id_dtype != np.uint8 and int(expert_ids_TLK.min()) < 0):
        return True
    if spec.top_k == 1:
        return False
    if spec.num_experts == 256 and largest == 255:  # -1 and expert 255 are one byte: only its neighbours tell
        return bool((expert_ids_TLK[:, :, 0] == expert_ids_TLK[:, :, 1]).any())
    some_TLK = expert_ids_TLK[:: max(1, len(expert_ids_TLK) // _LOOKED_AT)]
    return bool((some_TLK[:, :, 0] == some_TLK[:, :, 1]).any())
