"""Assignments and shards: every row and layer that a router consumes is placed once, in its order, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, SampleTwice, SampleUnknown, TicketMismatch, UnsupportedLayout
from r3channel.plan.assignment import Assignment, karmarkar_karp
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Plan, place_samples, plan_shards
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.spec import RoutingSpec
from tests.samples import SPEC, random_ids

LAYOUTS = st.builds(
    lambda dp, tp, pp, sp: TrainerLayout(dp=dp, tp=tp, pp=pp, sp=sp if tp > 1 else None),
    dp=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
)


def make_plan(
    layout: TrainerLayout, *, size: int, batches: int, seed: int
) -> tuple[Plan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    names = [f"s{index}" for index in range(layout.dp * size * batches)]
    tokens = {name: int(rng.integers(2, 40)) for name in names}
    assignment = Assignment.round_robin(names, dp=layout.dp, microbatch_size=size)
    ids = {name: random_ids(tokens[name] - 1, seed=seed + index) for index, name in enumerate(names)}
    return plan_shards(assignment, tokens=tokens, spec=SPEC, layout=layout), ids


def oracle(
    plan: Plan, ids: dict[str, np.ndarray], *, dp: int, microbatch: int, tp: int, layer: int
) -> np.ndarray:
    """What a router sees, the default path's way: everything padded [b, s, k], transposed, flattened, then cut; -1 for pads."""
    batch = plan.microbatches[dp][microbatch]
    full = np.full((len(batch.sample_ids), batch.seq_len, SPEC.top_k), -1)
    for index, name in enumerate(batch.sample_ids):
        full[index, : batch.tokens[index] - 1] = ids[name][:, SPEC.moe_index(layer)]
    rows = full.transpose(1, 0, 2).reshape(-1, SPEC.top_k)
    return np.split(rows, plan.layout.tp)[tp] if plan.layout.sequence_parallel else rows


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, size=st.integers(1, 3), batches=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_each_router_is_given_exactly_its_rows_in_its_order(
    layout: TrainerLayout, size: int, batches: int, seed: int
) -> None:
    plan, ids = make_plan(layout, size=size, batches=batches, seed=seed)
    for dp in range(layout.dp):
        placed = place_samples(plan, dp=dp, ids_of=ids.__getitem__)
        for pp in range(layout.pp):
            shard = plan.shard(dp=dp, pp=pp)
            assert placed[dp, pp].nbytes == shard.nbytes == shard.slot_bytes * layout.tp_slots
            views = shard.views(placed[dp, pp])
            for microbatch, tp, layer in np.ndindex(batches, layout.tp, len(shard.layers)):
                rows = views[microbatch][tp if layout.sequence_parallel else 0, layer]
                expected = oracle(plan, ids, dp=dp, microbatch=microbatch, tp=tp, layer=shard.layers[layer])
                real = expected[:, 0] >= 0
                assert np.array_equal(rows[real], expected[real])
                assert all(len(set(row)) == SPEC.top_k for row in rows[~real].tolist())
                sample, position = shard.row_map(microbatch, tp=tp)
                assert np.array_equal(sample >= 0, real) and np.array_equal(position >= 0, real)


@settings(max_examples=30, deadline=None)
@given(layout=LAYOUTS, seed=st.integers(0, 10**6))
def test_row_maps_of_all_ranks_name_each_row_of_each_sample_once(layout: TrainerLayout, seed: int) -> None:
    plan, _ = make_plan(layout, size=2, batches=2, seed=seed)
    for dp in range(layout.dp):
        shard = plan.shard(dp=dp, pp=0)
        for microbatch, batch in enumerate(shard.microbatches):
            named = []
            for tp in range(layout.tp_slots):
                sample, position = shard.row_map(microbatch, tp=tp)
                named += list(zip(sample[sample >= 0].tolist(), position[sample >= 0].tolist(), strict=True))
            assert sorted(named) == [(s, p) for s, n in enumerate(batch.tokens) for p in range(n - 1)]


def test_layers_of_all_stages_are_the_moe_layers_once() -> None:
    layout = TrainerLayout(pp=4)
    stages = [layout.stage_layers(SPEC, pp=pp) for pp in range(4)]
    assert stages == [(), (1,), (2,), (3,)]


@pytest.mark.parametrize("rank", range(8))
def test_rank_order_is_megatrons_default(rank: int) -> None:
    layout = TrainerLayout(dp=2, tp=2, pp=2)
    assert layout.coords(rank) == RankCoords(tp=rank % 2, cp=0, dp=rank // 2 % 2, pp=rank // 4)
    assert layout.rank(layout.coords(rank)) == rank


def test_layout_text_is_parsed_and_sequence_parallel_follows_tp() -> None:
    assert TrainerLayout.parse("dp=2,tp=2,pp=1,cp=1") == TrainerLayout(dp=2, tp=2)
    assert (
        TrainerLayout.parse("tp=2").sequence_parallel
        and not TrainerLayout.parse("tp=2,sp=0").sequence_parallel
    )


@pytest.mark.parametrize("text", ["cp=2", "vpp=2", "packing=thd"])
def test_layouts_of_later_versions_are_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedLayout, match=text.split("=")[0]):
        TrainerLayout.parse(text)


@pytest.mark.parametrize("text", ["dp=0", "dp=x", "zz=1", "tp=1,sp=1", "ep=3"])
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TrainerLayout.parse(text)


def test_an_uneven_pipeline_is_refused_when_planning() -> None:
    with pytest.raises(UnsupportedLayout, match="pp=3"):
        make_plan(TrainerLayout(pp=3), size=1, batches=1, seed=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(1, 6))
def test_balanced_parts_have_equal_counts_and_beat_or_equal_the_trivial_bound(
    weights: list[int], parts: int
) -> None:
    items = {f"n{i}": w for i, w in enumerate(weights * parts)}
    result = karmarkar_karp(items, parts=parts)
    assert sorted(name for part in result for name in part) == sorted(items)
    assert {len(part) for part in result} == {len(weights)}
    sums = [sum(items[name] for name in part) for part in result]
    assert max(sums) - min(sums) <= max(weights)


def test_balanced_is_better_than_round_robin_on_uneven_lengths() -> None:
    rng = np.random.default_rng(0)
    tokens = {f"s{i:02d}": int(n) for i, n in enumerate(rng.lognormal(7, 1, 64))}

    def spread(assignment: Assignment) -> int:
        sums = [sum(tokens[s] for batch in rank for s in batch) for rank in assignment.ranks]
        return max(sums) - min(sums)

    fair = Assignment.balanced(tokens, dp=4, microbatch_size=4)
    assert spread(fair) < 0.1 * spread(Assignment.round_robin(sorted(tokens), dp=4, microbatch_size=4))


@pytest.mark.parametrize("ranks", [[[["a"]], [["b"], ["c"]]], [[["a"], []], [["b"], ["c"]]], []])
def test_assignments_with_uneven_or_empty_microbatches_are_refused(ranks: list) -> None:
    with pytest.raises(ConfigError):
        Assignment.given(ranks)


def test_a_sample_assigned_twice_is_named() -> None:
    with pytest.raises(SampleTwice, match="'a'"):
        Assignment.given([[["a"]], [["a"]]])


def test_an_unknown_sample_is_named() -> None:
    with pytest.raises(SampleUnknown, match="'b'"):
        plan_shards(Assignment.given([[["b"]]]), tokens={"a": 3}, spec=SPEC, layout=TrainerLayout())


def make_ticket(spec: RoutingSpec = SPEC) -> Ticket:
    samples = tuple(TicketSample(name, tokens, 7, ()) for name, tokens in (("a", 9), ("b", 5)))
    return Ticket("run", 3, spec, TrainerLayout(tp=2), Assignment.given([[["a", "b"]]]), samples, 1 << 20)


def test_a_ticket_survives_the_trip_and_is_small() -> None:
    ticket = make_ticket()
    again = Ticket.from_bytes(ticket.to_bytes())
    assert again == ticket and again.plan.digest == ticket.plan.digest
    assert len(ticket.to_bytes()) < 600


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"ticket":2}', b"\x80\x04"])
def test_bytes_that_are_no_ticket_are_refused(damage: bytes) -> None:
    with pytest.raises(TicketMismatch):
        Ticket.from_bytes(damage)


def test_a_ticket_whose_lengths_were_changed_is_refused() -> None:
    with pytest.raises(TicketMismatch, match="plan digest"):
        Ticket.from_bytes(make_ticket().to_bytes().replace(b'"b",5', b'"b",6'))
