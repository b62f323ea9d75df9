"""Frames that were damaged, or lie with correct hashes: each decodes to what its bytes say, or gives a typed error."""

from __future__ import annotations

import random
import resource
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import xxhash

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import HEADER_BYTES, encode_error, encode_frame, parse_frame
from r3channel.wire.routing import SampleRouting
from tests.oracle import read
from tests.samples import SPEC, WIDE, frame_of, random_ids

ROWS = 12
EXPECTED = {
    errors.FrameMagicMismatch, errors.FrameCorrupt, errors.FrameVersionMismatch, errors.SpecMismatch, errors.RowCountMismatch,
    errors.ExpertIdInvalid, errors.EngineReported,
}  # fmt: skip
"""Every error that reading a frame can give."""

# Offset, width of every field of the header but the two hashes, from the documentation of the format.
FIELDS = [
    (0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 8), (16, 4), (20, 2), (22, 2), (24, 1), (25, 1), (26, 2), (28, 4), (32, 4),
    (36, 4), (40, 4), (44, 4), (48, 8), (56, 8), (64, 8), (72, 8), (80, 4), (84, 4),
]  # fmt: skip
SECTIONS_BYTES, WIRE_BYTES = 44, 56


def corpus() -> list[tuple[RoutingSpec, bytes]]:
    """Small frames of every codec, section and kind."""
    small, wide = random_ids(ROWS), random_ids(ROWS, spec=WIDE)
    return [
        (SPEC, frame_of(ROWS + 1, codec="stored")),
        (SPEC, frame_of(ROWS + 1, valid_T=np.arange(ROWS) % 5 != 2)),
        (SPEC, frame_of(ROWS + 1, codec="set")),
        (SPEC, encode_frame(SPEC, expert_ids_TLK=np.tile(small[:1], (ROWS, 1, 1)), codec="lz4")),
        (WIDE, frame_of(ROWS + 1, spec=WIDE)),
        (WIDE, frame_of(ROWS + 1, spec=WIDE, codec="set")),
        (WIDE, encode_frame(WIDE, expert_ids_TLK=np.tile(wide[:1], (ROWS, 1, 1)), codec="lz4")),
        (SPEC, encode_error("no rows")),
    ]  # fmt: skip


def rehash(data: bytearray) -> None:
    """Make both hashes true again, as a faulty or hostile encoder would."""
    if len(data) >= HEADER_BYTES:
        (size,) = struct.unpack_from("<I", data, SECTIONS_BYTES)
        sections = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        struct.pack_into("<Q", data, HEADER_BYTES - 16, xxhash.xxh3_64_intdigest(sections))
        struct.pack_into(
            "<Q", data, HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - 8]))
        )


def redigest(data: bytearray, *, spec: RoutingSpec) -> None:
    """Make the digests true again, too, where the frame can be decoded at all."""
    with suppress(errors.R3Error):
        frame = parse_frame(bytes(data), spec=spec, max_rows=64)
        digests_L = layer_digests(frame.ids(), first_row=frame.first_row, valid_T=frame.valid_T)
        bitmap = -(-frame.rows // 8) if data[7] & 1 else 0
        at = HEADER_BYTES + bitmap + 24 * len(frame.provenance)
        data[at : at + digests_L.nbytes] = digests_L.tobytes()
        rehash(data)


def lie_in_header(data: bytearray, rng: random.Random) -> None:
    at, width = rng.choice(FIELDS)
    old = int.from_bytes(data[at : at + width], "little")
    new = rng.choice(
        (0, 1, old + 1, old - 1, old * 2, old ^ 1 << rng.randrange(8 * width), rng.getrandbits(8 * width), -1)
    )
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")


def change_body(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data[rng.randrange(HEADER_BYTES, len(data))] = rng.choice(
            (0, 255, 1, rng.randrange(256), rng.randrange(128))
        )


def repeat_a_byte(data: bytearray, rng: random.Random) -> None:
    """Near the end, where ids lie: often a duplicate expert."""
    at = rng.randrange(max(HEADER_BYTES + 1, len(data) - 64), len(data))
    data[at] = data[at - 1]


def resize(data: bytearray, rng: random.Random) -> None:
    """More or fewer bytes, with a header that says so."""
    field, at = rng.choice((SECTIONS_BYTES, WIRE_BYTES)), rng.randrange(HEADER_BYTES, len(data))
    size = rng.randrange(1, 9)
    before = len(data)
    if rng.random() < 0.5:
        data[at:at] = rng.randbytes(size)
    else:
        del data[at : at + size]
    width = 4 if field == SECTIONS_BYTES else 8
    announced = int.from_bytes(data[field : field + width], "little") + len(data) - before
    data[field : field + width] = (announced % (1 << 8 * width)).to_bytes(width, "little")


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


LIES: list[Callable[[bytearray, random.Random], None]] = [
    *(lie_in_header, lie_in_header, change_body, change_body),
    *(repeat_a_byte, resize),
]
DAMAGES = [lie_in_header, change_body, cut, resize]


def mutated(good: bytes, rng: random.Random, *, spec: RoutingSpec) -> tuple[bytes, bool]:
    """(bytes, whether the hashes were made true again)."""
    data = bytearray(good)
    if rng.random() < 0.12:
        rng.choice(DAMAGES)(data, rng)
        return bytes(data), False
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) > HEADER_BYTES + 1:
            rng.choice(LIES)(data, rng)
    if rng.random() < 0.01:
        cut(data, rng)
    rehash(data)
    if rng.random() < 0.7:
        redigest(data, spec=spec)
    return bytes(data), len(data) >= HEADER_BYTES


def receive(data: bytes, *, spec: RoutingSpec) -> SampleRouting:
    return parse_frame(data, spec=spec, max_rows=64).routing(sample_id="m")


def check_against_oracle(data: bytes, routing: SampleRouting) -> None:
    rows = read(data)
    assert routing.expert_ids_TLK.tolist() == rows.ids
    assert routing.valid_T.tolist() == rows.valid and routing.first_row == rows.first_row
    assert [(s.start, s.end, s.weight_version, s.kind) for s in routing.provenance] == rows.spans


def run_mutations(count: int, *, seed: int) -> tuple[Counter[type], int, int]:
    """(outcomes by error class, accepted frames under NoneType; frames with true hashes; growth of resident kB)."""
    rng, frames = random.Random(seed), corpus()
    outcomes: Counter[type] = Counter()
    true_hashes, start_kb = 0, 0
    for number in range(count):
        if number == min(2000, count // 2):
            start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spec, good = rng.choice(frames)
        data, rehashed = mutated(good, rng, spec=spec)
        true_hashes += rehashed
        try:
            routing = receive(data, spec=spec)
        except errors.R3Error as error:
            outcomes[type(error)] += 1
            continue
        outcomes[type(None)] += 1
        check_against_oracle(data, routing)
    return outcomes, true_hashes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kb


def check_outcome(count: int, *, seed: int, each: int) -> None:
    outcomes, true_hashes, growth_kb = run_mutations(count, seed=seed)
    assert true_hashes >= 0.8 * count
    assert set(outcomes) - {type(None)} == EXPECTED
    assert min(outcomes.values()) >= each, outcomes
    assert growth_kb < 64 << 10


def test_twenty_thousand_mutated_frames_decode_as_an_oracle_does_or_give_a_typed_error() -> None:
    check_outcome(20_000, seed=1, each=20)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_million_mutated_frames_decode_as_an_oracle_does_or_give_a_typed_error() -> None:
    check_outcome(1_000_000, seed=2, each=1000)


def test_the_oracle_reads_every_frame_of_the_corpus() -> None:
    for spec, data in corpus()[:-1]:
        check_against_oracle(data, receive(data, spec=spec))
