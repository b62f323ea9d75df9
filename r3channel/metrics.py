"""The one table of metric names, and the counters of a process. Knows no other part of the package.

A `StageClock` (clock.py) measures what each thread is doing; a `Metrics` counts, and can serve what Prometheus reads.
Counting is plain Python; prometheus_client is imported only to serve, and its absence costs nothing but the page.

    clock = StageClock("relay")
    metrics = Metrics("relay", clock=clock)     # each span's seconds reach r3channel_stage_seconds
    metrics.inc("r3channel_samples_total", outcome="received")
    port = metrics.serve()                      # http://127.0.0.1:port/metrics
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from r3channel.clock import STAGES, WAITS, Span, StageClock, merge_intervals
from r3channel.errors import RoutingError, SampleTwice, UsageError

__all__ = [
    "LABELS",
    "METRICS",
    "STAGES",
    "WAITS",
    "Metric",
    "Metrics",
    "Span",
    "StageClock",
    "merge_intervals",
]

STAGE_BUCKETS_S = (0.0005, 0.002, 0.005, 0.02, 0.05, 0.2, 0.5, 2.0, 5.0, 20.0, 60.0)
"""From a frame's hash (about 1 ms) to the longest wait that is still healthy."""

_PREFIX = "r3channel_"


def _reasons(error: type[RoutingError]) -> Iterator[str]:
    yield error.reason
    for narrower in error.__subclasses__():
        yield from _reasons(narrower)


LABELS: dict[str, tuple[str, ...]] = {
    "role": ("engine", "relay", "trainer", "manager"),
    "stage": STAGES,
    "outcome": ("received", "delivered", "rejected", "discarded", "expired", "live"),
    "reason": (*sorted({*_reasons(RoutingError), SampleTwice.reason}), "other"),
    "cause": ("invalid", "padding"),
    "lag": ("ahead", "0", "1", "2", "3", "4_or_more"),
    "layer": tuple(str(layer) for layer in range(256)),
    "leg": (
        "engine_frame",
        "engine_http",
        "engine_direct",
        "object_store",
        "wire_sent",
        "wire_received",
        "landed",
    ),
}
"""Every label and the closed set of its values. A reason that is not listed is counted as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table. Counters are born at 0, gauges when they are first set."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """Base unit of the value: seconds, bytes, or what is counted."""
    labels: tuple[str, ...] = ()
    group: str
    """The dashboard row it belongs to."""
    roles: tuple[str, ...]
    """The processes that feed it."""
    help: str


def _counter(name: str, unit: str, group: str, roles: tuple[str, ...], help: str, *labels: str) -> Metric:
    full = f"{_PREFIX}{name}"
    return Metric(name=full, kind="counter", unit=unit, labels=labels, group=group, roles=roles, help=help)


def _gauge(name: str, unit: str, group: str, roles: tuple[str, ...], help: str, *labels: str) -> Metric:
    full = f"{_PREFIX}{name}"
    return Metric(name=full, kind="gauge", unit=unit, labels=labels, group=group, roles=roles, help=help)


_RELAY, _TRAINER, _BOTH = ("relay",), ("trainer",), ("relay", "trainer")

_TABLE = (
    Metric(
        name=f"{_PREFIX}stage_seconds",
        kind="histogram",
        unit="seconds",
        labels=("role", "stage"),
        group="stages",
        roles=LABELS["role"],
        help="Time of one span of a stage, inner spans taken out; wait_* is time a thread stood still.",
    ),
    _counter("samples_total", "samples", "samples", _RELAY, "Samples by what became of them.", "outcome"),
    _counter("rejected_total", "samples", "samples", _RELAY, "Rejected samples by reason.", "reason"),
    _counter("rows_total", "rows", "samples", _RELAY, "Rows of accepted samples; bytes / rows is B/token."),
    _counter("bytes_total", "bytes", "bytes", _BOTH, "Routing bytes by the leg that they travelled.", "leg"),
    _counter("buckets_total", "buckets", "bytes", _BOTH, "Buckets sent by a relay or received by a trainer."),
    _gauge("frames_in_store", "frames", "store", _RELAY, "Frames that the relay holds."),
    _gauge("store_bytes", "bytes", "store", _RELAY, "Bytes of rows that the relay holds."),
    _gauge("recording_lost_steps", "steps", "store", _RELAY, "Steps that a recording could not keep."),
    _gauge(
        "oldest_in_flight_seconds",
        "seconds",
        "store",
        _RELAY,
        "Age of the oldest sealed step that a trainer has not acknowledged; 0 when there is none.",
    ),
    _gauge("background_thread_alive", "bool", "health", _RELAY, "1 while the relay's thread runs."),
    _gauge(
        "epoch", "epoch", "health", _BOTH, "Connections that one receiver has had; a failure starts the next."
    ),
    _counter("group_resets_total", "resets", "health", _BOTH, "Connections that had to be given up."),
    _counter(
        "fallback_shards_total",
        "shards",
        "health",
        _TRAINER,
        "Shards received over the host transport because their process group failed.",
    ),
    _gauge("weight_version", "version", "weights", LABELS["role"], "Committed weight version.", "role"),
    _counter(
        "rows_by_staleness_total",
        "rows",
        "weights",
        _TRAINER,
        "Rows of a rank's samples by how many weight updates lie between them and the trainer.",
        "lag",
    ),
    _counter(
        "rows_masked_stale_total",
        "rows",
        "weights",
        _TRAINER,
        "Rows of a rank's samples that left the loss because they were too stale.",
    ),
    _counter("ids_compared_total", "ids", "audit", _TRAINER, "Ids compared: engine against router."),
    _counter(
        "ids_different_total", "ids", "audit", _TRAINER, "Ids that the router did not get; must stay 0."
    ),
    _counter(
        "live_rows_total",
        "rows",
        "audit",
        _TRAINER,
        "Rows that the live router chose for, by cause: no engine routing, or padding under the native policy.",
        "cause",
    ),
    _counter(
        "audit_pairs_total", "pairs", "audit", _TRAINER, "(token, layer) pairs compared: live router, replay."
    ),
    _counter(
        "audit_pairs_different_total",
        "pairs",
        "audit",
        _TRAINER,
        "Pairs in which the live router would choose other experts; a jump means a shift by a layer or token.",
    ),
    _counter("audit_pairs_disjoint_total", "pairs", "audit", _TRAINER, "Pairs that share no expert at all."),
    _counter("audit_tokens_total", "tokens", "audit", _TRAINER, "Tokens whose routing was audited."),
    _counter(
        "audit_tokens_different_total",
        "tokens",
        "audit",
        _TRAINER,
        "Audited tokens with at least one differing layer.",
    ),
    _gauge(
        "audit_layer_overlap",
        "ratio",
        "audit",
        _TRAINER,
        "Mean share of experts that live router and replay have in common, last audited step.",
        "layer",
    ),
    _gauge(
        "audit_layer_different",
        "ratio",
        "audit",
        _TRAINER,
        "Share of rows whose experts differ, last audited step.",
        "layer",
    ),
    _gauge(
        "audit_logprob_abs_diff",
        "nats",
        "audit",
        _TRAINER,
        "Mean |trainer - engine| log-prob of the last audited step.",
    ),
    _gauge("audit_logprob_k3", "nats", "audit", _TRAINER, "Mean exp(d) - 1 - d of the same."),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
"""All names that this package exports, by full name."""


class _Histogram:
    """Counts per bucket (not cumulative; the last is +Inf) and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(STAGE_BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        bucket = next((i for i, le in enumerate(STAGE_BUCKETS_S) if value <= le), len(STAGE_BUCKETS_S))
        self.counts[bucket] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        rows, running = [], 0
        for le, count in zip((*map(str, STAGE_BUCKETS_S), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((le, float(running)))
        return rows


_Key = tuple[str, ...]


class Metrics:
    """The numbers of one process. Any thread may count; several objects in one process do not meet.

    Only names in `METRICS` exist; the prefix may be left out. A `role` label that is not given is this object's.
    Lifecycle: COUNTING -> serve() -> SERVING -> close() -> CLOSED; counting never stops, closing twice is fine.
    """

    def __init__(self, role: str, *, clock: StageClock | None = None) -> None:
        if role not in LABELS["role"]:
            raise UsageError(f"unknown role {role!r}; the roles are {', '.join(LABELS['role'])}")
        self.role = role
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Key, float]] = {name: {} for name in METRICS}
        self._watched: dict[str, dict[_Key, Callable[[], float]]] = {name: {} for name in METRICS}
        self._stages: dict[_Key, _Histogram] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        for metric in METRICS.values():
            if metric.kind == "counter" and role in metric.roles:
                self._values[metric.name] = dict.fromkeys(_born_at_zero(metric), 0.0)
        if clock is not None:
            clock.subscribe(self._observe_stage)

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value` (not negative) to a counter."""
        metric = _metric(name, "counter")
        if value < 0:
            raise UsageError(f"{metric.name}: a counter cannot fall; got {value}")
        key = self._key(metric, labels)
        with self._lock:
            self._values[metric.name][key] = self._values[metric.name].get(key, 0.0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        metric = _metric(name, "gauge")
        key = self._key(metric, labels)
        with self._lock:
            self._values[metric.name][key] = float(value)

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Let a gauge be read when it is asked for, from any thread; a read that raises leaves the gauge out."""
        metric = _metric(name, "gauge")
        self._watched[metric.name][self._key(metric, labels)] = read

    def value(self, name: str, **labels: str) -> float:
        """What a counter or gauge holds now; 0.0 for one never touched."""
        metric = _metric(name, "counter", "gauge")
        key = self._key(metric, labels)
        return self._read(metric).get(key, 0.0)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve /metrics from a daemon thread and return the port; 0 means nothing is served, as
        prometheus_client is not installed. Raises OSError when the port is taken."""
        if self._server is not None:
            raise UsageError(f"already serving on port {self._server.server_port}; one server per process")
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            return 0
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        return int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """What prometheus_client's registry asks for at each scrape: one family per metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric in METRICS.values():
            if metric.kind == "histogram":
                family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for key, buckets, total_s in self._stage_rows():
                    family.add_metric(key, buckets, total_s)
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for key, value in self._read(metric).items():
                    family.add_metric(key, value)
            if family.samples:
                yield family

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5.0)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _observe_stage(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._stages.setdefault((self.role, stage), _Histogram()).observe(seconds)

    def _stage_rows(self) -> list[tuple[_Key, list[tuple[str, float]], float]]:
        with self._lock:
            return [(key, h.cumulative(), h.sum) for key, h in self._stages.items()]

    def _read(self, metric: Metric) -> dict[_Key, float]:
        with self._lock:
            values = dict(self._values[metric.name])
        for key, read in list(self._watched[metric.name].items()):
            try:
                values[key] = float(read())
            except Exception:  # the watched object is closing; a scrape must not fail for it
                values.pop(key, None)
        return values

    def _key(self, metric: Metric, labels: dict[str, str]) -> _Key:
        if not metric.labels and not labels:
            return ()
        if "role" in metric.labels:
            labels.setdefault("role", self.role)
        if labels.keys() != set(metric.labels):
            raise UsageError(f"{metric.name}: labels {sorted(labels)} given; it has {sorted(metric.labels)}")
        return tuple([_label_value(metric, label, labels[label]) for label in metric.labels])


def _metric(name: str, *kinds: str) -> Metric:
    metric = METRICS.get(name) or METRICS.get(_PREFIX + name)
    if metric is None or metric.kind not in kinds:
        known = ", ".join(m.name for m in METRICS.values() if m.kind in kinds)
        raise UsageError(f"{name!r} is no {' or '.join(kinds)} of the table in metrics.py; there are {known}")
    return metric


def _label_value(metric: Metric, label: str, value: str) -> str:
    if value in LABELS[label]:
        return value
    if label == "reason":  # a new error must not stop the step that it describes
        return "other"
    raise UsageError(f"{metric.name}: {label}={value!r} is outside the closed set {', '.join(LABELS[label])}")


def _born_at_zero(metric: Metric) -> list[_Key]:
    """Every label combination: a series born at 1 never raises an `increase() > 0` alert."""
    assert len(metric.labels) <= 1, "counters have at most one label, so that they stay few"
    return [(value,) for value in LABELS[metric.labels[0]]] if metric.labels else [()]
