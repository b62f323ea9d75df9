"""Each known misalignment is found and named, and clean steps of many shapes raise no alarm."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from r3channel.cli import main
from r3channel.errors import RecordingInvalid
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.consumed import ConsumedRows
from r3channel.recordings.diagnose import FAULTS, NOTES, judge
from r3channel.recordings.findings import Finding
from r3channel.recordings.importers import export_npz, import_npz, read_saved
from r3channel.recordings.recorder import segment_name, write_step
from r3channel.recordings.recording import Recording
from r3channel.recordings.replay import consumed, fitted
from r3channel.recordings.single_side import judge_alone
from r3channel.recordings.step import RecordedStep
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.frame import encode_frame
from tests.golden import corpus
from tests.misaligned import CASES, PLAIN, changed, engine_step, router_step, rows_of, variation

GOLDEN = Path(__file__).parents[1] / "golden" / "recording"


def found(want: RecordedStep, seen: RecordedStep) -> list[Finding]:
    return [one for sides in AlignedPair.of(want, seen) for one in judge(sides)]


CASE_LIST = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "spec", "layout", "mistake"), CASE_LIST, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASE_LIST)]
)
def test_each_mistake_is_found_and_named(name, spec, layout, mistake, seed: int) -> None:  # type: ignore[no-untyped-def]
    want = engine_step(spec, layout, seed=seed)
    told = found(want, mistake(want))
    assert {(one.verdict, one.name) for one in told} == {(True, name)}, [str(one) for one in told]
    if told[0].seen and name not in ("mtp_shift", "fused_shared_expert"):
        assert told[0].expected != told[0].seen and told[0].cells > 0


def test_every_name_of_the_catalogue_has_a_case_or_is_a_remainder() -> None:
    assert set(FAULTS) - set(CASES) == {"row_order", "unexplained", "out_of_range", "replay_hurts"}


LAYOUTS = (
    "", "dp=2", "tp=2", "cp=2", "pp=2", "dp=2,tp=2", "cp=2,packing=thd", "tp=2,cp=2,packing=thd", "pp=2,vpp=3", "cp=4",
)  # fmt: skip


def real_steps() -> dict[str, RecordedStep]:
    """Recorded steps of four models that real engines served."""
    steps = {name: Recording.open(corpus.FOLDER / name / "engine").step(corpus.STEP) for name in corpus.CLEAN}
    return {"clean_qwen3": Recording.open(GOLDEN).step(2), **steps}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_false_alarm_on_200_clean_variations_of_real_recordings(layout: str) -> None:
    """Six of each of four models under each of ten layouts that cut its layers evenly: `variation` says in what they vary."""
    cut = TrainerLayout.parse(layout)
    for name, real in real_steps().items():
        if real.spec.num_layers % (cut.pp * cut.vpp):
            continue
        for number in range(6):
            seed = LAYOUTS.index(layout) * 6 + number
            want = variation(real, layout, seed=seed)
            assert found(want, consumed(want).step()) == [], (name, seed)
            assert judge_alone(want) == [], (name, seed)


def test_other_order_of_the_same_experts_is_told_apart_from_other_experts() -> None:
    want = engine_step()
    (only,) = found(want, changed(want, lambda _, ids: ids[..., ::-1]))
    assert only.name == "row_order" and only.name in NOTES


def test_what_no_mistake_explains_is_said_with_its_place() -> None:
    want = engine_step()
    rows = rows_of(want)
    rows["s1"][3, 2] = (rows["s1"][3, 2] + 1) % PLAIN.num_experts
    (only,) = found(want, router_step(want, rows))
    assert (only.name, only.sample, only.position, only.layer) == ("unexplained", "s1", 3, 2)
    ids = [own["s1"][3, 2].tolist() for own in (rows_of(want), rows)]
    assert [list(only.expected), list(only.seen)] == ids


def test_two_mistakes_at_once_are_both_named() -> None:
    want = engine_step()
    rows = rows_of(want)
    rows["s0"][2:5] = 0
    rows["s1"] = np.roll(rows["s1"], 1, axis=1)
    assert {one.name for one in found(want, router_step(want, rows))} == {"zero_rows", "shifted_layer"}


# -- one side ----------------------------------------------------------------------------------------------------------------


def with_rows(step: RecordedStep, rows: dict[str, np.ndarray]) -> RecordedStep:
    """As an engine that made the mistake would say it: digests are of what it sent."""
    samples, frames = [], {}
    for s in step.ticket.samples:
        ids = rows[s.sample_id]
        samples.append(s._replace(digest=fold(layer_digests(ids, first_row=0))))
        frames[s.sample_id] = [
            encode_frame(step.spec, expert_ids_TLK=ids, provenance=s.provenance, codec="stored")
        ]
    return RecordedStep(replace(step.ticket, samples=samples), frames, step.tokens, step.spec)


@pytest.mark.parametrize("name", ["zero_rows", "duplicated_ids", "padding_rows"])
def test_one_side_alone_shows_what_its_bytes_show(name: str) -> None:
    step = engine_step()
    wrong = with_rows(step, rows_of(CASES[name][0][2](step)))
    assert [(one.name, one.verdict) for one in judge_alone(wrong)] == [(name, True)]


def test_one_side_raises_a_suspicion_and_no_verdict_where_only_statistics_speak() -> None:
    rng, step = np.random.default_rng(0), engine_step(lengths=(600, 600))
    table = np.stack([rng.permutation(64)[:4] for _ in range(512)])
    rows = rows_of(step)
    for name, ids in rows.items():  # a first layer that sees the token, as real ones do
        ids[:, 0] = table[step.tokens[name][:-1]]
    assert judge_alone(with_rows(step, rows)) == []
    shifted = {name: np.roll(ids, 1, axis=0) for name, ids in rows.items()}
    (only,) = judge_alone(with_rows(step, shifted))
    assert (only.name, only.verdict) == ("off_by_one_row", False)
    rows["s1"][40:60] = rows["s0"][100:120]
    (stale,) = judge_alone(with_rows(step, rows))
    assert (stale.name, stale.verdict, stale.sample, stale.position) == ("stale_row", False, "s1", 40)


# -- recordings of a real engine, on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*corpus.FAULTY, *corpus.CLEAN])
def test_faulty_recordings_are_named_clean_ones_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus.FOLDER / name
    status = main(["check", str(folder / "engine"), str(folder / "router"), "--json"])
    named = {one["name"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (status, named) == ((1, {name}) if name in corpus.FAULTY else (0, set()))


SAME = {
    "clean_all_sparse": {
        "dense_layer_counted": "no dense layer", "zigzag_order": "no context parallelism",
        "cp_chunks_swapped": "no context parallelism", "int16_as_uint8": "ids of one byte",
    },
    "clean_deepseek": {
        "duplicated_ids": "made in a third layer",
        "shifted_layer": "of two layers, the same as reversed ones",
        "sp_halves_swapped": "no sequence parallelism",
        "int16_as_uint8": "ids of one byte",
    },
    "clean_wide": {
        "shifted_layer": "the same as counting the dense layer",
        "sp_halves_swapped": "no sequence parallelism",
        "zigzag_order": "no context parallelism",
        "cp_chunks_swapped": "no context parallelism",
    },
}  # fmt: skip
"""Mistakes that cannot be made there, or that are another one there, by name."""


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_named_in_every_real_recording_where_it_can_be_made(name: str) -> None:
    steps = real_steps()
    for clean in (clean for clean, same in SAME.items() if name not in same):
        told = {one.name for one in found(steps[clean], CASES[name][0][2](steps[clean]))} - NOTES
        assert told == {name}, clean


def test_the_corpus_is_small_and_every_folder_of_it_is_named() -> None:
    assert {path.name for path in corpus.FOLDER.iterdir()} == {*corpus.FAULTY, *corpus.CLEAN}
    golden = [
        path for path in corpus.FOLDER.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in golden) < 300_000
    specs = {name: real.spec for name, real in real_steps().items()}
    assert len({(s.num_experts, s.top_k, s.moe_layers) for s in specs.values()}) == 4


# -- the commands ------------------------------------------------------------------------------------------------------------


def router_side(folder: Path, *, shift: int = 0) -> Path:
    step = Recording.open(GOLDEN).step(2)
    rows = consumed(step)
    for key, ids in rows.ids.items():
        rows.ids[key] = np.roll(ids, shift, axis=1)
    rows.write(folder)
    return folder


def test_check_of_two_sides_exits_1_with_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(GOLDEN), str(router_side(tmp_path / "good"))]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["check", str(GOLDEN), str(router_side(tmp_path / "bad", shift=1)), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["name"] in ("shifted_layer", "dense_layer_counted") and findings[0]["cells"] > 1000


def test_check_of_one_side_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(GOLDEN)]) == 0
    assert "one side alone" in capsys.readouterr().out


def test_what_cannot_be_read_is_a_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.npz").write_bytes(b"no zip")
    for arguments in (
        ["check", str(tmp_path)],
        ["inspect", str(tmp_path / "none")],
        ["import", "--format", "npz", "--out", str(tmp_path / "out"), str(tmp_path / "x.npz")],
        ["import", "--format", "vllm", "--out", str(tmp_path / "out"), str(tmp_path / "x.npz")],
        ["export", "--format", "slime-debug", "--out", str(tmp_path / "out"), str(GOLDEN)],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "expected" in said, said


def test_inspect_counts_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    step = Recording.open(GOLDEN).step(2)
    rows = sum(sample.tokens - 1 for sample in step.samples)
    assert (told["samples"], told["rows"], told["steps"][0]["weight_versions"]) == (16, rows, [1])
    assert sum(told["steps"][0]["kinds"].values()) == rows and len(told["load"]) == 3
    ids_TLK = np.concatenate([step.rows(sample.sample_id) for sample in step.samples])
    for place, found in enumerate(told["load"]):
        load_E = np.bincount(ids_TLK[:, place].ravel(), minlength=step.spec.num_experts)
        assert found["layer"] == step.spec.moe_layers[place] and found["busiest"] == int(load_E.argmax())
        assert found["busiest_over_mean"] == round(load_E.max() / load_E.mean(), 3)
        assert found["idle_experts"] == int((load_E == 0).sum())


def test_diff_names_the_first_place_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Recording.open(GOLDEN).step(2)
    rows, name = consumed(step), step.samples[3].sample_id
    rows.ids["forward", name][5, 1] = rows.ids["forward", name][5, 1][::-1]
    rows.ids["forward", name][7, 2, 0] ^= 1
    rows.write(tmp_path)
    assert main(["diff", str(GOLDEN), str(tmp_path), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    assert (told["different"], told["order_only"]) == (1, 1)
    assert (told["first"]["sample"], told["first"]["position"], told["first"]["layer"]) == (name, 7, 3)
    assert told["layers"] == {"2": {"different": 0, "order_only": 1}, "3": {"different": 1, "order_only": 0}}


@pytest.mark.parametrize(
    "layout", ["", "dp=4", "tp=2,pp=2", "dp=2,cp=2,packing=thd", "tp=2,cp=2", "dp=8,tp=2"]
)
def test_replay_hands_every_row_of_every_layer_to_its_router_under_any_layout(layout: str) -> None:
    step = fitted(Recording.open(GOLDEN).step(2), TrainerLayout.parse(layout))
    rows = consumed(step)
    assert len(step.samples) == 16 and found(step, rows.step()) == []
    assert all(there.all() for there in rows.there.values()) and len(rows.there) == 16


def test_a_recording_goes_out_as_arrays_and_comes_back_the_same(tmp_path: Path) -> None:
    assert main(["export", str(GOLDEN), "--format", "npz", "--out", str(tmp_path / "npz")]) == 0
    exported, rec = str(tmp_path / "npz" / "step-000002.npz"), str(tmp_path / "r")
    assert main(["import", exported, "--format", "npz", "--out", rec]) == 0
    first, second = Recording.open(GOLDEN).step(2), Recording.open(tmp_path / "r").step(2)
    for sample in first.samples:
        assert np.array_equal(first.rows(sample.sample_id), second.rows(sample.sample_id))
        assert second.ticket.sample(sample.sample_id).provenance == sample.provenance
    arrays = dict(np.load(tmp_path / "npz" / "step-000002.npz"))
    del arrays["tokens"]
    np.savez(tmp_path / "less.npz", **arrays)
    with pytest.raises(RecordingInvalid, match=r"needed are \['tokens'\] too"):
        import_npz([tmp_path / "less.npz"], tmp_path / "s")


def test_rows_without_routing_go_out_as_arrays_and_come_back_without(tmp_path: Path) -> None:
    first = variation(Recording.open(GOLDEN).step(2), seed=4)
    write_step(tmp_path / "a", first)
    import_npz(export_npz(Recording.open(tmp_path / "a"), tmp_path / "npz"), tmp_path / "b")
    second, invalid = Recording.open(tmp_path / "b").step(7), [one.invalid for one in first.samples]
    assert invalid == [second.ticket.sample(one.sample_id).invalid for one in first.samples] and any(invalid)
    for one in first.samples:
        (ids, there), (again, there_again) = first.ids(one.sample_id), second.ids(one.sample_id)
        assert np.array_equal(there, there_again) and np.array_equal(ids[there], again[there])


@pytest.mark.parametrize("order", "<>")
def test_saved_numbers_in_another_byte_order_are_refused(tmp_path: Path, order: str) -> None:
    torch.save({"ids": np.arange(3).astype(f"{order}i4")}, path := tmp_path / "0.pt")
    with nullcontext() if order == "<" else pytest.raises(RecordingInvalid, match="big-endian"):
        assert read_saved(path)["ids"].tolist() == [0, 1, 2]


def test_two_sides_of_different_runs_are_refused() -> None:
    with pytest.raises(RecordingInvalid, match="not the same on both sides"):
        found(engine_step(seed=0), consumed(engine_step(seed=1)).step())


def test_the_routers_side_is_written_and_read_again(tmp_path: Path) -> None:
    step = engine_step(PLAIN, "tp=2")
    rows = consumed(step)
    assert rows.write(tmp_path).name == segment_name(7)
    again = Recording.open(tmp_path)
    assert again.manifest.side == "router" and found(step, again.step(7)) == []


def test_rows_that_do_not_fit_the_layout_are_refused_with_both_numbers() -> None:
    step = engine_step()
    shard = step.ticket.plan.shard(dp=0, pp=0)
    with pytest.raises(RecordingInvalid, match="the router used 3 rows, the layout says"):
        ConsumedRows(step.ticket, step.spec).add_call(shard, np.zeros((3, 4)), microbatch=0, layer=0)
