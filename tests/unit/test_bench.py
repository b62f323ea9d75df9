"""Benchmarks: no figure without its machine, tables made of such results, and the same rows at the end of every path."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from r3channel import bench
from r3channel.bench import harness
from r3channel.bench import relay_paths as paths
from r3channel.bench import relay_peers as peers
from r3channel.bench.relay import CASE, MODELS, Round, path_of
from r3channel.bench.relay_paths import OWN, Case, Workload, digest
from r3channel.bench.relay_peers import ALL, DIRECT, LIMIT, NUMPY, PEERS, SLIME
from r3channel.errors import ConfigError
from r3channel.plan.placement import place_samples
from r3channel.relay.relay import Relay
from tests.support import figures
from tests.support.children import ROOT, printed
from tests.support.waits import RUN_S, SOON_S, until


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
    seen = harness.interleave(calls, rounds=2, warm_up=1)
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


# -- the relay's paths ----------------------------------------------------------------------------------------------------

SMALL = Case("qwen3-30b-a3b", tokens=1_500, dp=4)


@pytest.mark.parametrize("path", PEERS)
def test_every_peer_ends_with_the_rows_that_our_placement_makes_and_a_wrong_one_is_seen(path: str) -> None:
    work = Workload(SMALL)
    for dp in range(SMALL.dp):
        taking = peers.ArraysTaking(work.plan, dp, path)
        blank, ids = digest(taking.tensors()), work.wide if path == SLIME else work.narrow
        samples = [torch.from_numpy(ids[name]) for name in work.of_rank(dp)]
        taking.hold(samples)
        assert digest(taking.tensors()) == _placed(work, dp) != blank
        taking.hold([samples[0].roll(1, 0), *samples[1:]])
        assert digest(taking.tensors()) != _placed(work, dp)


def test_our_own_path_ends_with_the_same_rows_over_tcp() -> None:
    work = Workload(SMALL)
    sending, ends = paths.ChannelSending(work), []
    with closing(sending.relay):
        ranks = [paths.ChannelTaking(SMALL, rank, sending.relay) for rank in range(SMALL.dp)]
        wall_s, cpu_s = sending.prepare(whole=True)
        assert wall_s > 0 and cpu_s > 0
        start_s = sending.deliver(lambda rank, ticket: ends.append(ranks[rank].take(ticket)))
        sending.settle()
        assert len(ends) == 4 and min(ends) > start_s
        assert [digest(rank.tensors()) for rank in ranks] == [_placed(work, dp) for dp in range(SMALL.dp)]
        assert sending.bytes_sent == (SMALL.tokens - len(work.lengths)) * work.spec.bytes_per_token
        for rank in ranks:
            rank.receiver.close()


def test_a_body_goes_the_whole_way_without_a_connection() -> None:
    work = Workload(Case("qwen3-30b-a3b", tokens=1_500))
    with closing(Relay(work.spec, work.case.trainer)) as held:
        paths.add_bodies(held, work.bodies)
        ticket = held.seal(0, work.assignment)
        rows_N = paths.receive(held, ticket)
        held.join_previous(timeout_s=SOON_S)
    views = ticket.plan.shard(dp=0, pp=0).views(rows_N)
    assert digest([torch.from_numpy(layer) for view in views for layer in view[0]]) == _placed(work, 0)


@pytest.mark.parametrize("path", [SLIME, NUMPY])
def test_a_peer_reads_stock_replies_only_in_rounds_of_the_whole_way(path: str) -> None:
    sending = peers.StoreSending(Workload(SMALL), path)
    assert sending.prepare(whole=False) == (0.0, 0.0)
    assert min(sending.prepare(whole=True)) > 0


def test_a_path_is_its_medians_and_the_whole_way_is_that_of_the_rounds_that_had_it() -> None:
    walls = {OWN: (1.0, 0.5), SLIME: (8.0, 3.0), NUMPY: (8.0, 3.0), DIRECT: (6.0, 0.0), LIMIT: (0.5, 0.0)}
    seen = {
        path: [Round(wall, 8.0, 0.1, (s, s / 2)), Round(wall, 8.0, 0.1, (0.0, 0.0))]
        for path, (wall, s) in walls.items()
    }
    found = {path: path_of(path, seen, bytes_sent=CASE.tokens * 384) for path in ALL}
    own = found[OWN]
    assert own["wall_s"] == 1.0 and own["bytes_per_token"] == 384
    assert own["whole_wall_s"] == 1.5 and own["whole_cpu_s"] == 8.25
    assert own["manager_cpu_us_per_token"] == pytest.approx(0.35 / CASE.tokens * 1e6)
    assert found[DIRECT]["whole_wall_s"] == 9.0  # decodes what Ray's uint8 path decodes
    assert found[LIMIT]["whole_wall_s"] is found[LIMIT]["manager_cpu_us_per_token"] is None


def _placed(work: Workload, dp: int) -> str:
    """What the relay would send to this rank."""
    shard = work.plan.shard(dp=dp, pp=0)
    whole = place_samples(work.plan, dp=dp, ids_of=work.ids)[shard.key]
    return digest([torch.from_numpy(layer) for view in shard.views(whole) for layer in view[0]])


# -- whole benchmarks: the shape of what they print; the figures themselves need a quiet machine ---------------------------


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)  # four engines, one by one
def test_capture_has_every_variant_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["capture", "--json", "--quick", "--rounds", "8"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    variants, nbytes, us = report["variants"], report["topk_bytes"], report["topk_us"]
    assert list(variants) == ["off", "stock", "r3channel", "direct", "off_again"]
    for values in variants.values():
        assert set(values["engine_cpu_ratio_to_off"]) == {"median", "low", "high"}
    # Each request was served by the capturer that its id named: no rows, int32, frames in base64, frames past the reply.
    sent = [variants[way]["http_bytes_per_token"] for way in ("off", "direct", "r3channel", "stock")]
    assert sent[0] < 2 < 384 < sent[1] < 400 < 512 < sent[2] < 530 < 2048 <= sent[3]
    shapes = ("reply_us", "1000 4000 16000", 4), ("pass_us", "256 8192", 3), ("parts", "8 1000 16000", 6)
    for name, rows, count in shapes:
        for of_rows in (report[name], report[name.replace("_us", "_of_stock")]):
            assert list(of_rows) == rows.split() and all(len(each) == count for each in of_rows.values())
    assert nbytes["ours"] < 740 < 1366 < nbytes["binary"] + 1 < nbytes["stock"] and min(us.values()) > 0


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_weights_have_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["weights", "--quick", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["large"]["wall_s"]["raw_gloo"] > 0 < min(result["pauses"]["pause_s"].values())
    assert result["engine"]["wall_s"].keys() == {"per_tensor", "flattened", "staged", "colocated", "grouped"}
    assert result["engine"]["parameters_compared"] > 30


# -- as a user runs them: figures are there and fit each other, paths end alike, nothing outlives a command; on real Megatron ----

COMMAND, SHORT = ("-m", "r3channel.cli", "bench"), ("--quick", "--rounds", "2", "--json")


def measured(*words: str) -> dict[str, Any]:
    return json.loads(printed(*COMMAND, *words, *SHORT, limit_s=RUN_S).splitlines()[-1])


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_all_paths_end_alike_and_every_promised_key_is_there() -> None:
    report = measured("relay")  # paths that end differently raise EndStatesDiffer
    assert set(report["paths"]) == set(ALL)
    for values in report["paths"].values():
        assert values["wall_s"] > 0 and values["cpu_s"] > 0
        assert {"manager_cpu_us_per_token", "bytes_per_token"} <= set(values)
    assert set(report["seal_ms"]) == {"64", "8192"}
    placed = report["body_to_placed_cpu_us_per_token"]
    assert set(placed) == set(MODELS) and min(placed.values()) > 0
    assert all(report["socket_cpu_us_per_token"][way] > 0 for way in ("in_band", "direct", "stock"))
    assert report["case"] == {"model": MODELS[0], "tokens": 262_144, "dp": 4}


@pytest.mark.full
@pytest.mark.dist
def test_a_benchmark_that_is_killed_takes_its_processes_along() -> None:
    bench = subprocess.Popen([sys.executable, *COMMAND, "relay", *SHORT], stdout=subprocess.DEVNULL, cwd=ROOT)

    def family() -> list[psutil.Process]:
        assert bench.poll() is None, "it ended by itself"
        return psutil.Process(bench.pid).children(recursive=True)

    try:
        until(
            lambda: sum("Rank" in _title(one) for one in family()) >= 4, "ranks that started", limit_s=RUN_S
        )
        parts = family()
    finally:
        bench.kill()
        bench.wait(RUN_S)
    # Ray's agents first try to tell a server that is gone, too
    _, alive = psutil.wait_procs(parts, timeout=RUN_S)
    assert not [_title(process) for process in alive]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def holds(interval: dict[str, float]) -> bool:
    return interval["low"] <= interval["median"] <= interval["high"]


@pytest.mark.full
@pytest.mark.dist
def test_replay_says_what_it_adds_to_a_step_beside_the_same_step_twice() -> None:
    found = measured("replay")
    assert found["rounds"] == 2
    assert set(found["step_cpu_ms"]) == {"plain", "plain_again", "replay"}
    assert min(found["step_cpu_ms"].values()) > 0
    for name in ("replay_percent", "noise_percent"):
        assert holds(found[name]) and found[name]["low"] > -100
    assert found["operations"] == {"per_router": 0, "per_microbatch": 10}, "beside Megatron's own top-k"
    assert min(found["router_call_cpu_us"].values()) > 0 and 0 < found["router_calls_percent"] < 100


@pytest.mark.full
@pytest.mark.dist
def test_a_trainers_step_through_the_channel_is_paired_with_the_same_step_without() -> None:
    found = measured("e2e", "--only", "pairs")["pairs"]
    assert found["pairs"] == 2 and min(found["step_cpu_ms"].values()) > 0
    for name in ("trainer_cpu_ratio", "noise_ratio"):
        assert holds(found[name]) and found[name]["low"] > 0
