"""What travels in place of a frame: small, exact, and refused by name when it is damaged."""

from __future__ import annotations

import base64
import dataclasses
import random

import pytest

from r3channel.errors import PayloadCorrupt, R3Error, ReceiptInvalid
from r3channel.wire.hello import PROBE_PREFIX, Hello, probe_body
from r3channel.wire.receipt import InMemory, Receipt, new_memory, open_parcel, pack_parcel, read_frames
from tests.samples import SPEC

RECEIPT = Receipt(sample_key=2**64 - 1, boot_id=2**63, serial=2**40, first_row=2**24, rows=2**24)
HELLO = Hello(
    engine="http://e:1", boot_id=9, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="0.5.23",
    r3channel="0.1.0", hooks=("a", "b"), delivery="direct", codec="auto", allowed=("pp",),
)  # fmt: skip


def test_a_receipt_is_at_most_64_bytes_of_a_reply() -> None:
    assert len(base64.b64encode(RECEIPT.to_bytes())) == 56


def test_the_largest_receipt_survives() -> None:
    assert Receipt.from_bytes(RECEIPT.to_bytes()) == RECEIPT


@pytest.mark.parametrize("data", [b"", b"R3T\x01", RECEIPT.to_bytes()[:-1], b"R3F\x01" + bytes(36)])
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    with pytest.raises(ReceiptInvalid, match="expected 40"):
        Receipt.from_bytes(data)


def test_any_damaged_parcel_gives_a_typed_error_or_frames_of_its_own_bytes() -> None:
    rng, whole = random.Random(1), b"".join(pack_parcel(5, [(1, b"a" * 50), (2, b"b" * 9)]))
    refused = 0
    for _ in range(5000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            _, count = open_parcel(source := InMemory(data))
            frames = read_frames(source, count, place=new_memory)
            assert sum(len(frame) for _, frame in frames) <= len(data)
        except ReceiptInvalid:
            refused += 1
    assert refused > 1000


def test_a_parcel_that_announces_more_frames_than_allowed_is_refused() -> None:
    with pytest.raises(ReceiptInvalid, match="at most 1024"):
        open_parcel(InMemory(pack_parcel(5, [])[0].replace(bytes(4), b"\xff" * 4, 1)))


def test_a_hello_goes_in_front_of_the_probes_frame() -> None:
    assert Hello.split(HELLO.to_bytes() + b"R3F\x01...") == (HELLO, b"R3F\x01...")
    assert Hello.split(b"R3F\x01...") == (None, b"R3F\x01...")


def test_any_damaged_hello_gives_a_typed_error_or_a_hello() -> None:
    rng, whole = random.Random(2), HELLO.to_bytes()
    for _ in range(5000):
        data = bytearray(whole[: rng.randrange(4, len(whole) + 1)] if rng.random() < 0.5 else whole)
        data[rng.randrange(4, len(data)) if len(data) > 4 else 0] = rng.randrange(256)
        try:
            hello, _ = Hello.split(bytes(data))
            assert hello is None or dataclasses.is_dataclass(hello)
        except R3Error as error:
            assert isinstance(error, PayloadCorrupt)


def test_each_probe_has_an_id_of_its_own() -> None:
    first, second = probe_body()["rid"], probe_body()["rid"]
    assert first != second
    assert first.startswith(PROBE_PREFIX)
