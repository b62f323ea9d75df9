"""Reads an engine's reply as it came: decodes the frame from its base64 where it lies, and parses only the small rest as JSON.

A frame is 512 bytes of base64 per token of Qwen3-30B-A3B. To parse it as a JSON string and decode it with the standard library
costs 1.8 us per token, with the interpreter's lock held. pybase64 (extra `fast`) decodes it where it lies in 0.02 us, without the
lock.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from r3channel.errors import FrameCorrupt, FrameError, RoutingMissing, UsageError
from r3channel.wire.frame import sample_key
from r3channel.wire.header import HEADER_BYTES, announced_bytes
from r3channel.wire.source import Pieces

ROUTING_FIELD = "routed_experts"
_SLICE_CHARACTERS = 256 << 10
"""Characters decoded at a time, a multiple of 4: they fit a level-2 cache, and were the fastest of 16 kB to 16 MB (measured)."""
_HEAD_CHARACTERS = -(-HEADER_BYTES // 3) * 4
_KEY = b'"routed_experts"'
_OPENING = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
_STREAM = re.compile(rb"\s*(?:data|event|id|retry)?:")
"""The beginning of an event stream; no JSON begins so."""
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""19 digits: the fewest of an integer that does not fit 64 bits."""

try:
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads = None
try:
    from pybase64 import b64decode as _fast_b64decode
except ImportError:
    _fast_b64decode = None


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def decode_base64(text: str | bytes | memoryview) -> bytes:
    """Decode base64 strictly.

    Raises:
        ValueError: A byte is outside the alphabet, or the padding is wrong.
    """
    if _fast_b64decode is not None:
        return _fast_b64decode(text, validate=True)
    return base64.b64decode(text, validate=True)


class Base64Text(Pieces):
    """The bytes of a reply's base64 text, decoded slice by slice.

    No memory of the whole text's size is taken. The constructor, and a read of a bad slice, raise FrameCorrupt.

    >>> source = Base64Text("AQIDBA==")
    >>> source.left, bytes(source.take(3)), bytes(source.take(1))
    (4, b'\\x01\\x02\\x03', b'\\x04')
    """

    def __init__(self, text: str | memoryview, *, where: str = "a reply") -> None:
        self._text, self._at, self._where = text, 0, where
        end = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
        if len(text) % 4:
            raise self._corrupt(f"{len(text)} characters, expected a multiple of 4")
        self.left = len(text) // 4 * 3 - end.count("=")

    def receive(self, out_N: memoryview) -> int:
        text = self._text[self._at : self._at + _SLICE_CHARACTERS]
        self._at += len(text)
        try:
            data = decode_base64(text)
        except ValueError as error:
            raise self._corrupt(error) from error
        if not data or (len(data) != len(text) // 4 * 3 and self._at < len(self._text)):
            raise self._corrupt("padding within the text")
        self._ahead = memoryview(data)
        return 0

    def _corrupt(self, why: object) -> FrameCorrupt:
        return FrameCorrupt(f"{self._where}: {ROUTING_FIELD} is not base64, expected a frame: {why}")


def last_event(body: bytes, *, where: str) -> bytes:
    """Return the data of an event stream's last event with a frame.

    A body that is no stream is returned whole. Without a frame in any event, the result is the last event's data, which may be an
    error.

    Raises:
        UsageError: The events are of several choices.
        ValueError: An event is no JSON.
    """
    if not _STREAM.match(body):
        return body
    lines = [line for line in body.splitlines() if line.startswith(b"data:") and not line.endswith(b"[DONE]")]
    for reply in (parse(line[5:]) for line in lines if b'"index"' in line):
        indices = [each.get("index") for each in (reply, *_choices_of(reply)) if _is_object(each)]
        if any(indices):  # an OpenAI route's stream has one frame, which may be any choice's
            raise _several("events of several choices", where)
    # An event of usage may follow the frame's. An event whose field is no text goes before one without the field, so that the
    # error names the field.
    return max(reversed(lines), key=lambda line: (_value_at(line) > 0, _KEY in line), default=b"")[5:]


def split_reply(body: bytes) -> tuple[Any, memoryview | None]:
    """Parse a reply, and cut out the text of its routing field.

    >>> reply, text = split_reply(b'{"meta_info": {"id": "a", "routed_experts": "AQI="}}')
    >>> reply, bytes(text)
    ({'meta_info': {'id': 'a', 'routed_experts': ''}}, b'AQI=')

    Returns:
        What `json.loads(body)` gives, with the routing field emptied, and the characters that the field held. Where the field's
        place is not certain the whole body is parsed, and the characters are None.

    Raises:
        ValueError: As of `json.loads`, also for a body that is nested too deeply for it.
    """
    return _split(body, 1, lambda reply: [reply])[0]


def split_replies(body: bytes) -> list[tuple[Any, memoryview | None]]:
    """Split the body of a reply of several samples in one pass.

    >>> [reply["meta_info"]["id"] for reply, _ in split_replies(b'[{"meta_info": {"id": "a"}}, {"meta_info": {"id": "b"}}]')]
    ['a', 'b']

    Returns:
        For each sample what `split_reply` gives.

    Raises:
        ValueError: As of `json.loads`.
    """
    return _split(body, len(body), samples_of)


def samples_of(replies: Any) -> list[Any]:
    """Return one reply for each sample of a parsed body.

    A list has one reply for each sample. An OpenAI reply becomes one reply for each of its choices. Fields that a reply of
    several choices has once (`sglext`, `meta_info`) are left out: nothing says whose rows they hold (`sglext` has the first
    choice's).
    """
    if _is_list(replies):
        return replies
    if not (choices := _choices_of(replies)):
        return [replies]
    shared = ("sglext", "meta_info") if len(choices) > 1 else ()
    rest = {key: value for key, value in replies.items() if key not in shared}
    return [{**rest, "choices": [choice]} for choice in choices]


def _split(
    body: bytes, most: int, samples_of: Callable[[Any], list[Any]]
) -> list[tuple[Any, memoryview | None]]:
    texts, parts, at = dict[str, memoryview](), list[bytes](), 0
    with suppress(ValueError):
        while len(texts) < most and (begin := _value_at(body, at)):
            text, end = _text_at(body, begin)
            # The mark is random, so the body cannot contain it: the field that holds it is the one that was cut out.
            mark = secrets.token_hex(16)
            texts[mark] = text
            parts += [body[at:begin], mark.encode()]
            at = end
        split = list[tuple[Any, memoryview | None]]()
        for reply in samples_of(parse(b"".join([*parts, body[at:]]))):
            holder = _holder_of(reply)
            text = texts.pop(str(holder.get(ROUTING_FIELD)), None)
            if text is not None:
                holder[ROUTING_FIELD] = ""
            split.append((reply, text))
        if not texts:
            return split
    return [(reply, None) for reply in samples_of(parse(body))]


def _holder_of(reply: object) -> Any:
    """Return the object that holds a reply's routing field.

    Where no object holds it the result is `meta_info` or empty. The places were read in SGLang 0.5.15.post1 and 0.5.23.
    `/generate` has the field in `meta_info`. OpenAI's routes have it in `sglext`, and with `return_meta_info` in the choice's
    `meta_info` (the older release in both). A reply of several choices has no holder, because `sglext` has the first choice's
    frame only.
    """
    if not _is_object(reply) or len(choices := _choices_of(reply)) > 1:
        return {}
    metas = [each.get("meta_info") for each in (reply, *choices)] + [reply.get("sglext")]
    holders = [holder for holder in metas if _is_object(holder)]
    return next((holder for holder in holders if ROUTING_FIELD in holder), holders[0] if holders else {})


def _choices_of(reply: object) -> list[Any]:
    choices = reply.get("choices") if _is_object(reply) else None
    return [choice for choice in choices if _is_object(choice)] if _is_list(choices) else []


def _several(what: str, where: str) -> UsageError:
    return UsageError(
        f"{where}: the reply holds {what}, expected one sample. Was n above 1, or were several "
        "prompts sent? `add_bodies` takes such a body; or `add` each item of the parsed list by itself"
    )


def _text_at(body: bytes, begin: int) -> tuple[memoryview, int]:
    """Return the field's characters, and where the quote behind them is.

    A frame says itself where it ends, so most bytes need no look. Raises ValueError where no text ends.
    """
    with suppress(ValueError):
        size = announced_bytes(decode_base64(memoryview(body)[begin : begin + _HEAD_CHARACTERS]))
        end = begin + -(-size // 3) * 4
        if size and body[end : end + 1] == b'"':
            return memoryview(body)[begin:end], end
    end = body.index(b'"', begin)
    if body.find(b"\\", begin, end) < 0:
        return memoryview(body)[begin:end], end
    return memoryview(parse(body[begin - 1 : end + 1]).encode()), end  # the text has escaped characters


def routing_text(reply: object, *, where: str) -> str:
    """Return the text of a reply's routing field.

    Args:
        reply: The parsed reply.
        where: Whose reply it is, for errors.

    Raises:
        RoutingMissing: There is no such field. If the reply is an error, the message has the engine's own words.
        FrameError: The field is at another place.
        UsageError: The reply is of several samples.
    """
    if _is_list(reply) or len(_choices_of(reply)) > 1:
        raise _several("a list of replies or choices", where)
    text = _holder_of(reply).get(ROUTING_FIELD)
    if isinstance(text, str) and text:
        return text
    if _is_object(reply) and (place := _place_of(reply)):
        raise FrameError(
            f"{where}: {ROUTING_FIELD} is at {place}, expected text at meta_info, sglext or choices[0].meta_info. Is it another "
            "release of SGLang, or does something between engine and relay change replies?"
        )
    said = reply.get("error") if _is_object(reply) else None
    raise RoutingMissing(
        f"{where}: no {ROUTING_FIELD} in the reply, expected a frame. "
        + (f"The engine says: {str(said)[:300]}. " if said else "")
        + "Was return_routed_experts set, and was the server started with --enable-return-routed-experts?"
    )


def _place_of(reply: Any) -> str:
    """Return the path of a filled routing field, or an empty text."""
    todo: list[tuple[str, Any]] = [("", reply)]
    for path, value in todo:  # the list grows; a recursive call for each level could nest too deeply
        if _is_object(value) and value.get(ROUTING_FIELD):
            return f"{path}.{ROUTING_FIELD}".lstrip(".")
        inner = value.items() if _is_object(value) else enumerate(value)
        todo += [(f"{path}.{key}", each) for key, each in inner if isinstance(each, dict | list)]
    return ""


def frame_bytes_of(reply: object, *, where: str) -> bytes:
    """Return the bytes of a reply's routing field.

    The bytes are a frame, a frame reference, or an engine's hello and a frame.

    Raises:
        RoutingMissing: As of `routing_text`.
        FrameCorrupt: The field is not base64.
    """
    source = Base64Text(routing_text(reply, where=where), where=where)
    return bytes(source.take(source.left))


def key_of(reply: object) -> int | None:
    """Return the key that a frame for this reply's request carries.

    The result is None when the reply does not name its request.
    """
    request_id = _holder_of(reply).get("id")
    if request_id is None and _is_object(reply) and "choices" in reply:
        request_id = reply.get("id")
    return sample_key(request_id) if isinstance(request_id, str) else None


def read_body(read: Callable[[bytes], Any], body: bytes, *, where: str) -> Any:
    """Return what `read` makes of a body.

    Raises:
        RoutingMissing: `read` raised a ValueError.
    """
    try:
        return read(body)
    except ValueError as error:
        raise RoutingMissing(
            f"{where}: {len(body)} bytes beginning with {body[:40]!r} are no JSON, expected a reply: {error}"
        ) from error


def parse(body: bytes) -> Any:
    """Parse JSON as `json.loads` does, with orjson where it may.

    Raises:
        ValueError: As of `json.loads`, also for a body that is nested too deeply.
    """
    if _fast_loads is not None and not _has_long_integer(body):
        try:
            return _fast_loads(body)
        except ValueError:  # orjson refuses NaN and lone surrogates, which json takes
            pass
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply for a reply") from error


def _has_long_integer(body: bytes) -> bool:
    # orjson reads an integer beyond 64 bits as a float, without an error
    zeros = body.translate(_AS_ZEROS)
    at = zeros.find(_LONG)
    while at >= 0:
        if zeros[at - 1 : at] != b".":  # a fraction, such as a log-probability's, may be as long
            return True
        at = zeros.find(_LONG, at + len(_LONG))
    return False


def _value_at(body: bytes, begin: int = 0) -> int:
    """Return the place behind the next routing field's opening quote, or 0."""
    at = body.find(_KEY, begin)
    if at < 1 or body[at - 1] == ord("\\"):  # the end of a longer name with a quote in it
        return 0
    opening = _OPENING.match(body, at + len(_KEY))
    return opening.end() if opening else 0
