"""Stage clock, table of metrics and the served page."""

from __future__ import annotations

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import r3channel.observe.stage_clock
from examples.async_grpo.stages import stage_table
from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, FrameCorrupt, UsageError
from r3channel.observe.metric_table import LABELS, METRICS
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import STAGES, WAITS, StageClock, merge_intervals
from r3channel.observe.trace import Span
from r3channel.tools.run_model import hidden_share, waits_of
from r3channel.trainer.mismatch import LayerMismatch, MismatchReport, publish
from tests.support.children import said_by
from tests.support.waits import SOON_S
from tests.unit.test_alerts import needs_promtool, promtool


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON_S) as reply:
        return reply.read().decode()


# -- clock -------------------------------------------------------------------------------------------------------------


def test_an_outer_span_pauses_while_an_inner_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(r3channel.observe.stage_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = StageClock("relay")
    with clock.span("ingest", step=3):
        now[0] += 1
        with clock.span("verify"):
            now[0] += 30
        now[0] += 2
    assert clock.totals() == {"ingest": 3.0, "verify": 30.0}
    found = [(span.stage, span.step) for span in clock.spans()]
    assert found == [("ingest", 3), ("verify", 3), ("ingest", 3)], "the inner one's too"


def test_a_profilers_ranges_nest_as_the_spans_do_which_end_where_their_body_raises() -> None:
    clock, ranges = StageClock("trainer"), list[str]()
    with clock.span("ingest"):  # began before anybody looked, so it ends unseen
        clock.mark(ranges.append, lambda: ranges.append("end"))
        with pytest.raises(ZeroDivisionError), clock.span("place"), clock.span("recv"):
            _ = 1 / 0
    assert ranges == ["place", "recv", "end", "end"]
    assert clock.totals().keys() == {"ingest", "place", "recv"}


def test_coverage_is_the_share_of_wall_that_a_threads_spans_explain() -> None:
    clock = StageClock("trainer")
    clock.record("forward", 10.0, 12.0)
    clock.record("backward", 11.0, 13.0)  # an overlap counts once
    clock.record("optimizer", 19.0, 30.0)  # cut at the end
    assert clock.coverage(10.0, 20.0) == pytest.approx(0.4)
    assert clock.coverage(10.0, 20.0, thread="another") == 0.0


def test_span_that_has_not_ended_is_on_the_page_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(r3channel.observe.stage_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with closing(Metrics("trainer")) as metrics, ThreadPoolExecutor(1) as pool:
        seen = 'r3channel_stage_open_seconds{role="trainer",stage='
        with metrics.clock.span("forward"):
            now[0] += 30
            pool.submit(metrics.clock.span("wait_wire").__enter__).result()  # of a thread that hangs
            now[0] += 700
            text = page(port := metrics.serve())
        assert f'{seen}"forward"}} 730.0' in text and f'{seen}"wait_wire"}} 700.0' in text
        assert f'{seen}"forward"}}' not in (text := page(port)) and f'{seen}"wait_wire"}} 700.0' in text


def test_totals_outlive_forgotten_spans_in_the_order_of_the_stages() -> None:
    clock = StageClock("trainer", max_spans=2)
    clock.record("optimizer", 0.0, 1.0)
    for second in range(5):
        clock.record("recv", float(second), second + 1.0)
    assert len(clock.spans()) == 2
    assert list(clock.totals().items()) == [("recv", 5.0), ("optimizer", 1.0)]


def test_an_unknown_stage_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="sending"):
        StageClock("relay").span("sending")


def test_intervals_merge_to_their_union() -> None:
    assert merge_intervals([(4, 5), (0, 2), (1, 3), (3, 3), (9, 8)]) == [(0, 3), (4, 5)]


# -- table -------------------------------------------------------------------------------------------------------------


def test_names_have_prefix_and_base_units() -> None:
    for metric in METRICS.values():
        assert metric.name.startswith("r3channel_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        if metric.unit in ("seconds", "bytes"):
            assert metric.unit in metric.name


def test_labels_come_from_small_closed_sets() -> None:
    assert all(label in LABELS for metric in METRICS.values() for label in metric.labels)
    assert len(LABELS["reason"]) <= 32 and FrameCorrupt.reason in LABELS["reason"]
    assert set(WAITS) < set(STAGES)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_what_is_counted_is_the_value_and_a_new_reason_counts_as_other() -> None:
    metrics = Metrics("relay")
    metrics.inc("r3channel_samples_total", 3, outcome="received")
    assert metrics.value("r3channel_samples_total", outcome="received") == 3
    metrics.inc("r3channel_rejected_total", reason="never heard of")
    assert metrics.value("r3channel_rejected_total", reason="other") == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("r3channel_samples", {}), ("r3channel_samples_total", {}), ("r3channel_samples_total", {"outcome": "lost"}),
        ("r3channel_samples_total", {"outcome": "received", "sample": "17"}), ("r3channel_store_bytes", {}),
        ("samples_total", {"outcome": "received"}),
    ],
)  # fmt: skip
def test_what_the_table_does_not_know_is_refused(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is no counter" if "s_total" not in name[9:] else name):
        Metrics("relay").inc(name, 1, **labels)


def test_a_counter_cannot_fall() -> None:
    with pytest.raises(UsageError, match="fall"):
        Metrics("relay").inc("r3channel_rows_total", -1)


def test_threads_lose_no_count() -> None:
    metrics = Metrics("relay")

    def count() -> None:
        for _ in range(1_000):
            metrics.inc("r3channel_rows_total")

    with ThreadPoolExecutor(8) as pool:
        wait([pool.submit(count) for _ in range(8)])
    assert metrics.value("r3channel_rows_total") == 8_000


# -- the served page ---------------------------------------------------------------------------------------------------


def test_what_is_measured_is_born_at_zero_and_what_nobody_measures_is_absent() -> None:
    with closing(Metrics("relay")) as metrics:
        metrics.measure("r3channel_rejected_total")
        metrics.measure("r3channel_bytes_total", leg="wire_sent")
        text = page(metrics.serve())
    for reason in LABELS["reason"]:
        assert f'r3channel_rejected_total{{reason="{reason}"}} 0.0' in text
    assert 'r3channel_bytes_total{leg="wire_sent"} 0.0' in text
    assert "landed" not in text and "r3channel_samples_total" not in text


def test_measuring_again_keeps_the_count_and_another_role_does_not_measure() -> None:
    metrics = Metrics("trainer")
    metrics.inc("r3channel_digests_checked_total", 5)
    metrics.measure("r3channel_digests_checked_total")
    assert metrics.value("r3channel_digests_checked_total") == 5
    with pytest.raises(UsageError, match="digests_checked_total is measured by trainer, not by relay"):
        Metrics("relay").measure("r3channel_digests_checked_total")


def everything(role: str) -> str:
    """The page of all that this role can ever export: each label at all its values, a hundred audited layers in two steps."""
    metrics = Metrics(role, run="all")
    for metric in METRICS.values():
        if role not in metric.roles:
            continue
        if metric.kind == "counter":
            metrics.measure(metric.name)
        elif metric.labels in ((), ("role",)):
            metrics.set(metric.name, 1)
    for stage in STAGES:
        metrics.clock.record(stage, 0.0, 1.0)
    for order in (range(100), range(100, 0, -1)) if role == "trainer" else ():  # others are the worst in each
        layers = [LayerMismatch(layer, 100, at, at, 0) for layer, at in enumerate(order)]
        publish(MismatchReport(1, (0,), layers), metrics)
    with closing(metrics):
        return page(metrics.serve())


@pytest.mark.parametrize("role", LABELS["role"])
def test_a_process_has_at_most_800_series_whatever_happens(role: str) -> None:
    text = everything(role)
    served = {family.name for family in text_string_to_metric_families(text)}
    assert served <= {name.removesuffix("_total") for name in METRICS}
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(STAGES) * 16 < len(series) <= 800
    assert sum("audit_layer_" in line for line in series) == (16 if role == "trainer" else 0)
    assert not re.search(r'(step|sample)="', "".join(series))


@needs_promtool
@pytest.mark.parametrize("role", LABELS["role"])
def test_promtool_finds_no_fault_in_a_page(role: str) -> None:
    done = promtool("check", "metrics", input=everything(role))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_page_is_served_where_the_configuration_names_a_port_and_the_log_says_where(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Metrics.of("relay", ChannelConfig()).url == ""
    with caplog.at_level("INFO"), closing(Metrics.of("relay", ChannelConfig(metrics_port=0))) as first:
        assert f"metrics of this relay: {first.url}" in caplog.text
        port = int(first.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=f"port {port}.*already in use.*metrics_port 0"):
            Metrics.of("trainer", ChannelConfig(metrics_port=port - 3), offset=3)


def test_gauges_are_absent_until_set_and_watched_ones_are_read_at_each_scrape() -> None:
    ages = iter([1.5, 2.5])
    with closing(Metrics("relay")) as metrics:
        port = metrics.serve()
        assert "r3channel_background_thread_alive" not in page(port)
        metrics.set("r3channel_background_thread_alive", 1)
        assert "r3channel_background_thread_alive 1.0" in page(port)
        metrics.watch("r3channel_oldest_in_flight_seconds", lambda: next(ages))
        assert "r3channel_oldest_in_flight_seconds 1.5" in page(port)
        assert "r3channel_oldest_in_flight_seconds 2.5" in page(port)
        assert "r3channel_oldest_in_flight_seconds" not in page(port)  # the third read raises


def test_spans_reach_the_stage_histogram() -> None:
    clock = StageClock("relay")
    with closing(Metrics("relay", clock=clock)) as metrics:
        clock.record("send", 1.0, 1.3)
        with clock.span("ingest"), clock.span("verify"):
            time.sleep(0.001)
        text = page(metrics.serve())
    assert 'r3channel_stage_seconds_bucket{le="0.2",role="relay",stage="send"} 0.0' in text
    assert 'r3channel_stage_seconds_bucket{le="0.5",role="relay",stage="send"} 1.0' in text
    for stage in ("verify", "ingest"):  # which was paused meanwhile, and is one observation
        assert f'r3channel_stage_seconds_count{{role="relay",stage="{stage}"}} 1.0' in text


def test_close_frees_the_port_and_may_be_repeated(tmp_path: Path) -> None:
    metrics = Metrics("relay")
    port = metrics.serve(folder=str(tmp_path))
    metrics.close()
    with pytest.raises(OSError):
        page(port)
    assert Metrics("relay").serve(port=port, folder=str(tmp_path)) == port
    metrics.close()
    assert len([*tmp_path.iterdir()]) == 1, "the file of who has the port now"


def test_counting_works_without_prometheus_client() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from r3channel.observe.metrics import Metrics\n"
        "m = Metrics('relay'); m.inc('r3channel_rows_total', 4); port = m.serve(); m.close()\n"
        "print(port, m.value('r3channel_rows_total'))"
    )
    assert said_by(program).split() == ["0", "4.0"]


# -- the stage table and the hidden share of send time -----------------------------------------------------------------


def spans(stage: str, *intervals: tuple[float, float]) -> list[Span]:
    return [Span(stage, None, "any", start_s, end_s) for start_s, end_s in intervals]


def test_the_table_has_a_line_per_stage_in_the_order_of_the_design() -> None:
    table = stage_table({"relay": {"send": 2.0, "ingest": 1.0}, "trainer 0": {"send": 0.5}})
    assert [line.split() for line in table.splitlines()] == [
        ["stage", "(seconds)", "relay", "trainer", "0"],
        ["ingest", "1.000", "-"],
        ["send", "2.000", "0.500"],
    ]


def test_a_trainers_waits_are_added_up_by_step() -> None:
    waits = [("wait_relay", 3, 0, 1), ("wait_wire", 3, 1, 1.5), ("wait_relay", 4, 2, 3)]
    others = [("wait_generation", 3, 5, 9), ("forward", 4, 9, 10), ("wait_join", None, 0, 1)]
    told = [Span(stage, step, "t", start_s, end_s) for stage, step, start_s, end_s in waits + others]
    assert waits_of(told) == {3: 1.5, 4: 1.0}


WAITED = {
    "outside of every wait": (spans("send", (0, 1), (2, 4)), spans("wait_relay", (1, 2), (4, 5)), 1.0),
    "no send": ([], spans("wait_wire", (0, 5)), 0.0), "within a wait": (spans("send", (1, 2)), spans("wait_wire", (0, 5)), 0.0),
    "two at the same time each count": (spans("send", (0, 2), (0, 2)), spans("wait_relay", (0, 1)), 0.5),
    "waits of several trainers that overlap expose a moment once": (
        spans("send", (0, 10)), spans("wait_relay", (1, 3), (2, 4)) + spans("wait_wire", (3.5, 4)), 0.7,
    ),
    "work is what follows the seal, and a wait is one for routing": (
        spans("place", (0, 3)) + spans("send", (3, 4)) + spans("verify", (0, 9)),
        spans("wait_wire", (3, 4)) + spans("wait_generation", (0, 4)) + spans("forward", (0, 4)), 0.75,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("relay", "trainers", "hidden"), WAITED.values(), ids=WAITED)
def test_a_send_is_hidden_where_nobody_waits(relay: list[Span], trainers: list[Span], hidden: float) -> None:
    assert hidden_share(relay, trainers) == pytest.approx(hidden, abs=0)
