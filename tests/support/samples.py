"""Small routings, frames and replies for tests. Ids are distinct within a row, as real ones are."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
WIDE = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=384, top_k=8)


def sparse(layers: int, *, experts: int, top_k: int) -> RoutingSpec:
    """All layers are MoE layers."""
    return RoutingSpec(num_layers=layers, moe_layers=tuple(range(layers)), num_experts=experts, top_k=top_k)


def random_ids(rows: int, *, spec: RoutingSpec = SPEC, seed: int | np.random.Generator = 0) -> Ids:
    """[rows, L, K] in `spec.id_dtype`."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, spec.num_moe_layers, spec.num_experts))
    return scores.argsort(-1)[..., : spec.top_k].astype(spec.id_dtype)


def span(start: int, end: int, version: int = 0, kind: RowKind = RowKind.DECODED) -> ProvenanceSpan:
    return ProvenanceSpan(start=start, end=end, weight_version=version, kind=kind)


def frame_of(
    tokens: int, *, spec: RoutingSpec = SPEC, seed: int = 0, version: int = 0, **changes: Any
) -> bytes:
    """The frame of a sample of `tokens` tokens: half its rows prefilled, half decoded."""
    ids = random_ids(tokens - 1, spec=spec, seed=seed)
    middle = (tokens - 1) // 2
    halves = span(0, middle, version, RowKind.PREFILLED), span(middle, tokens - 1, version)
    spans = [half for half in halves if half.start < half.end]
    return encode_frame(spec, **({"expert_ids_TLK": ids, "provenance": spans} | changes))


def flipped(data: bytes, bit: int) -> bytes:
    """The data with one bit changed; a negative number counts from the end."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reply_of(frame: bytes, *, request_id: str = "r0") -> dict[str, Any]:
    """The part of SGLang's JSON reply that carries routing."""
    return {"meta_info": {"id": request_id, "routed_experts": base64.b64encode(frame).decode()}}


def reply_for(sample_id: str, tokens: int, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    frame = frame_of(tokens, seed=seed, sample_key=sample_key(sample_id), **changes)
    return reply_of(frame, request_id=sample_id)
