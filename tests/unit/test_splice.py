"""Rows of one request that two engines hold between them are put together, and told apart where they are not one."""

from __future__ import annotations

import numpy as np
import pytest

from r3channel.errors import RoutingError
from r3channel.relay.arrival.splice import frame_of, merge
from r3channel.routing import ProvenanceSpan, RowKind, SampleRouting, spans_of
from r3channel.wire.frame import parse_frame
from tests.samples import SPEC, WIDE, random_ids


def routing(
    first_row: int, rows: int, *, version: int = 0, missing: tuple[int, ...] = (), seed: int = 0, spec=SPEC
) -> SampleRouting:
    """Decoded rows [first_row, first_row + rows); `missing` are positions without routing."""
    valid_T = np.ones(rows, dtype=bool)
    valid_T[[row - first_row for row in missing]] = False
    return SampleRouting(
        spec=spec,
        sample_id="s",
        tokens=first_row + rows + 1,
        first_row=first_row,
        expert_ids_TLK=random_ids(rows, spec=spec, seed=seed),
        valid_T=valid_T,
        provenance=spans_of(
            np.where(valid_T, version, -1),
            np.where(valid_T, RowKind.DECODED, RowKind.MISSING).astype(np.uint8),
            first_row=first_row,
        ),
    )


def test_prompt_rows_come_from_the_prefill_engine_and_the_rest_from_decode() -> None:
    prefill = routing(0, 4, version=1)
    decode = routing(0, 9, version=2, missing=(0, 1, 2, 3), seed=1)
    whole = merge(prefill, decode)
    assert whole.valid_T.all()
    assert np.array_equal(whole.expert_ids_TLK[:4], prefill.expert_ids_TLK)
    assert np.array_equal(whole.expert_ids_TLK[4:], decode.expert_ids_TLK[4:])
    assert whole.provenance == (
        ProvenanceSpan(start=0, end=4, weight_version=1, kind=RowKind.DECODED),
        ProvenanceSpan(start=4, end=9, weight_version=2, kind=RowKind.DECODED),
    )


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


def test_two_models_are_not_merged() -> None:
    with pytest.raises(RoutingError, match="different routing"):
        merge(routing(0, 4, spec=WIDE), routing(0, 9))


def test_rows_of_another_sample_are_not_merged() -> None:
    with pytest.raises(RoutingError, match="expected a beginning of the same sample"):
        merge(routing(0, 12), routing(0, 9))


def test_a_merged_routing_is_a_frame_again() -> None:
    whole = merge(routing(0, 4, version=1), routing(0, 9, version=2, missing=(0, 1, 2, 3), seed=1))
    frame = parse_frame(frame_of(whole, sample_key=7), spec=SPEC)
    assert np.array_equal(frame.verify(), whole.expert_ids_TLK)
    assert (frame.sample_key, frame.provenance) == (7, whole.provenance)
