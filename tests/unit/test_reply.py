"""The frame is cut out of a reply's bytes: whatever the body says, the result is that of `json.loads`."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3channel.errors import FrameCorrupt
from r3channel.relay import reply as reply_module
from r3channel.relay.reply import ROUTING_FIELD, Base64Text, parse, split_reply

FIELD = "routed_experts"
quoted = st.sampled_from([FIELD, f'"{FIELD}": "AAAA"', f'\\"{FIELD}":"AAAA"', '\\"', "="])
texts = st.text(max_size=20) | quoted
names = st.sampled_from([FIELD, "meta_info", "id"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | names, inner, max_size=4),
    max_leaves=12,
)
frames = st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode())


@st.composite
def replies(draw: st.DrawFn) -> Any:
    meta = draw(st.dictionaries(texts, values, max_size=3)) | {FIELD: draw(frames | values)}
    places = ("meta_info", meta), ("sglext", meta), ("choices", [{"meta_info": meta}])
    fields = [draw(st.sampled_from(places)), *draw(st.dictionaries(texts, values, max_size=3)).items()]
    return dict(draw(st.permutations(fields)))


def check_equal_to_loads(body: bytes) -> bytes | None:
    try:
        expected = json.loads(body)
    except ValueError:
        with pytest.raises(ValueError):
            text = split_reply(body)[1]
            assert text is None or decoded(text) is None
            parse(body)  # as `add_body` does where the characters are no base64
        return None
    reply, text = split_reply(body)
    data = None if text is None else decoded(text)
    if text is not None:
        said = (holder := reply_module._holder_of(expected))[ROUTING_FIELD]
        assert data is None or base64.b64decode(said, validate=True) == data
        holder[ROUTING_FIELD] = ""
    assert reply == expected
    return data


def decoded(text: str | memoryview) -> bytes | None:
    """In pieces; None for what is no base64."""
    try:
        source, pieces = Base64Text(text), list[bytes]()
        while source.left:
            pieces.append(bytes(source.take(min(7, source.left))))
        return b"".join(pieces)
    except FrameCorrupt:
        return None


@pytest.mark.parametrize("number", [(1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 10**40])
def test_integers_stay_exact_whatever_their_size(number: int) -> None:
    body = json.dumps({"logprob": -0.0012345678901234567, "number": number}).encode()
    assert split_reply(body)[0]["number"] == number
    assert split_reply(str(number).encode())[0] == number


@pytest.fixture(params=["pybase64", "stdlib"], autouse=True)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reply_module._fast_b64decode is not None, "pybase64 is part of the locked environment"
    if request.param == "stdlib":
        monkeypatch.setattr(reply_module, "_fast_b64decode", None)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=replies() | values, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_a_reply_is_what_json_says(decoder: None, reply: Any, ascii: bool, indent: int | None) -> None:
    check_equal_to_loads(json.dumps(reply, ensure_ascii=ascii, indent=indent).encode())


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=replies(), data=st.data())
def test_a_damaged_reply_is_what_json_says(decoder: None, reply: Any, data: st.DataObject) -> None:
    body = bytearray(json.dumps(reply).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        other = data.draw(st.sampled_from([b"", b'"', b"\\", b"\\u005f", b":", b"{", b"x"]))
        body[at : at + data.draw(st.integers(0, 3))] = other
    check_equal_to_loads(bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"meta_info": {"routed_experts": "AAAA", "routed\\u005fexperts": "AQI="}}',
        b'{"meta_info": {"routed\\u005fexperts": "AQI=", "routed_experts": "AAAA"}}',
        b'{"x": {"routed_experts": "AAAA"}, "meta_info": {"routed\\u005fexperts": "AQI="}}',
        b'{"\\"routed_experts": "AAAA", "meta_info": {"routed\\u005fexperts": ""}}',
        b'{"meta_info": {"routed_experts": "AAAA"}, "meta_info": {"id": "x"}}',
        b'{"meta_info": {"id": "x"}, "meta_info": {"routed_experts": "AAAA"}}',
        b'{"meta_info": [{"routed_experts": "AAAA"}]}',
        b'{"text": "\\"routed_experts\\": \\"BBBB\\"", "meta_info": {"routed_experts": "AAAA"}}',
        b'{"meta_info": {"routed_experts": "AA\\u0041A"}}', b'{"meta_info": {"routed_experts": "AAA"}}',
        b'{"meta_info": {"routed_experts": "AAAA', b'\xef\xbb\xbf{"meta_info": {"routed_experts": "AAAA"}}',
        '{"meta_info": {"routed_experts": "AAAA"}}'.encode("utf-16"), b'["routed_experts": "AAAA"]', b"",
    ],
)  # fmt: skip
def test_hostile_spellings_change_nothing(body: bytes) -> None:
    check_equal_to_loads(body)


def test_an_ordinary_reply_takes_the_short_way() -> None:
    reply = {"text": "x", "output_ids": [1], "meta_info": {"id": "a", FIELD: "AQI=", "n": 1}}
    assert check_equal_to_loads(json.dumps(reply).encode()) == b"\x01\x02"


@pytest.mark.parametrize("form", ["%s", '{"x": %s}', '{"meta_info": {"routed_experts": "AQI="}, "x": %s}'])
def test_a_reply_that_is_nested_too_deeply_is_no_reply(form: str) -> None:
    for brackets in ("[" * 100_000, "[" * 100_000 + "]" * 100_000):
        with pytest.raises(ValueError):
            split_reply((form % brackets).encode())
