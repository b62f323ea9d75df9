"""A frame's bytes become rows at rest in one pass; no bytes of any origin make the relay take more memory than it has said."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.engine.capture import UnfinishedFrame
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import RANGE_BYTES, SPAN_BYTES, beside_bytes
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.pd_merge import merge, merged_frame
from r3channel.relay.relay import Relay
from r3channel.relay.verify import MOST_ROWS, VerifiedRows
from r3channel.wire import header as frame_header
from r3channel.wire.codec import CHUNK_ROWS, CODECS, Entry, table_of
from r3channel.wire.digest import coefficients, layer_digests
from r3channel.wire.frame import encode_frame, parse_frame, sample_key
from r3channel.wire.header import FLAG_UNORDERED, Header, assemble, padding
from r3channel.wire.parcel import FrameReference
from r3channel.wire.routing import RowKind, SampleRouting, spans_of
from tests.support.direct import deliver, hello_of, reference_reply
from tests.support.memory import growth_of
from tests.support.samples import SPEC, WIDE, flipped, frame_of, random_ids, reply_of, span

MIB = 1 << 20
LZ4, SET = 1, 3
BESIDE = beside_bytes(SPEC, spans=1)


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = opened()
    yield relay
    relay.close()


def opened(*, context: int = 0, **options: Any) -> Relay:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(**options))
    relay.samples.engines.greet(hello_of(context=context))
    return relay


def claim(relay: Relay, name: str, tokens: int, *, serial: int) -> None:
    reply = reference_reply(name, tokens, serial=serial)
    del reply["meta_info"]["id"]
    relay.add(name, reply, range(tokens))


def arrived(relay: Relay) -> VerifiedRows:
    (rows,) = relay.samples.table.expire(before_s=0.0, unclaimed_s=math.inf)[1].values()
    assert isinstance(rows, VerifiedRows)
    return rows


@pytest.mark.parametrize("rows", [3, 65, 300])
def test_rows_that_no_router_wrote_are_missing_by_policy_at_any_length(rows: int) -> None:
    """A router that never reports its choices leaves zeros: `live` counts every row as invalid, `error` refuses the sample."""
    unfinished = UnfinishedFrame(SPEC, rows=rows, first_row=0, sample_key=sample_key("s"))
    unfinished.runs, unfinished.ids_TLK[:] = [(0, rows, 0, 1)], 0
    reply = reply_of(unfinished.encode().tobytes(), request_id="s")
    with closing(opened(invalid_rows="live")) as native, closing(opened()) as strict:
        native.add("s", reply, range(rows + 1))
        ticket = native.seal(0, Assignment.round_robin(["s"], dp=1, microbatch_size=1))
        native.abandon(0)
        assert ticket.samples[0].invalid == ((0, rows),)
        said = r"row 0, layer 1 repeats .* A zero-filled row looks"
        with pytest.raises(errors.ExpertIdInvalid, match=said):
            strict.add("s", reply, range(rows + 1))


# -- where rows lie ------------------------------------------------------------------------------------------------------


def test_rows_that_lie_in_a_frame_as_they_are_stay_where_it_was_received(relay: Relay) -> None:
    ids = random_ids(300, seed=2)
    deliver(relay, (1, encode_frame(SPEC, expert_ids_TLK=ids, codec="stored", sample_key=5)))
    rows = arrived(relay)
    assert np.array_equal(rows.ids_TLK, ids) and not rows.ids_TLK.flags.writeable
    assert np.shares_memory(rows.ids_TLK, np.frombuffer(rows.block.view, np.uint8))
    assert np.array_equal(rows.digests_L, layer_digests(ids, first_row=0))
    assert relay.status()["store"]["bytes"] == len(rows.block.view) + BESIDE


@pytest.mark.parametrize("codec", ["lz4", "set"])
def test_coded_rows_are_decoded_once_and_stay_decoded(relay: Relay, codec: str) -> None:
    ids = np.sort(np.tile(random_ids(1, seed=2), (300, 1, 1)))
    deliver(relay, (1, encode_frame(SPEC, expert_ids_TLK=ids, codec=codec)))
    assert np.array_equal(arrived(relay).ids_TLK, ids)
    assert relay.status()["store"] == {"frames": 1, "bytes": ids.nbytes + BESIDE}


def test_frames_that_are_refused_leave_no_memory_taken(relay: Relay) -> None:
    good = frame_of(50)
    for bad in (flipped(good, 8 * -4), good[:-3], b"x" * 200, good[:110]):
        with pytest.raises(errors.FrameError):
            deliver(relay, (1, bad))
        with pytest.raises(errors.FrameError):
            relay.add("s", reply_of(bad), range(50))
    twice = random_ids(49)
    twice[3, 1, 2] = twice[3, 1, 0]
    deliver(relay, (2, encode_frame(SPEC, expert_ids_TLK=twice)))  # told to its reply
    for serial in (1, 2):
        kept = relay.samples.table._unclaimed[11, serial].what
        assert isinstance(kept, errors.R3Error)
        assert kept.__traceback__ is kept.__cause__ is kept.__context__ is None  # they would hold its memory
    assert relay.status()["store"] == {"frames": 0, "bytes": 0}


# -- bytes that announce more than they weigh ----------------------------------------------------------------------------


def bomb(rows: int, *, codec: int, spec: RoutingSpec = SPEC) -> bytes:
    """A frame of well-formed bytes and true hashes: one row, `rows` times."""
    layers, k = spec.num_moe_layers, spec.top_k
    row_NLK = np.broadcast_to(np.arange(k, dtype=spec.id_dtype), (CHUNK_ROWS, layers, k)).copy()
    sizes = [end - start for start, end in pairwise([*range(0, rows, CHUNK_ROWS), rows])]
    wires = {size: bytes(CODECS[codec].encode(row_NLK[:size]) or b"") for size in set(sizes)}
    chunks = [Entry(at * CHUNK_ROWS, size, codec, len(wires[size])) for at, size in enumerate(sizes)]
    sections = frame_header.SPAN.pack(0, rows, 0, 0) + bytes(8 * layers) + table_of(chunks, layers=layers)
    sections += bytes(padding(len(sections)))
    header = Header(
        codec=codec, flags=FLAG_UNORDERED if codec == SET else 0, spec_digest=spec.digest,
        num_experts=spec.num_experts, top_k=k, num_moe_layers=layers, id_width=spec.id_dtype.itemsize,
        layers_per_chunk=layers, rows=rows, chunks=len(chunks), spans=1, sections_bytes=len(sections),
        raw_bytes=rows * spec.bytes_per_token, wire_bytes=sum(chunk.nbytes for chunk in chunks),
    )  # fmt: skip
    return assemble(header[:-2], sections) + b"".join(wires[size] for size in sizes)


def warm(relay: Relay) -> None:
    """What the first frame loads and compiles."""
    frame = encode_frame(SPEC, expert_ids_TLK=random_ids(300), codec="lz4", sample_key=sample_key("warm"))
    deliver(relay, (99, frame))
    claim(relay, "warm", 301, serial=99)
    relay.discard(["warm"])


def own_copy(data: bytes) -> bytes:
    """The caller's bytes, so that they count where memory is measured."""
    return bytes(memoryview(data))


def delivering_many_rows(codec: int, way: str) -> Iterator[None]:
    relay, data = opened(context=4096 if way == "frame first" else 0), bomb(MOST_ROWS, codec=codec)
    warm(relay)
    if way == "reference first":
        claim(relay, "s", 4096, serial=1)
    yield
    if way != "in the reply":
        deliver(relay, (1, own_copy(data)))
    assert relay.status()["store"] == {"frames": 0, "bytes": 0}
    with pytest.raises(errors.RowCountMismatch, match=r"1048576 rows, .* at most 409[56]\. Is the prompt"):
        if way == "reference first":
            relay.samples.table.take(["s"], step=0)
        elif way == "frame first":
            claim(relay, "s", 4096, serial=1)
        else:
            relay.add_frame("s", own_copy(data), range(4096))
    relay.close()


@pytest.mark.parametrize("codec", [LZ4, SET])
@pytest.mark.parametrize("way", ["reference first", "frame first", "in the reply"])
def test_a_frame_with_more_rows_than_allowed_is_not_decoded(codec: int, way: str) -> None:
    size = len(bomb(MOST_ROWS, codec=codec))
    assert size < MOST_ROWS * SPEC.bytes_per_token / 50
    assert growth_of(delivering_many_rows, codec, way).peak < 3 * size + MIB


DECODED_BYTES = MOST_ROWS * SPEC.bytes_per_token


def filling_the_store() -> Iterator[None]:
    relay, data = opened(), bomb(MOST_ROWS, codec=SET)
    warm(relay)
    coefficients(0, MOST_ROWS)  # 8 MiB, once in a process
    relay.samples.store.ceiling_bytes = 30 * MIB
    yield
    own = own_copy(data)
    for serial in (1, 2, 3):
        with pytest.raises((errors.StoreFull, errors.FrameCorrupt)):  # the digests are not true either
            deliver(relay, (serial, own), (serial + 10, own))
    relay.close()


def test_frames_of_an_engine_without_a_context_fit_the_store_or_are_not_taken(relay: Relay) -> None:
    """Each of them decodes to 24 MiB; the store has room for one."""
    data = bomb(MOST_ROWS, codec=SET)
    # One at a time, and what is said of its rows.
    assert growth_of(filling_the_store).peak < DECODED_BYTES + len(data) + 4 * MIB
    relay.samples.store.ceiling_bytes = 10 * MIB
    with pytest.raises(errors.StoreFull):
        deliver(relay, (9, data))
    assert relay.status()["store"] == {"frames": 0, "bytes": 0}
    with pytest.raises(errors.RowCountMismatch):
        deliver(relay, (8, bomb(MOST_ROWS + 1, codec=SET)))
        claim(relay, "s", MOST_ROWS + 2, serial=8)


# -- rows lie once -------------------------------------------------------------------------------------------------------


ROWS, ROWS_BYTES = 4_000, 4_000 * SPEC.bytes_per_token
COUNTED: dict[str, int] = dict.fromkeys(("stored", "lz4"), ROWS_BYTES + BESIDE)
COUNTED["spans"] = COUNTED["lz4"] + (ROWS - 1) * SPAN_BYTES + ROWS // 2 * RANGE_BYTES
"""What the store counts for a frame of each kind: rows as they are or coded, or a span for each and every other one invalid."""


def adding_replies(kind: str, replies: int) -> Iterator[None]:
    """Each body is the caller's own, as a reply's is, and goes with the call."""
    relay, ids_TLK = opened(invalid_rows="live"), random_ids(ROWS)
    tokens = np.arange(ROWS + 1, dtype=np.int32)
    each = [span(row, row + 1, 300 + row % 2) for row in range(ROWS)]
    many: dict[str, Any] = {"provenance": each, "valid_T": np.arange(ROWS) % 2 == 1}
    frame = encode_frame(
        SPEC, expert_ids_TLK=np.tile(ids_TLK[:1], (ROWS, 1, 1)) if kind == "lz4" else ids_TLK,
        codec="lz4" if kind == "lz4" else "stored", sample_key=sample_key("r0"), **many if kind == "spans" else {},
    )  # fmt: skip
    text = json.dumps(reply_of(frame)).encode()
    warm(relay)
    for number in range(replies + 1):
        relay.add_body(str(number), own_copy(text), tokens)
        if not number:
            relay.discard(["0"])
            relay.samples.store.trim(idle_s=0)
            yield
    assert relay.status()["store"]["bytes"] == replies * COUNTED[kind]
    yield
    relay.close()


@pytest.mark.parametrize(("kind", "replies"), [("stored", 500), ("lz4", 500), ("spans", 60)])
def test_what_came_in_replies_takes_the_memory_that_the_store_counts(kind: str, replies: int) -> None:
    growth, counted = growth_of(adding_replies, kind, replies), replies * COUNTED[kind]
    assert ROWS_BYTES * replies < growth.kept < 1.15 * counted
    assert growth.peak < 1.15 * counted + 8 * ROWS_BYTES


def flooding(good: bool) -> Iterator[None]:
    """Frames of one row each, as fast as they come, that no reply claims."""
    relay, frame = opened(), frame_of(2, expert_ids_TLK=random_ids(1) * good)  # or experts 0
    warm(relay)
    relay.samples.store.ceiling_bytes = 10 * MIB
    yield
    with pytest.raises(errors.StoreFull) if good else nullcontext():
        for serial in range(10_000):
            deliver(relay, (serial, frame))
    assert relay.status()["store"]["bytes"] <= 10 * MIB
    yield
    relay.close()


@pytest.mark.parametrize(("good", "most_bytes"), [(True, 10.8 * MIB), (False, 6.5 * MIB)])
def test_small_frames_that_nobody_claims_take_no_more_than_the_store_allows(
    good: bool, most_bytes: float
) -> None:
    """Those that are refused count nowhere: of the oldest the relay forgets why."""
    assert growth_of(flooding, good).peak < most_bytes


# -- rows of one request that two engines hold between them ------------------------------------------------------------


def routing(
    first_row: int, rows: int, *, version: int = 0, missing: tuple[int, ...] = (), seed: int = 0, spec=SPEC
) -> SampleRouting:
    """Decoded rows [first_row, first_row + rows); `missing` are positions without routing."""
    valid_T = np.ones(rows, dtype=bool)
    valid_T[[row - first_row for row in missing]] = False
    kinds_T = np.where(valid_T, RowKind.DECODED, RowKind.MISSING).astype(np.uint8)
    return SampleRouting(
        spec=spec, sample_id="s", tokens=first_row + rows + 1, first_row=first_row, valid_T=valid_T,
        expert_ids_TLK=random_ids(rows, spec=spec, seed=seed),
        provenance=spans_of(np.where(valid_T, version, -1), kinds_T, first_row=first_row),
    )  # fmt: skip


def test_a_row_that_both_engines_have_is_the_decode_engines_and_neither_side_is_changed() -> None:
    prefill, decode = routing(0, 4), routing(0, 9, missing=(0, 1, 2), seed=1)
    before = decode.expert_ids_TLK.copy()
    assert np.array_equal(merge(prefill, decode).expert_ids_TLK[3], before[3])
    assert np.array_equal(decode.expert_ids_TLK, before)


def test_a_row_that_neither_engine_has_stays_invalid() -> None:
    whole = merge(routing(0, 4, missing=(2,)), routing(0, 9, missing=(0, 1, 2, 3), seed=1))
    assert np.flatnonzero(~whole.valid_T).tolist() == [2]
    assert [(span.start, span.end) for span in whole.provenance if span.kind is RowKind.MISSING] == [(2, 3)]


def test_two_models_or_samples_are_not_merged() -> None:
    with pytest.raises(errors.RoutingError, match="different routing"):
        merge(routing(0, 4, spec=WIDE), routing(0, 9))
    with pytest.raises(errors.RoutingError, match="expected a beginning of the same sample"):
        merge(routing(0, 12), routing(0, 9))


def reply(routing: SampleRouting, request_id: str) -> dict[str, Any]:
    frame = encode_frame(
        SPEC, expert_ids_TLK=routing.expert_ids_TLK, valid_T=routing.valid_T, provenance=routing.provenance,
        sample_key=sample_key(request_id),
    )  # fmt: skip
    return reply_of(frame, request_id=request_id)


def test_prompt_rows_come_from_the_prefill_engine_and_the_rest_from_decode_under_its_request() -> None:
    prefill, decode = routing(0, 4, version=1), routing(0, 9, version=2, missing=(0, 1, 2, 3), seed=1)
    frame = parse_frame(merged_frame(reply(prefill, "p"), reply(decode, "d"), spec=SPEC), spec=SPEC)
    assert np.array_equal(frame.verify()[:4], prefill.expert_ids_TLK) and frame.valid_T.all()
    assert np.array_equal(frame.verify()[4:], decode.expert_ids_TLK[4:])
    assert (frame.sample_key, frame.provenance) == (sample_key("d"), (span(0, 4, 1), span(4, 9, 2)))


def test_a_half_that_was_damaged_is_not_merged() -> None:
    halves = reply(routing(0, 4), "p"), reply(routing(0, 9, missing=(0, 1, 2, 3), seed=1), "d")
    data = base64.b64decode(halves[0]["meta_info"]["routed_experts"])
    halves[0]["meta_info"]["routed_experts"] = base64.b64encode(flipped(data, 8 * -1)).decode()
    with pytest.raises(errors.FrameCorrupt, match="sample s"):
        merged_frame(*halves, spec=SPEC, sample_id="s")


def test_a_half_that_went_to_the_relay_is_not_there_to_merge() -> None:
    reference = FrameReference(sample_key=1, boot_id=3, serial=1, first_row=0, rows=4).to_bytes()
    with pytest.raises(errors.FrameMagicMismatch, match="sample s from engine prefill"):
        merged_frame(reply_of(reference, request_id="p"), reply(routing(0, 9), "d"), spec=SPEC, sample_id="s")
