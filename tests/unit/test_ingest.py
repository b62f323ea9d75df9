"""Bad input at the door: each kind of bad reply gets its own typed error that names sample and engine."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.relay.ingest import verify_reply
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_error, encode_frame, sample_key
from tests.samples import SPEC, frame_of, random_ids, reply_for, reply_of

TOKENS = 12
FEWER_LAYERS = RoutingSpec(num_layers=4, moe_layers=(1, 2), num_experts=128, top_k=8)
OTHER_MODEL = RoutingSpec(num_layers=8, moe_layers=(1, 2, 3), num_experts=128, top_k=8)


def verify(reply: dict[str, Any]) -> None:
    verify_reply(reply, spec=SPEC, sample_id="s1", tokens=TOKENS, engine="http://e:1")


def with_ids(change: Any) -> dict[str, Any]:
    ids = random_ids(TOKENS - 1)
    change(ids)
    return reply_of(encode_frame(SPEC, expert_ids_TLK=ids, sample_key=sample_key("r0")))


def put(ids: np.ndarray, where: tuple, value: int) -> None:
    ids[where] = value


def flipped() -> dict[str, Any]:
    frame = bytearray(frame_of(TOKENS))
    frame[-5] ^= 4
    return reply_of(bytes(frame))


def test_a_good_reply_passes() -> None:
    verify(reply_for("r0", TOKENS))


BAD = {
    "no routing": (lambda: {"meta_info": {"id": "r0"}}, errors.RoutingMissing),
    "no meta_info": (lambda: {"error": "x"}, errors.RoutingMissing),
    "empty": (lambda: {"meta_info": {"routed_experts": ""}}, errors.RoutingMissing),
    "not base64": (lambda: {"meta_info": {"routed_experts": "***"}}, errors.PayloadCorrupt),
    "stock int32": (lambda: reply_of(random_ids(11).astype(np.int32).tobytes()), errors.FrameMagicMismatch),
    "html": (lambda: reply_of(b"<html>502 Bad Gateway</html>"), errors.FrameMagicMismatch),
    "too few rows": (lambda: reply_for("r0", TOKENS - 1), errors.RowCountMismatch),
    "too many rows": (lambda: reply_for("r0", TOKENS + 1), errors.RowCountMismatch),
    "start offset": (
        lambda: reply_of(
            encode_frame(SPEC, expert_ids_TLK=random_ids(10), first_row=1, sample_key=sample_key("r0"))
        ),
        errors.RowCountMismatch,
    ),
    "wrong top-k": (
        lambda: reply_for("r0", TOKENS, spec=RoutingSpec.from_dict(SPEC.to_dict() | {"top_k": 4})),
        errors.TopKMismatch,
    ),
    "wrong layers": (lambda: reply_for("r0", TOKENS, spec=FEWER_LAYERS), errors.LayerMismatch),
    "wrong experts": (
        lambda: reply_for("r0", TOKENS, spec=RoutingSpec.from_dict(SPEC.to_dict() | {"num_experts": 64})),
        errors.ExpertCountMismatch,
    ),
    "another model": (lambda: reply_for("r0", TOKENS, spec=OTHER_MODEL), errors.SpecMismatch),
    "id >= E": (lambda: with_ids(lambda ids: put(ids, (2, 1, 3), 200)), errors.ExpertIdOutOfRange),
    "duplicate id": (lambda: with_ids(lambda ids: put(ids, (2, 1), 5)), errors.DuplicateExpertId),
    "flipped bit": (flipped, errors.PayloadCorrupt),
    "cut short": (lambda: reply_of(frame_of(TOKENS)[:-3]), errors.FrameTruncated),
    "swapped replies": (
        lambda: reply_of(frame_of(TOKENS, sample_key=sample_key("r1"))),
        errors.PayloadCorrupt,
    ),
    "an id that is no text": (
        lambda: {"meta_info": reply_for("r0", TOKENS)["meta_info"] | {"id": "\ud800"}},
        errors.PayloadCorrupt,
    ),
    "engine failed": (lambda: reply_of(encode_error("no slot")), errors.EngineReported),
    "invalid rows": (
        lambda: reply_of(frame_of(TOKENS, valid_T=np.arange(11) != 4, sample_key=sample_key("r0"))),
        errors.RowsInvalid,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_reply_is_refused_by_its_own_error(name: str) -> None:
    make, error = BAD[name]
    with pytest.raises(error, match=r"s1 from engine http://e:1.*") as caught:
        verify(make())
    assert type(caught.value) is error
    assert "expected" in str(caught.value) or "damaged on the way" in str(caught.value)


def test_the_layer_of_a_bad_id_is_the_global_one() -> None:
    with pytest.raises(
        errors.ExpertIdOutOfRange, match=r"row 2, layer 2, slot 3 has id 200; expected 0..127"
    ):
        verify(with_ids(lambda ids: put(ids, (2, 1, 3), 200)))


def test_padding_characters_are_not_ignored() -> None:
    text = base64.b64encode(frame_of(TOKENS)).decode()
    with pytest.raises(errors.PayloadCorrupt):
        verify({"meta_info": {"id": "r0", "routed_experts": text[:40] + "\n" + text[40:]}})
