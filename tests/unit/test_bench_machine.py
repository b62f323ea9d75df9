"""No figure without its machine: every benchmark stamps its result, and the pages' tables are made of such results."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from r3channel import bench
from r3channel.bench import figures, machine
from r3channel.errors import ConfigError


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_result_says_on_what_it_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = importlib.import_module(f"r3channel.bench.{name}" + (".measure" if name == "relay" else ""))
    monkeypatch.setattr(module, "measure", lambda *args, **options: {"figure": 1.5})
    assert bench.run([name, "--quick", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    stamp = result.pop("machine")
    assert result == {"figure": 1.5, "command": f"r3channel bench {name} --quick --json"}
    assert stamp["cores"] >= 1 and stamp["memcpy_gbps"] > 0 and len(stamp["load"]) == 2
    assert stamp["cpu"] and {"python", "numpy", "torch", "sglang"} <= set(stamp["versions"])


def test_a_machine_is_described_as_its_example_says() -> None:
    assert doctest.testmod(machine) == (0, 1)


def fresh(file: Path, **changes: Any) -> Path:
    """A result of `bench e2e` on another machine."""
    loop = {mode: {"train_wait_s": 0.0301234, "step_s": 2.0} for mode in ("default", "channel")}
    stamp = {"cpu": "Other CPU", "cores": 64, "load": [0.2, 3.0]}
    result = {"command": "r3channel bench e2e --json", "machine": stamp, "loop": loop, "unused": 1} | changes
    file.write_text(json.dumps(result) + "\n")
    return file


def test_a_fresh_result_takes_the_place_of_its_benchmarks_figures_and_says_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept := tmp_path / "figures.json").write_text(figures.KEPT.read_text())
    monkeypatch.setattr(figures, "KEPT", kept)
    before = figures.lines("measured")
    figures.keep(fresh(tmp_path / "e2e.json"))
    changed = [line for line in figures.lines("measured") if line not in before]
    assert len(changed) == 1
    assert (
        "30 ms of 2.0 s | 30 ms of 2.0 s | `r3channel bench e2e --json` | 64 x Other CPU, load 0.2 to 3.0 |"
        in changed[0]
    )
    assert "unused" not in kept.read_text() and "0.03012," in kept.read_text()


@pytest.mark.parametrize(
    "changes", [{"loop": {}}, {"command": "ls"}, {"machine": "2 x x86_64"}, {"loop": {"default": 1}}]
)
def test_a_result_that_lacks_something_is_refused_and_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    (kept := tmp_path / "figures.json").write_text(figures.KEPT.read_text())
    monkeypatch.setattr(figures, "KEPT", kept)
    with pytest.raises(ConfigError, match=r"e2e.json: .*with every part measured"):
        figures.keep(fresh(tmp_path / "e2e.json", **changes))
    assert kept.read_text() == Path(figures.__file__).with_name("figures.json").read_text()


def test_what_is_kept_is_what_the_tables_show() -> None:
    kept = json.loads(figures.KEPT.read_text())
    wanted = {(figure[1], figure[2]) for figure in figures._FIGURE.finditer(figures._TABLES.read_text())}
    assert wanted == {(bench, path) for bench, one in kept.items() for path in one["figures"]}
