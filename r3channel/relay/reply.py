"""An engine's reply as it came: the frame is read out of its base64 where it lies, and only the small rest is parsed as JSON.

A frame is 512 bytes of base64 per token of Qwen3-30B-A3B. Parsing it as a JSON string and decoding it by the standard library
costs 1.8 us per token, the interpreter's lock held; pybase64 (extra `fast`) decodes it where it lies in 0.02, without the lock.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from r3channel.errors import FrameCorrupt, FrameError, RoutingMissing, UsageError
from r3channel.wire.frame import sample_key
from r3channel.wire.header import HEADER_BYTES, announced_bytes
from r3channel.wire.source import Source

ROUTING_FIELD = "routed_experts"
_SLICE_CHARACTERS = 256 << 10
"""Decoded at a time: within a level-2 cache, and the fastest of 16 kB to 16 MB (measured). A multiple of 4."""
_HEAD_CHARACTERS = -(-HEADER_BYTES // 3) * 4
_KEY = b'"routed_experts"'
_OPENING = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
_STREAM = re.compile(rb"\s*(?:data|event|id|retry)?:")
"""How an event stream begins, and no JSON does."""
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


class NotBase64(ValueError):
    """What was read in base64 is none."""


class Base64Text(Source):
    """The bytes that a text in base64 stands for, decoded slice by slice: no memory of the whole one's size is taken.

    Raises NotBase64, as `decode_base64` a ValueError; when it is built, or where a slice is none.

    >>> source = Base64Text("AQIDBA==")
    >>> source.left, bytes(source.take(3)), bytes(source.take(1))
    (4, b'\\x01\\x02\\x03', b'\\x04')
    """

    def __init__(self, text: str | memoryview) -> None:
        self._text, self._at, self._ahead = text, 0, memoryview(b"")
        end = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
        if len(text) % 4:
            raise NotBase64(f"{len(text)} characters, expected a multiple of 4")
        self.left = len(text) // 4 * 3 - end.count("=")

    def fill(self, out_N: memoryview) -> None:
        at, size = 0, len(out_N)
        while at < size:
            if not self._ahead:
                self._ahead = self._next()
            part = self._ahead[: size - at]
            out_N[at : at + len(part)] = part
            self._ahead = self._ahead[len(part) :]
            at += len(part)
        self.left -= size

    def _next(self) -> memoryview:
        text = self._text[self._at : self._at + _SLICE_CHARACTERS]
        self._at += len(text)
        try:
            data = decode_base64(text)
        except ValueError as error:
            raise NotBase64(str(error)) from error
        if not data or (len(data) != len(text) // 4 * 3 and self._at < len(self._text)):
            raise NotBase64("padding within the text")
        return memoryview(data)


def last_event(body: bytes, *, sample_id: str, engine: str) -> bytes:
    """Return the data of an event stream's last event with a frame, or the body if it is no stream.

    Without a frame in any event: the last one's, which may be an error. Raises UsageError where the events are of several
    choices, and ValueError for one that is no JSON.
    """
    if not _STREAM.match(body):
        return body
    lines = [line for line in body.splitlines() if line.startswith(b"data:") and not line.endswith(b"[DONE]")]
    for reply in (parsed(line[5:]) for line in lines if b'"index"' in line):
        indices = [each.get("index") for each in (reply, *_choices_of(reply)) if isinstance(each, Mapping)]
        if any(indices):  # a stream of an OpenAI route has one frame, of any choice
            raise _several("events of several choices", sample_id, engine)
    # An event of usage may follow the frame's. A field that is no text is chosen above none, and then named.
    return max(reversed(lines), key=lambda line: (_value_at(line) > 0, _KEY in line), default=b"")[5:]


def split_reply(body: bytes) -> tuple[Any, memoryview | None]:
    """(what `json.loads(body)` gives, with the routing field emptied; the characters that it held).

    Where the field's place is not certain the whole body is parsed, and the characters are None. Raises ValueError as
    `json.loads` does, also for a body that is nested too deeply for it.

    >>> reply, text = split_reply(b'{"meta_info": {"id": "a", "routed_experts": "AQI="}}')
    >>> reply, bytes(text)
    ({'meta_info': {'id': 'a', 'routed_experts': ''}}, b'AQI=')
    """
    (reply, text), *_ = _split(body, 1, lambda reply: [reply])
    return reply, text


def split_replies(body: bytes) -> list[tuple[Any, memoryview | None]]:
    """Split the body of a reply of several samples, in one pass over its bytes: for each what `split_reply` gives.

    >>> [reply["meta_info"]["id"] for reply, _ in split_replies(b'[{"meta_info": {"id": "a"}}, {"meta_info": {"id": "b"}}]')]
    ['a', 'b']

    Raises:
        ValueError: As `json.loads`.
    """
    return _split(body, len(body), samples_of)


def samples_of(replies: Any) -> list[Any]:
    """Return a list's items, or an OpenAI reply for each of its choices, without what is said once: whose rows those are is
    not told (`sglext` has the first one's)."""
    if isinstance(replies, list):
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
            # Nobody else can have written a mark: the field that holds it is the one that was cut out.
            mark = secrets.token_hex(16)
            texts[mark] = text
            parts += [body[at:begin], mark.encode()]
            at = end
        split = list[tuple[Any, memoryview | None]]()
        for reply in samples_of(parsed(b"".join([*parts, body[at:]]))):
            holder = _holder_of(reply)
            text = texts.pop(str(holder.get(ROUTING_FIELD)), None)
            if text is not None:
                holder[ROUTING_FIELD] = ""
            split.append((reply, text))
        if not texts:
            return split
    return [(reply, None) for reply in samples_of(parsed(body))]


def _holder_of(reply: Any) -> Any:
    """Return what holds a reply's field, read in SGLang 0.5.15.post1 and 0.5.23; `meta_info` or nothing where none does.

    `/generate` has it in `meta_info`. OpenAI's routes have it in `sglext`, with `return_meta_info` in the choice's `meta_info`
    (the older release in both). The frames of several choices are nobody's: `sglext` has the first one's.
    """
    if not isinstance(reply, Mapping) or len(choices := _choices_of(reply)) > 1:
        return {}
    metas = [each.get("meta_info") for each in (reply, *choices)] + [reply.get("sglext")]
    holders = [holder for holder in metas if isinstance(holder, Mapping)]
    return next((holder for holder in holders if ROUTING_FIELD in holder), holders[0] if holders else {})


def _choices_of(reply: Any) -> list[Any]:
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    return [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []


def _several(what: str, sample_id: str, engine: str) -> UsageError:
    return UsageError(
        f"sample {sample_id} from engine {engine}: the reply holds {what}, expected one sample. Was n above 1, or were several "
        "prompts sent? `add_bodies` takes such a body; or `add` each item of the parsed list by itself"
    )


def _text_at(body: bytes, begin: int) -> tuple[memoryview, int]:
    """(the field's characters, where the quote behind them is). A frame says itself where it ends, which saves a look at every
    byte. Raises ValueError where no text ends."""
    with suppress(ValueError):
        size = announced_bytes(decode_base64(memoryview(body)[begin : begin + _HEAD_CHARACTERS]))
        end = begin + -(-size // 3) * 4
        if size and body[end : end + 1] == b'"':
            return memoryview(body)[begin:end], end
    end = body.index(b'"', begin)
    if body.find(b"\\", begin, end) < 0:
        return memoryview(body)[begin:end], end
    return memoryview(parsed(body[begin - 1 : end + 1]).encode()), end  # characters that JSON escapes


def routing_text(reply: Any, *, sample_id: str, engine: str) -> str:
    """Return the text of a reply's field.

    Raises RoutingMissing where nothing is, with the engine's own words where its reply is an error; FrameError for a field at
    another place, and UsageError for a reply of several samples.
    """
    if isinstance(reply, list) or len(_choices_of(reply)) > 1:
        raise _several("a list of replies or choices", sample_id, engine)
    text = _holder_of(reply).get(ROUTING_FIELD)
    if isinstance(text, str) and text:
        return text
    where = f"sample {sample_id} from engine {engine}"
    if isinstance(reply, Mapping) and (place := _place_of(reply)):
        raise FrameError(
            f"{where}: {ROUTING_FIELD} is at {place}, expected text at meta_info, sglext or choices[0].meta_info. Is it another "
            "release of SGLang, or does something between engine and relay change replies?"
        )
    said = reply.get("error") if isinstance(reply, Mapping) else None
    raise RoutingMissing(
        f"{where}: no {ROUTING_FIELD} in the reply, expected a frame. "
        + (f"The engine says: {str(said)[:300]}. " if said else "")
        + "Was return_routed_experts set, and was the server started with --enable-return-routed-experts?",
        samples=[sample_id],
        engines=[engine],
    )


def _place_of(reply: Any) -> str:
    """Return the path of a field that holds something, wherever it is; nothing where there is none."""
    todo = [("", reply)]
    for path, value in todo:  # it grows: a call for each level could nest too deeply
        if isinstance(value, Mapping) and value.get(ROUTING_FIELD):
            return f"{path}.{ROUTING_FIELD}".lstrip(".")
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        todo += [(f"{path}.{key}", each) for key, each in inner if isinstance(each, dict | list)]
    return ""


def frame_bytes_of(reply: Any, *, sample_id: str, engine: str) -> bytes:
    """The bytes of a reply's field: a frame, a frame reference, or an engine's hello and a frame.

    Raises RoutingMissing, or FrameCorrupt.
    """
    try:
        return decode_base64(routing_text(reply, sample_id=sample_id, engine=engine))
    except ValueError as error:
        raise no_base64(error, sample_id, engine) from error


def no_base64(error: ValueError, sample_id: str, engine: str) -> FrameCorrupt:
    return FrameCorrupt(
        f"sample {sample_id} from engine {engine}: {ROUTING_FIELD} is not base64, expected a frame: {error}",
        samples=[sample_id],
        engines=[engine],
    )


def key_of(reply: Any) -> int | None:
    """The key that a frame for this reply's request carries; None when the reply does not name its request."""
    request_id = _holder_of(reply).get("id")
    if request_id is None and isinstance(reply, Mapping) and "choices" in reply:
        request_id = reply.get("id")
    return sample_key(request_id) if isinstance(request_id, str) else None


def read_body(read: Callable[[bytes], Any], body: bytes, *, sample_id: str, engine: str) -> Any:
    """What `read` makes of a body. Raises RoutingMissing for its ValueError."""
    try:
        return read(body)
    except ValueError as error:
        raise RoutingMissing(
            f"sample {sample_id} from engine {engine}: {len(body)} bytes beginning with {body[:40]!r} are no JSON, "
            f"expected a reply: {error}",
            samples=[sample_id],
        ) from error


def parsed(body: bytes) -> Any:
    """As `json.loads`."""
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


def _value_at(body: bytes, begin: int = 0) -> int:
    """Where the text of the next field of that name begins, behind its quote; 0 where there is none."""
    at = body.find(_KEY, begin)
    if at < 1 or body[at - 1] == ord("\\"):  # the end of a longer name with a quote in it
        return 0
    opening = _OPENING.match(body, at + len(_KEY))
    return opening.end() if opening else 0
