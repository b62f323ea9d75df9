"""Each known misalignment is found and named, and clean steps of many shapes raise no alarm."""

from __future__ import annotations

import json
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.cli import main
from r3channel.errors import RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.consumed import ConsumedRows, consume_step, fit
from r3channel.recordings.diagnose import judge, judge_alone
from r3channel.recordings.importers import import_npz, read_saved
from r3channel.recordings.mistakes import MISTAKES, NOTES, Finding
from r3channel.recordings.recorder import write_step
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import columns_of
from tests.golden import corpus
from tests.support import misaligned
from tests.support.combined import CHANGES
from tests.support.misaligned import CASES, PLAIN, Rows, changed, engine_step, router_step, rows_of
from tests.support.samples import sparse

GOLDEN = Path(__file__).parents[1] / "golden" / "recording"


def found(want: RecordedStep, seen: RecordedStep) -> list[Finding]:
    return [one for sides in AlignedPair.align(want, seen) for one in judge(sides)]


CASE_LIST = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASE_LIST, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASE_LIST)])
def test_each_mistake_is_found_and_named(case: Any, seed: int) -> None:
    name, spec, layout, mistake = case
    want = engine_step(spec, layout, seed=seed)
    told = found(want, mistake(want))
    assert {(one.verdict, one.name) for one in told} == {(True, name)}, [str(one) for one in told]
    if told[0].seen and name not in ("mtp_shift", "fused_shared_expert"):
        assert told[0].expected != told[0].seen and told[0].cells > 0


def test_every_name_of_the_catalogue_has_a_case_or_is_a_remainder() -> None:
    remainders = {"row_order", "unexplained", "out_of_range", "replay_hurts", "tensor_row"}
    assert {*MISTAKES} - {*CASES} == remainders


LAYOUTS = (*misaligned.LAYOUTS, "pp=2,vpp=3", "cp=4")


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
            want = misaligned.variation(real, layout, seed=seed)
            assert found(want, consume_step(want).step()) == [], (name, seed)
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
    assert [only.expected, only.seen] == [tuple(own["s1"][3, 2].tolist()) for own in (rows_of(want), rows)]


SEEDS = {"": (40, 500), **dict.fromkeys(("two moves", *CHANGES), (20, 250))}
"""Kind of mistakes -> how many of them each time, and in all."""


@pytest.mark.timeout(900)  # 78 s on a quiet machine
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", SEEDS)
def test_of_several_mistakes_the_first_name_is_right(kind: str, rest: bool) -> None:
    """In 95 % of one to three moves, in 90 % of two mistakes of each kind. Names are of mistakes that changed ids; where all
    together changed none there is nothing to name."""
    seeds = range(*SEEDS[kind]) if rest else range(SEEDS[kind][0])
    wrong, made = dict[int, tuple[set[str], list[str]]](), 0
    for seed in seeds:
        names, want, seen = misaligned.combined(seed, kind)
        told = [one.name for one in found(want, seen) if one.name not in NOTES]
        made += bool(names - NOTES)
        if names - NOTES and not (told and told[0] in names):
            wrong[seed] = names, told
    print(f"{kind}: {made} combinations, {len(wrong)} with a wrong first name: {wrong}")
    assert made >= 0.9 * len(seeds) and len(wrong) <= (0.1 if kind else 0.05) * made, wrong


# -- one side ----------------------------------------------------------------------------------------------------------------


def with_rows(step: RecordedStep, rows: Rows) -> RecordedStep:
    """As an engine that made the mistake would say it: digests are of what it sent."""
    part = misaligned.Part
    parts = [part(rows[s.sample_id], step.tokens[s.sample_id], [s.provenance]) for s in step.samples]
    return misaligned.step_of(step.spec, step.ticket.layout, parts)


@pytest.mark.parametrize("name", ["zero_rows", "duplicated_ids", "padding_rows"])
def test_one_side_alone_shows_what_its_bytes_show(name: str) -> None:
    step = engine_step()
    wrong = with_rows(step, rows_of(CASES[name][0][2](step)))
    assert [(one.name, one.verdict) for one in judge_alone(wrong)] == [(name, True)]


@pytest.mark.parametrize("spec", [PLAIN, sparse(48, experts=128, top_k=8)], ids=["6 layers", "48 layers"])
def test_one_side_raises_a_suspicion_and_no_verdict_where_only_statistics_speak(spec: RoutingSpec) -> None:
    rng, step = np.random.default_rng(0), engine_step(spec, lengths=(600, 600))
    table = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(512)])
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


@pytest.mark.parametrize("lengths", [(60, 50, 60, 50), (2, 2)], ids=["a sample", "all"])
def test_rows_left_to_the_live_router_are_not_judged(tmp_path: Path, capsys: Any, lengths: Any) -> None:
    step, live = engine_step(lengths=lengths), ["s1"] if len(lengths) > 2 else ["s0", "s1"]
    gone = [one._replace(invalid=((0, one.tokens - 1),), provenance=(), digest=0) for one in step.samples]
    samples = [other if one.sample_id in live else one for one, other in zip(step.samples, gone, strict=True)]
    frames = {**step.frames, **{name: [] for name in live}}
    step = replace(step, ticket=replace(step.ticket, samples=samples), frames=frames)
    write_step(tmp_path, step)
    write_step(tmp_path / "whole", engine_step(lengths=lengths))
    assert main(["diff", str(tmp_path), f"{tmp_path}/whole"]) == 1  # as in the other order
    consume_step(step).write(tmp_path / "router")
    assert main(["check", str(tmp_path), "--strict"]) == 0 and "one side alone" in capsys.readouterr().out
    assert main(["check", str(tmp_path), str(tmp_path / "router")]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(1, 8, 3), (2, 8, 2), (4, 4, 1), (8, 2, 2)])
def test_small_models_have_no_faults_by_chance(layers: int, experts: int, top_k: int) -> None:
    spec = sparse(layers, experts=experts, top_k=top_k)
    assert judge_alone(engine_step(spec, lengths=(2001,) * 4)) == []


# -- recordings of a real engine, on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*corpus.FAULTY, *corpus.CLEAN])
def test_faulty_recordings_are_named_clean_ones_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus.FOLDER / name
    status = main(["check", str(folder / "engine"), str(folder / "router"), "--json"])
    named = {one["name"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (status, named) == ((1, {name}) if name in corpus.FAULTY else (0, set()))


def test_every_folder_of_the_corpus_is_named() -> None:
    assert {path.name for path in corpus.FOLDER.iterdir()} == {*corpus.FAULTY, *corpus.CLEAN}


# -- the commands ------------------------------------------------------------------------------------------------------------


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
    assert step.ticket.layout.tp == 2
    assert sum(told["steps"][0]["kinds"].values()) == rows and len(told["load"]) == 3
    ids_TLK = np.concatenate([step.rows(sample.sample_id) for sample in step.samples])
    for place, found in enumerate(told["load"]):
        load_E = np.bincount(ids_TLK[:, place].ravel(), minlength=step.spec.num_experts)
        assert found == {
            "layer": step.spec.moe_layers[place], "busiest": int(load_E.argmax()), "idle_experts": int((load_E == 0).sum()),
            "busiest_over_mean": round(load_E.max() / load_E.mean(), 3),
        }  # fmt: skip


def test_diff_names_the_first_place_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Recording.open(GOLDEN).step(2)
    rows, name = consume_step(step), step.samples[3].sample_id
    rows.ids["forward", name][5, 1] = rows.ids["forward", name][5, 1][::-1]
    rows.ids["forward", name][7, 2, 0] ^= 1
    rows.write(tmp_path)
    assert main(["diff", str(GOLDEN), str(tmp_path), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    assert (told["different"], told["order_only"]) == (1, 1)
    assert (told["first"]["sample"], told["first"]["position"], told["first"]["layer"]) == (name, 7, 3)
    assert told["layers"] == {"2": {"different": 0, "order_only": 1}, "3": {"different": 1, "order_only": 0}}


def test_another_layout_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = engine_step(lengths=(33, 25, 33, 25, 40, 41, 42, 43))  # micro-batches of 4
    cut = fit(want, TrainerLayout.parse("dp=2"))
    assert [len(batch) for rank in cut.ticket.assignment.ranks for batch in rank] == [4, 4]
    assert cut.untested == () and fit(want, None) is want
    write_step(tmp_path, want)
    assert main(["replay", str(tmp_path), "--layout", "dp=3"]) == 0
    said = capsys.readouterr().out
    assert "2 samples do not fill 3 DP ranks: s6, s7" in said and "micro-batches of [4] samples" in said


def test_a_recording_goes_out_as_arrays_and_comes_back_the_same(tmp_path: Path) -> None:
    """One of the demo, and one in which rows have no routing."""
    golden = Recording.open(GOLDEN).step(2)
    for first in (misaligned.variation(golden, seed=4), golden):
        rec, npz, again = (tmp_path / f"{name}{first.number}" for name in ("rec", "npz", "again"))
        write_step(rec, first)
        assert main(["export", str(rec), "--format", "npz", "--out", str(npz)]) == 0
        (exported,) = npz.iterdir()
        assert main(["import", str(exported), "--format", "npz", "--out", str(again)]) == 0
        second = Recording.open(again).step(first.number)
        for one in first.samples:
            other = second.ticket.sample(one.sample_id)
            assert other.invalid == one.invalid and other.digest == one.digest
            assert np.array_equal(columns_of(other.provenance), columns_of(one.provenance))
            assert np.array_equal(first.rows(one.sample_id), second.rows(one.sample_id))
    arrays = dict(np.load(exported))
    del arrays["tokens"]
    np.savez(tmp_path / "less.npz", **arrays)
    with pytest.raises(RecordingInvalid, match=r"needed are \['tokens'\] too"):
        import_npz([tmp_path / "less.npz"], tmp_path / "s")


TWO = {
    "sample": np.array(["a", "b"]), "tokens": np.array([31, 31]), "ids": np.tile(np.arange(4, dtype=np.uint8), (60, 6, 1)),
    "spec": np.array(json.dumps(PLAIN.to_dict())), "step": np.array(1), "token_ids": np.arange(62),
}  # fmt: skip
"""Arrays that are a step."""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sample": np.array(["a", "a"])}, "each name once"), ({"tokens": np.array([0, 62])}, "two tokens at least"),
        ({"token_ids": np.arange(31)}, r"\(60, 31\) rows .* expected \(60, 62\)"),
        ({"step": np.array(-1)}, "step -1"),
        ({"spec": np.array("[" * 100_000)}, "RecursionError"),
        ({"more": np.zeros(50_000_000, np.uint8)}, "times as many at most"),
        ({}, "has already"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_a_step_are_refused(tmp_path: Path, changed: Any, said: str) -> None:
    """Nor is a step written over; a damaged archive is a typed error, wherever the damage is."""
    np.savez_compressed(path := tmp_path / "x.npz", **{**TWO, **changed})
    if not changed:
        import_npz([path], tmp_path / "rec")
    with pytest.raises(RecordingInvalid, match=said):
        import_npz([path], tmp_path / "rec")
    data = path.read_bytes()
    for at in range(40, len(data) if not changed else 0, 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        with suppress(RecordingInvalid):
            import_npz([path], tmp_path / f"rec{at}")


def shared_lists(levels: int) -> bytes:
    """Lists that hold the one before twice: 2 ** levels leaves in a few bytes."""
    body = b"".join(b"]q%c(h%ch%ce" % (at + 1, at, at) for at in range(levels))
    return b"\x80\x02]q\x00" + body


BOMBS = {
    "shared": (shared_lists(60) + b".", None),
    "deep": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", None),
    "a key": (
        b"\x80\x02)q\x00" + b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(60)) + b"}h\x3cNs.", "expected",
    ),
    "a count": (shared_lists(60) + b"(Nctorch\nFloatStorage\nX\x01\x00\x00\x000Nh\x3ctQ.", "a list, expected"),
    "packed": (b"\x80\x02N" + b"0N" * 4_000_000 + b".", "times as many"),
}  # fmt: skip
"""Name -> (pickle, what is said of it; None: it is read)."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_takes_no_more_memory_than_its_bytes(tmp_path: Path, name: str) -> None:
    pickled, said = BOMBS[name]
    with zipfile.ZipFile(path := tmp_path / "0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(4))
    with nullcontext() if said is None else pytest.raises(RecordingInvalid, match=said):
        read_saved(path)


def test_saved_numbers_in_another_byte_order_are_refused(tmp_path: Path) -> None:
    torch.save({"ids": np.arange(3).astype(">i4")}, path := tmp_path / "0.pt")
    with pytest.raises(RecordingInvalid, match="big-endian"):
        read_saved(path)


def test_two_sides_of_different_runs_are_refused() -> None:
    with pytest.raises(RecordingInvalid, match="not the same on both sides"):
        found(engine_step(seed=0), consume_step(engine_step(seed=1)).step())


def test_rows_that_do_not_fit_the_layout_are_refused_with_both_numbers() -> None:
    step = engine_step()
    shard = step.ticket.plan.shard(dp=0, pp=0)
    count = len(shard.row_map(0, tp=0)[0])
    for rows, top_k, value in ((3, 4, 0), (count, 5, 0), (count, 4, 256), (count, 4, -1)):
        used = np.full((rows, top_k), value)  # the last two are 0 and 255 in a byte
        said = rf"router used {rows} rows, .*ids are .*{value}.* in \({top_k},\) columns"
        with pytest.raises(RecordingInvalid, match=said):
            ConsumedRows(step.ticket, step.spec).add_call(shard, used, microbatch=0, layer=0)
