"""No figure without its machine: every benchmark stamps its result, and the pages' tables are made of such results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3channel import bench
from r3channel.bench import harness
from r3channel.errors import ConfigError
from tests.support import figures


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_result_names_its_machine(capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parts = {
        part: lambda effort, part=part: {"rounds": {part: effort.rounds_of(9, 2)}}
        for part in bench.parts_of(name)
    }
    monkeypatch.setattr(bench, "parts_of", {name: parts}.get)
    assert bench.run([name, "--quick", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    stamp = result.pop("machine")
    assert result == {"rounds": dict.fromkeys(parts, 2), "command": f"r3channel bench {name} --quick --json"}
    assert stamp["cores"] >= 1 and stamp["memcpy_gbps"] > 0 and len(stamp["load"]) == 2
    assert stamp["cpu"] and {"python", "numpy", "torch", "sglang"} <= set(stamp["versions"])


def test_every_round_makes_all_calls_begins_elsewhere_and_forgets_the_warm_up() -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) or len(made) for name in "abc"}
    seen = harness.interleaved(calls, rounds=2, warm_up=1)
    assert made == [*"abc", *"bca", *"cab"]
    assert seen == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_a_ratio_is_that_of_the_pairs_and_its_interval_holds_it() -> None:
    found = harness.ratio([2.0, 6.0, 20.0], [1.0, 2.0, 5.0])
    assert found["median"] == 3.0 and 2.0 <= found["low"] <= 3.0 <= found["high"] <= 4.0


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is kept, which `figures` reads and writes."""
    (file := tmp_path / "figures.json").write_text(figures.KEPT.read_text())
    monkeypatch.setattr(figures, "KEPT", file)
    return file


def fresh(file: Path, **changes: Any) -> Path:
    """A result of `bench e2e` on another machine."""
    stamp = {"cpu": "Other CPU", "cores": 64, "load": [0.2, 3.0]}
    result = {"command": "r3channel bench e2e --json", "machine": stamp, "unused": 1} | changes
    result.setdefault("pairs", {"trainer_cpu_ratio": {"median": 1.0301234}})
    file.write_text(json.dumps(result) + "\n")
    return file


def test_a_fresh_result_takes_its_benchmarks_place_and_says_its_machine(tmp_path: Path, kept: Path) -> None:
    before = figures.lines("measured")
    figures.keep(fresh(tmp_path / "e2e.json"))
    changed = [line for line in figures.lines("measured") if line not in before]
    assert len(changed) == 1
    assert "| 1.03 | `r3channel bench e2e --json` | 64 x Other CPU, load 0.2 to 3.0 |" in changed[0]
    assert "unused" not in kept.read_text() and "1.03\n" in kept.read_text()


@pytest.mark.parametrize(
    "changes",
    [{"pairs": {}}, {"command": "ls"}, {"machine": "2 x x86_64"}, {"pairs": {"trainer_cpu_ratio": 1}}],
)
def test_a_result_that_lacks_something_is_refused_and_leaves_what_was_kept(
    tmp_path: Path, kept: Path, changes: dict[str, Any]
) -> None:
    before = kept.read_text()
    with pytest.raises(ConfigError, match=r"e2e.json: .*with every part measured"):
        figures.keep(fresh(tmp_path / "e2e.json", **changes))
    assert kept.read_text() == before


def test_what_is_kept_is_what_the_tables_show() -> None:
    kept = json.loads(figures.KEPT.read_text())
    wanted = {(figure[1], figure[2]) for figure in figures._FIGURE.finditer(figures._TABLES.read_text())}
    assert wanted == {(bench, path) for bench, one in kept.items() for path in one["figures"]}
