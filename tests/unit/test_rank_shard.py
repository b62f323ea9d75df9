"""Rows without engine routing at the trainer: refused, left to the live router, or masked; and what a trainer must agree on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3channel.errors import RowsInvalid, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.receiver import check_lengths
from r3channel.trainer.shard import RankShard
from tests.samples import SPEC


def make(
    layout: TrainerLayout, *, policy: str, tp: int = 0, invalid: tuple[tuple[int, int], ...] = ((2, 4),)
):
    samples = (
        TicketSample("a", 9, 7, 7, (), invalid, ((8, 0),)),
        TicketSample("b", 5, 7, 7, (), (), ((4, 0),)),
    )
    ticket = Ticket("run", 3, SPEC, layout, Assignment.given([[["a", "b"]]]), samples, 1 << 20)
    shard = ticket.plan.shard(dp=0, pp=0)
    data = torch.zeros(shard.slot_bytes, dtype=torch.uint8)
    return RankShard(ticket, shard, data, tp=tp, invalid_rows=policy)


def named(shard: RankShard, flags: torch.Tensor) -> set[tuple[int, int]]:
    """(sample, position) of the flagged rows; padding is (-1, -1)."""
    sample, position = shard.shard.row_map(0, tp=shard.tp)
    at = np.flatnonzero(flags.numpy())
    return set(zip(sample[at].tolist(), position[at].tolist(), strict=True))


def test_policy_error_refuses_the_ticket_and_names_sample_and_rows() -> None:
    with pytest.raises(RowsInvalid, match=r"sample.* a .*\(2, 4\).*policy: error") as refusal:
        make(TrainerLayout(), policy="error")
    assert (refusal.value.samples, refusal.value.step) == (("a",), 3)
    make(TrainerLayout(), policy="error", invalid=())


@pytest.mark.parametrize("policy", ["native", "mask"])
def test_the_live_router_chooses_for_rows_without_routing_only(policy: str) -> None:
    shard = make(TrainerLayout(), policy=policy)
    live = shard.live_rows(0)
    assert live is not None and named(shard, live) == {(0, 2), (0, 3)}
    assert shard.live_counts() == {"invalid": 2, "padding": 0}


def test_nothing_is_live_where_every_row_has_routing() -> None:
    assert make(TrainerLayout(), policy="native", invalid=()).live_rows(0) is None


def test_pad_policy_native_leaves_padding_and_last_tokens_to_the_live_router() -> None:
    shard = make(TrainerLayout(pad_policy="native"), policy="native")
    live = shard.live_rows(0)
    assert live is not None and named(shard, live) == {(0, 2), (0, 3), (-1, -1)}
    assert int(live.sum()) == 2 + 18 - 8 - 4
    assert shard.live_counts() == {"invalid": 2, "padding": 18 - 8 - 4}


def test_audited_rows_are_those_that_an_engine_computed() -> None:
    shard = make(TrainerLayout(tp=2), policy="native", tp=0)
    rows = {(s, p) for s, n in ((0, 8), (1, 4)) for p in range(min(n, 5))} - {(0, 2), (0, 3)}
    assert named(shard, shard.counted_rows(0)) == rows


@pytest.mark.parametrize(("policy", "masked"), [("native", set()), ("mask", {2, 3})])
def test_only_the_mask_policy_takes_tokens_out_of_the_loss(policy: str, masked: set[int]) -> None:
    keep = make(TrainerLayout(), policy=policy).loss_mask(0)
    assert keep.shape == (2, 9)
    assert [p for p in range(9) if not keep[0, p]] == sorted(masked)
    assert keep[1].tolist() == [True] * 5 + [False] * 4


def test_another_number_of_micro_batches_is_refused_with_both_numbers() -> None:
    shard = make(TrainerLayout(), policy="native")
    with pytest.raises(TicketMismatch, match=r"1 micro-batches planned, this trainer runs 2") as refusal:
        check_lengths(shard.ticket, shard.shard, [[9], [5]])
    assert (refusal.value.ranks, refusal.value.step) == (((0, 0, 0),), 3)


def test_other_sequence_lengths_are_refused_with_both_values() -> None:
    shard = make(TrainerLayout(), policy="native")
    check_lengths(shard.ticket, shard.shard, [[9, 5]])
    with pytest.raises(
        TicketMismatch, match=r"micro-batch 0: samples of \(9, 5\) tokens planned.*\(9, 6\)"
    ) as refusal:
        check_lengths(shard.ticket, shard.shard, [[9, 6]])
    assert (refusal.value.samples, refusal.value.ranks) == (("a", "b"), ((0, 0, 0),))
