"""Layouts and the shards that they cut: words, rank order, rows and layers of each rank; bytes are test_place's matter."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, R3Error, SampleUnknown
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.shards import Plan, plan_shards
from tests.support.children import said_by
from tests.support.pages import LAYOUTS, WHEN
from tests.support.plans import layouts, oracle_rows
from tests.support.samples import SPEC, random_ids

DEEP = RoutingSpec(num_layers=8, moe_layers=(1, 2, 5), num_experts=16, top_k=2)


def make_plan(
    layout: TrainerLayout, *, spec: RoutingSpec = SPEC, size: int, batches: int, seed: int
) -> tuple[Plan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    names = [f"s{index}" for index in range(layout.dp * size * batches)]
    tokens = {name: int(rng.integers(2, 40)) for name in names}
    assignment = Assignment.round_robin(names, dp=layout.dp, microbatch_size=size)
    ids = {name: random_ids(tokens[name] - 1, spec=spec, seed=seed + i) for i, name in enumerate(names)}
    return plan_shards(assignment, tokens=tokens, spec=spec, layout=layout), ids


@settings(max_examples=100)
@given(layout=layouts(), seed=st.integers(0, 10**6))
def test_maps_of_all_ranks_name_each_row_and_each_token_of_each_sample_once(
    layout: TrainerLayout, seed: int
) -> None:
    plan, _ = make_plan(layout, spec=DEEP, size=2, batches=2, seed=seed)
    for dp in range(layout.dp):
        for number, batch in enumerate(plan.microbatches[dp]):
            named, tokens_named = [], []
            for cp in range(layout.cp):
                shard = plan.shard(dp=dp, pp=0, cp=cp)
                sample, position = shard.token_map(number)
                assert sample.shape == position.shape == (batch.width, batch.seq_len // layout.cp)
                inside = (sample >= 0) & (position < np.asarray([*batch.tokens, 0])[sample])
                tokens_named += list(zip(sample[inside].tolist(), position[inside].tolist(), strict=True))
                for tp in range(layout.tp_slots):
                    sample, position = shard.row_map(number, tp=tp)
                    assert len(sample) == shard.slot_rows(number)
                    real = sample >= 0
                    named += list(zip(sample[real].tolist(), position[real].tolist(), strict=True))
                    expected = [np.arange(tokens - 1)[:, None] for tokens in batch.tokens]
                    assert np.array_equal(position, oracle_rows(expected, batch, layout, cp=cp, tp=tp)[:, 0])
            assert sorted(named) == [(s, p) for s, n in enumerate(batch.tokens) for p in range(n - 1)]
            assert sorted(tokens_named) == [(s, p) for s, n in enumerate(batch.tokens) for p in range(n)]


def test_mtp_layers_are_left_out_unless_mapped_and_then_replay_their_named_layer() -> None:
    assert TrainerLayout(pp=2).stage_layers(SPEC, pp=1) == (2, 3)
    layout = TrainerLayout(pp=2, mtp=(3, 1))
    assert [layout.stage_layers(SPEC, pp=pp) for pp in range(2)] == [(1,), (2, 3, 4, 5)]
    plan, ids = make_plan(layout, size=1, batches=2, seed=0)
    shard = plan.shard(dp=0, pp=1)
    view = shard.views(place_samples(plan, dp=0, ids_of=ids.__getitem__)[shard.key])[0]
    rows = len(ids["s0"])
    for index, source in enumerate((2, 3, 3, 1)):  # layers 2 and 3, then the two MTP layers
        assert np.array_equal(view[0, index, :rows], ids["s0"][:, SPEC.moe_index(source)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=3", "4 layers"), ("pp=2,vpp=4", r"\(2, 2\) layers"), ("pp=2,first_layers=5", "4 layers"),
        ("pp=2,first_layers=1,last_layers=1", "4 layers"), ("mtp=0", r"mtp maps to decoder layers \[0\]"),
        ("pp=3,first_layers=2,last_layers=2", "0 layers remain for 1 equal stages"),
    ],
)  # fmt: skip
def test_layers_that_do_not_divide_or_are_dense_are_refused_when_planning(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(TrainerLayout.parse(text), size=1, batches=4, seed=0)


def test_a_pipelines_micro_batches_share_a_length_within_an_optimizer_step() -> None:
    tokens = {f"s{i}": n for i, n in enumerate((5, 9, 20, 30))}
    assignment = Assignment.given([[["s0"], ["s1"], ["s2"], ["s3"]]], steps=[2, 2])

    def lengths(layout: TrainerLayout) -> list[int]:
        plan = plan_shards(assignment, tokens=tokens, spec=SPEC, layout=layout)
        return [batch.seq_len for batch in plan.microbatches[0]]

    assert lengths(TrainerLayout()) == [5, 9, 20, 30]
    assert lengths(TrainerLayout(pp=2)) == [9, 9, 30, 30]
    assert lengths(TrainerLayout(pp=2, uniform=False)) == [5, 9, 20, 30]
    assert lengths(TrainerLayout(pp=2, packing="thd", cp=2)) == [12, 12, 32, 32]


@pytest.mark.parametrize(("tokens", "error"), [({"a": 3}, SampleUnknown), ({"a": 3, "b": 1}, ConfigError)])
def test_an_unknown_sample_or_one_of_one_token_is_named(tokens: dict[str, int], error: type[R3Error]) -> None:
    with pytest.raises(error, match="'b'") as refusal:
        plan_shards(Assignment.given([[["a"], ["b"]]]), tokens=tokens, spec=SPEC, layout=TrainerLayout())
    assert refusal.value.samples == ("b",)


def test_lengths_of_two_bytes_are_summed_as_plain_integers() -> None:
    tokens: Any = {name: np.int16(30000) for name in "abcd"}
    assignment, layout = Assignment.given([[list(tokens)]]), TrainerLayout(packing="thd")
    (batch,) = plan_shards(assignment, tokens=tokens, spec=SPEC, layout=layout).microbatches[0]
    assert batch.rows == 120000 and type(batch.tokens[0]) is int


@pytest.mark.parametrize(
    ("ranks", "layout", "words"),
    [
        ([[["a", "b"], ["c"]]], "pp=2", r"rank 0, optimizer step 0: .* of \[1, 2\] samples.*packing=thd"),
        ([[["a"], ["b"]], [["c", "d"], ["e"]]], "dp=2,pp=2,uniform=1", r"rank 1, optimizer step 0"),
    ],
)
def test_widths_are_refused_in_a_pipeline(ranks: list[list[list[str]]], layout: str, words: str) -> None:
    tokens = dict.fromkeys("abcde", 9)
    with pytest.raises(ConfigError, match=words):
        plan_shards(Assignment.given(ranks), tokens=tokens, spec=SPEC, layout=TrainerLayout.parse(layout))


@pytest.mark.parametrize(
    ("steps", "layout"), [([2], ""), ([2], "pp=2,packing=thd"), ([2], "pp=2,uniform=0"), ([1, 1], "pp=2")]
)
def test_several_widths_are_planned_where_no_pipeline_step_mixes_them(steps: list[int], layout: str) -> None:
    assignment = Assignment.given([[["a", "b"], ["c"]]], steps=steps)
    tokens = dict.fromkeys("abc", 9)
    plan = plan_shards(assignment, tokens=tokens, spec=SPEC, layout=TrainerLayout.parse(layout))
    assert [len(batch.tokens) for batch in plan.microbatches[0]] == [2, 1]


@pytest.mark.parametrize("rank", [{"dp": -1}, {"dp": 2}, {"pp": -1}, {"pp": 2}, {"cp": -1}, {"cp": 2}])
def test_ranks_that_the_layout_does_not_have_are_named(rank: dict[str, int]) -> None:
    plan, _ = make_plan(TrainerLayout(dp=2, pp=2, cp=2), size=1, batches=1, seed=0)
    ((name, number),) = rank.items()
    with pytest.raises(ConfigError, match=rf"{name}={number}: expected 0..1"):
        plan.shard(**({"dp": 0, "pp": 0} | rank))
    with pytest.raises(ConfigError, match="dp=-1"):
        plan.table(-1)


_HASH = """
import json
import numpy as np
from r3channel.plan.assignment import Assignment, names_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import plan_shards
from r3channel.model.spec import RoutingSpec
from tests.support.samples import SPEC
lengths = names_of(np.random.default_rng(0).integers(2, 2000, 1024))
layout = TrainerLayout.parse("dp=4,tp=2,cp=2,pp=2,packing=thd")
ways = (Assignment.balanced(lengths, dp=4, microbatch_size=4, steps=2),
        Assignment.dynamic(lengths, dp=4, max_tokens=4096, steps=2))
print(json.dumps([plan_shards(way, tokens=lengths, spec=SPEC, layout=layout).digest for way in ways]))
"""


def test_processes_that_exchange_only_lengths_compute_the_same_plan() -> None:
    found = {said_by(_HASH, PYTHONHASHSEED=str(rank + 1)) for rank in range(4)}
    assert len(found) == 1 and len(set(*map(json.loads, found))) == 2


# -- a layout alone: parsing, rank order, what is refused by name ---------------------------------------------------------


@pytest.mark.parametrize("rank", range(16))
def test_rank_order_is_megatrons_default(rank: int) -> None:
    layout = TrainerLayout(dp=2, tp=2, pp=2, cp=2)
    expected = RankCoords(tp=rank % 2, cp=rank // 2 % 2, dp=rank // 4 % 2, pp=rank // 8)
    assert layout.coords(rank) == expected
    assert layout.rank(layout.coords(rank)) == rank


def test_every_field_can_be_said_in_text() -> None:
    text = "cp=2,pp=2,vpp=2,packing=thd,cp_split=contiguous,pad_policy=live,pad_multiple=4,uniform=0,mtp=3+1"
    layout = TrainerLayout.parse(text)
    assert not TrainerLayout.parse("tp=2,sp=0").sequence_parallel
    assert layout.mtp == (3, 1) and layout.uniform is False and layout.packing == "thd"
    assert TrainerLayout.from_dict(layout.to_dict()) == layout
    assert "cp_split=contiguous" in str(layout) and "mtp=(3, 1)" in str(layout)


@pytest.mark.parametrize(
    "text",
    ["dp=0", "dp=x", "zz=1", "tp=1,sp=1", "ep=3", "vpp=2", "packing=ragged", "cp_split=x", "pad_policy=zero", "first_layers=0"],
)  # fmt: skip
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TrainerLayout.parse(text)


@pytest.mark.parametrize(
    "values",
    [{"dp": 2.0}, {"tp": "2"}, {"cp": None}, {"pad_multiple": float("inf")}, {"mtp": (1.5,)}, {"sp": 2}, {"uniform": "on"}],
)  # fmt: skip
def test_values_of_other_types_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"layout: {next(iter(values))}="):
        TrainerLayout(**values)
    with pytest.raises(ConfigError, match="'zz'"):
        TrainerLayout.from_dict({"dp": 1, "zz": 2})


def test_numbers_of_numpy_become_plain_ones() -> None:
    layout = TrainerLayout(dp=np.int16(300), tp=np.int16(300))  # type: ignore[arg-type]
    assert layout == TrainerLayout(dp=300, tp=300) and layout.world_size == 90000


SPEC8 = RoutingSpec(num_layers=8, moe_layers=tuple(range(8)), num_experts=8, top_k=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda layout: layout.coords(-1), lambda layout: layout.coords(16),
        lambda layout: layout.rank(RankCoords(dp=0, pp=-1, cp=0, tp=0)),
        lambda layout: layout.stage_layers(SPEC8, pp=-1), lambda layout: layout.chunk_layers(SPEC8, pp=0, chunk=1),
    ],
)  # fmt: skip
def test_ranks_that_a_layout_does_not_have_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"=(-1|1|2|16): expected 0\.\."):
        call(TrainerLayout(dp=2, tp=2, pp=2, cp=2))


def test_an_interleaved_pipeline_of_which_megatron_cannot_compute_the_middle_is_refused() -> None:
    """Megatron-core 0.16.1 divides by its number of stages between the first and the last, where both sizes are given."""
    with pytest.raises(ConfigError, match="Give one of the two"):
        TrainerLayout(pp=2, vpp=2, first_layers=2, last_layers=6).stage_sizes(8)
    one = TrainerLayout(pp=2, vpp=2, first_layers=2)
    assert one.stage_sizes(8) == (2, 6)
    chunks = [[one.chunk_layers(SPEC8, pp=pp, chunk=chunk) for chunk in range(2)] for pp in range(2)]
    assert chunks == [[(0,), (4,)], [(1, 2, 3), (5, 6, 7)]]


def test_megatrons_own_arguments_give_the_layout() -> None:
    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None,
        context_parallel_size=2, expert_model_parallel_size=4, sequence_parallel=True,
        decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=None,
    )  # fmt: skip
    made = TrainerLayout.from_megatron_args(args, world_size=16, packing="thd", pad_multiple=128)
    assert made == TrainerLayout.parse(
        "dp=2,tp=2,pp=2,cp=2,ep=4,sp=1,packing=thd,pad_multiple=128,first_layers=3"
    )


# -- the table of supported layouts --------------------------------------------------------------------------------------

ASKED = (
    "dp=1", "tp=2", "dp=2,ep=2", "pp=2", "pp=2,vpp=2", "cp=2", "cp=2,packing=thd", "tp=2,cp=2,packing=thd", "dp=2,tp=2",
)  # fmt: skip


def test_every_layout_that_was_asked_for_is_proven_and_fits_eight_processes() -> None:
    assert set(ASKED) <= set(WHEN) and len(WHEN) == len(LAYOUTS)
    assert all(TrainerLayout.parse(text).world_size <= 8 for text in WHEN)
