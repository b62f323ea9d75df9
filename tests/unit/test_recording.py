"""The recording on disk: bytes, torn ends, limits, and what is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from r3channel.cli import main
from r3channel.errors import ConfigError, FrameError, R3Error, RecordingInvalid, TicketMismatch, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recordings.logprobs import SIDES, KeptLogprobs, read_logprobs, write_logprobs
from r3channel.recordings.recorder import Recorder, segment_name, write_segment, write_step
from r3channel.recordings.recording import Recording
from r3channel.recordings.segment import HEAD_BYTES, Kind, pack, read
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.support.misaligned import engine_step
from tests.support.samples import SPEC, WIDE, flipped, random_ids, span

GOLDEN = Path(__file__).parents[1] / "golden" / "recording"
TOKENS = {"a": 9, "b": 30, "c": 5}


def held(name: str, step: int = 0) -> Any:
    """Rows as a relay holds them."""
    rows = TOKENS[name] - 1
    ids = random_ids(rows, seed=step * 10 + ord(name))
    own = {"digests_L": layer_digests(ids, first_row=0), "provenance": (span(0, rows, step),), "invalid": ()}
    return SimpleNamespace(ids_TLK=ids, first_row=0, sample_key=1, **own)


def ticket_of(step: int) -> Ticket:
    samples = []
    for name, tokens in TOKENS.items():
        rows = held(name, step)
        tokens_hash = hash_tokens(as_tokens(range(tokens)))
        samples.append(TicketSample(name, tokens, tokens_hash, fold(rows.digests_L), rows.provenance))
    return Ticket("run", step, SPEC, TrainerLayout(), Assignment.given([[["a", "b", "c"]]]), samples, 1024)


def record(recorder: Recorder, *steps: int) -> None:
    recorder.open(SPEC, TrainerLayout())
    for step in steps:
        for name, tokens in TOKENS.items():
            recorder.keep(name, as_tokens(range(tokens)))
        recorder.write(ticket_of(step), [[held(name, step)] for name in TOKENS])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder with step 0."""
    record(Recorder(tmp_path), 0)
    return tmp_path


def check(folder: Path, step: int) -> None:
    found = Recording.open(folder).step(step)
    assert found.ticket == ticket_of(step) and found.cut == ()
    for name, tokens in TOKENS.items():
        assert np.array_equal(found.rows(name), held(name, step).ids_TLK)
        assert found.tokens[name].tolist() == list(range(tokens))


def test_a_frame_of_another_model_in_a_torn_step_costs_its_sample_alone(recorded: Path) -> None:
    step = Recording.open(recorded).step(0)
    other = encode_frame(WIDE, expert_ids_TLK=random_ids(8, spec=WIDE))
    path = write_step(recorded / "mixed", replace(step, frames={**step.frames, "a": (memoryview(other),)}))
    path.write_bytes(path.read_bytes()[:-HEAD_BYTES])  # without its end
    assert Recording.open(recorded / "mixed").step(0).cut == ("a",)


@pytest.mark.parametrize("rows", [range(5), range(3, 5)], ids=str)
def test_rows_beyond_a_samples_tokens_cost_it_alone(tmp_path: Path, capsys: Any, rows: range) -> None:
    """A record under another sample's number: on the engines' side that sample is not whole, on the routers' it is an error."""
    record(Recorder(tmp_path / "good"), 0)
    step, ids = Recording.open(tmp_path / "good").step(0), random_ids(len(rows))
    frames = {**step.frames, "c": [encode_frame(SPEC, expert_ids_TLK=ids, first_row=rows[0])]}
    write_step(tmp_path / "forged", replace(step, frames=frames))
    passes = {("forward", name): turns for name, turns in frames.items()}
    write_step(tmp_path / "router", replace(step, side="router", passes=passes))
    good, forged, router = (str(tmp_path / name) for name in ("good", "forged", "router"))
    both = f"check {forged} {good}", f"diff {forged} {good}", f"diff {good} {forged}"
    for words in (f"inspect {forged}", f"check {forged}", *both):
        assert main(words.split()) == 1, words
    assert Recording.open(forged).step(0).cut == ("c",) and main(["replay", forged]) == 0
    said = capsys.readouterr().out
    assert "1 samples are not whole: c" in said and said.count("and not compared: c\nnot equal") == 2
    for words in (f"inspect {router}", f"check {router}", f"check {good} {router}", f"diff {good} {router}"):
        assert main(words.split()) == 2 and "sample c: rows" in capsys.readouterr().err


@pytest.mark.parametrize("cut", range(40))
def test_a_torn_end_is_cut_at_the_last_whole_record_and_said(recorded: Path, cut: int) -> None:
    path = recorded / segment_name(0)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * cut // 40])
    try:
        step = Recording.open(recorded).step(0)
    except RecordingInvalid as error:
        assert "before its ticket does" in str(error) and cut < 20
        return
    whole = [sample.sample_id for sample in step.samples]
    assert whole == list(TOKENS)[: len(whole)] and step.cut == tuple(TOKENS)[len(whole) :] and len(whole) < 4
    for name in whole:
        assert np.array_equal(step.rows(name), held(name).ids_TLK)
    for name in step.cut:
        with pytest.raises(RecordingInvalid, match=f"sample {name}.*cut off"):
            step.rows(name)


def test_without_a_whole_sample_nothing_is_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, torn, out = (str(tmp_path / name) for name in ("whole", "torn", "out"))
    for folder in (whole, torn):
        record(Recorder(folder), 0)
    changed(Path(torn), segment_name(0), lambda data: data[:600])
    assert Recording.open(torn).step(0).cut == tuple(TOKENS)
    Recorder(tmp_path / "none").open(SPEC, TrainerLayout())
    assert main(["replay", str(tmp_path / "none")]) == 1
    for command, *rest in (["inspect", torn], ["diff", whole, torn], ["check", torn], ["check", whole, torn]):
        assert main([command, *rest]) == 1, command
        assert command != "check" or "3 samples that are not whole: a, b, c" in capsys.readouterr().out
    for arguments in (["replay", torn], ["export", torn, "--format", "npz", "--out", out]):
        assert main(arguments) == 2 and "expected" in capsys.readouterr().err


def test_a_recording_begun_while_samples_are_held_goes_out_and_comes_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "late")
    recorder.open(SPEC, TrainerLayout())
    recorder.keep("c", as_tokens(range(TOKENS["c"])))
    recorder.write(ticket_of(0), [[held(name)] for name in TOKENS])
    assert Recording.open(tmp_path / "late").step(0).cut == ()
    late, exported, again = (str(tmp_path / name) for name in ("late", "step-000000.npz", "again"))
    for arguments in (["export", late, "--out", str(tmp_path)], ["import", exported, "--out", again]):
        assert main([*arguments, "--format", "npz"]) == 0
    found = Recording.open(again).step(0)
    assert list(found.tokens) == ["c"] and np.array_equal(found.rows("a"), held("a").ids_TLK)


def test_a_segment_that_was_spliced_is_noticed(recorded: Path) -> None:
    path, records = recorded / segment_name(0), read(recorded / segment_name(0))[0]
    packed = [pack(one.kind, bytes(one.payload), sample=one.sample) for one in records]
    short = pack(Kind.TOKENS, bytes(8), sample=1)
    for pieces in ([*packed, *packed[:-1]], [packed[0], packed[0]], [packed[0], short]):
        write_segment(path, pieces)
        with pytest.raises(RecordingInvalid, match=r"two segments in one file|expected 4 for each"):
            Recording.open(recorded).step(0)
    write_segment(path, packed[:4] + packed[5:-1])  # without b's frame
    assert Recording.open(recorded).step(0).cut == ("b",) and main(["check", str(recorded)]) == 1


def test_a_step_that_is_recorded_again_leaves_a_reader_what_it_has_mapped(tmp_path: Path) -> None:
    path = tmp_path / segment_name(0)
    write_segment(path, [pack(Kind.TOKENS, b"1" * 8)])
    mapped = read(path)[0]
    write_segment(path, [pack(Kind.TOKENS, b"2" * 8)])
    assert mapped[0].payload == b"1" * 8


@pytest.mark.parametrize("limit", ["steps", "max_bytes"])
def test_a_limit_ends_the_recording_and_a_ring_keeps_the_newest(tmp_path: Path, limit: str) -> None:
    record(Recorder(tmp_path / "one"), 0)
    size = Recording.open(tmp_path / "one").nbytes(0)
    limits: Any = {limit: {"steps": 2, "max_bytes": size * 5 // 2}[limit]}
    ends, ring = Recorder(tmp_path / "ends", **limits), Recorder(tmp_path / "ring", ring=True, **limits)
    record(ends, 0, 1, 2, 3)
    record(ring, 0, 1, 2, 3)
    assert Recording.open(ends.folder).steps == (0, 1) and ends.stopped and ends.lost == 0
    assert Recording.open(ring.folder).steps == (2, 3) and not ring.stopped
    check(ring.folder, 3)
    record(Recorder(ring.folder, ring=True, **limits), 4)  # a restarted relay goes on with what is there
    assert Recording.open(ring.folder).steps == (3, 4)
    small = Recorder(tmp_path / "small", max_bytes=100, ring=True)
    record(small, 0, 1)
    assert Recording.open(small.folder).steps == () and small.lost == 2


def test_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for values in ({"steps": -1}, {"ring": True}):
        with pytest.raises(ConfigError, match="recording"):
            Recorder(tmp_path, **values)  # pyright: ignore[reportArgumentType]


def test_tokens_may_be_left_out(tmp_path: Path) -> None:
    record(Recorder(tmp_path, tokens=False), 0)
    step = Recording.open(tmp_path).step(0)
    assert step.tokens == {} and step.cut == () and np.array_equal(step.rows("b"), held("b").ids_TLK)
    assert Kind.TOKENS not in {record.kind for record in read(tmp_path / segment_name(0))[0]}


def test_a_folder_of_another_model_is_not_recorded_into(recorded: Path) -> None:
    with pytest.raises(RecordingInvalid, match=r"spec.*give another folder"):
        Recorder(recorded).open(WIDE, TrainerLayout())
    assert sorted(path.name for path in recorded.iterdir()) == ["manifest.json", segment_name(0)]


def changed(folder: Path, name: str, change: Any) -> Path:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    return folder


def with_version(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"version": 9}).encode()


@pytest.mark.parametrize(
    ("name", "change", "error", "said"),
    [
        ("manifest.json", with_version, RecordingInvalid, "version 9; expected 'r3channel-recording', 1"),
        ("manifest.json", lambda data: data[:50], RecordingInvalid, "expected a recording's folder"),
        ("manifest.json", lambda data: data.replace(b'"spec"', b'"spek"'), RecordingInvalid, "damaged"),
        ("manifest.json", lambda data: data.replace(b'"num_experts": 128', b'"num_experts": 64'), RecordingInvalid, "of spec"),
        (segment_name(0), partial(flipped, bit=8 * 5), RecordingInvalid, "head of a record"),
        (segment_name(0), lambda data: b"R3R\x02" + data[4:], RecordingInvalid, "segment format 2, expected 1"),
        (segment_name(0), partial(flipped, bit=8 * (HEAD_BYTES + 60)), TicketMismatch, "damaged"),
        (segment_name(0), lambda data: b"what is this, it is no segment at all", RecordingInvalid, "head of a record"),
        (segment_name(0), partial(flipped, bit=8 * -700), FrameError, "sample c|sample b"),
    ],
)  # fmt: skip
def test_damage_is_named(recorded: Path, name: str, change: Any, error: type[R3Error], said: str) -> None:
    with pytest.raises(error, match=said):
        step = Recording.open(changed(recorded, name, change)).step(0)
        for sample in step.samples:
            step.rows(sample.sample_id)


def test_a_segment_that_was_renamed_is_not_taken_for_another_step(tmp_path: Path) -> None:
    record(Recorder(tmp_path), 1)
    (tmp_path / segment_name(1)).rename(tmp_path / segment_name(0))
    with pytest.raises(RecordingInvalid, match="it holds step 1; was the file renamed"):
        Recording.open(tmp_path).step(0)


def test_a_manifest_has_no_path_and_names_versions(recorded: Path) -> None:
    text = (recorded / "manifest.json").read_text()
    assert str(recorded) not in text and os.sep + "tmp" not in text
    assert json.loads(text)["versions"]["numpy"] == np.__version__


def logprobs_of(step: Ticket, kept: tuple[str, ...] = SIDES) -> dict[str, np.ndarray]:
    """Log-probs of every output that is a token's; each tells its place."""
    rows = [one.tokens - 1 for one in step.samples]
    sample, position = np.repeat(range(len(rows)), rows), np.concatenate([np.arange(count) for count in rows])
    value = -(sample * 100 + position).astype(np.float32)
    return {"sample": sample, "position": position} | {name: value - SIDES.index(name) / 4 for name in kept}


@pytest.mark.parametrize("first", [0, 1_000_000], ids=str)
def test_log_probs_lie_beside_their_step_as_safetensors_and_go_with_it(tmp_path: Path, first: int) -> None:
    record(Recorder(tmp_path, steps=2, ring=True), first)
    given = logprobs_of(ticket_of(first))
    path = write_logprobs(tmp_path, first, 3, given)
    assert path is not None and path.name == f"step-{first or '000000'}.logprobs-3.safetensors"
    assert [str(load_file(path)[name].dtype) for name in given] == ["int32"] * 2 + ["float32"] * 3
    found = Recording.open(tmp_path).step(first).logprobs
    assert found.keys() == given.keys() and all(np.array_equal(found[name], given[name]) for name in given)
    assert write_logprobs(tmp_path, first + 1, 3, given) is None  # a step that nobody records
    shutil.copy(tmp_path / segment_name(first), copy := tmp_path / "step-copy.r3s")
    os.utime(copy, (0, 0))  # the oldest goes first
    record(Recorder(tmp_path, steps=2, ring=True), first)
    assert Recording.open(tmp_path).step(first).logprobs == {}, "those of the earlier attempt"
    write_logprobs(tmp_path, first, 3, given)
    record(Recorder(tmp_path, steps=2, ring=True), first + 1, first + 2)
    assert Recording.open(tmp_path).steps == (first + 1, first + 2) and not path.exists()


@pytest.mark.parametrize("damage", ["short", "size", "end", "of another step", "of two axes"])
def test_damaged_log_probs_are_named(recorded: Path, damage: str) -> None:
    given = logprobs_of(ticket_of(0))
    given["position"][-1] += damage == "of another step"
    columns = {name: own[None] if damage == "of two axes" else own for name, own in given.items()}
    path = write_logprobs(recorded, 0, 0, columns)
    assert path is not None
    data = path.read_bytes()
    end = data.replace(b"[0, ", b"[9, ")
    changes = {"short": data[:60], "size": (1 << 60).to_bytes(8, "little"), "end": end}
    path.write_bytes(changes.get(damage, data))
    with pytest.raises(RecordingInvalid, match=r"safetensors|does not have"):
        Recording.open(recorded).step(0)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,cp=2", "pp=2,cp=2,packing=thd"])
def test_each_rank_places_what_its_model_puts_out(tmp_path: Path, layout: str) -> None:
    """In the layout of each rank's output, prompts masked; a side that one micro-batch lacks is left out of all."""
    step = replace(engine_step(layout=layout).ticket, step=0)
    write_segment(tmp_path / segment_name(0), [pack(Kind.TICKET, step.to_bytes())])
    given, places = logprobs_of(step, ("trainer",)), {one.sample_id: n for n, one in enumerate(step.samples)}
    for shard in (one for one in step.plan.shards if one.pp == step.layout.pp - 1):
        kept = KeptLogprobs(step, shard)
        for index, batch in enumerate(shard.microbatches):
            own = [given["trainer"][given["sample"] == places[name]] for name in batch.sample_ids]
            outputs = torch.from_numpy(shard.lay_out(index, own))
            prompt = [(np.arange(tokens) >= 4).astype(np.float32) for tokens in batch.tokens]
            sides = {"trainer": outputs, "engine": None if index else outputs}
            kept.add(index, torch.from_numpy(shard.lay_out(index, prompt)).bfloat16(), **sides)
        assert kept.write(tmp_path)
    found = read_logprobs(tmp_path, 0)
    order = np.lexsort((found["position"], found["sample"]))
    answer = given["position"] >= 4
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[name][order], own[answer]) for name, own in given.items())
    assert len(list(tmp_path.glob("*.logprobs-*"))) == step.layout.dp * step.layout.cp
    with pytest.raises(UsageError, match="a recording can place"):
        KeptLogprobs(step, step.plan.shards[-1]).add(0, torch.ones(3), trainer=torch.ones(3))


def test_a_full_disk_ends_the_log_probs_alone(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ticket_of(0).plan.shard(dp=0, pp=0)
    kept, ones = KeptLogprobs(ticket_of(0), shard), torch.ones(shard.token_map(0)[0].shape)
    kept.add(0, ones, trainer=ones)
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    assert not kept.write(recorded) and Recording.open(recorded).step(0).logprobs == {}


def test_inspect_diff_and_check_use_log_probs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, further in (("a", 0.0), ("b", 3.0)):
        shutil.copytree(GOLDEN, tmp_path / name)
        given = logprobs_of(Recording.open(GOLDEN).step(2).ticket)
        given["trainer"] -= further
        write_logprobs(tmp_path / name, 2, 0, given)
    assert main(["inspect", str(tmp_path / "a"), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    tokens = len(given["sample"])
    assert told["logprobs"] == {"tokens": tokens, "abs_diff": 0.25, "abs_diff_replay_off": 0.5}
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["diff", str(tmp_path / "a"), str(GOLDEN)]) == 0  # one side has none
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["logprobs"] == {"engine": 0.0, "trainer": 3.0, "natural": 0.0}
    assert main(["check", str(tmp_path / "a")]) == 0 and "suspicion" not in capsys.readouterr().out
    for strict, code in (("--json", 0), ("--strict", 1)):
        assert main(["check", str(tmp_path / "b"), strict]) == code
        given["engine"][0] = -np.inf
        write_logprobs(tmp_path / "b", 2, 0, given)
        assert "replay_hurts" in capsys.readouterr().out
