"""The main job, whole: real SGLang, real Ray, real Megatron-core; judged from what the run wrote, without our own code."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from dashboards.dashboard import dashboard
from examples.async_grpo.grpo import Request
from examples.async_grpo.rollout import RolloutManager
from examples.embedded.sglang import free_port, kill_family
from r3channel.observe.metric_table import METRICS
from r3channel.recordings.recording import Recording
from r3channel.recordings.summary import summarize
from r3channel.weights.checksums import tensor_checksum
from r3channel.weights.store import HeldWeights
from tests.engine.reference import reference_ids
from tests.support import children
from tests.support.http_answers import Answering
from tests.support.prometheus import PROMETHEUS, answer, prometheus
from tests.support.waits import PROGRAM_S, RUN_S, SOON_S, await_memory, busy, meanwhile
from tests.support.weights import as_engine_keeps

pytestmark = pytest.mark.e2e
TOP_K, LAYERS = 8, (1, 2, 3)


# -- whole runs of the demo, each once per session -------------------------------------------------------------------------

OLDER_RAY = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
"""What a cluster that was started before leaves in the environment."""


@dataclass
class Run:
    """One finished run."""

    code: int
    result: dict[str, Any]
    """The JSON object in the last line of stdout."""
    stderr: str
    folder: Path
    pages: dict[str, list[str]] = field(default_factory=dict)
    """/metrics of each process, scraped while it ran."""
    panels: dict[str, int] = field(default_factory=dict)
    """The dashboard's expressions -> how many series each gave in a real Prometheus; empty without one."""


RunDemo = Callable[..., Run]


def run_demo(folder: Path, *options: str, channel: bool = True) -> Run:
    """Run the demo as a user would; with `--report` in the options its /metrics are scraped on the way."""
    await_memory(6, "a run of the demo")
    command = ("-m", "examples.demo") if channel else (f"{children.ROOT}/examples/async_grpo/train_async.py",)
    pages = dict[str, list[str]]()
    with meanwhile(lambda: _scrape(folder / "report/endpoints.json", pages), every_s=0.5):
        done = children.run(*command, *options, "--json", cwd=folder, limit_s=RUN_S, **OLDER_RAY)
    lines = done.stdout.strip().splitlines()
    said = f"no JSON at the end; {done.returncode}:\n{done.stderr[-4000:]}"
    assert lines and lines[-1].startswith("{"), said
    return Run(done.returncode, json.loads(lines[-1]), done.stderr, folder, pages)


def _scrape(endpoints: Path, pages: dict[str, list[str]]) -> None:
    urls = json.loads(endpoints.read_text())["metrics"] if endpoints.is_file() else {}
    for name, url in urls.items():
        # a process may end between two looks
        with suppress(OSError), urllib.request.urlopen(url, timeout=SOON_S) as page:
            pages.setdefault(name, []).append(page.read().decode())


def _series(api: str, expr: str, begin_s: float) -> int:
    """Return how many series an expression of the dashboard gave over the run."""
    expr = expr.replace("$__rate_interval", "20s").replace("$run", ".*")
    query = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": time.time(), "step": 1})
    found = answer(api, f"query_range?{query}")
    return sum(any(value != "NaN" for _, value in series["values"]) for series in found)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The default run: DP2 x TP2 with sequence parallelism, three steps, everything written."""
    folder = tmp_path_factory.mktemp("demo")
    written = ("--report", "report", "--dump", "dump", "--record", "record", "--export", "export")
    with prometheus(folder, folder / "report/targets", every="1s") as api:
        begin_s = time.time()
        found = run_demo(folder, "--steps", "3", *written, "--weights-manifest", "committed.json")
        asked = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
        return replace(found, panels={expr: _series(api, expr, begin_s) for expr in asked if api})


@pytest.fixture(scope="session")
def run_small(tmp_path_factory: pytest.TempPathFactory) -> RunDemo:
    """One step of few samples, for what a short run can show."""

    def start(*options: str, channel: bool = True) -> Run:
        folder = tmp_path_factory.mktemp("small")
        layout = () if "--layout" in options else ("--layout", "dp=1,tp=1,pp=1,cp=1")
        return run_demo(folder, "--steps", "1", "--samples", "8", *layout, *options, channel=channel)

    return start


# -- the run as it is by default --------------------------------------------------------------------------------------------


def load(run: Run, name: str) -> dict[str, np.ndarray]:
    with np.load(run.folder / "dump" / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


def test_the_demo_reports_no_difference_and_every_promised_number(demo: Run) -> None:
    result = demo.result
    assert demo.code == 0 and result["ids_different"] == 0 and result["digests_different"] == 0
    assert result["ids_compared"] == result["rows"] * len(LAYERS) * TOP_K * 3 >= 100_000
    steps, samples, passes, tp = 3, 16, 3, 2
    assert result["digests_checked"] == steps * samples * len(LAYERS) * passes * tp
    assert result["stage_coverage"] >= 0.95
    assert result["bytes_per_token"]["object_store"] <= 32
    assert result["bytes_per_token"]["engine_frame"] < 32 and result["bytes_per_token"]["engine_http"] < 100
    assert len(result["bytes_per_token"]["landed_per_rank"]) == 4
    # 1 where trainers came to each step after its rows, as on a busy machine
    assert 0 < result["hidden_fraction"] <= 1 and not result["samples_lost"]
    assert set(result["wait_s_by_step"]) == {"0", "1", "2"} and 0 < result["wait_fraction"] < 0.5
    assert set(result["coverage_by_process"]) == {"relay", "trainer0", "trainer1", "trainer2", "trainer3"}
    assert min(result["coverage_by_process"].values()) >= 0.95, result["coverage_by_process"]
    (engine,) = (stages for name, stages in result["stages_by_process_s"].items() if name.startswith("engine "))  # fmt: skip
    assert set(engine) == {"capture", "frame", "generation"}
    assert result["logprob_abs_diff"]["replay_on"] < result["logprob_abs_diff"]["replay_off"]
    assert (result["sglang_version"], result["megatron_version"]) == ("0.5.23", "0.16.1")
    for key in ("steps", "ray_version", "layout", "wall_s"):
        assert result[key]


def test_each_engine_row_was_used_once_per_pass_with_the_same_ids(demo: Run) -> None:
    engine, router = load(demo, "engine"), load(demo, "router")
    columns = ("sample", "position", "layer")
    rows = zip(*(engine[name] for name in (*columns, "ids")), strict=True)
    expected = {tuple(map(str, key)): ids.tobytes() for *key, ids in rows}
    used: Counter[tuple[str, ...]] = Counter()
    for *key, name, ids in zip(*(router[name] for name in (*columns, "pass", "ids")), strict=True):
        assert expected[tuple(map(str, key))] == ids.tobytes()
        used[*map(str, key), str(name)] += 1
    assert set(used.values()) == {1}
    assert len(used) == 3 * len(expected) == len(router["ids"])
    assert set(router["pass"].tolist()) == {"forward", "recompute", "logprob"}
    assert set(router["rank"].tolist()) == {0, 1, 2, 3} and set(router["step"].tolist()) == {0, 1, 2}
    assert set(engine["layer"].tolist()) == set(LAYERS), "dense layers never travel"
    assert engine["ids"].dtype == np.uint8 and engine["ids"].shape[1] == TOP_K and engine["ids"].max() < 128
    assert (np.diff(np.sort(engine["ids"].astype(int), axis=1), axis=1) > 0).all()
    assert len(np.unique(engine["ids"], axis=0)) > 0.5 * len(engine["ids"])


def test_bytes_that_landed_are_the_rows_that_each_rank_used(demo: Run) -> None:
    legs = json.loads((demo.folder / "dump" / "bytes.json").read_text())
    router, used = load(demo, "router"), 0
    for rank, landed in legs["landed_per_rank"].items():
        mine = (router["rank"] == int(rank)) & (router["pass"] == "forward")
        real = router["ids"][mine].nbytes
        assert real <= landed <= 1.5 * real  # the rest is padding, which does not travel
        used += real
    assert sum(legs["received_per_rank"].values()) == legs["wire_sent"] == used


def test_rows_carry_the_weight_version_that_made_them(demo: Run) -> None:
    def versions(step: int) -> set[int]:
        return set(Recording.open(demo.folder / "record").step(step).ticket.weight_versions)

    assert demo.result["weight_versions"] == [0, 1, 2, 3] and demo.result["weights_verified"] >= 30
    everyone = demo.result["engines"]
    assert demo.result["engines_routable"] == [[version, everyone] for version in range(4)]
    # The loop is one step off: step 1 was generated beside the training of step 0, so before its update.
    assert [versions(step) for step in range(3)] == [{0}, {0}, {1}]


def test_log_probs_of_both_sides_are_in_the_recording(demo: Run) -> None:
    """As far apart as the run itself says; in the first step with replay off, too."""
    first, *later = [step["logprobs"] for step in summarize(Recording.open(demo.folder / "record"))["steps"]]
    assert all(one["tokens"] > 100 and one["abs_diff"] > 0 for one in later) and len(later) == 2
    for name, own in {"replay_on": "abs_diff", "replay_off": "abs_diff_replay_off"}.items():
        assert math.isclose(first[own], demo.result["logprob_abs_diff"][name], rel_tol=1e-4)


def test_the_engine_answers_as_the_trainers_weights_do(demo: Run) -> None:
    """Greedy tokens equal those of transformers on the exported weights; every byte is the trainer's, routers included."""
    folder = demo.folder / "export"
    (engine,) = json.loads((folder / "engines.json").read_text()).values()
    exported = as_engine_keeps(load_file(folder / "model.safetensors")).items()
    assert engine["version"] == "3"
    assert engine["checksums"] == [{name: tensor_checksum(tensor) for name, tensor in exported}]
    assert sum(name.endswith("mlp.gate.weight") for name in engine["checksums"][0]) == len(LAYERS)

    held = HeldWeights.read(demo.folder / "committed.json")
    assert held.version == 3 and held.engine == {"1": engine["checksums"]}

    greedy = reference_ids(folder, [prompt + said for prompt, said in engine["greedy"]])
    for (prompt, said), wanted in zip(engine["greedy"], greedy, strict=True):
        assert wanted.logits_TV[len(prompt) - 1 :].argmax(-1).tolist() == said


def test_the_trainer_knows_how_stale_each_row_was(demo: Run) -> None:
    """Step 0 is fresh; the loop is one step off, so the rows of steps 1 and 2 are one update behind."""
    rows = demo.result["rows_by_staleness"]
    assert rows["0"] > 0 and rows["1"] > rows["0"] and sum(rows.values()) == rows["0"] + rows["1"]
    assert sum(rows.values()) == 2 * demo.result["rows"]  # both TP ranks of each DP rank see its samples


@pytest.mark.long
def test_ctrl_c_while_parts_start_gives_the_prompt_back_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # short: Ray's sockets lie below it
        command = [sys.executable, "-m", "examples.demo"]
        child = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder},
            preexec_fn=children.foreground,
        )  # fmt: skip
        try:
            assert child.stderr is not None
            assert any("engines and trainers start" in line for line in child.stderr)
            parts = psutil.Process(child.pid).children(recursive=True)
            (scratch,) = Path(folder).iterdir()
            assert len(parts) >= 6 and {"ray", "lock"} <= {path.name for path in scratch.iterdir()}
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=10 * busy())
        finally:
            kill_family(child)
        assert child.returncode == 130
        assert "stopped by SIGINT" in said and "Traceback" not in said and len(said.splitlines()) <= 3
        assert not psutil.wait_procs(parts, timeout=busy())[1] and not list(Path(folder).iterdir())


def test_the_run_is_a_page_and_a_trace_with_an_arrow_for_each_sample(demo: Run) -> None:
    """From the engine that generated it over the relay to the rank that replays it."""
    assert (demo.folder / "report" / "report.html").read_text().count("<svg") == 8
    events = json.loads((demo.folder / "report" / "trace.json").read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    names = {event["pid"]: event["args"]["name"].partition(" ")[0] for event in named}
    ways: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] in "stf":
            ways.setdefault(event["name"], []).append(names[event["pid"]])
    ends = Counter(map(tuple, ways.values()))
    assert ends.pop(("engine", "relay")) == 3 * 4, "evaluated samples go no further"
    assert ends.keys() == {("engine", "relay", f"trainer{rank}") for rank in (0, 2)} and ends.total() == 3 * 16  # fmt: skip
    versions = {step: set(rows) for step, rows in demo.result["rows_by_version"].items()}
    assert versions == {"0": {"0"}, "1": {"0"}, "2": {"1"}}
    assert sum(sum(rows.values()) for rows in demo.result["rows_by_version"].values()) == demo.result["rows"]
    assert len(demo.result["logprobs"]) > 100 and all(len(token) == 3 for token in demo.result["logprobs"])


def samples_of(page: str) -> dict[str, float]:
    """But for the label that all have."""
    page = page.replace(',run="demo"', "").replace('run="demo",', "").replace('{run="demo"}', "")
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_were_served_while_it_ran(demo: Run) -> None:
    assert set(demo.pages) == {"engine0", "relay", "trainer0", "trainer1", "trainer2", "trainer3"}
    lines = [line for line in demo.pages["engine0"][-1].splitlines() if line.startswith("r3channel_")]
    assert lines and all('run="demo"' in line for line in lines)
    for pages in demo.pages.values():
        names = {name.split("{")[0] for name in samples_of(pages[-1])}
        bare = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in names}
        assert {name for name in bare if name.startswith("r3channel_")} <= set(METRICS)
    relay, trainer = samples_of(demo.pages["relay"][-1]), samples_of(demo.pages["trainer0"][-1])
    engine = samples_of(demo.pages["engine0"][-1])
    assert relay['r3channel_samples_total{outcome="received"}'] > 0
    assert relay['r3channel_samples_total{outcome="discarded"}'] > 0
    assert engine['r3channel_engine_frames_total{way="inband"}'] >= 3 * 20
    for stage in ("capture", "frame"):
        assert engine[f'r3channel_stage_seconds_sum{{role="engine",stage="{stage}"}}'] > 0
    for stage in ("verify", "plan", "place", "send"):
        assert relay[f'r3channel_stage_seconds_count{{role="relay",stage="{stage}"}}'] > 0
    for stage in ("wait_wire", "forward", "backward", "optimizer", "rebroadcast"):
        assert trainer[f'r3channel_stage_seconds_sum{{role="trainer",stage="{stage}"}}'] > 0
    assert trainer["r3channel_digests_checked_total"] > 0 and trainer["r3channel_digests_different_total"] == 0  # fmt: skip


EMPTY = {"ALERTS", "r3channel_engine_queue_bytes"}
"""In this run: it is well, and frames go in the replies."""


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian package) is not there")
def test_every_panel_of_the_dashboard_shows_something_in_a_real_prometheus(demo: Run) -> None:
    empty = [expr for expr, series in demo.panels.items() if not series]
    assert len(demo.panels) > 20 and len(empty) == len(EMPTY), empty
    assert all(any(name in expr for name in EMPTY) for expr in empty), empty


@pytest.mark.long
def test_one_id_that_was_changed_in_a_trainers_memory_is_refused_by_its_router(tmp_path: Path) -> None:
    small = "--samples 8 --json --layout dp=1,tp=1,pp=1,cp=1 --steps 1 --fault corrupt-id"
    done = children.run("-m", "examples.demo", *small.split(), cwd=tmp_path, limit_s=RUN_S)
    assert done.returncode == 1 and not done.stdout.strip()
    said = next(line for line in done.stderr.splitlines() if line.startswith("r3channel.errors.DigestMismatch"))  # fmt: skip
    assert f"layer {LAYERS[0]}" in said and "step0/sample/" in said and "(1 in all)" in said


@pytest.mark.long
def test_routing_that_is_not_replayed_is_seen(run_small: RunDemo) -> None:
    run = run_small("--no-replay", "--layout", "dp=2,tp=1,pp=1,cp=1", "--engines", "2")
    assert run.code == 1 and run.result["ids_different"] > 100 and run.result["digests_checked"] == 0
    assert run.result["engines"] == 2


@pytest.mark.long
def test_without_the_flag_the_rooms_of_the_channel_are_never_entered(run_small: RunDemo) -> None:
    run = run_small(channel=False)
    assert run.code == 0 and run.result["channel_modules"] == []
    assert run.result["bytes_per_token"]["object_store"] > 4 * LAYERS[-1] * TOP_K  # int32 through Ray
    assert run.result["logprob_abs_diff"]["replay_on"] < run.result["logprob_abs_diff"]["replay_off"]


def struck(folder: Path, process: str, *options: str) -> tuple[int, str]:
    """A run of which the first process that is called so is killed once a step is done: its exit status, and its words."""
    command = [sys.executable, "-m", "examples.demo", "--layout", "dp=2,tp=1,pp=1,cp=1", "--samples", "8"]
    command += options
    child = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, cwd=folder)
    said: list[str] = []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line)
            if line.startswith("step 0:"):
                family = psutil.Process(child.pid).children(recursive=True)
                named = {each: each.as_dict(["cmdline"])["cmdline"] for each in family}  # None of a zombie
                next(each for each, words in named.items() if process in " ".join(words or ())).kill()
        return child.wait(PROGRAM_S), "".join(said)
    finally:
        kill_family(child)


@pytest.mark.full
def test_a_run_goes_on_without_an_engine_that_was_killed_and_says_so(tmp_path: Path) -> None:
    code, said = struck(tmp_path, "sglang_main", "--steps", "3", "--engines", "2", "--json")
    result = json.loads(said.splitlines()[-1])
    assert code == 0 and result["ids_different"] == 0 and result["ids_compared"] > 20_000
    assert "went without http://" in said and result["engines_routable"][-1] == [3, 1]


def test_requests_of_an_engine_that_is_gone_go_to_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    manager, requests = RolloutManager.__new__(RolloutManager), [Request(str(at), [1], 1) for at in range(5)]
    with Answering(lambda *_: (501, b"")) as server:
        manager.routable = gone, alive = f"http://127.0.0.1:{free_port()}", server.url
        answers = manager._ask(requests, {})
    assert [url for url, _ in answers.values()] == [alive] * 5 and manager.routable == (alive,)
    assert all("answered 501" in str(answer) for _, answer in answers.values()), "it was asked, and said so"
    assert capsys.readouterr().err.count(f"an engine is out, its requests go to the others: {gone}") == 1


@pytest.mark.full
def test_a_trainer_that_was_killed_is_named_in_the_last_line_with_what_to_do(tmp_path: Path) -> None:
    code, said = struck(tmp_path, "ray::AuditedTrainer", "--steps", "2")
    (line,) = [line for line in said.splitlines() if line.startswith("r3channel: ")]
    assert code == 2 and said.endswith(line + "\n")
    assert "trainer rank" in line and "SYSTEM_ERROR. 1 steps are trained; undelivered" in line
