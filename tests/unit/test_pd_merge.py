"""Rows of one request that two engines hold between them are put together, and told apart where they are not one."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from r3channel.errors import FrameCorrupt, FrameMagicMismatch, RoutingError
from r3channel.relay.pd_merge import merge, merged_frame
from r3channel.wire.frame import encode_frame, parse_frame, sample_key
from r3channel.wire.parcel import FrameReference
from r3channel.wire.routing import RowKind, SampleRouting, spans_of
from tests.support.samples import SPEC, WIDE, random_ids, reply_of, span


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


def test_prompt_rows_come_from_the_prefill_engine_and_the_rest_from_decode() -> None:
    prefill = routing(0, 4, version=1)
    decode = routing(0, 9, version=2, missing=(0, 1, 2, 3), seed=1)
    whole = merge(prefill, decode)
    assert whole.valid_T.all()
    assert np.array_equal(whole.expert_ids_TLK[:4], prefill.expert_ids_TLK)
    assert np.array_equal(whole.expert_ids_TLK[4:], decode.expert_ids_TLK[4:])
    assert whole.provenance == (span(0, 4, 1), span(4, 9, 2))


def test_a_row_that_both_engines_have_is_the_decode_engines() -> None:
    prefill, decode = routing(0, 4), routing(0, 9, missing=(0, 1, 2), seed=1)
    assert np.array_equal(merge(prefill, decode).expert_ids_TLK[3], decode.expert_ids_TLK[3])


def test_a_row_that_neither_engine_has_stays_invalid() -> None:
    whole = merge(routing(0, 4, missing=(2,)), routing(0, 9, missing=(0, 1, 2, 3), seed=1))
    assert np.flatnonzero(~whole.valid_T).tolist() == [2]
    assert [(span.start, span.end) for span in whole.provenance if span.kind is RowKind.MISSING] == [(2, 3)]


def test_merging_changes_neither_side() -> None:
    prefill, decode = routing(0, 4), routing(0, 9, missing=(0, 1), seed=1)
    before = decode.expert_ids_TLK.copy()
    merge(prefill, decode)
    assert np.array_equal(decode.expert_ids_TLK, before)


def test_two_models_or_samples_are_not_merged() -> None:
    with pytest.raises(RoutingError, match="different routing"):
        merge(routing(0, 4, spec=WIDE), routing(0, 9))
    with pytest.raises(RoutingError, match="expected a beginning of the same sample"):
        merge(routing(0, 12), routing(0, 9))


def reply(routing: SampleRouting, request_id: str) -> dict[str, Any]:
    frame = encode_frame(
        SPEC, expert_ids_TLK=routing.expert_ids_TLK, valid_T=routing.valid_T, provenance=routing.provenance,
        sample_key=sample_key(request_id),
    )  # fmt: skip
    return reply_of(frame, request_id=request_id)


def test_the_replies_of_both_engines_give_one_frame_of_the_decode_engines_request() -> None:
    halves = routing(0, 4, version=1), routing(0, 9, version=2, missing=(0, 1, 2, 3), seed=1)
    whole = merge(*halves)
    data = merged_frame(reply(halves[0], "p"), reply(halves[1], "d"), spec=SPEC)
    frame = parse_frame(data, spec=SPEC)
    assert np.array_equal(frame.verify(), whole.expert_ids_TLK)
    assert (frame.sample_key, frame.provenance) == (sample_key("d"), whole.provenance)


def test_a_half_that_was_damaged_is_not_merged() -> None:
    halves = reply(routing(0, 4), "p"), reply(routing(0, 9, missing=(0, 1, 2, 3), seed=1), "d")
    data = bytearray(base64.b64decode(halves[0]["meta_info"]["routed_experts"]))
    data[-1] ^= 1
    halves[0]["meta_info"]["routed_experts"] = base64.b64encode(data).decode()
    with pytest.raises(FrameCorrupt, match="sample s"):
        merged_frame(*halves, spec=SPEC, sample_id="s")


def test_a_half_that_went_to_the_relay_is_not_there_to_merge() -> None:
    reference = FrameReference(sample_key=1, boot_id=3, serial=1, first_row=0, rows=4).to_bytes()
    with pytest.raises(FrameMagicMismatch, match="sample s from engine prefill"):
        merged_frame(reply_of(reference, request_id="p"), reply(routing(0, 9), "d"), spec=SPEC, sample_id="s")
