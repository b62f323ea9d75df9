"""An engine's reply as it came: the frame is taken out of the bytes, and only the small rest is parsed as JSON.

A frame is 512 bytes of base64 per token of Qwen3-30B-A3B. Parsing it as a JSON string and decoding it by the standard library
costs 1.8 us per token, the interpreter's lock held; pybase64 (extra `fast`) decodes it where it lies in 0.02, without the lock.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from r3channel.errors import FrameCorrupt, RoutingMissing
from r3channel.wire.frame import sample_key
from r3channel.wire.parcel import REFERENCE_MAGIC, FrameReference

ROUTING_FIELD = "routed_experts"
_KEY = b'"routed_experts"'
_OPENING = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""As many digits as the smallest integer has that does not fit 64 bits."""

try:
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads = None
try:
    from pybase64 import b64decode as _fast_b64decode
except ImportError:
    _fast_b64decode = None


def decode_base64(text: str | bytes | memoryview) -> bytes:
    """Strict: any byte outside the alphabet, and wrong padding, is a `ValueError`."""
    if _fast_b64decode is not None:
        return _fast_b64decode(text, validate=True)
    return base64.b64decode(text, validate=True)


def split_reply(body: bytes) -> tuple[Any, bytes | None]:
    """(what `json.loads(body)` gives, with meta_info.routed_experts emptied; the bytes that it held in base64).

    Where the field's place is not certain, or it is not base64, the whole body is parsed and the bytes are None: nobody's
    spelling of JSON changes the result. Raises ValueError as `json.loads` does, also for one that is nested too deeply for it.

    >>> split_reply(b'{"meta_info": {"id": "a", "routed_experts": "AQI="}}')
    ({'meta_info': {'id': 'a', 'routed_experts': ''}}, b'\\x01\\x02')
    """
    begin = _value_at(body)
    end = body.find(b'"', begin) if begin else -1
    if end < 0:
        return _parsed(body), None
    try:
        data = decode_base64(memoryview(body)[begin:end])
    except ValueError:
        return _parsed(body), None
    # Nobody else can have written it: the field that holds it is the one that was cut out.
    mark = secrets.token_hex(16)
    reply = _parsed(body[:begin] + mark.encode() + body[end:])
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict) or meta.get(ROUTING_FIELD) != mark:
        return _parsed(body), None
    meta[ROUTING_FIELD] = ""
    return reply, data


def frame_bytes_of(reply: Any, *, sample_id: str, engine: str) -> bytes:
    """What is in `reply["meta_info"]["routed_experts"]` (base64, SGLang's in-band place): a frame, or a frame reference for one.

    Raises RoutingMissing, with the engine's own words where its reply is an error, or FrameCorrupt.
    """
    where = f"sample {sample_id} from engine {engine}"
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    text = meta.get(ROUTING_FIELD) if isinstance(meta, Mapping) else None
    if not isinstance(text, str) or not text:
        said = reply.get("error") if isinstance(reply, Mapping) else None
        raise RoutingMissing(
            f"{where}: no meta_info.{ROUTING_FIELD} in the reply, expected a frame. "
            + (f"The engine says: {str(said)[:300]}. " if said else "")
            + "Was return_routed_experts set, and was the server started with --enable-return-routed-experts?",
            samples=[sample_id],
            engines=[engine],
        )
    try:
        return decode_base64(text)
    except ValueError as error:
        raise FrameCorrupt(
            f"{where}: {ROUTING_FIELD} is not base64, expected a frame: {error}",
            samples=[sample_id],
            engines=[engine],
        ) from error


def key_of(reply: Any) -> int | None:
    """The key that a frame for this reply's request carries; None when the reply does not name its request."""
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    request_id = meta.get("id") if isinstance(meta, Mapping) else None
    return sample_key(request_id) if isinstance(request_id, str) else None


def reference_in(data: bytes) -> FrameReference | None:
    """The frame reference, when a reply holds one in place of a frame."""
    return FrameReference.from_bytes(data) if data[:4] == REFERENCE_MAGIC else None


def _parsed(body: bytes) -> Any:
    if _fast_loads is not None and not _has_long_integer(body):
        try:
            return _fast_loads(body)
        except ValueError:  # it refuses NaN and lone surrogates, which json takes
            pass
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply for a reply") from error


def _has_long_integer(body: bytes) -> bool:
    """Whether some digits may be an integer that does not fit 64 bits: orjson reads it as a float, without a word."""
    zeros = body.translate(_AS_ZEROS)
    at = zeros.find(_LONG)
    while at >= 0:
        if zeros[at - 1 : at] != b".":  # a fraction, such as a log-probability's, may be as long
            return True
        at = zeros.find(_LONG, at + len(_LONG))
    return False


def _value_at(body: bytes) -> int:
    """Where the text of the first field of that name begins, behind its quote; 0 where there is none."""
    at = body.find(_KEY)
    if at < 1 or body[at - 1] == ord("\\"):  # the end of a longer name with a quote in it
        return 0
    opening = _OPENING.match(body, at + len(_KEY))
    return opening.end() if opening else 0
