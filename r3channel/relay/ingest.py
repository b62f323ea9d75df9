"""From one engine reply to one verified frame. Knows SGLang's reply fields; knows nothing about steps or ranks."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3channel import errors
from r3channel.routing import RowKind, SampleRouting
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import Frame, parse_frame, sample_key

ROUTING_FIELD = "routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A frame whose hashes, shape, coverage and ids have all been checked."""

    sample_id: str
    frame: Frame
    data: bytes
    """The frame's bytes."""
    routing: SampleRouting


def frame_bytes_of(reply: Mapping[str, Any], *, sample_id: str, engine: str) -> bytes:
    """The frame in `reply["meta_info"]["routed_experts"]` (base64, SGLang's in-band place)."""
    meta = reply.get("meta_info")
    text = meta.get(ROUTING_FIELD) if isinstance(meta, Mapping) else None
    if not isinstance(text, str) or not text:
        raise errors.RoutingMissing(
            f"sample {sample_id} from engine {engine}: no meta_info.{ROUTING_FIELD} in the reply, expected a frame. Was "
            "return_routed_experts set, and was the server started with --enable-return-routed-experts?"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise errors.PayloadCorrupt(
            f"sample {sample_id} from engine {engine}: {ROUTING_FIELD} is not base64, expected a frame: {error}"
        ) from error


def verify_reply(
    reply: Mapping[str, Any],
    *,
    spec: RoutingSpec,
    sample_id: str,
    tokens: int,
    engine: str,
    invalid_rows: str = "error",
) -> Verified:
    """Verify the frame of a reply for a sample of `tokens` tokens, and that it belongs to this reply's request."""
    data = frame_bytes_of(reply, sample_id=sample_id, engine=engine)
    request_id = reply["meta_info"].get("id")
    expected_key = sample_key(request_id) if isinstance(request_id, str) else None
    return verify_frame(
        data,
        spec=spec,
        sample_id=sample_id,
        tokens=tokens,
        engine=engine,
        expected_key=expected_key,
        invalid_rows=invalid_rows,
    )


def verify_frame(
    data: bytes,
    *,
    spec: RoutingSpec,
    sample_id: str,
    tokens: int,
    engine: str,
    expected_key: int | None = None,
    invalid_rows: str = "error",
) -> Verified:
    """Verify a frame's bytes, its row count, its request and every id. Raises a typed `RoutingError`.

    `invalid_rows`: `error` refuses a sample with rows that hold no routing; other policies leave them to the trainer.
    """
    where = f"sample {sample_id} from engine {engine}"
    frame = parse_frame(data, spec=spec, sample_id=sample_id, engine=engine)
    if expected_key is not None and frame.sample_key != expected_key:
        raise errors.PayloadCorrupt(
            f"{where}: the frame belongs to request key {frame.sample_key:#x}, expected "
            f"the reply's {expected_key:#x}; were replies swapped?"
        )
    if frame.first_row != 0 or frame.rows != tokens - 1:
        raise errors.RowCountMismatch(
            f"{where}: rows {frame.first_row}..{frame.first_row + frame.rows} of layers {spec.moe_layers} for {tokens} tokens; "
            f"expected 0..{tokens - 1}. Was a start offset set, or the text cut after generation?"
        )
    if invalid_rows == "error":
        _check_valid(frame, where=where)
    routing = frame.routing(sample_id=f"{sample_id} from engine {engine}")  # the name is for its errors
    return Verified(sample_id=sample_id, frame=frame, data=data, routing=routing)


def invalid_ranges(frame: Frame) -> tuple[tuple[int, int], ...]:
    """Row ranges [start, end) of a frame that hold no routing, ascending."""
    if frame.valid_T.all():
        return ()
    edges = np.flatnonzero(np.diff(np.concatenate([[True], frame.valid_T, [True]]).astype(np.int8)))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _check_valid(frame: Frame, *, where: str) -> None:
    """Policy `error`: a row without routing is refused by name."""
    missing = [span for span in frame.provenance if span.kind is RowKind.MISSING]
    if not frame.valid_T.all() or missing:
        first = int((~frame.valid_T).argmax()) if not frame.valid_T.all() else missing[0].start
        raise errors.RowsInvalid(
            f"{where}: {int((~frame.valid_T).sum())} of {frame.rows} rows hold no routing, the first is row {first}; expected "
            "all rows valid (policy: error)"
        )
