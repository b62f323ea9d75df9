"""What a model is given, held against the ticket: another layout is refused with its cause, with or without tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from examples.embedded.bench.operations import Operations
from examples.embedded.model import VOCAB_SIZE
from r3channel.errors import TicketMismatch
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.row_order import RowTable
from r3channel.plan.ticket import TicketSample
from r3channel.trainer.model_tokens import ModelTokens, say_once
from r3channel.trainer.rank_shard import RankShard
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.engine.host_copies import HostCopies
from tests.unit.test_rank_shard import shard_of

LENGTHS = (17, 5, 9)
TOKENS = [np.random.default_rng(n).integers(4, VOCAB_SIZE, n).tolist() for n in LENGTHS]
PADDED, PACKED = TrainerLayout(), TrainerLayout(packing="thd")
LEFT, ORDER = "padded on the left", "in the order [2, 1, 0]"


def rank_of(layout: TrainerLayout, *, cp: int = 0) -> RankShard:
    hashes = [hash_tokens(as_tokens(own)) for own in TOKENS]
    samples = [TicketSample(f"s{at}", len(own), hashes[at], 0, ()) for at, own in enumerate(TOKENS)]
    return shard_of(samples, layout, cp=cp)


def planned(layout: TrainerLayout, *, cp: int = 0, tokens: Any = TOKENS) -> torch.Tensor:
    return rank_of(layout, cp=cp).model_input(0, tokens)[0]


def left_padded(layout: TrainerLayout, cp: int = 0) -> torch.Tensor:
    whole = max(LENGTHS) + -max(LENGTHS) % (2 * layout.cp if layout.cp > 1 else 1)
    return planned(layout, cp=cp, tokens=[[0] * (whole - len(own)) + own for own in TOKENS])


def refusal_of(rank: RankShard, ids: torch.Tensor, *, given: bool) -> str:
    with pytest.raises(TicketMismatch) as refusal:
        ModelTokens(rank, [TOKENS] if given else None).check(0, ids)
    assert refusal.value.step == 3 and refusal.value.samples[0] in ("s0", "s1", "s2")
    return str(refusal.value)


@pytest.mark.parametrize("given", [True, False], ids=["tokens", "hashes"])
@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
def test_a_batch_as_planned_passes_in_either_shape_whatever_its_padding(
    layout: TrainerLayout, given: bool
) -> None:
    rank, ids = rank_of(layout), planned(layout)
    ids[rank.padding_mask(0)] = 3
    check = ModelTokens(rank, [TOKENS] if given else None)
    check.check(0, ids)
    check.check(0, ids.T.flatten().int())
    check.verified()


@pytest.mark.parametrize("given", [True, False], ids=["tokens", "hashes"])
def test_left_padding_and_another_order_are_found(given: bool) -> None:
    padded, packed = rank_of(PADDED), rank_of(PACKED)
    assert LEFT in refusal_of(padded, left_padded(PADDED), given=given)
    assert ORDER in refusal_of(padded, planned(PADDED).flip(0), given=given)
    reversed_pack = torch.tensor([[token for own in reversed(TOKENS) for token in own]])
    assert ORDER in refusal_of(packed, reversed_pack, given=given)
    other = planned(PADDED, tokens=[[1] * n for n in LENGTHS])
    assert "of another batch" in refusal_of(padded, other, given=given)


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize(("by", "side"), [(1, "right"), (-1, "left")])
def test_ids_that_are_shifted_by_one_are_found(layout: TrainerLayout, by: int, side: str) -> None:
    rows = [np.roll(own, by).tolist() for own in TOKENS]
    said = refusal_of(rank_of(layout), planned(layout, tokens=rows), given=True)
    assert f"shifted to the {side}" in said and "'s0' at its position 0" in said


@pytest.mark.parametrize("cp", [0, 1])
@pytest.mark.parametrize("packing", ["padded", "thd"])
def test_another_cut_over_context_parallel_ranks_is_found(packing: str, cp: int) -> None:
    layout = TrainerLayout(cp=2, packing=packing)
    rank, whole = rank_of(layout, cp=cp), RowTable(rank_of(layout).shard.microbatches, TrainerLayout())
    ModelTokens(rank, [TOKENS]).check(0, planned(layout, cp=cp))
    other = replace(rank.shard, table=whole, cp=0).lay_out(0, [as_tokens(own) for own in TOKENS])
    contiguous = torch.from_numpy(np.split(other, 2, axis=1)[cp])
    assert "cut contiguous, planned zigzag" in refusal_of(rank, contiguous, given=True)
    if packing == "padded":
        assert LEFT in refusal_of(rank, left_padded(layout, cp), given=True)


def test_without_tokens_a_part_of_a_sample_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    for _ in range(2):
        ModelTokens(rank_of(TrainerLayout(cp=2))).check(0, torch.zeros(1, 20))
    assert len(caplog.records) == 1 and "sees parts of samples" in caplog.text


def test_a_gpus_ids_are_noted_in_one_operation_and_read_when_the_step_is_verified() -> None:
    check = ModelTokens(rank_of(PADDED), [TOKENS])
    check._at_once = False  # as on a GPU
    ids = planned(PADDED)
    with HostCopies() as copies, Operations() as operations:
        check.check(0, ids)
    assert operations.names == ["aten::clone"] and copies.blocking == []
    check.check(0, wrong := ids.flip(0))
    wrong.zero_()  # the loop may use its memory again
    with pytest.raises(TicketMismatch, match=r"in the order \[2, 1, 0\]"):
        check.verified()
    check.verified()
