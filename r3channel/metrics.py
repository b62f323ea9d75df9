"""The one table of metric names, and the counters of a process. Knows no other part of the package.

A `StageClock` (clock.py) measures what each thread is doing; a `Metrics` counts, and can serve what Prometheus reads.
Counting is plain Python; prometheus_client is imported only to serve, and its absence costs nothing but the page.
The table is the contract with dashboards and alerts. A name is written in full wherever it is used.

    clock = StageClock("relay")
    metrics = Metrics("relay", clock=clock)     # each span's seconds reach r3channel_stage_seconds
    metrics.measure("r3channel_samples_total")  # 0 from here on; what nobody measures is absent
    metrics.inc("r3channel_samples_total", outcome="received")
    port = metrics.serve()                      # http://127.0.0.1:port/metrics
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

from r3channel.clock import STAGES, WAITS, Span, StageClock, merge_intervals
from r3channel.errors import ConfigError, RoutingError, SampleTwice, UsageError

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

log = logging.getLogger(__name__)


def _reasons(error: type[RoutingError]) -> Iterator[str]:
    yield error.reason
    for narrower in error.__subclasses__():
        yield from _reasons(narrower)


LABELS: dict[str, tuple[str, ...]] = {
    "role": ("engine", "relay", "trainer", "manager"),
    "stage": STAGES,
    "outcome": ("received", "delivered", "rejected", "duplicate", "live", "discarded", "expired"),
    "reason": (*sorted({*_reasons(RoutingError), SampleTwice.reason}), "other"),
    "cause": ("invalid", "padding"),
    "lag": ("ahead", "0", "1", "2", "3", "4_or_more"),
    "layer": tuple(str(layer) for layer in range(256)),
    "leg": ("engine_frame", "engine_http", "engine_direct", "wire_sent", "wire_received", "landed"),
    "way": ("inband", "overflowed", "direct", "given_up"),
    "result": ("committed", "failed", "unknown"),
}
"""Every label and the closed set of its values. A reason that is not listed is counted as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table. Counters are born at 0 when somebody says that he measures them, gauges when they are first set."""

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
    return Metric(name=name, kind="counter", unit=unit, labels=labels, group=group, roles=roles, help=help)


def _gauge(name: str, unit: str, group: str, roles: tuple[str, ...], help: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, labels=labels, group=group, roles=roles, help=help)


_RELAY, _TRAINER, _BOTH, _ENGINE = ("relay",), ("trainer",), ("relay", "trainer"), ("engine",)

_TABLE = (
    Metric(
        name="r3channel_stage_seconds",
        kind="histogram",
        unit="seconds",
        labels=("role", "stage"),
        group="stages",
        roles=LABELS["role"],
        help="Time of one span of a stage, inner spans taken out; wait_* is time a thread stood still.",
    ),
    _counter(
        "r3channel_samples_total",
        "samples",
        "samples",
        _RELAY,
        "Samples by what became of them: received is the sum of all other outcomes and of those in flight.",
        "outcome",
    ),
    _gauge(
        "r3channel_samples_in_flight",
        "samples",
        "samples",
        _RELAY,
        "Samples that wait for a step or are in one.",
    ),
    _counter(
        "r3channel_rejected_total",
        "errors",
        "samples",
        _RELAY,
        "Refused replies, frames and steps by reason; a sample can be refused more than once.",
        "reason",
    ),
    _counter(
        "r3channel_rows_total",
        "rows",
        "samples",
        _RELAY,
        "Rows of accepted samples; bytes / rows is B/token.",
    ),
    _counter(
        "r3channel_steps_total",
        "steps",
        "samples",
        _BOTH,
        "Steps sealed by a relay or received by a trainer.",
    ),
    _gauge(
        "r3channel_steps_in_flight",
        "steps",
        "samples",
        _RELAY,
        "Sealed steps that a trainer has not acknowledged.",
    ),
    _gauge(
        "r3channel_frames_unclaimed",
        "frames",
        "samples",
        _RELAY,
        "Frames that came directly and whose replies have not come.",
    ),
    _gauge(
        "r3channel_expiry_in_seconds",
        "seconds",
        "samples",
        _RELAY,
        "Time until the oldest sample that no step has taken expires; absent when there is none.",
    ),
    _counter(
        "r3channel_bytes_total",
        "bytes",
        "bytes",
        _BOTH,
        "Routing bytes by the leg that they travelled.",
        "leg",
    ),
    _counter(
        "r3channel_buckets_total",
        "buckets",
        "bytes",
        _BOTH,
        "Buckets sent by a relay or received by a trainer.",
    ),
    _gauge("r3channel_frames_in_store", "frames", "store", _RELAY, "Frames that the relay holds."),
    _gauge("r3channel_store_bytes", "bytes", "store", _RELAY, "Bytes of rows that the relay holds."),
    _gauge("r3channel_store_limit_bytes", "bytes", "store", _RELAY, "Ceiling of these; at it, replies wait."),
    _gauge(
        "r3channel_staging_peak_bytes",
        "bytes",
        "store",
        _RELAY,
        "The most that was staged at once for one receiver.",
    ),
    _gauge(
        "r3channel_shard_bytes", "bytes", "store", _TRAINER, "Rows that this rank's routers use, last step."
    ),
    _gauge(
        "r3channel_recording_lost_steps", "steps", "store", _RELAY, "Steps that a recording could not keep."
    ),
    _gauge(
        "r3channel_oldest_in_flight_seconds",
        "seconds",
        "store",
        _RELAY,
        "Age of the oldest sealed step that a trainer has not acknowledged; 0 when there is none.",
    ),
    _gauge("r3channel_background_thread_alive", "bool", "health", _RELAY, "1 while the relay's thread runs."),
    _gauge(
        "r3channel_epoch",
        "epoch",
        "health",
        _BOTH,
        "Connections that one receiver has had; a failure starts the next.",
    ),
    _gauge(
        "r3channel_engines_silent",
        "engines",
        "health",
        _RELAY,
        "Engines that were expected and have said no hello, or whose hello was refused.",
    ),
    _gauge("r3channel_engines_greeted", "engines", "health", _RELAY, "Engines that have said hello."),
    _counter(
        "r3channel_group_resets_total", "resets", "health", _BOTH, "Connections that had to be given up."
    ),
    _counter(
        "r3channel_fallback_shards_total",
        "shards",
        "health",
        _TRAINER,
        "Shards received over the host transport because their process group failed.",
    ),
    _gauge(
        "r3channel_weight_version", "version", "weights", LABELS["role"], "Committed weight version.", "role"
    ),
    _counter(
        "r3channel_weight_updates_total",
        "updates",
        "weights",
        _TRAINER,
        "Weight updates of all engines, by result; a failed one leaves the old version.",
        "result",
    ),
    _gauge(
        "r3channel_engines_routable", "engines", "weights", _TRAINER, "Engines with the committed version."
    ),
    _counter(
        "r3channel_rows_by_staleness_total",
        "rows",
        "weights",
        _TRAINER,
        "Rows of a rank's samples by how many weight updates lie between them and the trainer.",
        "lag",
    ),
    _counter(
        "r3channel_rows_masked_stale_total",
        "rows",
        "weights",
        _TRAINER,
        "Rows of a rank's samples that left the loss because they were too stale.",
    ),
    _counter(
        "r3channel_ids_compared_total", "ids", "audit", _TRAINER, "Ids compared: engine against router."
    ),
    _counter(
        "r3channel_ids_different_total",
        "ids",
        "audit",
        _TRAINER,
        "Ids that the router did not get; must stay 0.",
    ),
    _counter(
        "r3channel_live_rows_total",
        "rows",
        "audit",
        _TRAINER,
        "Rows that the live router chose for, by cause: no engine routing, or padding under the native policy.",
        "cause",
    ),
    _counter(
        "r3channel_audit_pairs_total",
        "pairs",
        "audit",
        _TRAINER,
        "(token, layer) pairs compared: live router, replay.",
    ),
    _counter(
        "r3channel_audit_pairs_different_total",
        "pairs",
        "audit",
        _TRAINER,
        "Pairs in which the live router would choose other experts; a jump means a shift by a layer or token.",
    ),
    _counter(
        "r3channel_audit_pairs_disjoint_total",
        "pairs",
        "audit",
        _TRAINER,
        "Pairs that share no expert at all.",
    ),
    _counter(
        "r3channel_audit_tokens_total", "tokens", "audit", _TRAINER, "Tokens whose routing was audited."
    ),
    _counter(
        "r3channel_audit_tokens_different_total",
        "tokens",
        "audit",
        _TRAINER,
        "Audited tokens with at least one differing layer.",
    ),
    _gauge(
        "r3channel_audit_layer_overlap",
        "ratio",
        "audit",
        _TRAINER,
        "Mean share of experts that live router and replay have in common, last audited step, the worst eight layers.",
        "layer",
    ),
    _gauge(
        "r3channel_audit_layer_different",
        "ratio",
        "audit",
        _TRAINER,
        "Share of rows whose experts differ, last audited step, the worst eight layers.",
        "layer",
    ),
    _gauge(
        "r3channel_audit_logprob_abs_diff",
        "nats",
        "audit",
        _TRAINER,
        "Mean |trainer - engine| log-prob of the last audited step.",
    ),
    _gauge("r3channel_audit_logprob_k3", "nats", "audit", _TRAINER, "Mean exp(d) - 1 - d of the same."),
    _counter(
        "r3channel_engine_frames_total",
        "frames",
        "engine",
        _ENGINE,
        "Frames by how they left: in the reply, in the reply as the queue was full, directly, or given up.",
        "way",
    ),
    _gauge(
        "r3channel_engine_queue_bytes",
        "bytes",
        "engine",
        _ENGINE,
        "Frames that wait to be sent to the relay.",
    ),
    _gauge("r3channel_engine_queue_limit_bytes", "bytes", "engine", _ENGINE, "Ceiling of these."),
    _gauge(
        "r3channel_engine_greeted",
        "bool",
        "engine",
        _ENGINE,
        "1 once the relay has taken this engine's hello.",
    ),
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


class Page(Protocol):
    """What a configuration says of /metrics: `ChannelConfig` and `EngineConfig` do."""

    @property
    def interface(self) -> str: ...
    @property
    def metrics_port(self) -> int: ...
    @property
    def metrics_dir(self) -> str: ...
    @property
    def run_name(self) -> str: ...


class Metrics:
    """The numbers of one process. Any thread may count; several objects in one process do not meet.

    Only names in `METRICS` exist. A `role` label that is not given is this object's; `run` is a label of every series.
    Lifecycle: COUNTING -> serve() -> SERVING -> close() -> CLOSED; counting never stops, closing twice is fine.
    """

    def __init__(self, role: str, *, clock: StageClock | None = None, run: str = "") -> None:
        if role not in LABELS["role"]:
            raise UsageError(f"unknown role {role!r}; the roles are {', '.join(LABELS['role'])}")
        self.role, self.run = role, run
        self.url = ""
        """Of the page, while it is served."""
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Key, float]] = {name: {} for name in METRICS}
        self._watched: dict[str, dict[_Key, Callable[[], float]]] = {name: {} for name in METRICS}
        self._stages: dict[_Key, _Histogram] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._target: Path | None = None
        self.clock = clock or StageClock(role)
        self.clock.subscribe(self._observe_stage)

    @classmethod
    def of(cls, role: str, page: Page, *, clock: StageClock | None = None, offset: int = 0) -> Metrics:
        """As a configuration says: served where it names a port. `offset` keeps processes of one machine apart at a fixed one."""
        metrics = cls(role, clock=clock, run=page.run_name)
        if page.metrics_port >= 0:
            port = page.metrics_port and page.metrics_port + offset
            metrics.serve(page.interface, port, folder=page.metrics_dir)
        return metrics

    def measure(self, name: str, **labels: str) -> None:
        """A counter exists from here on, at 0: a series born at 1 never raises an `increase() > 0` alert. Labels that are not
        given take all their values."""
        metric = _metric(name, "counter")
        if self.role not in metric.roles:
            raise UsageError(f"{name} is measured by {', '.join(metric.roles)}, not by {self.role}")
        every = [[labels[label]] if label in labels else LABELS[label] for label in metric.labels]
        with self._lock:
            for values in product(*every):
                key = self._key(metric, dict(zip(metric.labels, values, strict=True)))
                self._values[name].setdefault(key, 0.0)

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

    def replace(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set a gauge for these values of its label, and forget it for all others."""
        metric = _metric(name, "gauge")
        found = {self._key(metric, {label: key}): float(value) for key, value in values.items()}
        with self._lock:
            self._values[metric.name] = found

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Let a gauge be read when it is asked for, from any thread; a read that raises leaves the gauge out."""
        metric = _metric(name, "gauge")
        self._watched[metric.name][self._key(metric, labels)] = read

    def value(self, name: str, **labels: str) -> float:
        """What a counter or gauge holds now; 0.0 for one never touched."""
        metric = _metric(name, "counter", "gauge")
        key = self._key(metric, labels)
        return self._read(metric).get(key, 0.0)

    def serve(self, host: str = "127.0.0.1", port: int = 0, *, folder: str = "") -> int:
        """Serve /metrics from a daemon thread, log where, and return the port; 0 means that nothing is served, as
        prometheus_client is not installed. With a `folder`, a file in it tells Prometheus where (file_sd).

        Raises ConfigError when the port is taken or the folder cannot be written.
        """
        if self._server is not None:
            raise UsageError(f"already serving at {self.url}; one page per object")
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            log.warning("r3channel: no /metrics: prometheus_client is not installed (extra `metrics`)")
            return 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
            port = int(self._server.server_port)
            self.url = f"http://{host}:{port}/metrics"
            if folder:
                self._target = self._announce(Path(folder), f"{host}:{port}")
        except (OSError, OverflowError) as error:
            self.close()
            raise ConfigError(
                f"metrics of this {self.role} at {host} port {port}, metrics_dir {folder!r}: {error}. Does another process have "
                "that port? metrics_port 0 takes a free one, and metrics_dir tells Prometheus which"
            ) from error
        log.info("r3channel: metrics of this %s: %s", self.role, self.url)
        return port

    def _announce(self, folder: Path, target: str) -> Path:
        """A file for Prometheus's file_sd_configs; renamed into place, so that it is never read half written."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.role}-{socket.gethostname()}-{target.rpartition(':')[2]}.json"
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps([{"targets": [target], "labels": {"job": "r3channel"}}]))
        half.rename(path)
        return path

    def collect(self) -> Iterator[Any]:
        """What prometheus_client's registry asks for at each scrape: one family per metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, run = (("run",), (self.run,)) if self.run else ((), ())
        for metric in METRICS.values():
            if metric.kind == "histogram":
                family = HistogramMetricFamily(metric.name, metric.help, labels=(*metric.labels, *names))
                for key, buckets, total_s in self._stage_rows():
                    family.add_metric((*key, *run), buckets, total_s)
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=(*metric.labels, *names))
                for key, value in self._read(metric).items():
                    family.add_metric((*key, *run), value)
            if family.samples:
                yield family

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        server, thread = self._server, self._thread
        self._server, self._thread, self.url = None, None, ""
        if self._target is not None:
            self._target.unlink(missing_ok=True)
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
    metric = METRICS.get(name)
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
