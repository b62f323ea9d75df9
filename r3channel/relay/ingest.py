"""From one engine reply to one verified frame or receipt. Knows SGLang's reply fields; knows nothing about steps or ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3channel import errors
from r3channel.relay.reply import ROUTING_FIELD, decode_base64
from r3channel.relay.splice import check_adjoins, frame_of
from r3channel.routing import Ids, RowKind, SampleRouting
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import Frame, parse_frame, sample_key
from r3channel.wire.prefix import resolve
from r3channel.wire.receipt import RECEIPT_MAGIC, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A frame whose hashes, shape, coverage and ids have all been checked."""

    sample_id: str
    frame: Frame
    data: bytes | memoryview
    """The frame's bytes."""
    routing: SampleRouting


def frame_bytes_of(reply: Any, *, sample_id: str, engine: str) -> bytes:
    """What is in `reply["meta_info"]["routed_experts"]` (base64, SGLang's in-band place): a frame, or a receipt for one."""
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    text = meta.get(ROUTING_FIELD) if isinstance(meta, Mapping) else None
    if not isinstance(text, str) or not text:
        raise errors.RoutingMissing(
            f"sample {sample_id} from engine {engine}: no meta_info.{ROUTING_FIELD} in the reply, expected a frame. Was "
            "return_routed_experts set, and was the server started with --enable-return-routed-experts?"
        )
    try:
        return decode_base64(text)
    except ValueError as error:
        raise errors.PayloadCorrupt(
            f"sample {sample_id} from engine {engine}: {ROUTING_FIELD} is not base64, expected a frame: {error}"
        ) from error


def key_of(reply: Mapping[str, Any]) -> int | None:
    """The key that a frame for this reply's request carries; None when the reply does not name its request."""
    request_id = reply["meta_info"].get("id")
    return sample_key(request_id) if isinstance(request_id, str) else None


def receipt_in(data: bytes) -> Receipt | None:
    """The receipt, when a reply holds one in place of a frame."""
    return Receipt.from_bytes(data) if data[:4] == RECEIPT_MAGIC else None


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
    return verify_frame(
        data,
        spec=spec,
        sample_id=sample_id,
        tokens=tokens,
        engine=engine,
        expected_key=key_of(reply),
        invalid_rows=invalid_rows,
    )


def verify_frame(
    data: bytes | memoryview,
    *,
    spec: RoutingSpec,
    sample_id: str,
    tokens: int,
    engine: str,
    expected_key: int | None = None,
    invalid_rows: str = "error",
    held_rows: int | None = 0,
) -> Verified:
    """Verify a frame's bytes, its rows, its request and every id. Raises a typed `RoutingError`.

    `invalid_rows`: `error` refuses a sample with rows that hold no routing; other policies leave them to the trainer.
    `held_rows` rows of the sample are there already (earlier turns) and the frame must bring the others; None when that
    is not known yet.
    """
    where = f"sample {sample_id} from engine {engine}"
    frame = parse_frame(data, spec=spec, sample_id=sample_id, engine=engine)
    check_fit(
        first_row=frame.first_row,
        rows=frame.rows,
        key=frame.sample_key,
        tokens=tokens,
        expected_key=expected_key,
        held_rows=frame.first_row if held_rows is None else held_rows,
        where=f"{where}, layers {spec.moe_layers}",
    )
    return _verified(frame, data, sample_id=sample_id, where=where, invalid_rows=invalid_rows)


def verify_arrival(
    data: memoryview,
    *,
    spec: RoutingSpec,
    engine: str,
    serial: int,
    invalid_rows: str,
    lookup: Callable[[bytes], Ids | None],
) -> tuple[Frame, bytes | memoryview]:
    """Verify all that can be said about a frame before its reply is known: bytes, spec, validity, every id.

    Returns it with its bytes. Rows that it shares with others are put in place (`lookup` by digest), so that it can be kept
    without them.
    """
    name = f"of frame {serial}"
    where = f"sample {name} from engine {engine}"
    frame = parse_frame(data, spec=spec, sample_id=name, engine=engine)
    if frame.prefix is None:
        _verified(frame, data, sample_id=name, where=where, invalid_rows=invalid_rows)
        return frame, data
    routing = resolve(frame, lookup).routing(sample_id=where.removeprefix("sample "))
    whole = frame_of(routing, sample_key=frame.sample_key, row_digests=frame.digests_L is not None)
    again = parse_frame(whole, spec=spec, sample_id=name, engine=engine)
    if frame.digests_L is not None and not np.array_equal(frame.digests_L, again.digests_L):  # type: ignore[arg-type]
        raise errors.PayloadCorrupt(
            f"{where}: the shared rows are not those of the engine; its digests differ, expected the same"
        )
    if invalid_rows == "error":
        _check_valid(again, where=where)
    return again, whole


def _verified(
    frame: Frame, data: bytes | memoryview, *, sample_id: str, where: str, invalid_rows: str
) -> Verified:
    if invalid_rows == "error":
        _check_valid(frame, where=where)
    routing = frame.routing(sample_id=where.removeprefix("sample "))  # the name is for its errors
    return Verified(sample_id=sample_id, frame=frame, data=data, routing=routing)


def check_fit(
    *,
    first_row: int,
    rows: int,
    key: int,
    tokens: int,
    expected_key: int | None,
    held_rows: int,
    where: str,
) -> None:
    """Do rows [first_row, first_row + rows) of request `key` complete a sample of `tokens` tokens?"""
    if expected_key is not None and key != expected_key:
        raise errors.PayloadCorrupt(
            f"{where}: the frame belongs to request key {key:#x}, expected the reply's {expected_key:#x}; were replies "
            "swapped?"
        )
    if held_rows:
        check_adjoins(held_rows=held_rows, first_row=first_row, where=where)
    if (not held_rows and first_row != 0) or first_row + rows != tokens - 1:
        raise errors.RowCountMismatch(
            f"{where}: rows {first_row}..{first_row + rows} for {tokens} tokens; expected {held_rows}..{tokens - 1}. Was a "
            "start offset set without append, or the text cut after generation?"
        )


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
