"""From captured expert ids to the frame of one finished request. Knows tensors and frames, and no engine.

Shape letters: T rows, L MoE layers, A all decoder layers (dense ones included), K top-k; `slots_T` are KV-cache slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from r3channel.errors import ConfigError, RoutingError
from r3channel.routing import Ids, RowKind, spans_of
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_frame

NO_VERSION = -1
"""Weight version of a slot that was never written; its rows are MISSING."""
UNREADABLE_VERSION = -2
"""Stamped while the engine's version is not a number; a request with such rows gets an error frame."""


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


class SlotProvenance:
    """What made the row in each KV slot: weight version and kind, stamped when ids are written to the host cache.

    SGLang's own version spans cover output tokens only, and a prefix-cache hit returns rows of an older request.
    Host memory, 9 bytes per slot. One thread at a time.
    """

    def __init__(self, slots: int) -> None:
        self.weight_version = torch.full((slots,), NO_VERSION, dtype=torch.int64)
        self.kind = torch.full((slots,), int(RowKind.MISSING), dtype=torch.uint8)

    def stamp(self, slots_T: torch.Tensor, *, weight_version: int, kind: RowKind) -> None:
        self.weight_version[slots_T] = weight_version
        self.kind[slots_T] = int(kind)

    def gather(self, slots_T: torch.Tensor) -> tuple[Ids, Ids]:
        """(weight versions int64 [T], kinds uint8 [T]) of the slots, as fresh arrays."""
        return self.weight_version[slots_T].numpy(), self.kind[slots_T].numpy()


def captured_rows(expert_ids_TLK: Ids, *, spec: RoutingSpec) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[T] bool: False where a layer's ids cannot come from a router: padding (-1) or memory that was never written.

    Looks at range and at the first two slots only (an unwritten layer is all zero, padding all equal). The relay checks
    every id; this only tells rows that the engine does not have from rows that were damaged later.
    """
    bad_T = np.zeros(len(expert_ids_TLK), dtype=bool)
    if not expert_ids_TLK.size:
        return ~bad_T
    if spec.top_k > 1:
        bad_T |= (expert_ids_TLK[:, :, 0] == expert_ids_TLK[:, :, 1]).any(axis=1)
    if int(expert_ids_TLK.max()) >= spec.num_experts or int(expert_ids_TLK.min()) < 0:
        bad_T |= ((expert_ids_TLK >= spec.num_experts) | (expert_ids_TLK < 0)).any(axis=(1, 2))
    return ~bad_T


def build_frame(
    spec: RoutingSpec,
    *,
    expert_ids_TLK: torch.Tensor,
    weight_versions_T: Ids,
    kinds_T: Ids,
    first_row: int = 0,
    sample_key: int = 0,
    codec: str = "auto",
    row_digests: bool = False,
) -> bytes:
    """The frame of one finished request. `expert_ids_TLK` is a host tensor in the id dtype; nothing is kept.

    Rows without usable ids become invalid rows of kind MISSING. Raises RoutingError for rows of an unreadable weight version.
    """
    ids_TLK = expert_ids_TLK.numpy()
    valid_T = captured_rows(ids_TLK, spec=spec) & (kinds_T != RowKind.MISSING)
    if (weight_versions_T[valid_T] == UNREADABLE_VERSION).any():
        raise RoutingError(
            "rows were made while the engine's weight version was not a number; count versions up from '0'"
        )
    return encode_frame(
        spec,
        expert_ids_TLK=ids_TLK,
        first_row=first_row,
        valid_T=valid_T,
        provenance=spans_of(
            np.where(valid_T, weight_versions_T, NO_VERSION),
            np.where(valid_T, kinds_T, np.uint8(RowKind.MISSING)),
            first_row=first_row,
        ),
        sample_key=sample_key,
        codec=codec,
        row_digests=row_digests,
    )
