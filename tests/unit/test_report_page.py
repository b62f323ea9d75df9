"""The page of a run: whole without a network, readable in both themes and on a phone, and right about what was slow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the page needs matplotlib (extra plot)")

from examples.async_grpo.stages import in_slots
from r3channel.cli import main
from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import StageClock
from r3channel.observe.trace import Span, TraceFile, chrome_trace, read, spans_of
from r3channel.tools.report_page import page, verdict_of
from r3channel.tools.run_model import facts_of
from tests.support.children import ROOT
from tests.support.waits import PROGRAM_S, until

CHROMIUM = shutil.which("chromium")
LAYERS, STEPS = (1, 2, 3), 4
PROBE = """<script>addEventListener("load", () => {
  const css = (element, name) => getComputedStyle(element)[name];
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const body = light(css(document.body, "backgroundColor"));
  const card = light(css(document.querySelector("section"), "backgroundColor"));
  const found = [...document.querySelectorAll("h1, h2, p, svg text")].map(e => [
    ratio(light(css(e, e.tagName == "text" ? "fill" : "color")), e.closest("section") ? card : body), e.textContent]);
  found.sort((a, b) => a[0] - b[0]);
  const wide = document.documentElement.scrollWidth - innerWidth;
  document.title = JSON.stringify({worst: found[0], wide, dark: body < .5});
});</script>"""
"""Says in the title how well the faintest letters stand out, and how much wider the page is than its window."""


def spans() -> dict[str, list[Span]]:
    """Four steps of three seconds: generation beside training, and the relay's stages between."""
    found: dict[str, list[Span]] = {"relay": [], "trainer0": [], "trainer1": []}

    def put(process: str, stage: str, step: int, at_s: float, seconds: float) -> float:
        found[process].append(Span(stage, step, "MainThread", at_s, at_s + seconds))
        return at_s + seconds

    for step in range(STEPS):
        at_s = put("relay", "http", step, 3.0 * step, 2.0)
        for stage, seconds in (("ingest", 0.05), ("verify", 0.08), ("plan", 0.02), ("place", 0.1)):
            at_s = put("relay", stage, step, at_s, seconds)
        put("relay", "send", step, 3.0 * step + 2.9, 0.05)
        for name in ("trainer0", "trainer1"):
            at_s = put(name, "wait_relay", step, 3.0 * step + 2.85, 0.05)
            at_s = put(name, "rebroadcast", step, at_s, 0.02)
            for stage, seconds in (("logprob", 0.7), ("forward", 0.5), ("backward", 0.9), ("optimizer", 0.1)):
                at_s = put(name, stage, step, at_s, seconds)
    return found


def result(own: dict[str, list[Span]], **changes: Any) -> dict[str, Any]:
    """As the demo writes it."""
    layers = [[{"layer": n, "rows": 100, "different": 7 * n + step} for n in LAYERS] for step in range(STEPS)]
    audit = [{"step": step, "layers": own} for step, own in enumerate(layers)]
    return facts_of(own) | {
        "steps": STEPS, "layout": "dp=2,tp=2,pp=1,cp=1,ep=1,vpp=1,sp=1,packing=padded",
        "sglang_version": "0.5.23", "megatron_version": "0.16.1", "wall_s": 12.3,
        "wait_fraction": 0.017, "ids_compared": 189_648,
        "ids_different": 0, "digests_different": 0,
        "routing_mismatch": audit, "default_bytes_per_token": 128,
        "bytes_per_token": {
            "engine_http": 71.3, "engine_frame": 27.7, "object_store": 11.7, "wire": 26.7, "landed_per_rank": {"0": 6.7},
        },
        "expert_load": {str(layer): [(expert * 7 + layer) % 23 for expert in range(128)] for layer in LAYERS},
        "logprob_abs_diff": {"replay_on": 0.01322, "replay_off": 0.02084},
        "logprobs": [[-0.1 * n, -0.1 * n - 0.01, -0.1 * n + 0.05] for n in range(40)],
        "rows_by_version": {"0": {"0": 1200}, "1": {"0": 1100, "1": 90}},
        "samples_by_outcome": {"received": 80.0, "delivered": 62.0, "rejected": 2.0, "duplicate": 0.0, "discarded": 16.0},
        "rejected_by_reason": {"rows": 2.0}, "faults": [],
    } | changes  # fmt: skip


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL))


def test_the_page_loads_nothing_and_shows_every_part_of_the_run() -> None:
    made = page(result(spans()), spans())
    foreign = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#|data:)([a-z]+:[^"\')\s]+)', made)
    assert not foreign and "<script" not in made and "@import" not in made
    assert made.count("<svg") == 8 and len(made) < 2_000_000
    for words in (
        "replay off: 0.0208 nats apart", "version 1", "All 189,648 ids", "refused: rows", "stock int32 through Ray", "trainer1",
        "Expert load",
    ):  # fmt: skip
        assert words in text_of(made), words
    ids = re.findall(r' id="([^"]+)"', made)
    assert len(ids) == len(set(ids)), "two pictures share a name"


def test_a_run_with_a_difference_is_not_well() -> None:
    good, verdict = verdict_of(result(spans(), ids_different=3))
    assert not good and "3 of 189,648" in verdict
    assert not verdict_of(result(spans(), ids_compared=0))[0]
    good, verdict = verdict_of(result(spans(), faults=["relay h:1: its thread has ended"]))
    assert not good and verdict.startswith("relay h:1: its thread has ended; All 189,648 ids")


def written(folder: Path, own: dict[str, list[Span]]) -> dict[str, TraceFile]:
    files = {name: TraceFile(folder, name) for name in own}
    for name, file in files.items():
        for span in own[name]:
            file.span(*astuple(span))
    return files


def test_spans_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, spans())
    events, said = read(tmp_path)
    found, wall_s = spans_of(events), time.time() - time.monotonic()
    assert not said and found.keys() == spans().keys()
    for name, own in spans().items():
        for one, other in zip(found[name], own, strict=True):
            assert (one.stage, one.step, one.thread) == (other.stage, other.step, other.thread)
            assert one.seconds == pytest.approx(other.seconds, abs=1e-6)
            assert one.start_s - wall_s == pytest.approx(other.start_s, abs=1), "within a clock that was set"


def test_a_sample_is_an_arrow_from_engine_over_relay_to_router(tmp_path: Path) -> None:
    """Each end lies within a span of its thread, as Perfetto wants it; requests that overlap have threads of their own."""
    engine = in_slots([(0.1, 1.9), (0.5, 1.0), (1.1, 1.5)], stage="generation", step=0)
    assert [one.thread for one in engine] == ["slot 0", "slot 1", "slot 1"]
    files = written(tmp_path, {"engine http://e": engine} | spans())
    for name, one in zip("abc", engine, strict=True):
        files["engine http://e"].sample(name, thread=one.thread, at_s=one.end_s)
        files["relay"].sample(name, thread="MainThread", at_s=2.04)
        files["trainer1"].sample(name, thread="MainThread", at_s=99.0)
    files["relay"].sample("seen once", thread="MainThread", at_s=2.04)
    events = chrome_trace(read(tmp_path)[0])["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows = [event for event in events if event["ph"] in "stf"]
    assert {(event["name"], event["ph"]) for event in arrows} == {(n, kind) for n in "abc" for kind in "stf"}
    assert len(arrows) == 9 and len({event["id"] for event in arrows}) == 3
    for arrow in arrows:
        assert any(
            one["ts"] - 1 <= arrow["ts"] <= one["ts"] + one["dur"] + 1
            for one in slices
            if (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"])
        ), arrow


WRITER = """
import sys, threading, time
from r3channel.observe.stage_clock import StageClock
clock = StageClock("trainer")
clock.keep(*sys.argv[1:])
def work():
    for step in range(10**9):
        with clock.span("wait_relay", step=step % 5):
            time.sleep(1e-4)
for _ in range(4):
    threading.Thread(target=work).start()
"""


def test_a_run_is_a_page_while_it_runs_and_after_its_processes_were_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They write all the time, and at most the line that was under way is lost."""
    names = ("trainer0", "trainer1")
    children = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, name], cwd=ROOT) for name in names]
    try:
        until(lambda: [file.stat().st_size > 50_000 for file in tmp_path.glob("*.trace")] == [True, True])
        assert main(["report", str(tmp_path)]) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
    events, said = read(tmp_path)
    assert len({line.partition(":")[0] for line in said}) == len(said), "one line of a file at most"
    _, second = sorted(tmp_path.glob("*.trace"))
    second.write_bytes(second.read_bytes()[:-9])
    relay = TraceFile(tmp_path, "relay")
    relay.note("step", {"step": 1, "layers": [{"layer": 2, "rows": 10, "different": 4}]})
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "report.html")
    assert re.search(rf"^{second.name}: line \d+ is half-written and was left out$", told.err, re.M)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) >= len(events) - 1 + 2
    made = (tmp_path / "report.html").read_text()
    assert made.startswith("<!doctype html>") and made.count("<svg") == 3 and len(made) < 500_000
    for words in ("trainer1", "Mismatch by layer and step", "5 steps"):
        assert words in text_of(made), words


def test_a_folder_without_spans_and_one_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no spans; expected"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        StageClock("relay").keep(str(tmp_path / "file" / "below"), "relay")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian package) is not there")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["laptop", "phone, dark"])
def test_a_browser_shows_it_without_a_word_on_its_console(tmp_path: Path, width: int, dark: bool) -> None:
    """Nothing is wider than the window (pictures scroll within their cards), and letters stand out from the paper."""
    file = tmp_path / "page.html"
    file.write_text(page(result(spans()), spans()).replace("</head>", PROBE + "</head>"))
    found = browse(file, width=width, dark=dark, folder=tmp_path)
    seen = json.loads(re.search(r"<title>(.*?)</title>", found.stdout, re.DOTALL)[1].replace("&quot;", '"'))  # pyright: ignore[reportOptionalSubscript]
    assert seen["dark"] == dark and seen["wide"] <= 0 and seen["worst"][0] >= 4.0, seen
    assert "CONSOLE" not in found.stderr, found.stderr


def browse(file: Path, *, width: int, dark: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
        f"--window-size={width},2400", "--enable-logging=stderr", "--hide-scrollbars", "--virtual-time-budget=3000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", f"file://{file}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
