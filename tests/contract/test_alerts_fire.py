"""Each alert fires over what a real fault leaves on real pages, and no other does: faults take seconds, promtool has hours.

Three looks at the pages: at the start, after a step as it should be, after the fault. Then time passes: steps of `STEP_S`
count as the one between two looks did; the fault counts once, but the seconds that stages take in it go on; gauges stay.
tests/unit/test_alerts.py draws the bounds with series of its own making; here names, labels and signs are real.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from r3channel import config, errors
from r3channel.config import EngineConfig
from r3channel.engine.frame_sender import Outlet
from r3channel.observe.metrics import Metrics
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.sealed_steps import Steps
from r3channel.tools.run_model import Look, Series
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.mismatch import RoutingAudit, measure, publish
from r3channel.trainer.replay import ReplayDriver
from r3channel.weights.session import WeightSync
from tests.support.delivery import MakeRelay, receivers_of, relays
from tests.support.direct import Engine, hello_of
from tests.support.fake_engine import FakeEngine
from tests.support.samples import SPEC, random_ids, reply_for
from tests.support.waits import SOON_S, UPDATE_S, busy, until
from tests.unit.test_alerts import RULES, hold_rules_against, needs_promtool

BEFORE, AFTER, STEP_S = 45, 30, 60.0
"""Minutes of what should be, and of the fault; what a step takes."""
SMALL_STORE = 1 << 16
pytestmark = needs_promtool


@dataclass
class Place:
    """A relay and its trainer, as served; whoever joins them has a page too."""

    make_relay: MakeRelay
    folder: Path
    patch: pytest.MonkeyPatch
    stack: ExitStack
    served: list[Metrics] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    looks: list[dict[str, Look]] = field(default_factory=list)
    number: int = 0

    def start(self, **options: Any) -> None:
        self.relay = self.make_relay(metrics_port=0, run_name="r", **options)
        (self.receiver,) = receivers_of(self.relay)
        self.stack.callback(self.receiver.close)
        self.served += [self.relay.metrics, self.receiver.metrics]
        measure(self.receiver.metrics)
        self.work()

    def work(self) -> None:
        """A step as it should be."""
        self.number += 1
        self.add(f"s{self.number}", tokens=20)
        self.receiver.receive(self.seal(self.number, f"s{self.number}"))
        self.relay.join_previous(timeout_s=UPDATE_S)
        audited(self, shift=0)
        held = self.relay.samples.store
        until(lambda: not self.relay.metrics.value("r3channel_samples_in_flight") and not len(held))

    def add(self, name: str = "x", *, tokens: int = 9) -> None:
        self.relay.add(name, reply_for(name, tokens), range(tokens))

    def seal(self, step: int = 99, name: str = "x") -> Ticket:
        return self.relay.seal(step, Assignment.given([[[name]]]))

    def engine(self, token: str = "token", **options: Any) -> Engine:
        """One that sends its frames here, with this file's token."""
        url = self.relay.serve(token_file=self.folder / "token")
        engine = Engine(url, self.folder / token, metrics_port=0, run_name="r", **options)
        self.stack.callback(engine.close)
        self.served.append(engine.outlet.metrics)
        return engine

    def weights_to(self, *engines: FakeEngine, **options: Any) -> WeightSync:
        urls = [engine.url for engine in engines]
        sync = self.stack.enter_context(WeightSync.whole(urls, metrics=self.receiver.metrics, **options))
        sync.connect(timeout_s=UPDATE_S)
        return sync

    def look(self) -> None:
        """At every page that there was, as Prometheus does."""
        self.urls = list(dict.fromkeys([*self.urls, *(m.url for m in self.served if m.url)]))
        self.looks.append({url: Look.read(url, timeout_s=SOON_S) for url in self.urls})

    def look_again(self) -> None:
        """The last look once more, as somebody has joined since."""
        self.looks.pop()
        self.look()


def refused(place: Place) -> None:
    with pytest.raises(errors.RoutingError):
        place.relay.add("x", reply_for("x", 9), range(12))


def left_to_the_live_router(place: Place) -> None:
    place.relay.add("x", {"meta_info": {"id": "x"}}, range(9))
    place.receiver.receive(place.seal())
    place.relay.join_previous(timeout_s=UPDATE_S)


def never_asked_for(place: Place) -> None:
    place.add()
    place.relay.samples.config = replace(place.relay.config, expiry_s=1e-9)
    place.relay.samples.expire()


def no_trainer_comes(place: Place) -> None:
    place.add()
    place.seal()
    (sealed,) = place.relay.steps._steps.values()
    sealed.sealed_s -= 1200  # twenty minutes ago


def thread_ends(place: Place) -> None:
    place.patch.setattr(Steps, "_prepare", lambda *_: 1 // 0)
    place.add()
    place.seal()
    until(lambda: place.relay.samples.broken is not None)


def store_fills(place: Place) -> None:
    limit = place.relay.config.store_bytes
    for number in range(99):
        if place.relay.samples.store.live_bytes > 0.92 * limit:
            return
        place.add(f"x{number}", tokens=20)


def relay_is_slow(place: Place) -> None:
    inner = place.relay.steps.outgoing
    place.patch.setattr(place.relay.steps, "outgoing", lambda *a, **o: (time.sleep(4), inner(*a, **o))[1])
    place.work()


def engine_cannot_greet(place: Place) -> None:
    place.relay.expect_engines(["http://e:1"], timeout_s=60.0)
    (place.folder / "wrong").write_text("not_the_token_" * 4)
    (place.folder / "wrong").chmod(0o600)
    place.engine("wrong")


def sample_is_nowhere(place: Place) -> None:
    place.add()
    place.relay.samples.table.samples.pop("x")


def process_is_killed(place: Place) -> None:
    place.receiver.metrics.close()


def audited(place: Place, *, shift: int, logprob: float = -1.0) -> None:
    """The audit of a trainer whose routers nearly agree with the engine, whose rows are `shift` rows off, and which gives tokens
    a log-prob of -1."""
    natural = torch.from_numpy(random_ids(64)[:, 0].astype("int64"))
    replayed = natural.roll(shift, 0)
    replayed[:2, 0] = 255
    audit = RoutingAudit(step=0, microbatches=1, count=1, counted_rows=lambda _: torch.ones(64) > 0)
    observer = audit.observer(1, 0)
    assert observer is not None
    observer(natural, replayed)
    audit.add_logprobs(torch.full((64,), -1.0), torch.full((64,), logprob), torch.ones(64))
    publish(audit.report(), place.receiver.metrics)


def engine_hangs_while_others_are_updated(place: Place) -> None:
    place.patch.setattr("r3channel.weights.update.CONTROL_S", busy())
    weight = {"model.layers.0.mlp.gate.weight": torch.zeros(4, 4)}
    engines = [FakeEngine(receives={name: one.clone() for name, one in weight.items()}) for _ in range(2)]
    for engine in engines:
        outlet = Outlet(EngineConfig(metrics_port=0, run_name="r"), hello_of(engine.url))
        outlet.metrics.watch("r3channel_weight_version", lambda engine=engine: int(engine.version))
        place.stack.callback(outlet.close)
        place.served.append(outlet.metrics)
    sync = place.weights_to(*engines, engine_timeout_s=2 * busy())
    hung = engines[1]
    for version in (1, 2, 3):
        sync.update(weight.items(), version=version, timeout_s=UPDATE_S)
        hung.script["/pause_generation", hung._counts["/pause_generation"] + 1] = "hang"
    assert sync.evicted.keys() == {hung.url} and hung.version == "1"
    value = place.receiver.metrics.value
    # two engines, two again, of which one hangs when it is paused, and the other
    assert value("r3channel_engine_evictions_total") == 1 and value("r3channel_weight_bytes_total") == 5 * 64
    assert 1.0 < value("r3channel_weight_pause_seconds_total") < sync.metrics.clock.totals()["weights"]


def rows_are_damaged_in_a_trainer(place: Place) -> None:
    channel = TrainerChannel(ReplayDriver({}, [], spec=SPEC), place.receiver, place.relay.config)
    place.look_again()
    place.add()
    ticket = place.seal()
    with pytest.raises(errors.DigestMismatch), channel.step(ticket):
        assert channel.shard is not None
        layer = channel.shard.shard.layers[0]
        ids_RK = channel.shard.layer_ids(0, layer)
        ids_RK[0] = ids_RK[0].flip(0) ^ 1
        channel.shard.check_digest(0, layer, ids_RK)
    place.relay.join_previous(timeout_s=UPDATE_S)


def an_update_has_no_numbers(place: Place) -> None:
    sync = place.weights_to(FakeEngine(receives={"model.norm.weight": torch.zeros(4)}))
    place.look_again()
    with pytest.raises(errors.R3Error):
        sync.update([("model.norm.weight", torch.full((4,), torch.nan))], version=1, timeout_s=UPDATE_S)


def relay_takes_no_frames(place: Place) -> None:
    engine = place.engine(deliver_timeout_s=0.1)
    until(lambda: engine.outlet.metrics.value("r3channel_engine_greeted"))
    place.look_again()
    assert place.relay._door is not None
    place.relay._door.close(timeout_s=UPDATE_S)
    engine.finish("x", 9)
    until(lambda: engine.frames("given_up"))


def folder_of_a_recording_is_gone(place: Place) -> None:
    place.relay.record(Recorder(str(place.folder / "recording")))
    shutil.rmtree(place.folder / "recording")
    place.work()


Fault = Callable[[Place], None]
FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {
    "R3ChannelRejected": (refused, {}),
    "R3ChannelFallbackActive": (left_to_the_live_router, {"on_missing": "live", "max_live": 1.0}),
    "R3ChannelSamplesExpired": (never_asked_for, {}),
    "R3ChannelStalled": (no_trainer_comes, {}),
    "R3ChannelThreadDead": (thread_ends, {}),
    "R3ChannelNearCeiling": (store_fills, {"store_bytes": SMALL_STORE}),
    "R3ChannelNotHidden": (relay_is_slow, {}),
    "R3ChannelEngineSilent": (engine_cannot_greet, {}),
    "R3ChannelUnbalanced": (sample_is_nowhere, {}),
    "R3ChannelPageGone": (process_is_killed, {}),
    "R3ChannelMismatchJumped": (partial(audited, shift=1), {}),
    "R3ChannelMismatch": (rows_are_damaged_in_a_trainer, {}),
    "R3ChannelLogprobsApart": (partial(audited, shift=0, logprob=-3.0), {}),
    "R3ChannelWeightsFailed": (an_update_has_no_numbers, {}),
    "R3ChannelFramesGivenUp": (relay_takes_no_frames, {}),
    "R3ChannelRecordingLost": (folder_of_a_recording_is_gone, {}),
    "R3ChannelVersionSkew": (engine_hangs_while_others_are_updated, {}),
}


def test_every_alert_has_a_real_fault() -> None:
    assert FAULTS.keys() == RULES.keys()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setitem(config._BOUNDS, "store_bytes", (SMALL_STORE, math.inf, "as small as this"))
    with relays() as make_relay, ExitStack() as stack:
        yield Place(make_relay, tmp_path, monkeypatch, stack)


@pytest.mark.parametrize("alert", FAULTS)
def test_a_real_fault_fires_its_alert_and_no_other(alert: str, place: Place) -> None:
    fault, options = FAULTS[alert]
    place.start(**options)
    for act in (lambda _: None, Place.work, fault):
        act(place)
        place.look()
    hold_rules_against([judged(place.looks, alert)], place.folder)


def judged(looks: list[dict[str, Look]], alert: str) -> dict[str, Any]:
    """As promtool wants it: silent while all is well, then this alert alone."""

    def fired(minutes: int) -> str:
        return f'max by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{minutes}m]))'

    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values}
            for url in looks[-1]
            for name, values in series_of([look.get(url) for look in looks])
        ],
        "promql_expr_test": [
            {"expr": fired(BEFORE), "eval_time": f"{BEFORE - 1}m", "exp_samples": []},
            {"expr": fired(AFTER), "eval_time": f"{BEFORE + AFTER - 1}m", "exp_samples": fires},
        ],
    }


def series_of(looks: list[Look | None]) -> Iterator[tuple[str, str]]:
    """Name with labels, and a value for each minute, of one page."""
    looked = [look for look in looks if look]
    place = f'instance="{looked[-1].place}"'
    up = [look and float(not look.fault) for look in looks]
    yield f'up{{job="r3channel",{place}}}', written([up[1]] * BEFORE + [up[2]] * AFTER)
    found = [{name_of(one, place): one.value for one in look.page} if look else {} for look in looks]
    for name in dict.fromkeys(name for page in found for name in page):
        values = [page.get(name) for page in found]
        yield name, written(minutes(name.split("{")[0], *values))


def written(values: list[float | None]) -> str:
    return " ".join("_" if value is None else f"{value:.9g}" for value in values)


def name_of(one: Series, place: str) -> str:
    labels = [place, *(f'{key}="{value}"' for key, value in one.labels.items())]
    return f"{one.name}{{{','.join(labels)}}}"


def minutes(name: str, start: float | None, well: float | None, fault: float | None) -> list[float | None]:
    """A series by minutes. A page that was not there at first says nothing until it is."""
    if well is None or fault is None or not name.endswith(("_total", "_sum", "_count")):
        return [well] * BEFORE + [fault] * AFTER
    steps = 60 / STEP_S
    grew, grows = steps * (well - (start or 0)), steps * (fault - well)
    before = [well + grew * minute for minute in range(BEFORE)]
    if name.endswith("_total"):
        return [*before, *[before[-1] + fault - well] * AFTER]
    return [*before, *(before[-1] + grows * minute for minute in range(1, AFTER + 1))]
