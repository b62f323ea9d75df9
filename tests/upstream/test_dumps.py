"""`r3channel import` of what slime and miles save for debugging: files made by their own `Sample`, read without unpickling."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.embedded.model import write_model
from r3channel.cli import main
from r3channel.recordings.importers import Foreign, read_saved
from r3channel.recordings.recording import Recording
from tests.support.children import ROOT, said_by
from tests.upstream.wheels import sources

LENGTHS = (9, 14, 5, 9)
LAYERS, TOP_K, EXPERTS = 4, 8, 128


def rows_of(number: int) -> Any:
    """[tokens - 1, all decoder layers, K] int32, the dense layer's of zeros, as SGLang returns them."""
    scores = np.random.default_rng(number).random((LENGTHS[number] - 1, LAYERS, EXPERTS))
    ids = scores.argsort(-1)[..., :TOP_K].astype(np.int32)
    ids[:, 0] = 0
    return ids


def samples(*, arrays: bool) -> list[dict[str, Any]]:
    return [
        {
            "index": number,
            "tokens": list(range(number, number + length)),
            "response_length": 3,
            "weight_versions": ["7"] if number else ["7", "8"],
            "rollout_log_probs": [-0.5, -1.0, -0.25],
            "rollout_routed_experts": rows_of(number) if arrays else torch.from_numpy(rows_of(number)),
            "metadata": {"score": 0.5, "words": ["a", "b"]},
        }
        for number, length in enumerate(LENGTHS)
    ]


UPSTREAM = {
    "slime-debug": (
        "slime-624b824a",
        "from slime.observability.rollout_data_utils import save_debug_rollout_data\n"
        "from slime.utils.types import Sample\n"
        "own = [Sample.from_dict({'status': 'completed', **one}) for one in test_dumps.samples(arrays=False)]\n"
        "save_debug_rollout_data(sys.argv[1] + '/{rollout_id}.pt', own, rollout_id=3, evaluation=False)\n",
    ),
    "miles-dump": (
        "miles-31f1ca96",
        "from miles.utils.types import Sample\n"  # debug_data itself wants polars and Ray; these are its last two lines
        "own = [Sample.from_dict({'status': 'completed', **one}) for one in test_dumps.samples(arrays=True)]\n"
        "dump_data = dict(samples=[sample.to_dict() for sample in own])\n"
        "test_dumps.torch.save(dict(rollout_id=3, metadata={}, **dump_data), sys.argv[1] + '/3.pt')\n",
    ),
}


def imported(file: Path, form: str, tmp_path: Path, *, model: bool = True) -> int:
    options = ["--model", str(write_model(tmp_path / "model"))] if model else []
    return main(["import", str(file), "--format", form, "--out", str(tmp_path / "rec"), *options])


@pytest.mark.parametrize("form", UPSTREAM)
@pytest.mark.parametrize("theirs", [True, False], ids=["saved by the upstream", "of its structure"])
def test_what_the_upstream_saves_is_imported_row_by_row(form: str, theirs: bool, tmp_path: Path) -> None:
    if theirs:
        name, program = UPSTREAM[form]
        program = f"import sys\nfrom tests.upstream import test_dumps\n{program}"
        said_by(program, str(tmp_path), PYTHONPATH=f"{sources(name)}:{ROOT}")
    else:
        torch.save({"rollout_id": 3, "samples": samples(arrays=form == "miles-dump")}, tmp_path / "3.pt")
    assert imported(tmp_path / "3.pt", form, tmp_path) == 0
    step = Recording.open(tmp_path / "rec").step(3)
    assert len(step.samples) == len(LENGTHS)
    for number, length in enumerate(LENGTHS):
        name = f"sample{number}"
        assert np.array_equal(step.rows(name), rows_of(number)[:, 1:])
        assert step.tokens[name].tolist() == list(range(number, number + length))
        (span,) = step.ticket.sample(name).provenance
        assert span.weight_version == (7 if number else -1)
    assert main(["check", str(tmp_path / "rec")]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.update(rollout_routed_experts=None), "sample 1 has no rollout_routed_experts"),
        (lambda one: one.update(rollout_routed_experts=torch.zeros(13, 3, 8)), "(13, 3, 8), expected (13, 4, 8)"),
        (lambda one: one["rollout_routed_experts"].fill_(128), "ids 128..128, expected 0..127"),
        (lambda one: one["tokens"].append(4), "expected (14, 4, 8)"),
    ],
)  # fmt: skip
def test_a_dump_that_lacks_something_is_refused(tmp_path: Path, capsys: Any, change: Any, said: str) -> None:
    own = samples(arrays=False)
    change(own[1])
    torch.save({"rollout_id": 3, "samples": own}, tmp_path / "3.pt")
    assert imported(tmp_path / "3.pt", "slime-debug", tmp_path) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1, told
    assert not (tmp_path / "rec").exists()


def test_dumps_of_no_model_and_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"rollout_id": 3, "samples": samples(arrays=False)}, tmp_path / "3.pt")
    assert imported(tmp_path / "3.pt", "slime-debug", tmp_path, model=False) == 2
    assert "give --model" in capsys.readouterr().err
    whole = (tmp_path / "3.pt").read_bytes()
    for data in (b"no zip", whole[: len(whole) // 2], json.dumps({}).encode()):
        (tmp_path / "3.pt").write_bytes(data)
        assert imported(tmp_path / "3.pt", "slime-debug", tmp_path) == 2
        assert "expected a file that torch.save wrote" in capsys.readouterr().err


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (HARM,)


HARM = "r3channel-was-here"


def test_nothing_of_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 3, "samples": [Harmful()]}, tmp_path / "3.pt")
    assert read_saved(tmp_path / "3.pt")["samples"] == [Foreign("posix mkdir")]
    assert not Path(HARM).exists()
    with zipfile.ZipFile(tmp_path / "3.pt") as archive, pytest.raises(FileExistsError):
        Path(HARM).mkdir()
        pickle.loads(archive.read("3/data.pkl"))  # noqa: S301 - what it would have done
