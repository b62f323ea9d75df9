"""Frames, and what travels in their place: round trips, golden bytes, a typed error for every way in which bytes can be wrong."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import LZ4
from r3channel.wire.frame import encode_error, encode_frame, parse_frame, sample_key
from r3channel.wire.hello import Hello
from r3channel.wire.parcel import FrameReference, frames_in, open_parcel, pack_parcel
from r3channel.wire.routing import RowKind
from r3channel.wire.source import InHand
from tests.support.samples import SPEC, WIDE, flipped, frame_of, random_ids, span, sparse

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["uint8", "int16"])
@pytest.mark.parametrize("codec", ["auto", "stored", "lz4", "packed9"])
@pytest.mark.parametrize("rows", [0, 1, 8191, 8192, 8193])
def test_ids_survive_the_wire_in_order(spec: RoutingSpec, codec: str, rows: int) -> None:
    ids = random_ids(min(rows, 512), spec=spec, seed=rows)
    ids = np.tile(ids, (20, 1, 1))[:rows] if rows > 512 else ids
    frame = parse_frame(encode_frame(spec, expert_ids_TLK=ids, codec=codec), spec=spec)
    assert frame.rows == rows and np.array_equal(frame.verify(), ids)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), layers=st.integers(1, 5), experts=st.sampled_from([8, 256, 300]), first_row=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_validity_and_spans_survive(rows: int, layers: int, experts: int, first_row: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = sparse(layers, experts=experts, top_k=4)
    ids, valid = random_ids(rows, spec=spec, seed=seed), rng.random(rows) < 0.8
    cut = int(rng.integers(0, rows + 1))
    both = span(0, cut, -3), span(cut, rows, 2**40, RowKind.UNKNOWN)
    spans = [
        one._replace(start=first_row + one.start, end=first_row + one.end)
        for one in both
        if one.start < one.end
    ]
    data = encode_frame(spec, expert_ids_TLK=ids, first_row=first_row, valid_T=valid, provenance=spans)
    routing = parse_frame(data, spec=spec).routing(sample_id="s")
    assert np.array_equal(routing.expert_ids_TLK, ids) and np.array_equal(routing.valid_T, valid)
    assert routing.provenance == tuple(spans) and routing.tokens == first_row + rows + 1


@pytest.mark.parametrize(
    "name", ["uint8_stored", "uint8_set", "invalid_rows", "int16_lz4", "int16_packed9", "int16_set"]
)
def test_golden_frames_are_decoded_for_ever(name: str) -> None:
    expected = np.load(GOLDEN / f"frame_v2_{name}.npy", allow_pickle=False)
    spec = WIDE if name.startswith("int16") else SPEC
    frame = parse_frame((GOLDEN / f"frame_v2_{name}.bin").read_bytes(), spec=spec)
    assert np.array_equal(frame.verify(), expected)
    assert frame.valid_T.all() == (name != "invalid_rows") and frame.weight_version == 7
    assert frame.ordered == ("set" not in name) and frame.sample_key == 99


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uint8_prefix", r"kind 2, expected one of .*of another release"),
        ("uint8_after_prefix", r"flag 4: .*expected all of its 12 rows.*of another release"),
        ("uint8_layers", r"chunks of 2 layers, expected all 3.*of another release"),
    ],
)
def test_golden_frames_of_what_is_reserved_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(errors.FrameVersionMismatch, match=said):
        parse_frame((GOLDEN / f"frame_v2_{name}.bin").read_bytes(), spec=SPEC)


def test_a_frame_of_another_wire_version_is_refused_by_name() -> None:
    old = (GOLDEN / "frame_v1.bin").read_bytes()
    with pytest.raises(errors.FrameVersionMismatch, match=r"wire version 1, expected 2.*older"):
        parse_frame(old, spec=WIDE)
    with pytest.raises(errors.FrameVersionMismatch, match=r"wire version 3, expected 2.*newer"):
        parse_frame(b"R3F\x03", spec=WIDE)
    with pytest.raises(errors.FrameMagicMismatch):
        parse_frame(b"R3Z\x02" + old[4:], spec=WIDE)


def test_lz4_is_used_only_where_it_pays_which_samples_of_a_large_chunk_tell() -> None:
    padded, in_the_middle = np.tile(random_ids(1), (400, 1, 1)), np.tile(random_ids(512), (16, 1, 1))
    in_the_middle[2000:6000] = in_the_middle[0]
    apart = random_ids(199), random_ids(4000)
    for ids, pays in [*((ids, False) for ids in apart), (padded, True), (in_the_middle, True)]:
        data = encode_frame(SPEC, expert_ids_TLK=ids)
        assert parse_frame(data, spec=SPEC).entries[0].codec == (LZ4.codec_id if pays else 0)
        assert (len(data) < 0.9 * ids.nbytes) == pays


def test_an_error_of_any_characters_is_reported_for_a_request_of_any_name() -> None:
    data = encode_error("no file \udcff", sample_key=sample_key("\ud800"))
    with pytest.raises(errors.EngineReported, match="no file"):
        parse_frame(data, spec=SPEC)


def test_any_flipped_bit_and_any_cut_is_noticed() -> None:
    data = frame_of(9)
    for bit in range(0, 8 * len(data), 3):
        with pytest.raises(errors.FrameError):
            parse_frame(flipped(data, bit), spec=SPEC).verify()
    for size in range(len(data)):
        with pytest.raises(errors.FrameError):
            parse_frame(data[:size], spec=SPEC)
    with pytest.raises(errors.FrameCorrupt):
        parse_frame(data + b"\0", spec=SPEC)


@pytest.mark.parametrize(
    ("value", "words"), [(128, "slot 2 has id 128; expected 0..127"), ("same", "repeats an expert")]
)
def test_a_bad_id_is_named_by_row_layer_sample(value: object, words: str) -> None:
    ids = random_ids(9)
    ids[3, 1, 2] = ids[3, 1, 0] if value == "same" else value
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids), spec=SPEC)
    with pytest.raises(errors.ExpertIdInvalid, match=rf"s1.*row 3, layer 2.*{words}"):
        frame.routing(sample_id="s1")


def test_ids_of_invalid_rows_are_not_judged_and_count_in_the_row_that_is_named() -> None:
    ids, valid = random_ids(9), np.arange(9) != 2
    ids[2] = 0
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids, valid_T=valid), spec=SPEC)
    assert frame.routing(sample_id="s").valid_T.tolist() == valid.tolist()
    ids[5, 1, 0] = 128
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids, valid_T=valid), spec=SPEC)
    with pytest.raises(errors.ExpertIdInvalid, match="row 5, layer 2"):
        frame.verify()


@pytest.mark.parametrize("value", ["another", "same", "large"])
def test_ids_that_were_damaged_are_told_from_ids_that_the_engine_got_wrong(value: str) -> None:
    ids = random_ids(9)
    data = bytearray(encode_frame(SPEC, expert_ids_TLK=ids, codec="stored"))
    first = len(data) - ids.nbytes
    at = first + (4 * 3 + 1) * 8  # row 4, second of the three layers
    unused = next(expert for expert in range(128) if expert not in ids[4, 1])
    data[at] = {"another": unused, "same": data[at + 1], "large": 200}[value]
    said = r"sample s from engine e: layers \[2\]: the ids are not those"
    with pytest.raises(errors.FrameCorrupt, match=said):
        parse_frame(data, spec=SPEC, sample_id="s", engine="e").verify()


def test_damage_of_many_layers_names_a_few_and_counts_the_others() -> None:
    spec = replace(SPEC, num_layers=9, moe_layers=tuple(range(1, 9)))
    data = bytearray(encode_frame(spec, expert_ids_TLK=random_ids(4, spec=spec), codec="stored"))
    data[-8 * 8 :] = bytes(8 * 8)
    with pytest.raises(errors.FrameCorrupt, match=r"layers \[1, 2, 3, 4, 5\] and 3 more"):
        parse_frame(data, spec=spec).verify()


def test_ids_at_an_odd_address_are_verified() -> None:
    ids = random_ids(40, spec=WIDE)
    data = b"x" + encode_frame(WIDE, expert_ids_TLK=ids, codec="stored")
    assert np.array_equal(parse_frame(memoryview(data)[1:], spec=WIDE).verify(), ids)


# -- what travels in place of a frame ----------------------------------------------------------------------------------

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
    with pytest.raises(errors.FrameReferenceInvalid, match="expected 40"):
        FrameReference.from_bytes(data)


PARCEL = b"".join(pack_parcel(5, [(1, b"a" * 50), (2, b"b" * 9)]))


def frames_of(data: bytes, boot_id: int | None = None) -> list[tuple[int, int]]:
    """(serial, bytes) of each."""
    named, count = open_parcel(source := InHand(data))
    frames = frames_in(source, count, boot_id=named if boot_id is None else boot_id)
    return [(serial, frame.left) for serial, frame in frames]


@pytest.mark.parametrize(("at", "entry"), [(16, 0), (16 + 16 + 64, 1)])
def test_a_frame_whose_name_or_size_came_damaged_is_placed_nowhere(at: int, entry: int) -> None:
    for bit in range(128):
        placed = list[int]()
        _, count = open_parcel(source := InHand(flipped(PARCEL, 8 * at + bit)))
        with pytest.raises(errors.FrameReferenceInvalid, match=f"entry {entry} of a parcel is damaged"):
            for serial, _ in frames_in(source, count, boot_id=5):
                placed.append(serial)
        assert placed == [1][:entry]


def test_another_engines_frame_a_size_beyond_the_bytes_and_too_many_frames_are_refused() -> None:
    with pytest.raises(errors.FrameReferenceInvalid, match="entry 0 of a parcel is damaged"):
        frames_of(PARCEL, boot_id=6)
    whole = pack_parcel(5, [(1, b"a" * 50)])
    with pytest.raises(errors.FrameReferenceInvalid, match="announces 50 bytes, 40 are left"):
        frames_of(b"".join([*whole[:2], whole[2][:40]]))
    with pytest.raises(errors.FrameReferenceInvalid, match="at most 1024"):
        open_parcel(InHand(pack_parcel(5, [])[0].replace(bytes(4), b"\xff" * 4, 1)))


def test_a_hello_of_an_older_engine_lacks_what_came_later() -> None:
    values = asdict(HELLO)
    for name in ("torch", "nccl", "context"):
        del values[name]
    text = json.dumps(values).encode()
    hello, _ = Hello.split(HELLO.to_bytes()[:4] + len(text).to_bytes(4, "little") + text)
    assert hello == replace(HELLO, context=0)


@pytest.mark.parametrize(
    "changes",
    [{"context": -1}, {"context": 1 << 40}, {"context": True}, {"context": "8192"}, {"boot_id": -1}],
)
def test_a_hello_with_impossible_numbers_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.FrameCorrupt, match="cannot be read"):
        Hello.split(replace(HELLO, **changes).to_bytes())
