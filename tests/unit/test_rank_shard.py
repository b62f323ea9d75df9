"""One rank's rows, and what its model is given: refused, left to the live router, masked, held against digests and ticket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.embedded.bench.operations import Operations
from examples.embedded.model import VOCAB_SIZE
from r3channel.errors import DigestMismatch, RowsInvalid, RowsStale, TicketMismatch, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import Placement
from r3channel.plan.row_order import RowTable
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.model_tokens import ModelTokens, say_once
from r3channel.trainer.rank_shard import RankShard, slot_parts
from r3channel.trainer.staleness import UNKNOWN
from r3channel.wire.routing import RowKind, as_tokens, hash_tokens
from tests.engine.host_copies import HostCopies
from tests.support.plans import Step, steps
from tests.support.samples import SPEC, random_ids, span, sparse


def shard_of(
    samples: Sequence[TicketSample], layout: TrainerLayout, *, cp: int = 0, tp: int = 0, policy: str = "live"
) -> RankShard:
    assignment = Assignment.given([[[sample.sample_id for sample in samples]]])
    ticket = Ticket("run", 3, SPEC, layout, assignment, samples, 1 << 20)
    shard = ticket.plan.shard(dp=0, pp=0, cp=cp)
    return RankShard(
        ticket, shard, torch.zeros(shard.slot_bytes, dtype=torch.uint8), tp=tp, invalid_rows=policy
    )


def make(layout: TrainerLayout, *, policy: str, tp: int = 0, invalid: Sequence[tuple[int, int]] = ((2, 4),)):
    samples = TicketSample("a", 9, 7, 7, (), tuple(invalid)), TicketSample("b", 5, 7, 7, ())
    return shard_of(samples, layout, tp=tp, policy=policy)


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


@pytest.mark.parametrize(("policy", "pads"), [("live", "spread"), ("mask", "spread"), ("live", "live")])
def test_the_live_router_chooses_for_rows_without_routing_and_for_padding_where_told(
    policy: str, pads: str
) -> None:
    shard = make(TrainerLayout(pad_policy=pads), policy=policy)
    live, padding = shard.live_rows(0), 18 - 8 - 4 if pads == "live" else 0
    assert live is not None and int(live.sum()) == 2 + padding
    assert named(shard, live) == {(0, 2), (0, 3)} | ({(-1, -1)} if padding else set())
    assert shard.live_counts() == {"invalid": 2, "padding": padding}
    assert make(TrainerLayout(), policy=policy, invalid=()).live_rows(0) is None


@pytest.mark.parametrize(("policy", "masked"), [("live", set()), ("mask", {2, 3})])
def test_only_the_mask_policy_takes_tokens_out_of_the_loss(policy: str, masked: set[int]) -> None:
    keep = make(TrainerLayout(), policy=policy).loss_mask(0)
    assert keep.shape == (2, 9)
    assert [p for p in range(9) if not keep[0, p]] == sorted(masked)
    assert keep[1].tolist() == [True] * 5 + [False] * 4


def test_padding_is_where_no_token_is_and_padding_rows_are_where_no_engine_row_is() -> None:
    shard = make(TrainerLayout(), policy="live")
    assert shard.padding_mask(0).tolist() == [[False] * 9, [False] * 5 + [True] * 4]
    rows = shard.padding_rows(0).view(9, 2).T  # row = position * samples + sample
    assert rows.tolist() == [[False] * 8 + [True], [False] * 4 + [True] * 5]


# -- rows as a router is handed them, beside the engine's digests ---------------------------------------------------------


def ranks_of(step: Step, shard: Shard) -> list[RankShard]:
    """One for each TP slot, with the digests that placement found."""
    whole_N = np.empty(shard.nbytes, np.uint8)
    stream = Stream.of(step.ticket, shard)
    placement = Placement(stream, whole_N)
    digests = placement.new_digests()
    placement.pads()
    placement.rows(step.source(stream), digests, begin=0)
    parts = slot_parts(shard, torch.from_numpy(whole_N))
    return [
        RankShard(
            step.ticket, shard, torch.cat([batch[slot] for batch in parts]), tp=slot, invalid_rows="live",
            digests_SL=torch.from_numpy(digests[slot].view(np.int64)),
        )
        for slot in range(shard.tp_slots)
    ]  # fmt: skip


def calls(rank: RankShard) -> list[tuple[int, int]]:
    return [(index, layer) for index in range(rank.num_microbatches) for layer in rank.shard.layers]


@settings(max_examples=60)
@given(step=steps())
def test_every_router_is_handed_what_the_engine_hashed_in_any_layout(step: Step) -> None:
    for shard in step.shards:
        for rank in ranks_of(step, shard):
            for index, layer in calls(rank):
                ids = rank.layer_ids(index, layer)
                assert rank.check_digest(index, layer, ids).equal(ids.long())
            rank.verify()


@settings(max_examples=60)
@given(step=steps(), noted=st.booleans(), kept=st.booleans(), data=st.data())
def test_one_changed_id_is_named_before_the_step_ends(
    step: Step, noted: bool, kept: bool, data: st.DataObject
) -> None:
    """`noted`: as on a GPU, where nothing is known before `verified`. `kept`: outside of the shard, for a recompute."""
    rank = data.draw(st.sampled_from([rank for shard in step.shards for rank in ranks_of(step, shard)]))
    whole_N = rank.data_N.clone()
    if noted:
        rank.digests._host_SL = None
    for index, layer in calls(rank):
        rank.data_N[:] = whole_N
        rank.digests._ahead.clear()  # as by another pass
        ids = rank.layer_ids(index, layer).clone() if kept else rank.layer_ids(index, layer)
        row = data.draw(st.integers(0, len(ids) - 1))
        ids[row, 0] = (int(ids[row, 0]) + 1) % rank.shard.spec.num_experts
        sample = int(rank.shard.row_map(index, tp=rank.tp)[0][row])
        if not bool(rank.counted_rows(index)[row]):  # nobody hashed it: padding, or no routing
            rank.check_digest(index, layer, ids)
            rank.verify()
            continue
        with pytest.raises(DigestMismatch, match=f"decoder layer {layer} .*micro-batch {index}") as refusal:
            rank.check_digest(index, layer, ids)
            assert noted, "it was used before it was looked at"
            rank.verify()
        assert refusal.value.samples == (rank.shard.microbatches[index].sample_ids[sample],)
        assert (refusal.value.ranks, refusal.value.step) == ((rank.shard.key,), step.ticket.step)


def two_samples(layers: int = 2, layout: str = "") -> RankShard:
    """Two micro-batches of one sample each, as on a GPU."""
    names, spec = ("a", "b"), sparse(layers, experts=128, top_k=8)
    samples = [TicketSample(name, 9, 0, 0, ()) for name in names]
    assignment = Assignment.given([[[name] for name in names]])
    ticket = Ticket("run", 1, spec, TrainerLayout.parse(layout), assignment, samples, 1 << 20)
    ids = {name: random_ids(8, spec=spec, seed=seed) for seed, name in enumerate(names)}
    (rank,) = ranks_of(step := Step(ticket, ids, 0), step.shards[0])
    rank.digests._host_SL = None
    return rank


@pytest.mark.parametrize("passes", [(True, False), (False, True)], ids=["forward", "recompute"])
def test_a_difference_in_either_pass_is_kept_until_the_device_is_asked(passes: tuple[bool, bool]) -> None:
    rank = two_samples()
    for wrong in passes:
        rank.check_digest(0, 0, rank.layer_ids(1 if wrong else 0, 0))
    with pytest.raises(DigestMismatch, match=r"of samples \['a'\]"):
        rank.verify()


def test_a_device_keeps_one_micro_batch_widened_whatever_layers_a_pass_leaves_out() -> None:
    rank = two_samples()
    for index in range(2):
        rank.check_digest(index, 0, rank.layer_ids(index, 0))
        assert list(rank.digests._ahead) == [index]
    rank.check_digest(1, 1, rank.layer_ids(1, 1))
    assert rank.digests._ahead == {}


def test_a_device_widens_and_checks_the_layers_of_the_chunk_that_runs() -> None:
    rank = two_samples(8, "pp=2,vpp=2")
    rank.layer_ids(1, 5)[0] += 1
    for index, layer in ((index, first + more) for first in (0, 4) for index in (0, 1) for more in (0, 1)):
        wide = rank.check_digest(index, layer, ids := rank.layer_ids(index, layer))
        assert torch.equal(wide, ids) and wide.untyped_storage().nbytes() == 2 * wide.nbytes
    with pytest.raises(DigestMismatch, match=r"decoder layer 5.*of samples \['b'\]"):
        rank.verify()


@pytest.mark.parametrize(
    ("layout", "ids", "positions"),
    [
        ("", [[*range(10, 19)], [*range(20, 25), 0, 0, 0, 0]], [[*range(9)], [*range(9)]]),
        ("packing=thd", [[*range(10, 19), *range(20, 25)]], [[*range(9), *range(5)]]),
    ],
)
def test_a_models_input_is_the_tickets(layout: str, ids: list[list[int]], positions: list[list[int]]) -> None:
    shard = make(TrainerLayout.parse(layout), policy="live")
    found = shard.model_input(0, [range(10, 19), range(20, 25)])
    assert [part.tolist() for part in found] == [ids, positions]
    assert {part.dtype for part in found} == {torch.int64}


# -- rows beside the trainer's weight version: counted, masked out of the loss, or refused by sample ---------------------------

MIXED = TicketSample("a", 9, 7, 7, (span(0, 3, 4, RowKind.PREFILLED), span(3, 6, 5), span(6, 8, 7)))
FRESH = TicketSample("b", 5, 7, 7, (span(0, 4, 7),))


def aged(*samples: TicketSample, layout: TrainerLayout | None = None, cp: int = 0) -> RankShard:
    samples = samples or (MIXED, FRESH)
    return shard_of(samples, layout or TrainerLayout(), cp=cp)


def test_each_token_knows_how_many_updates_lie_behind_its_row() -> None:
    shard = aged()
    with pytest.raises(UsageError, match="trainer's version"):
        shard.lags(0)
    shard.set_version(7)
    lags = shard.lags(0)
    assert lags[0].tolist() == [3, 3, 3, 2, 2, 2, 0, 0, UNKNOWN]
    assert lags[1].tolist() == [0] * 4 + [UNKNOWN] * 5


def test_rows_are_counted_by_lag_and_missing_ones_are_not() -> None:
    holed = TicketSample("c", 4, 7, 7, (span(0, 1, 1), span(1, 3, 0, RowKind.MISSING)), ((1, 3),))
    shard = aged(MIXED, FRESH, holed)
    counts = shard.set_version(7).counts(shard.sample_ids)
    assert counts == {3: 3, 2: 3, 0: 6, 6: 1}
    assert aged(MIXED).set_version(5).counts(("a",)) == {1: 3, 0: 3, -2: 2}


def test_the_mask_policy_takes_stale_tokens_out_of_the_loss_and_no_others() -> None:
    shard = aged()
    shard.set_version(7, max_staleness=2, on_stale="mask")
    assert shard.loss_mask_missed  # until somebody asks for it
    keep = shard.loss_mask(0)
    assert not shard.loss_mask_missed
    assert keep[0].tolist() == [False] * 3 + [True] * 6
    assert keep[1].tolist() == [True] * 5 + [False] * 4  # padding, as before

    shard.set_version(7, max_staleness=3, on_stale="mask")
    assert shard.loss_mask(0)[0].all()
    (accepting := aged()).set_version(7, max_staleness=0)
    assert not accepting.loss_mask_missed and accepting.loss_mask(0)[0].all()


@pytest.mark.parametrize(
    ("samples", "version", "bound", "said", "names"),
    [
        ((), 7, 2, r"1 samples .*0 to 2 versions behind the trainer's 7: a \(3 rows\).*\[4, 5, 7\]", ("a",)),
        ((), 6, 9, r"a \(2 rows\), b \(4 rows\)", ("a", "b")),  # ahead of the trainer
        ((TicketSample("a", 5, 7, 7, (span(0, 4, -(2**63)),)),), 7, 2, r"a \(4 rows\)", ("a",)),  # no counter reaches it
    ],
)  # fmt: skip
def test_rows_outside_the_bound_are_refused_by_sample_with_both_versions(
    samples: tuple[TicketSample, ...], version: int, bound: int, said: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(RowsStale, match=said) as refusal:
        aged(*samples).set_version(version, max_staleness=bound, on_stale="reject")
    assert (refusal.value.samples, refusal.value.step) == (names, 3)
    aged().set_version(7, max_staleness=3, on_stale="reject")


# -- what a model is given: another layout is refused with its cause, with or without tokens ---------------------------

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
    check.verify()


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
        check.verify()
    check.verify()
