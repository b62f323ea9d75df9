"""What travels in place of a frame: small, exact, and refused by name when it is damaged."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest

from r3channel.errors import FrameCorrupt, FrameReferenceInvalid
from r3channel.wire.hello import Hello
from r3channel.wire.parcel import FrameReference, frames_in, open_parcel, pack_parcel
from r3channel.wire.source import InHand
from tests.support.samples import SPEC

REFERENCE = FrameReference(sample_key=2**64 - 1, boot_id=2**63, serial=2**40, first_row=2**24, rows=2**24)
HELLO = Hello(
    engine="http://e:1", boot_id=9, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="0.5.23",
    r3channel="0.1.0", hooks=("a", "b"), delivery="direct", codec="auto", allowed=("pp",), weighing=("w",), context=8192,
)  # fmt: skip


def test_the_largest_reference_survives_in_at_most_64_bytes_of_a_reply() -> None:
    assert len(base64.b64encode(REFERENCE.to_bytes())) == 56
    assert FrameReference.from_bytes(REFERENCE.to_bytes()) == REFERENCE


@pytest.mark.parametrize("data", [b"", b"R3T\x01", REFERENCE.to_bytes()[:-1], b"R3F\x01" + bytes(36)])
def test_what_is_no_reference_is_refused(data: bytes) -> None:
    with pytest.raises(FrameReferenceInvalid, match="expected 40"):
        FrameReference.from_bytes(data)


PARCEL = b"".join(pack_parcel(5, [(1, b"a" * 50), (2, b"b" * 9)]))


def frames_of(data: bytes | bytearray, boot_id: int | None = None) -> list[tuple[int, int]]:
    """(serial, bytes) of each."""
    named, count = open_parcel(source := InHand(data))
    frames = frames_in(source, count, boot_id=named if boot_id is None else boot_id)
    return [(serial, frame.left) for serial, frame in frames]


@pytest.mark.parametrize(("at", "entry"), [(16, 0), (16 + 16 + 64, 1)])
def test_a_frame_whose_name_or_size_came_damaged_is_placed_nowhere(at: int, entry: int) -> None:
    for bit in range(128):
        data, placed = bytearray(PARCEL), []
        data[at + bit // 8] ^= 1 << bit % 8
        _, count = open_parcel(source := InHand(data))
        with pytest.raises(FrameReferenceInvalid, match=f"entry {entry} of a parcel is damaged"):
            for serial, _ in frames_in(source, count, boot_id=5):
                placed.append(serial)
        assert placed == [1][:entry]


def test_another_engines_frame_a_size_beyond_the_bytes_and_too_many_frames_are_refused() -> None:
    with pytest.raises(FrameReferenceInvalid, match="entry 0 of a parcel is damaged"):
        frames_of(PARCEL, boot_id=6)
    whole = pack_parcel(5, [(1, b"a" * 50)])
    with pytest.raises(FrameReferenceInvalid, match="announces 50 bytes, 40 are left"):
        frames_of(b"".join([*whole[:2], whole[2][:40]]))
    with pytest.raises(FrameReferenceInvalid, match="at most 1024"):
        open_parcel(InHand(pack_parcel(5, [])[0].replace(bytes(4), b"\xff" * 4, 1)))


def test_a_hello_goes_in_front_of_the_probes_frame() -> None:
    assert Hello.split(HELLO.to_bytes() + b"R3F\x01...") == (HELLO, b"R3F\x01...")
    assert Hello.split(b"R3F\x01...") == (None, b"R3F\x01...")


def test_a_hello_of_an_older_engine_lacks_what_came_later() -> None:
    values = dataclasses.asdict(HELLO)
    for name in ("torch", "nccl", "context"):
        del values[name]
    text = json.dumps(values).encode()
    hello, _ = Hello.split(HELLO.to_bytes()[:4] + len(text).to_bytes(4, "little") + text)
    assert hello == dataclasses.replace(HELLO, context=0)


@pytest.mark.parametrize(
    "changes",
    [{"context": -1}, {"context": 1 << 40}, {"context": True}, {"context": "8192"}, {"boot_id": -1}],
)
def test_a_hello_with_impossible_numbers_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FrameCorrupt, match="cannot be read"):
        Hello.split(dataclasses.replace(HELLO, **changes).to_bytes())
