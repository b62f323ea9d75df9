"""Turns of one sample at the relay's door: new rows are appended, everything that does not fit is refused by name."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.recording import Recorder, Recording, step_folder
from r3channel.relay.relay import Relay
from r3channel.routing import ProvenanceSpan, RowKind
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame, parse_frame, sample_key
from tests.samples import SPEC, random_ids, reply_of

IDS = random_ids(40, seed=5)
TOKENS = list(range(100, 141))


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(backend="loopback"))
    yield relay
    relay.close()


def turn(first_row: int, end: int, *, version: int = 0, digests: bool = True) -> dict[str, Any]:
    """The reply of a turn that returns rows [first_row, end)."""
    span = ProvenanceSpan(start=first_row, end=end, weight_version=version, kind=RowKind.DECODED)
    data = encode_frame(
        SPEC,
        expert_ids_TLK=IDS[first_row:end],
        first_row=first_row,
        provenance=[span],
        sample_key=sample_key("r"),
        row_digests=digests,
    )
    return reply_of(data, request_id="r")


def held(relay: Relay) -> Any:
    sample = relay._inbox.held("s")
    assert sample is not None
    return parse_frame(relay._store.get(sample.key), spec=SPEC)


def test_later_turns_add_their_rows_only(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    for first_row, end in ((10, 25), (25, 26), (26, 40)):
        assert relay.rows_held("s") == first_row
        relay.add("s", turn(first_row, end), TOKENS[: end + 1], append=True)
    assert np.array_equal(held(relay).decode(), IDS)
    assert relay.metrics.value("r3channel_rows_total") == 40
    assert relay.metrics.value("r3channel_samples_total", outcome="received") == 1


def test_rows_keep_the_weight_version_of_their_turn(relay: Relay) -> None:
    relay.add("s", turn(0, 10, version=1), TOKENS[:11])
    relay.add("s", turn(10, 40, version=4), TOKENS, append=True)
    assert [(span.end, span.weight_version) for span in held(relay).provenance] == [(10, 1), (40, 4)]


def test_the_engines_digests_add_up_over_turns(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    relay.add("s", turn(10, 40), TOKENS, append=True)
    expected = layer_digests(IDS, positions_T=np.arange(40), layers_L=SPEC.moe_layers)
    assert np.array_equal(held(relay).digests_L, expected)


@pytest.mark.parametrize(
    ("first_row", "error"), [(11, errors.RowGap), (9, errors.RowOverlap), (0, errors.RowOverlap)]
)
def test_a_gap_or_an_overlap_is_refused_and_the_held_rows_stay(
    relay: Relay, first_row: int, error: type[Exception]
) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    with pytest.raises(error, match=r"sample s from engine e: .*expected to begin at row 10"):
        relay.add("s", turn(first_row, 20), TOKENS[:21], append=True, engine="e")
    assert relay.rows_held("s") == 10
    relay.add("s", turn(10, 20), TOKENS[:21], append=True)
    assert np.array_equal(held(relay).decode(), IDS[:20])


def test_a_turn_whose_earlier_tokens_changed_is_refused(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    changed = [*TOKENS[:4], 7, *TOKENS[5:21]]
    with pytest.raises(errors.TokensChanged, match="first 10 tokens differ"):
        relay.add("s", turn(10, 20), changed, append=True)


def test_the_last_token_of_a_turn_may_change_because_it_has_no_row_yet(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    relay.add("s", turn(10, 20), [*TOKENS[:10], 7, *TOKENS[11:21]], append=True)


def test_a_turn_of_a_sample_that_is_not_here_is_refused(relay: Relay) -> None:
    with pytest.raises(errors.SampleUnknown, match="no turn to append to"):
        relay.add("s", turn(10, 20), TOKENS[:21], append=True)


def test_a_whole_sample_that_comes_again_is_not_taken_for_a_turn(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    with pytest.raises(errors.SampleTwice):
        relay.add("s", turn(0, 20), TOKENS[:21])


def test_a_turn_without_append_is_refused(relay: Relay) -> None:
    with pytest.raises(errors.RowCountMismatch, match="start offset set without append"):
        relay.add("s", turn(10, 20), TOKENS[:21])


def test_a_step_records_the_joined_rows(tmp_path: Any) -> None:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(backend="loopback"), recorder=Recorder(tmp_path))
    relay.add("s", turn(0, 10), TOKENS[:11])
    relay.add("s", turn(10, 40), TOKENS, append=True)
    relay.seal(0, Assignment.round_robin(["s"], dp=1, microbatch_size=1))
    deadline_s = time.monotonic() + 20
    while (
        not step_folder(tmp_path, 0).exists() and time.monotonic() < deadline_s
    ):  # written in the background
        time.sleep(0.01)
    recording = Recording.load(step_folder(tmp_path, 0))
    assert np.array_equal(recording.frame("s").decode(), IDS)
    with pytest.raises(errors.StepError):
        relay.close()


def test_a_sample_that_cannot_be_kept_is_told_and_the_next_ones_come_in(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(errors.StepError, match="sample s from engine"):
        patch.setattr(relay._store, "put", broken)
        relay.add("s", turn(0, 10), TOKENS[:11])
    assert not relay.holds("s")
    relay.add("s", turn(0, 10), TOKENS[:11])
    relay.add("t", turn(0, 10), TOKENS[:11])
    relay.discard(["s", "t"])
