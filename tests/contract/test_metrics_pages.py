"""Pages that can be believed: served by the library itself, without fault; every sample that was received is somewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, current_thread, local, main_thread
from types import SimpleNamespace
from typing import Any

import pytest

from r3channel.cli import main
from r3channel.observe import stage_clock
from r3channel.observe.stage_clock import WAITS, StageClock
from r3channel.plan.assignment import Assignment
from r3channel.relay import verify
from r3channel.relay.relay import Relay
from r3channel.relay.row_server import _Served
from r3channel.relay.sample_table import SampleTable
from r3channel.relay.sealed_steps import SealedStep, Steps
from r3channel.tools.report_page import verdict_of
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.network import urlopen
from tests.support.delivery import MakeRelay, receivers_of
from tests.support.direct import Engine
from tests.support.samples import reply_for
from tests.support.waits import SOON_S, until
from tests.unit.test_report_page import result


@pytest.fixture
def make_relay(make_relay: MakeRelay) -> MakeRelay:
    """That leave what is missing to the live router."""
    return partial(make_relay, on_missing="live", on_lost="live", max_live=1.0, frame_timeout_s=0.05)


def pages(relay: Relay, receiver: Receiver, engine: Engine) -> dict[str, str]:
    served = {part.metrics.role: part.metrics for part in (relay, receiver, engine.outlet)}
    return {role: urlopen(metrics.url, timeout_s=SOON_S).read().decode() for role, metrics in served.items()}


def test_relay_trainer_and_engine_serve_what_they_measure(
    make_relay: MakeRelay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the library: nothing here serves or counts. The audit, which nobody made, is absent and not 0."""
    options = {"metrics_port": 0, "metrics_dir": str(tmp_path / "targets"), "run_name": "seven"}
    relay = make_relay(**options)
    url = relay.serve(token_file=tmp_path / "token")
    (receiver,) = receivers_of(relay)
    with Engine(url, tmp_path / "token", **options) as engine:
        for name in ("a", "b"):
            relay.add(name, engine.finish(name, 20), range(20))
        until(lambda: engine.frames("direct") == 2)
        receiver.receive(relay.seal(0, Assignment.given([[["a", "b"]]])))
        relay.join_previous(timeout_s=SOON_S)
        until(lambda: relay.metrics.value("r3channel_samples_in_flight") == 0)
        found = pages(relay, receiver, engine)
        assert len(list((tmp_path / "targets").glob("*.json"))) == 3
        look_at_the_top(tmp_path / "targets", capsys)
        receiver.close()
    for text in found.values():
        assert all('run="seven"' in line for line in text.splitlines() if not line.startswith("#"))
    assert 'r3channel_samples_total{outcome="delivered",run="seven"} 2.0' in found["relay"]
    assert 'r3channel_samples_in_flight{run="seven"} 0.0' in found["relay"]
    assert 'r3channel_engines_greeted{run="seven"} 1.0' in found["relay"]
    assert 'r3channel_steps_total{run="seven"} 1.0' in found["trainer"]
    for role in ("relay", "trainer"):
        assert 'r3channel_step{run="seven"} 0.0' in found[role]
    assert "audit" not in found["trainer"] and "digests_checked" not in "".join(found.values())
    assert 'r3channel_engine_frames_total{run="seven",way="direct"} 2.0' in found["engine"]
    assert 'role="engine",run="seven",stage="http"' in found["engine"]
    assert not list((tmp_path / "targets").glob("trainer*"))


def look_at_the_top(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`r3channel top` says what the pages say."""

    def line(first: str) -> list[str]:
        return next(words[1:] for words in lines if words[0] == first)

    def place(role: str) -> str:
        (file,) = targets.glob(f"{role}-*.json")
        ((group,)) = json.loads(file.read_text())
        assert group["labels"] == {"job": "r3channel"}
        return group["targets"][0]

    assert main(["top", str(targets), "--once", "--every", "0.1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[-1] == ["no", "fault"], lines
    assert lines[0] == ["r3channel", "seven", "-", "3", "page(s)"]
    assert lines[1][1:] == ["2", "received", "=", "2", "delivered;", "0.0/s", "in,", "0.0/s", "delivered"]
    samples, steps, *_, engines = line(place("relay"))
    assert (samples, steps, engines) == ("0", "0", "1")
    assert line(place("trainer"))[:2] == ["-", "1"] and line(place("engine"))[0] == "-"


SLOW_S = 0.2
"""How far the stages' clock goes in a slow call; it stands still elsewhere, however busy the machine is."""
SLOW = {
    ("relay", "ingest"): (SampleTable, "reply"), ("relay", "verify"): (verify, "read_frame"),
    ("relay", "place"): (SealedStep, "prepare"), ("relay", "send"): (_Served, "_send_plain"),
    ("trainer", "place"): (ShardBuffer, "rows"), ("trainer", "verify"): (ShardBuffer, "verify"),
    ("trainer", "wait_relay"): (Steps, "outgoing"),
}  # fmt: skip
"""(role, stage) -> the call that is made slow."""


class Calls(local):
    """Slow calls of a thread so far."""

    own = 0


@pytest.mark.parametrize(("role", "stage"), SLOW)
def test_a_stage_that_is_slow_is_found_in_its_own_time(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, role: str, stage: str
) -> None:
    relay = make_relay()
    (receiver,) = receivers_of(relay)
    clocks = {"relay": relay.clock, "trainer": receiver.clock}
    waits = waiting(monkeypatch, clocks[role], stage) if stage in WAITS else None
    # who waits sees the other thread's call; else a call is slow for its own thread alone, whatever another has begun meanwhile
    calls, begin_s = SimpleNamespace(own=0) if waits else Calls(), time.monotonic()
    stages = SimpleNamespace(monotonic=lambda: begin_s + SLOW_S * calls.own)
    monkeypatch.setattr(stage_clock, "time", stages)
    made = make_slow(monkeypatch, calls, *SLOW[role, stage], waits=waits)
    one_step(relay, receiver)
    took_s = clocks[role].totals()
    assert made and took_s[stage] == pytest.approx(SLOW_S * len(made))
    assert [name for name in took_s if name not in (stage, "recv", *WAITS)] == [], took_s
    assert diagnosis(stage, role) in verdict_of_run(relay, receiver)
    receiver.close()


def diagnosis(stage: str, role: str) -> str:
    where = role.replace("trainer", "trainer0")
    return f"longest in {stage}" if stage in WAITS else f"row, {stage} at {where} took longest: "


def verdict_of_run(relay: Relay, receiver: Receiver) -> str:
    """What the page of a run with these spans says in its first lines."""
    spans = {"relay": relay.clock.spans(), "trainer0": receiver.clock.spans(), "trainer1": []}
    return verdict_of(result(spans))[1]


def one_step(relay: Relay, receiver: Receiver) -> None:
    relay.add("s", reply_for("s", 20), range(20))
    receiver.receive(relay.seal(0, Assignment.given([[["s"]]])))
    relay.join_previous(timeout_s=SOON_S)


def waiting(patch: pytest.MonkeyPatch, clock: StageClock, stage: str) -> Event:
    """Set while this thread is in the stage; one that receives ahead waits too, and nobody counts it."""
    inside, span = Event(), clock.span

    @contextmanager
    def noted(own: str, **more: Any) -> Iterator[None]:
        with span(own, **more):
            if own == stage and current_thread() is main_thread():
                inside.set()
            yield

    patch.setattr(clock, "span", noted)
    return inside


def make_slow(
    patch: pytest.MonkeyPatch, calls: Any, place: Any, name: str, *, waits: Event | None
) -> list[str]:
    """Count before each call, from when somebody waits for it; return a list with an entry for each."""
    made, inner = list[str](), getattr(place, name)

    def slow(*args: Any, **options: Any) -> Any:
        assert waits is None or waits.wait(SOON_S), "nobody waits"
        calls.own += 1
        made.append(name)
        return inner(*args, **options)

    patch.setattr(place, name, slow)
    return made
