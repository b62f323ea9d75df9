"""Shards: over random layouts every row and layer that a router consumes is placed once, in its order, and nothing else is.

The oracle is the default path's way: everything padded, everything to everyone, then cut for CP, flattened, cut for SP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, SampleUnknown, UnsupportedLayout
from r3channel.plan import place, shards
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples
from r3channel.plan.shards import Microbatch, Plan, ShardKey, plan_shards
from r3channel.spec import RoutingSpec
from tests.samples import SPEC, random_ids

ROOT = Path(__file__).parents[2]
DEEP = RoutingSpec(num_layers=8, moe_layers=(1, 2, 5), num_experts=16, top_k=2)


@st.composite
def specs(draw: st.DrawFn) -> RoutingSpec:
    """Eight layers, any of them dense, ids of one or two bytes, top-k that makes rows of 2 to 16 bytes."""
    moe = draw(st.sets(st.integers(0, 7), min_size=1))
    experts = draw(st.sampled_from([16, 300]))
    return RoutingSpec(
        num_layers=8,
        moe_layers=tuple(sorted(moe)),
        num_experts=experts,
        top_k=draw(st.sampled_from([2, 3, 8])),
    )


@st.composite
def layouts(draw: st.DrawFn) -> TrainerLayout:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    uneven = draw(st.booleans()) and (pp, vpp) == (4, 1)
    return TrainerLayout(
        dp=draw(st.integers(1, 3)),
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=draw(st.integers(1, 3)),
        sp=draw(st.booleans()) if tp > 1 else None,
        packing=draw(st.sampled_from(["padded", "thd"])),
        cp_split=draw(st.sampled_from(["zigzag", "contiguous"])),
        pad_multiple=draw(st.sampled_from([1, 4])),
        uniform=draw(st.sampled_from([None, True, False])),
        first_layers=1 if uneven else None,
        last_layers=3 if uneven else None,
    )


def make_plan(
    layout: TrainerLayout, *, spec: RoutingSpec = SPEC, size: int, batches: int, seed: int
) -> tuple[Plan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    names = [f"s{index}" for index in range(layout.dp * size * batches)]
    tokens = {name: int(rng.integers(2, 40)) for name in names}
    assignment = Assignment.round_robin(names, dp=layout.dp, microbatch_size=size)
    ids = {
        name: random_ids(tokens[name] - 1, spec=spec, seed=seed + index) for index, name in enumerate(names)
    }
    return plan_shards(assignment, tokens=tokens, spec=spec, layout=layout), ids


def oracle_positions(length: int, layout: TrainerLayout, *, cp: int) -> np.ndarray:
    """Which positions of a sequence (or of a whole pack) a CP rank holds, in its order."""
    if layout.cp_split == "contiguous" or layout.cp == 1:
        return np.array_split(np.arange(length), layout.cp)[cp]
    chunks = np.array_split(np.arange(length), 2 * layout.cp)
    return np.concatenate([chunks[cp], chunks[2 * layout.cp - 1 - cp]])


def oracle_line(values: list[np.ndarray], batch: Microbatch, layout: TrainerLayout, *, cp: int) -> np.ndarray:
    """`values` holds an array [tokens - 1, ...] per sample; gives the rank's rows in its router's order, -1 for pads."""

    def pad(rows: np.ndarray, length: int) -> np.ndarray:
        full = np.full((length, *rows.shape[1:]), -1)
        full[: len(rows)] = rows
        return full

    full = [pad(rows, length) for rows, length in zip(values, batch.padded, strict=True)]
    if not batch.packed:
        cut = [rows[oracle_positions(len(rows), layout, cp=cp)] for rows in full]
        return np.stack(cut, axis=1).reshape(-1, *full[0].shape[1:])
    full.append(pad(full[0][:0], batch.tail))
    if layout.cp_split == "contiguous":
        pack = np.concatenate(full)
        return pack[oracle_positions(len(pack), layout, cp=cp)]
    return np.concatenate([rows[oracle_positions(len(rows), layout, cp=cp)] for rows in full])


def oracle_rows(
    values: list[np.ndarray], batch: Microbatch, layout: TrainerLayout, *, cp: int, tp: int
) -> np.ndarray:
    line = oracle_line(values, batch, layout, cp=cp)
    return np.split(line, layout.tp)[tp] if layout.sequence_parallel else line


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(),
    experts=st.sampled_from([128, 200, 384]),
    top_k=st.sampled_from([4, 8, 16]),
    size=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_compiled_and_numpy_placement_write_the_same_bytes(
    layout: TrainerLayout, experts: int, top_k: int, size: int, seed: int
) -> None:
    spec = RoutingSpec(num_layers=8, moe_layers=tuple(range(8)), num_experts=experts, top_k=top_k)
    plan, _ = make_plan(layout, spec=spec, size=size, batches=2, seed=seed)
    rng = np.random.default_rng(seed)
    lengths = {
        name: int(rng.integers(2, 1400))
        for batch in plan.microbatches
        for m in batch
        for name in m.sample_ids
    }
    ids = {
        name: rng.integers(0, experts, (length - 1, 8, top_k)).astype(spec.id_dtype)
        for name, length in lengths.items()
    }
    assignment = Assignment.round_robin(list(ids), dp=layout.dp, microbatch_size=size)
    plan = plan_shards(assignment, tokens=lengths, spec=spec, layout=layout)
    placed = [_placed(plan, ids, compiled=compiled) for compiled in (True, False)]
    assert placed[0].keys() == placed[1].keys()
    assert all(np.array_equal(placed[0][key], placed[1][key]) for key in placed[0])


def _placed(plan: Plan, ids: dict[str, np.ndarray], *, compiled: bool) -> dict[ShardKey, np.ndarray]:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(place, "kernels", lambda: None)
        return place_samples(plan, dp=0, ids_of=ids.__getitem__)


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), spec=specs(), size=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_each_router_is_given_exactly_its_rows_in_its_order(
    layout: TrainerLayout, spec: RoutingSpec, size: int, seed: int
) -> None:
    plan, ids = make_plan(layout, spec=spec, size=size, batches=2, seed=seed)
    dp = seed % layout.dp
    placed = place_samples(plan, dp=dp, ids_of=ids.__getitem__)
    assert list(placed) == [shard.key for shard in plan.shards if shard.dp == dp]
    for key, data in placed.items():
        shard = plan.shard(dp=dp, pp=key[1], cp=key[2])
        assert data.nbytes == shard.nbytes == shard.slot_bytes * layout.tp_slots
        for (number, view), tp in [(v, t) for v in enumerate(shard.views(data)) for t in range(layout.tp)]:
            batch = plan.microbatches[dp][number]
            for index, layer in enumerate(shard.layers):
                rows = view[tp if layout.sequence_parallel else 0, index]
                values = [ids[name][:, spec.moe_index(layer)] for name in batch.sample_ids]
                expected = oracle_rows(values, batch, layout, cp=shard.cp, tp=tp)
                assert len(rows) == len(expected)  # nothing else is delivered
                real = expected[:, 0] >= 0
                assert np.array_equal(rows[real], expected[real])
                assert all(len(set(row)) == spec.top_k for row in rows[~real].tolist())
                assert rows.max(initial=0) < spec.num_experts and rows.min(initial=0) >= 0


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 10**6))
def test_row_maps_of_all_ranks_name_each_row_of_each_sample_once(layout: TrainerLayout, seed: int) -> None:
    plan, _ = make_plan(layout, spec=DEEP, size=2, batches=2, seed=seed)
    for dp in range(layout.dp):
        for number, batch in enumerate(plan.microbatches[dp]):
            named = []
            for cp in range(layout.cp):
                shard = plan.shard(dp=dp, pp=0, cp=cp)
                for tp in range(layout.tp_slots):
                    sample, position = shard.row_map(number, tp=tp)
                    assert len(sample) == shard.slot_rows(number)
                    real = sample >= 0
                    named += list(zip(sample[real].tolist(), position[real].tolist(), strict=True))
                    expected = [np.arange(tokens - 1)[:, None] for tokens in batch.tokens]
                    line = oracle_rows(expected, batch, layout, cp=cp, tp=tp)[:, 0]
                    assert np.array_equal(position, line)
            assert sorted(named) == [(s, p) for s, n in enumerate(batch.tokens) for p in range(n - 1)]


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 10**6))
def test_token_maps_hold_every_token_once_in_the_models_shape(layout: TrainerLayout, seed: int) -> None:
    plan, _ = make_plan(layout, spec=DEEP, size=2, batches=1, seed=seed)
    (batch,) = plan.microbatches[0]
    found = []
    for cp in range(layout.cp):
        sample, position = plan.shard(dp=0, pp=0, cp=cp).token_map(0)
        assert sample.shape == position.shape == (batch.width, batch.seq_len // layout.cp)
        inside = (sample >= 0) & (position < np.asarray([*batch.tokens, 0])[sample])
        found += list(zip(sample[inside].tolist(), position[inside].tolist(), strict=True))
    assert sorted(found) == [(s, p) for s, n in enumerate(batch.tokens) for p in range(n)]


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), spec=specs(), seed=st.integers(0, 10**6))
def test_the_bytes_of_all_shards_are_those_of_the_padded_rows_once(
    layout: TrainerLayout, spec: RoutingSpec, seed: int
) -> None:
    plan, _ = make_plan(layout, spec=spec, size=2, batches=2, seed=seed)
    rows = sum(batch.rows for rank in plan.microbatches for batch in rank)
    assert sum(shard.nbytes for shard in plan.shards) == rows * spec.bytes_per_token


def test_layers_of_all_stages_are_the_moe_layers_once() -> None:
    layout = TrainerLayout(pp=4)
    stages = [layout.stage_layers(SPEC, pp=pp) for pp in range(4)]
    assert stages == [(), (1,), (2,), (3,)]


def test_interleaved_chunks_are_megatrons() -> None:
    """Eight layers, the first dense: measured on Megatron-core 0.16.1 (routers are 1-based there)."""
    spec = RoutingSpec(num_layers=8, moe_layers=tuple(range(1, 8)), num_experts=8, top_k=2)
    layout = TrainerLayout(pp=2, vpp=2)
    chunks = [[layout.chunk_layers(spec, pp=pp, chunk=chunk) for chunk in range(2)] for pp in range(2)]
    assert chunks == [[(1,), (4, 5)], [(2, 3), (6, 7)]]


def test_a_chunk_without_any_moe_layer_is_an_empty_shard() -> None:
    plan, ids = make_plan(TrainerLayout(pp=4), size=1, batches=4, seed=0)
    shard = plan.shard(dp=0, pp=0)
    assert shard.layers == () and shard.nbytes == 0
    assert place_samples(plan, dp=0, ids_of=ids.__getitem__)[0, 0, 0].size == 0
    assert all(view.shape[1] == 0 for view in shard.views(np.empty(0, np.uint8)))


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


def test_an_mtp_layer_cannot_be_mapped_to_a_dense_layer() -> None:
    with pytest.raises(ConfigError, match=r"mtp maps to decoder layers \[0\]"):
        make_plan(TrainerLayout(mtp=(0,)), size=1, batches=1, seed=0)


@pytest.mark.parametrize(
    "text", ["pp=3", "pp=2,vpp=4", "pp=2,first_layers=5", "pp=2,first_layers=1,last_layers=1"]
)
def test_a_pipeline_that_does_not_divide_is_refused_when_planning(text: str) -> None:
    with pytest.raises(UnsupportedLayout, match=r"4 layers|\(2, 2\) layers"):
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


def test_an_unknown_sample_is_named() -> None:
    with pytest.raises(SampleUnknown, match="'b'"):
        plan_shards(Assignment.given([[["b"]]]), tokens={"a": 3}, spec=SPEC, layout=TrainerLayout())


def test_a_sample_of_one_token_is_named() -> None:
    with pytest.raises(ConfigError, match="'b'") as refusal:
        plan_shards(
            Assignment.given([[["a"], ["b"]]]), tokens={"a": 3, "b": 1}, spec=SPEC, layout=TrainerLayout()
        )
    assert refusal.value.samples == ("b",)


def test_lengths_of_two_bytes_are_summed_as_plain_integers() -> None:
    tokens = {name: np.int16(30000) for name in "abcd"}
    (batch,) = plan_shards(
        Assignment.given([[list(tokens)]]),
        tokens=tokens,  # type: ignore[arg-type]
        spec=SPEC,
        layout=TrainerLayout(packing="thd"),
    ).microbatches[0]
    assert batch.rows == 120000 and type(batch.tokens[0]) is int


@pytest.mark.parametrize(
    ("ranks", "layout", "words"),
    [
        ([[["a", "b"], ["c"]]], "pp=2", r"rank 0, optimizer step 0: .* of \[1, 2\] samples.*packing=thd"),
        ([[["a"], ["b"]], [["c", "d"], ["e"]]], "dp=2,pp=2,uniform=1", r"rank 1, optimizer step 0"),
    ],
)
def test_padded_micro_batches_of_several_widths_are_refused_in_a_pipeline(
    ranks: list[list[list[str]]], layout: str, words: str
) -> None:
    tokens = dict.fromkeys("abcde", 9)
    with pytest.raises(ConfigError, match=words):
        plan_shards(Assignment.given(ranks), tokens=tokens, spec=SPEC, layout=TrainerLayout.parse(layout))


@pytest.mark.parametrize(
    ("steps", "layout"), [([2], ""), ([2], "pp=2,packing=thd"), ([2], "pp=2,uniform=0"), ([1, 1], "pp=2")]
)
def test_several_widths_are_planned_where_no_pipeline_step_mixes_them(steps: list[int], layout: str) -> None:
    assignment = Assignment.given([[["a", "b"], ["c"]]], steps=steps)
    plan = plan_shards(
        assignment, tokens=dict.fromkeys("abc", 9), spec=SPEC, layout=TrainerLayout.parse(layout)
    )
    assert [len(batch.tokens) for batch in plan.microbatches[0]] == [2, 1]


@pytest.mark.parametrize("rank", [{"dp": -1}, {"dp": 2}, {"pp": -1}, {"pp": 2}, {"cp": -1}, {"cp": 2}])
def test_ranks_that_the_layout_does_not_have_are_named(rank: dict[str, int]) -> None:
    plan, _ = make_plan(TrainerLayout(dp=2, pp=2, cp=2), size=1, batches=1, seed=0)
    ((name, number),) = rank.items()
    with pytest.raises(ConfigError, match=rf"{name}={number}: expected 0..1"):
        plan.shard(**({"dp": 0, "pp": 0} | rank))
    with pytest.raises(ConfigError, match="dp=-1"):
        plan.table(-1)


def test_a_plan_makes_only_the_micro_batches_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    pad = shards.pad_batch

    def counted(sample_ids: tuple[str, ...], tokens: tuple[int, ...], **rest: Any) -> Microbatch:
        made.append(sample_ids)
        return pad(sample_ids, tokens, **rest)

    monkeypatch.setattr(shards, "pad_batch", counted)
    plan, _ = make_plan(TrainerLayout(dp=3), size=2, batches=2, seed=0)
    assert made == []
    assert plan.shard(dp=1, pp=0).nbytes == plan.shard(dp=1, pp=0).nbytes > 0
    assert made == list(plan.assignment.ranks[1])
    assert [batch.sample_ids for rank in plan.microbatches for batch in rank] == [
        names for rank in plan.assignment.ranks for names in rank
    ]


_HASH = """
import json, sys
import numpy as np
from r3channel.plan.assignment import Assignment, names_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import plan_shards
from r3channel.spec import RoutingSpec
from tests.samples import SPEC
lengths = names_of(np.frombuffer(sys.stdin.buffer.read(), np.int64))
layout = TrainerLayout.parse("dp=4,tp=2,cp=2,pp=2,packing=thd")
found = []
for assignment in (Assignment.balanced(lengths, dp=4, microbatch_size=4, steps=2),
                   Assignment.dynamic(lengths, dp=4, max_tokens=4096, steps=2)):
    found.append(plan_shards(assignment, tokens=lengths, spec=SPEC, layout=layout).digest)
print(json.dumps(found))
"""


def test_processes_that_exchange_only_lengths_compute_the_same_plan() -> None:
    parts = [np.random.default_rng(rank).integers(2, 2000, 256) for rank in range(4)]
    exchanged = np.concatenate(parts).astype(np.int64).tobytes()
    assert len(exchanged) == 8192  # 1,024 lengths, all that anybody learns of the others
    found = set()
    for rank in range(4):
        environment = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
        child = subprocess.run(
            [sys.executable, "-c", _HASH], cwd=ROOT, input=exchanged, capture_output=True, timeout=60,
            env=environment, check=True,
        )  # fmt: skip
        found.add(tuple(json.loads(child.stdout)))
    assert len(found) == 1 and len(set(*found)) == 2
