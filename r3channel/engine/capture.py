"""From captured expert ids to the frame of one finished request. Knows tensors and frames, and no engine.

Shape letters: T rows, L MoE layers, A all decoder layers (dense ones included), K top-k; `slots_T` are KV-cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from r3channel.errors import ConfigError, RoutingError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import written_as_is
from r3channel.wire.frame import encode_frame
from r3channel.wire.inplace import Run, StoredFrame, prepare
from r3channel.wire.routing import Ids, RowKind, spans_of
from r3channel.wire.validate import items_of, out_of_range

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
        self._dtype = torch_id_dtype(spec)
        self._full_byte = spec.num_experts == 256
        self._range = slice(first, last + 1)
        self._picked = None
        if last + 1 - first != spec.num_moe_layers:
            self._picked = torch.tensor(spec.moe_layers, device=device)

    def narrow(self, expert_ids_TAK: torch.Tensor) -> torch.Tensor:
        """[T, L, K] in the id dtype, a new tensor on the same device, ordered on the current stream.

        -1 becomes 255 in uint8; `captured_rows` recognises it. Where 255 is an expert, all ids of its layer become 255.
        """
        if self._picked is None:
            ids_TLK = expert_ids_TAK[:, self._range]
        else:
            ids_TLK = expert_ids_TAK.index_select(1, self._picked)
        if self._full_byte:
            ids_TLK = ids_TLK.masked_fill((ids_TLK >> 8).any(-1, keepdim=True), -1)
        return ids_TLK.to(self._dtype)


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


class SlotRows:
    """The rows that the engine holds, by KV slot: ids [slots, L, K] in the id dtype, and what made each.

    Provenance travels with the slot, because a prefix-cache hit returns rows of an older request (SGLang's own version
    spans cover output tokens only). Host memory: the ids and 2 bytes per slot. One thread at a time: the scheduler's.
    """

    def __init__(self, spec: RoutingSpec, ids: torch.Tensor) -> None:
        """`ids` is the host memory to keep ids in, [slots, L, K] in the id dtype."""
        self.spec, self.ids = spec, ids
        prepare(spec)
        self._stamps = torch.zeros((len(ids),), dtype=torch.int16)
        self._makers: list[Maker] = [MISSING_MAKER]
        self._stamp_of: dict[Maker, int] = {MISSING_MAKER: 0}

    def write(
        self, slots_T: torch.Tensor, expert_ids_TLK: torch.Tensor, *, weight_version: int, kind: RowKind
    ) -> None:
        """Rows of one forward pass; host tensors whose copy has completed."""
        self.ids[slots_T] = expert_ids_TLK
        self._stamps[slots_T] = self._stamp((weight_version, int(kind)))

    def forget(self, slots_T: torch.Tensor) -> None:
        """What lies in these slots now was not computed here: the rows that they held are no longer theirs."""
        self._stamps[slots_T] = self._stamp_of[MISSING_MAKER]

    def unfinished(self, slots_T: torch.Tensor, *, first_row: int, sample_key: int) -> UnfinishedFrame:
        """Gather a request's rows, once, into the memory that becomes its frame."""
        unfinished = UnfinishedFrame(
            self.spec,
            stamps_T=self._stamps.index_select(0, slots_T).numpy(),
            makers=self._makers,
            first_row=first_row,
            sample_key=sample_key,
        )
        # 10 times as fast as ids[slots_T] on uint8
        torch.index_select(self.ids, 0, slots_T, out=torch.from_numpy(unfinished.ids_TLK))
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
        """After 16 thousand weight versions: keep the makers of slots. Drafts go on with the list that they were given."""
        used, stamps = torch.unique(self._stamps, return_inverse=True)
        kept = [self._makers[stamp] for stamp in used.tolist()]
        shift = int(kept[:1] != [MISSING_MAKER])
        self._makers = [MISSING_MAKER] * shift + kept
        self._stamp_of = {maker: stamp for stamp, maker in enumerate(self._makers)}
        self._stamps = (stamps + shift).to(torch.int16)


# -- one request ---------------------------------------------------------------------------------------------------------


class UnfinishedFrame:
    """A finished request's rows between the gather and the frame. `encode` may run on another thread than the gather."""

    __slots__ = ("_first_row", "_rows", "_runs", "_stored", "ids_TLK", "sample_key", "spec")

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        stamps_T: Ids,
        makers: Sequence[Maker],
        first_row: int = 0,
        sample_key: int = 0,
    ) -> None:
        self.spec, self.sample_key = spec, sample_key
        self._rows, self._first_row = len(stamps_T), first_row
        self._runs = runs_of_stamps(stamps_T, makers, first_row=first_row)
        self._stored = StoredFrame(spec, rows=self._rows, first_row=first_row, runs=self._runs)
        self.ids_TLK = self._stored.ids_TLK
        """[T, L, K] in the id dtype; whoever made it fills it before `encode`."""

    @property
    def first_row(self) -> int:
        return self._first_row

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return len(self._stored.buffer_N)

    def name(self, sample_key: int) -> None:
        """Tie the rows to their request; before `encode`."""
        self.sample_key = sample_key

    def _complete(self) -> bool:
        """Does every row have ids that can come from a router, and a weight version?"""
        known = all(kind != _MISSING and version >= 0 for _, _, version, kind in self._runs)
        return known and not (self.rows and _looks_wrong(self.ids_TLK, spec=self.spec))

    def encode(self, *, codec: str = "auto") -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The frame's bytes. In place where all rows are there and the codec stores them as they are.

        Rows without usable ids become invalid rows of kind MISSING. Raises RoutingError for rows of an unreadable weight
        version.
        """
        if written_as_is(codec, num_experts=self.spec.num_experts) and self._complete():
            self._stored.finish(sample_key=self.sample_key)
            return self._stored.buffer_N
        data = self._encode_with(codec)
        return np.frombuffer(bytearray(data), np.uint8)  # torch wants it writable

    def _encode_with(self, codec: str) -> bytes:
        lengths = [end - start for start, end, _, _ in self._runs]
        versions_T = np.repeat(np.array([run[2] for run in self._runs], np.int64), lengths)
        kinds_T = np.repeat(np.array([run[3] for run in self._runs], np.uint8), lengths)
        valid_T = captured_rows(self.ids_TLK, spec=self.spec)
        valid_T &= kinds_T != _MISSING
        if (versions_T[valid_T] == UNREADABLE_VERSION).any():
            raise RoutingError(
                "rows were made while the engine's weight version was not a number; count versions up from '0'"
            )
        return encode_frame(
            self.spec,
            expert_ids_TLK=self.ids_TLK,
            first_row=self._first_row,
            valid_T=valid_T,
            provenance=spans_of(
                np.where(valid_T, versions_T, NO_VERSION),
                np.where(valid_T, kinds_T, np.uint8(_MISSING)),
                first_row=self._first_row,
            ),
            sample_key=self.sample_key,
            codec=codec,
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
    """Is an id out of range, or (with top-k above 1) a layer's ids all zero, or all the marker of 256 experts?

    Asked in words of several ids, where a zero word repeats expert 0: 20 us for 1,000 rows of 48 layers x 8, where comparing
    the first two ids of each takes 80.
    """
    if out_of_range(expert_ids_TLK, num_experts=spec.num_experts):
        return True
    if spec.top_k == 1:
        return False
    words = items_of(expert_ids_TLK)
    if words.itemsize == expert_ids_TLK.itemsize:  # top-k is odd
        return bool((expert_ids_TLK[:, :, 0] == expert_ids_TLK[:, :, 1]).any())
    full = spec.num_experts == 256 and int(words.max()) == np.iinfo(words.dtype).max
    return full or int(words.min()) == 0
