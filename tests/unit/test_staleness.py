"""Rows beside the trainer's weight version: counted, masked out of the loss, or refused by sample."""

from __future__ import annotations

import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, RowsStale, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.staleness import UNKNOWN
from r3channel.wire.routing import ProvenanceSpan, RowKind
from tests.samples import SPEC


def span(start: int, end: int, version: int, kind: RowKind = RowKind.DECODED) -> ProvenanceSpan:
    return ProvenanceSpan(start=start, end=end, weight_version=version, kind=kind)


def sample(
    name: str, tokens: int, *spans: ProvenanceSpan, invalid: tuple[tuple[int, int], ...] = ()
) -> TicketSample:
    return TicketSample(name, tokens, 7, 7, spans, invalid)


MIXED = sample("a", 9, span(0, 3, 4, RowKind.PREFILLED), span(3, 6, 5), span(6, 8, 7))
FRESH = sample("b", 5, span(0, 4, 7))


def make(*samples: TicketSample, layout: TrainerLayout | None = None, cp: int = 0) -> RankShard:
    samples = samples or (MIXED, FRESH)
    assignment = Assignment.given([[[sample.sample_id for sample in samples]]])
    ticket = Ticket("run", 3, SPEC, layout or TrainerLayout(), assignment, samples, 1 << 20)
    shard = ticket.plan.shard(dp=0, pp=0, cp=cp)
    return RankShard(
        ticket, shard, torch.zeros(shard.slot_bytes, dtype=torch.uint8), tp=0, invalid_rows="live"
    )


def test_each_token_knows_how_many_updates_lie_behind_its_row() -> None:
    shard = make()
    shard.set_version(7)
    lags = shard.lags(0)
    assert lags[0].tolist() == [3, 3, 3, 2, 2, 2, 0, 0, UNKNOWN]
    assert lags[1].tolist() == [0] * 4 + [UNKNOWN] * 5


def test_a_version_that_no_counter_reaches_is_stale_and_no_error() -> None:
    shard = make(sample("a", 5, span(0, 4, -(2**63))))
    with pytest.raises(RowsStale, match=r"a \(4 rows\)"):
        shard.set_version(7, max_staleness=2, on_stale="reject")


def test_rows_are_counted_by_lag_and_missing_ones_are_not() -> None:
    holed = sample("c", 4, span(0, 1, 1), span(1, 3, 0, RowKind.MISSING), invalid=((1, 3),))
    shard = make(MIXED, FRESH, holed)
    counts = shard.set_version(7).counts(shard.sample_ids)
    assert counts == {"3": 3, "2": 3, "0": 6, "4_or_more": 1}
    assert make(MIXED).set_version(5).counts(("a",)) == {"1": 3, "0": 3, "ahead": 2}


def test_the_mask_policy_takes_stale_tokens_out_of_the_loss_and_no_others() -> None:
    shard = make()
    shard.set_version(7, max_staleness=2, on_stale="mask")
    assert shard.loss_mask_missed  # until somebody asks for it
    keep = shard.loss_mask(0)
    assert not shard.loss_mask_missed
    assert keep[0].tolist() == [False] * 3 + [True] * 6
    assert keep[1].tolist() == [True] * 5 + [False] * 4  # padding, as before

    shard.set_version(7, max_staleness=3, on_stale="mask")
    assert shard.loss_mask(0)[0].all()


def test_with_context_parallelism_each_rank_masks_its_own_tokens() -> None:
    layout = TrainerLayout(cp=2)
    masked = 0
    for cp in (0, 1):
        shard = make(MIXED, layout=layout, cp=cp)
        shard.set_version(7, max_staleness=2, on_stale="mask")
        sample, position = shard.shard.token_map(0)
        gone = (sample >= 0) & (position < 9) & ~shard.loss_mask(0).numpy()
        assert all(position[gone] < 3)
        masked += int(gone.sum())
    assert masked == 3


def test_accept_changes_nothing() -> None:
    shard = make()
    shard.set_version(7, max_staleness=0)
    assert not shard.loss_mask_missed
    before = make().loss_mask(0)
    assert torch.equal(shard.loss_mask(0), before)


def test_reject_names_the_samples_and_both_versions() -> None:
    shard = make()
    with pytest.raises(
        RowsStale, match=r"1 samples .*0 to 2 versions behind the trainer's 7: a \(3 rows\).*\[4, 5, 7\]"
    ) as refusal:
        shard.set_version(7, max_staleness=2, on_stale="reject")
    assert (refusal.value.samples, refusal.value.step) == (("a",), 3)
    shard.set_version(7, max_staleness=3, on_stale="reject")


def test_rows_ahead_of_the_trainer_are_outside_the_bound_too() -> None:
    with pytest.raises(RowsStale, match=r"a \(2 rows\), b \(4 rows\)"):
        make().set_version(6, max_staleness=9, on_stale="reject")


def test_misuse_is_named() -> None:
    with pytest.raises(UsageError, match="trainer's version"):
        make().lags(0)
    with pytest.raises(ConfigError, match="on_stale 'drop'"):
        ChannelConfig(on_stale="drop")
    with pytest.raises(ConfigError, match="max_staleness -2"):
        ChannelConfig(max_staleness=-2)
