"""Codecs: what each keeps, when it falls back, and what hostile bytes cost."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from functools import cache
from itertools import product

import lz4.block
import numpy as np
import pytest
import zstandard

from r3channel import errors
from r3channel.bench import wire as bench_wire
from r3channel.bench.wire import REGIMES, entropy_bytes_per_token, generate
from r3channel.cli import main
from r3channel.config import EngineConfig
from r3channel.engine.frame_sender import is_costly
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CHUNK_ROWS, CODECS, LZ4, PACKED9, SET, STORED, Codec, bytes_of
from r3channel.wire.frame import HEADER_BYTES, encode_frame, parse_frame
from r3channel.wire.routing import Ids
from tests.chaos.mutations import rehash
from tests.support.loops import numba
from tests.support.memory import growth_of
from tests.support.samples import SPEC, WIDE, random_ids


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8, 10, 22])
@pytest.mark.parametrize("experts", [64, 256, 257, 512, 2000])
def test_a_set_comes_back_sorted(experts: int, top_k: int) -> None:
    spec = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=experts, top_k=top_k)
    ids = random_ids(700, spec=spec, seed=top_k)
    frame = parse_frame(encode_frame(spec, expert_ids_TLK=ids, codec="set"), spec=spec)
    assert np.array_equal(frame.verify(), ids if frame.ordered else np.sort(ids, axis=-1))
    assert not frame.ordered or top_k < 3, "one or two ids do not shrink, and are stored"


@pytest.mark.parametrize("sets", [1, 2, (1 << 14) + 1])
def test_encoding_leaves_the_ids_as_they_are(sets: int) -> None:
    ids = np.tile(np.array([7, 3, 5, 1, 6, 0, 4, 2], np.uint8), (sets, 1, 1))
    before = ids.copy()
    for codec in CODECS.values():
        codec.encode(ids)
        assert np.array_equal(ids, before), codec.name


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("rows", [0, 1, 10, 11, 21, 22, 43, 30000])
def test_nine_bits_keep_every_id_in_order_wherever_they_lie(rows: int, compiled: bool) -> None:
    ids = np.random.default_rng(rows).integers(0, 512, (rows, 1, 3), np.int16)
    wire = PACKED9.encode(ids)
    assert wire is not None and len(wire) == ids.size + -(-ids.size // 8)
    with numba(compiled):
        for skipped in range(0, 40, 1 if rows < 100 else 13):
            guarded = np.full(ids.size + 48, -7, np.int16)
            out = guarded[skipped : skipped + ids.size].reshape(ids.shape)
            PACKED9.decode_into(memoryview(bytes(skipped) + bytes(wire))[skipped:], out)
            assert np.array_equal(out, ids)
            assert (guarded[:skipped] == -7).all() and (guarded[skipped + ids.size :] == -7).all()


def test_auto_stores_ids_of_384_experts_that_do_not_fit_nine_bits() -> None:
    ids = random_ids(200, spec=WIDE)
    ids[3] = -1
    frame = parse_frame(encode_frame(WIDE, expert_ids_TLK=ids, valid_T=np.arange(200) != 3), spec=WIDE)
    assert np.array_equal(frame.ids(), ids) and frame.entries[0].codec == STORED.codec_id


@cache
def repeating(experts: int, fresh: float, layers: int) -> Ids:
    """Tokens of a small vocabulary, each with its own experts; a share of all rows chooses by itself."""
    rng, rows = np.random.default_rng(7), CHUNK_ROWS + 1500 if layers < 8 else 1500
    lines = rng.integers(0, experts, (60, layers, 8), np.int16)
    ids, own = lines[np.minimum(rng.zipf(1.3, rows), 60) - 1], rng.random((rows, layers)) < fresh
    ids[own] = rng.integers(0, experts, (int(own.sum()), 8), np.int16)
    return ids


@pytest.mark.parametrize("layers", [2, 24])
@pytest.mark.parametrize("fresh", [0.0, 0.2, 0.35, 0.45, 0.6, 1.0])
@pytest.mark.parametrize("experts", [384, 900])
def test_auto_is_never_much_above_the_shorter_of_lz4_and_packed9(
    experts: int, fresh: float, layers: int
) -> None:
    spec = RoutingSpec(num_layers=layers, moe_layers=tuple(range(layers)), num_experts=experts, top_k=8)
    ids = repeating(experts, fresh, layers)
    size = {
        codec: len(encode_frame(spec, expert_ids_TLK=ids, codec=codec))
        for codec in ("auto", "lz4", "packed9")
    }
    assert size["auto"] <= 1.03 * min(size["lz4"], size["packed9"]), size
    assert np.array_equal(parse_frame(encode_frame(spec, expert_ids_TLK=ids), spec=spec).ids(), ids)


def test_a_row_that_is_no_set_keeps_its_chunk_in_order() -> None:
    ids = np.tile(random_ids(512), (20, 1, 1))[: CHUNK_ROWS + 100]
    ids[5, 1, 3] = ids[5, 1, 2]
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids, codec="set"), spec=SPEC)
    assert [chunk.codec for chunk in frame.entries] == [STORED.codec_id, SET.codec_id]
    assert np.array_equal(frame.ids()[:CHUNK_ROWS], ids[:CHUNK_ROWS]) and not frame.ordered


def test_invalid_rows_do_not_cost_a_chunk_its_set() -> None:
    ids, valid = random_ids(500), np.arange(500) % 9 != 4
    ids[~valid] = 0
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids, valid_T=valid, codec="set"), spec=SPEC)
    assert not frame.ordered and np.array_equal(frame.valid_T, valid)
    assert np.array_equal(frame.ids()[valid], np.sort(ids[valid], axis=-1))


@pytest.mark.parametrize("regime", REGIMES)
def test_a_set_costs_at_most_268_bytes_per_row_in_every_regime(regime: str) -> None:
    model = model_named("qwen3-30b-a3b")
    ids = generate(model, regime=regime, rows=512)
    valid = np.arange(512) % 100 != 99
    data = encode_frame(model.spec, expert_ids_TLK=ids, valid_T=valid, codec="set")
    assert len(data) / 512 <= (256 if regime == "U" else 268)


class Backwards(Codec):
    """Ids from last to first: nobody's codec."""

    codec_id, name, worth_it, costly = 9, "backwards", 1.1, True

    def encode(self, ids_TLK: Ids) -> bytes:
        return bytes(bytes_of(ids_TLK))[::-1]

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        bytes_of(out_TLK)[:] = bytes(wire)[::-1]


def test_an_own_codec_needs_its_class_and_its_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Backwards.codec_id, Backwards())
    ids = random_ids(50)
    frame = parse_frame(encode_frame(SPEC, expert_ids_TLK=ids, codec="backwards"), spec=SPEC)
    assert np.array_equal(frame.verify(), ids) and frame.entries[0].codec == 9 and frame.ordered
    with pytest.raises(errors.ConfigError, match="codec 'backwards' with in-band delivery"):
        is_costly(EngineConfig(codec="backwards"))


# -- the benchmark ------------------------------------------------------------------------------------------------------


def test_the_json_has_all_codecs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_wire, "MODELS", ("kimi-k2",))
    monkeypatch.delitem(bench_wire.REGIMES, "Zmid")
    monkeypatch.setattr(bench_wire, "_MIN_S", 0.0)
    assert main(["bench", "wire", "--json", "--quick", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {result["codec"] for result in report["results"]} == {
        "auto", "stored", "lz4", "packed9", "set", "json-base64-int32",
    }  # fmt: skip
    figures = ("bytes_per_token", "encode_gbps", "decode_gbps", "entropy_bytes_per_token")
    assert all(result[figure] > 0 for result in report["results"] for figure in figures)


def test_every_way_gives_the_ids_again() -> None:
    model = model_named("deepseek-v3")
    ids_TLK = generate(model, regime="U", rows=16)
    wide_N = ids_TLK.reshape(16, -1).astype(np.int32)
    ways = bench_wire.ways(ids_TLK, spec=model.spec)
    stock = (way := ways.pop("json-base64-int32")).decode(way.encode())
    assert np.array_equal(stock.reshape(16, -1)[:, -wide_N.shape[1] :], wide_N)  # dense layers come first
    for name, way in ways.items():
        decoded, kept = way.decode(way.encode()), np.sort(ids_TLK) if name == "set" else ids_TLK
        assert np.array_equal(np.sort(decoded) if name == "set" else decoded, kept), name


def test_entropy_of_uniform_rows_is_that_of_counting() -> None:
    model = model_named("qwen3-30b-a3b")
    ordered, unordered = entropy_bytes_per_token(generate(model, regime="U", rows=1024), num_experts=128)
    assert ordered == pytest.approx(334.1, rel=0.01) and unordered == pytest.approx(242.3, rel=0.01)


# -- hostile bytes -----------------------------------------------------------------------------------------------------


def with_payload(ids: Ids, *, spec: RoutingSpec, codec: str, payload: bytes) -> bytes:
    """A frame of one chunk whose coded bytes are replaced; header, table and hashes agree with them."""
    good = encode_frame(spec, expert_ids_TLK=ids, codec=codec)
    old = len(parse_frame(good, spec=spec).payload)
    data = bytearray(good[: len(good) - old] + payload)
    struct.pack_into("<Q", data, 56, len(payload))
    # behind the header, one span and three digests, in the first table row
    struct.pack_into("<I", data, 104 + 24 + 24 + 12, len(payload))
    rehash(data)
    return bytes(data)


def zstd_of(plain: bytes, *, declare: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declare, write_checksum=False).compress(plain)


def lying_size(plain: bytes, *, declared: int) -> bytes:
    """A zstd frame of `plain` that declares another content size (magic 4, descriptor 1, maybe window 1, size 4)."""
    data = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(plain))
    assert data[4] >> 6 == 2, "a four-byte size"
    struct.pack_into("<I", data, 5 if data[4] & 0x20 else 6, declared)
    assert zstandard.get_frame_parameters(bytes(data)).content_size == declared
    return bytes(data)


ZEROS = bytes(40 << 20)


@cache
def hostile_frames() -> dict[str, bytes]:
    """Some kilobytes each; what the bombs hold, or sizes lie about, is larger than `CHEAP_BYTES`."""
    of_sets, of_lz4 = np.tile(random_ids(500), (16, 1, 1)), np.tile(random_ids(1), (8000, 1, 1))
    zstd_payloads = {
        "bomb": zstd_of(ZEROS), "undeclared": zstd_of(ZEROS, declare=False), "nested": zstd_of(zstd_of(ZEROS)),
        "lying": lying_size(ZEROS, declared=8000 * 24), "trailing": zstd_of(bytes(8000 * 24)) + b"more",
        "short": zstd_of(bytes(8000 * 24 - 1)), "skippable": b"\x50\x2a\x4d\x18" + struct.pack("<I", 16) + bytes(16),
        "empty": b"",
    }  # fmt: skip
    lz4_payloads = {
        "bomb": lz4.block.compress(ZEROS, store_size=False),
        "short": lz4.block.compress(bytes(8000 * 24 - 1), store_size=False),
        "noise": b"\xff" * 99,
    }
    frames = dict[str, bytes]()
    for codec, ids, payloads in (("set", of_sets, zstd_payloads), ("lz4", of_lz4, lz4_payloads)):
        for name, payload in payloads.items():
            frames[f"{codec} {name}"] = with_payload(ids, spec=SPEC, codec=codec, payload=payload)
    good = encode_frame(SPEC, expert_ids_TLK=random_ids(10))
    fields = (28, 4), (32, 4), (36, 4), (40, 4), (44, 4), (48, 8), (56, 8), (26, 2), (80, 4)
    for (at, width), value in product(fields, (2**24, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)):
        lying = bytearray(good)
        lying[at : at + width] = min(value, 2 ** (8 * width) - 1).to_bytes(width, "little")
        rehash(lying)
        frames[f"size at {at}: {value}"] = bytes(lying)
    return frames


CHEAP_BYTES = 32 << 20


def refusing_bombs_and_lying_sizes() -> Iterator[None]:
    frames = hostile_frames()
    refused(frames["set short"])
    refused(frames["lz4 short"])
    yield
    for data in frames.values():
        refused(data)


def test_bombs_and_lying_sizes_are_refused_before_they_take_memory() -> None:
    assert growth_of(refusing_bombs_and_lying_sizes).peak < CHEAP_BYTES < len(ZEROS)


def test_a_coded_chunk_that_is_called_stored_is_refused_when_it_is_parsed() -> None:
    ids_TLK = np.tile(random_ids(1), (10, 1, 1))
    data = bytearray(encode_frame(SPEC, expert_ids_TLK=ids_TLK, codec="lz4"))
    codec_at = data.index(bytes([LZ4.codec_id, 0, 0, 0]), HEADER_BYTES + 24 + 8 * SPEC.num_moe_layers)
    data[codec_at] = STORED.codec_id
    rehash(data)
    with pytest.raises(errors.FrameCorrupt, match=r"chunk 0 is .*expected .* in \d+ to \d+ bytes"):
        parse_frame(bytes(data), spec=SPEC)


def refused(data: bytes) -> None:
    with pytest.raises((errors.FrameError, errors.RowCountMismatch)):
        parse_frame(data, spec=SPEC).routing(sample_id="s")


def test_a_decoder_writes_nothing_past_its_output() -> None:
    rng = random.Random(3)
    for codec in (LZ4, PACKED9, SET, STORED):
        guarded = np.full((12, 2, 8), 99, np.int16)
        for _ in range(300):
            try:
                codec.decode_into(memoryview(rng.randbytes(rng.randrange(1, 300))), guarded[4:8])
            except errors.FrameCorrupt:
                continue
        assert (guarded[:4] == 99).all() and (guarded[8:] == 99).all(), codec.name


def test_an_encoder_that_repeats_an_expert_in_a_set_is_found_out() -> None:
    plain = np.zeros((8, 10 * 3), np.uint8)
    plain[1:] = 1
    plain[4, 7] = 0
    data = with_payload(random_ids(10), spec=SPEC, codec="set", payload=zstd_of(plain.tobytes()))
    with pytest.raises(errors.FrameCorrupt, match="do not increase"):
        parse_frame(data, spec=SPEC).ids()
