"""`r3channel top`: what is between two looks at real pages, on one screen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the screen needs rich (extra metrics)")

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from r3channel.errors import ConfigError
from r3channel.observe.metric_table import LABELS, METRICS
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import STAGES, StageClock
from r3channel.tools import top
from r3channel.tools.run_model import FAULTS, Between, Fault, Look, faults_of, parse_page, urls_of
from r3channel.tools.top import screen
from tests.support.http_answers import Answering


def look(metrics: Metrics, at_s: float) -> Look:
    registry = CollectorRegistry()
    registry.register(metrics)  # pyright: ignore[reportArgumentType]
    return Look(f"http://h:{id(metrics)}/metrics", at_s, list(parse_page(generate_latest(registry).decode())))


def between(metrics: Metrics, act: Callable[[], object]) -> Between:
    """A look, what is done, and a look two seconds later."""
    before = look(metrics, 10.0)
    act()
    return Between(before, look(metrics, 12.0))


def lines_of(*processes: Between, height: int = 0) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(screen(processes, height=height))
    return capture.get().splitlines()


def test_rates_and_stages_are_those_of_the_time_between_two_looks() -> None:
    relay = Metrics("relay", run="seven")
    relay.clock.record("send", 0.0, 100.0)
    relay.inc("r3channel_samples_total", 30, outcome="received")

    def act() -> None:
        for _ in range(4):
            relay.clock.record("send", 0.0, 0.125)
        relay.inc("r3channel_samples_total", 5, outcome="received")
        relay.inc("r3channel_bytes_total", 6 << 20, leg="wire_sent")

    lines = lines_of(between(relay, act))
    assert "35 received" in lines[1] and "2.5/s in" in lines[1]
    assert row_of("send", lines) == ["send", "25.0%", "125.0"]
    assert "3.0" in row_of("h:", lines), "6 MiB in two seconds"


def row_of(first: str, lines: list[str]) -> list[str]:
    (row,) = (line.split() for line in lines if line.startswith(first))
    return row


def test_a_process_that_began_anew_has_no_negative_rate() -> None:
    before, now = Metrics("trainer"), Metrics("trainer")
    before.inc("r3channel_steps_total", 9)
    now.inc("r3channel_steps_total", 2)
    assert Between(look(before, 1.0), look(now, 2.0)).rate("r3channel_steps_total") == 2.0


def test_it_stays_one_screen_and_shows_those_that_wait_longest() -> None:
    found = []
    for number in range(12):
        trainer = Metrics("trainer")

        def act(clock: StageClock = trainer.clock, number: int = number) -> None:
            for at, stage in enumerate(STAGES, 1):
                clock.record(stage, 0.0, 0.001 * at)
            clock.record("wait_wire", 0.0, 0.1 * number)

        found.append(between(trainer, act))
    lines = lines_of(*found, height=24)
    assert len(lines) <= 24 and "and 4 more" in "".join(lines)
    assert next(line for line in lines if line.startswith("h:")).startswith(found[-1].now.place)
    assert any(line.startswith("wait_wire") for line in lines)
    assert not any(line.startswith("capture") for line in lines), "the shortest stages make room"


def test_a_dead_thread_and_a_fault_are_said_with_what_is_new_of_it() -> None:
    relay = Metrics("relay")
    relay.set("r3channel_background_thread_alive", 0)
    relay.inc("r3channel_rejected_total", 3, reason="rows")
    found = between(relay, lambda: relay.inc("r3channel_rejected_total", 2, reason="rows"))
    dead, refused = faults_of([found])
    said = ": 5 (+2) replies, frames or steps refused, reason rows. r3channel errors rows"
    assert ": its thread has ended. restart" in dead and refused.endswith(said)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.says], ids=lambda fault: fault.says)
def test_each_fault_of_the_table_is_said_of_a_page_that_shows_it_and_of_no_other(fault: Fault) -> None:
    metric = METRICS[fault.series]
    labels = {name: LABELS[name][0] for name in metric.labels} | dict(fault.labels)

    def said(value: float) -> str:
        metrics = Metrics(metric.roles[-1])
        if fault.of:
            metrics.set(fault.of, 1000)
        (metrics.inc if metric.kind == "counter" else metrics.set)(fault.series, value, **labels)
        return "".join(faults_of([between(metrics, lambda: None)]))

    whole = 1000 if fault.of else 1
    assert said(fault.most * whole) == said(fault.least * whole) == ""
    begins, *rest = fault.says.partition("{value")[0].split(), f". {fault.do.partition('{')[0]}"
    wrong = said(fault.most * whole + 2)
    assert all(word in wrong for word in [*begins, *rest]) and wrong.startswith(f"{metric.roles[-1]} h:")


@pytest.mark.parametrize("role", LABELS["role"])
def test_a_process_is_shown_from_its_first_second(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Metrics(role)) as metrics:
        assert top.run([f"http://127.0.0.1:{metrics.serve()}/metrics", "--once", "--every", "0.01"]) == 0
    told = capsys.readouterr().out
    assert "1 page(s)" in told and "no fault" in told and (role == "manager" or f"\n{role} " in told)


def test_a_page_that_does_not_answer_is_a_fault_and_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"/metrics": (1000, b""), "/targets": (200, b'{"a": 1}')}  # neither is HTTP, or a list
    with Answering(lambda path, _: answers[path]) as other:
        for place in ("127.0.0.1:9", other.url.removeprefix("http://")):
            for page in answers:
                assert top.run([f"http://{place}{page}", "--once", "--every", "0.01"]) == 1
                said = " ".join(capsys.readouterr().out.split())
                assert f"{place}{page.removesuffix('/metrics')} does not answer: " in said


def test_what_is_no_folder_of_targets_is_refused(tmp_path: Path) -> None:
    assert urls_of("http://h:1/metrics") == ["http://h:1/metrics"]
    with pytest.raises(ConfigError, match="neither a URL nor a folder"):
        urls_of(str(tmp_path / "missing"))
    assert top.run([str(tmp_path), "--once", "--every", "0.01"]) == 1  # nobody has left a page there
    (tmp_path / "report.json").write_text('{"steps": 3}')
    with pytest.raises(ConfigError, match=r"report.json: expected a list of file_sd groups"):
        urls_of(str(tmp_path))
