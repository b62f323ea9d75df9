"""Stage clock, table of metrics and the served page."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from r3channel.clock import merge_intervals
from r3channel.errors import HeaderCorrupt, UsageError
from r3channel.metrics import LABELS, METRICS, STAGES, WAITS, Metrics, Span, StageClock

ROOT = Path(__file__).parents[2]


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode()


# -- clock -------------------------------------------------------------------------------------------------------------


def test_an_outer_span_pauses_while_an_inner_one_runs() -> None:
    clock = StageClock("relay")
    with clock.span("ingest", step=3):
        time.sleep(0.01)
        with clock.span("verify"):
            time.sleep(0.03)
        time.sleep(0.01)
    totals = clock.totals()
    assert 0.02 <= totals["ingest"] < totals["verify"] + 0.02
    assert totals["verify"] >= 0.03
    assert [span.stage for span in clock.spans()] == ["ingest", "verify", "ingest"]


def test_spans_of_a_thread_never_overlap() -> None:
    clock = StageClock("relay")
    for _ in range(3):
        with clock.span("ingest"), clock.span("verify"), clock.span("plan"):
            pass
    spans = clock.spans()
    assert all(earlier.end_s <= later.start_s for earlier, later in itertools.pairwise(spans))


def test_an_inner_span_takes_the_step_of_the_outer() -> None:
    clock = StageClock("relay")
    with clock.span("ingest", step=3), clock.span("verify"):
        time.sleep(0.001)
    assert clock.totals(step=3).keys() == {"ingest", "verify"}
    assert clock.totals(step=4) == {}


def test_a_span_ends_when_its_body_raises() -> None:
    clock = StageClock("relay")
    with pytest.raises(ZeroDivisionError), clock.span("ingest"):
        time.sleep(0.002)
        _ = 1 / 0
    with clock.span("send"):
        time.sleep(0.001)
    assert clock.totals()["ingest"] >= 0.002
    assert clock.spans()[-1].stage == "send"


def test_threads_measure_apart() -> None:
    clock = StageClock("relay")

    def work() -> None:
        with clock.span("send"):
            time.sleep(0.02)

    threads = [threading.Thread(target=work, name=f"sender-{i}") for i in range(4)]
    with clock.span("wait_join"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
    assert {span.thread for span in clock.spans()} == {"MainThread", *(thread.name for thread in threads)}
    assert clock.totals()["send"] >= 4 * 0.02


def test_coverage_is_the_share_of_wall_that_a_threads_spans_explain() -> None:
    clock = StageClock("trainer")
    clock.record("forward", 10.0, 12.0)
    clock.record("backward", 11.0, 13.0)  # an overlap counts once
    clock.record("optimizer", 19.0, 30.0)  # cut at the end
    assert clock.coverage(10.0, 20.0) == pytest.approx(0.4)
    assert clock.coverage(10.0, 20.0, thread="another") == 0.0


def test_totals_come_in_the_order_of_the_stages() -> None:
    clock = StageClock("trainer")
    clock.record("optimizer", 0.0, 1.0)
    clock.record("recv", 1.0, 2.0)
    assert list(clock.totals()) == ["recv", "optimizer"]


def test_totals_outlive_forgotten_spans() -> None:
    clock = StageClock("trainer", max_spans=2)
    for second in range(5):
        clock.record("recv", float(second), second + 1.0)
    assert len(clock.spans()) == 2
    assert clock.totals() == {"recv": 5.0}


def test_an_unknown_stage_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="sending"):
        StageClock("relay").span("sending")


def test_intervals_merge_to_their_union() -> None:
    assert merge_intervals([(4, 5), (0, 2), (1, 3), (3, 3), (9, 8)]) == [(0, 3), (4, 5)]


def test_a_span_costs_little() -> None:
    clock = StageClock("trainer")
    metrics = Metrics("trainer", clock=clock)
    best_s = min(_timed(clock, spans=2_000) for _ in range(5)) / 2_000
    assert best_s < 100e-6, "a span should cost a few microseconds"
    assert "trainer" in metrics.role


def _timed(clock: StageClock, *, spans: int) -> float:
    start_s = time.perf_counter()
    for _ in range(spans):
        with clock.span("bind"):
            pass
    return time.perf_counter() - start_s


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
    assert len(LABELS["reason"]) <= 32
    assert set(WAITS) < set(STAGES)


def test_every_sample_error_is_a_reason() -> None:
    assert HeaderCorrupt.reason in LABELS["reason"]


# -- counting ----------------------------------------------------------------------------------------------------------


def test_counters_count_with_and_without_the_prefix() -> None:
    metrics = Metrics("relay")
    metrics.inc("r3channel_samples_total", outcome="received")
    metrics.inc("samples_total", 2, outcome="received")
    assert metrics.value("samples_total", outcome="received") == 3


def test_a_new_reason_counts_as_other() -> None:
    metrics = Metrics("relay")
    metrics.inc("rejected_total", reason="never heard of")
    assert metrics.value("rejected_total", reason="other") == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("samples", {}),
        ("samples_total", {}),
        ("samples_total", {"outcome": "lost"}),
        ("samples_total", {"outcome": "received", "sample": "17"}),
        ("store_bytes", {}),
    ],
)
def test_what_the_table_does_not_know_is_refused(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Metrics("relay").inc(name, 1, **labels)


def test_a_counter_cannot_fall() -> None:
    with pytest.raises(UsageError, match="fall"):
        Metrics("relay").inc("rows_total", -1)


def test_a_role_label_is_filled_in() -> None:
    metrics = Metrics("trainer")
    metrics.set("weight_version", 7)
    assert metrics.value("weight_version", role="trainer") == 7


def test_threads_lose_no_count() -> None:
    metrics = Metrics("relay")

    def count() -> None:
        for _ in range(1_000):
            metrics.inc("rows_total")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert metrics.value("rows_total") == 8_000


# -- the served page ---------------------------------------------------------------------------------------------------


def test_labelled_counters_are_born_at_zero() -> None:
    with Metrics("relay") as metrics:
        text = page(metrics.serve())
    for reason in LABELS["reason"]:
        assert f'r3channel_rejected_total{{reason="{reason}"}} 0.0' in text


def test_gauges_are_absent_until_set() -> None:
    with Metrics("relay") as metrics:
        port = metrics.serve()
        assert "r3channel_background_thread_alive" not in page(port)
        metrics.set("background_thread_alive", 1)
        assert "r3channel_background_thread_alive 1.0" in page(port)


def test_a_watched_gauge_is_read_at_each_scrape() -> None:
    ages = iter([1.5, 2.5])
    with Metrics("relay") as metrics:
        metrics.watch("oldest_in_flight_seconds", lambda: next(ages))
        port = metrics.serve()
        assert "r3channel_oldest_in_flight_seconds 1.5" in page(port)
        assert "r3channel_oldest_in_flight_seconds 2.5" in page(port)
        assert "r3channel_oldest_in_flight_seconds" not in page(port)  # the third read raises


def test_spans_reach_the_stage_histogram() -> None:
    clock = StageClock("relay")
    with Metrics("relay", clock=clock) as metrics:
        clock.record("send", 1.0, 1.3)
        with clock.span("verify"):
            time.sleep(0.001)
        text = page(metrics.serve())
    assert 'r3channel_stage_seconds_bucket{le="0.2",role="relay",stage="send"} 0.0' in text
    assert 'r3channel_stage_seconds_bucket{le="0.5",role="relay",stage="send"} 1.0' in text
    assert 'r3channel_stage_seconds_count{role="relay",stage="verify"} 1.0' in text


def test_a_paused_span_is_one_observation() -> None:
    clock = StageClock("relay")
    with Metrics("relay", clock=clock) as metrics:
        with clock.span("ingest"), clock.span("verify"):
            pass
        assert 'r3channel_stage_seconds_count{role="relay",stage="ingest"} 1.0' in page(metrics.serve())


def test_two_objects_in_one_process_do_not_meet() -> None:
    with Metrics("relay") as relay, Metrics("trainer") as trainer:
        relay.inc("rows_total", 5)
        assert "r3channel_rows_total 5.0" in page(relay.serve())
        assert "r3channel_rows_total" not in page(trainer.serve())


def test_served_names_are_those_of_the_table() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    clock = StageClock("relay")
    with Metrics("relay", clock=clock) as metrics:
        clock.record("send", 0.0, 1.0)
        served = {family.name for family in text_string_to_metric_families(page(metrics.serve()))}
    assert served <= {name.removesuffix("_total") for name in METRICS}


def test_close_frees_the_port_and_may_be_repeated() -> None:
    metrics = Metrics("relay")
    port = metrics.serve()
    metrics.close()
    metrics.close()
    with pytest.raises(OSError):
        page(port)
    assert Metrics("relay").serve(port=port) == port


def test_counting_works_without_prometheus_client() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from r3channel.metrics import Metrics\n"
        "m = Metrics('relay'); m.inc('rows_total', 4); port = m.serve(); m.close()\n"
        "print(port, m.value('rows_total'))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.split() == ["0", "4.0"]


def test_a_span_knows_its_length() -> None:
    assert Span("send", None, "MainThread", 1.0, 3.5).seconds == 2.5
