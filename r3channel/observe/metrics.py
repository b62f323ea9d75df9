"""The counters of a process, and the page that serves them. They know the table of names and no other part of the package.

A `StageClock` (stage_clock.py) measures what each thread is doing; a `Metrics` counts, and can serve what Prometheus reads.
Counting is plain Python; prometheus_client is imported only to serve, and its absence costs nothing but the page.

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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import r3channel
from r3channel.errors import ConfigError, UsageError
from r3channel.observe.metric_table import LABELS, METRICS, Metric
from r3channel.observe.stage_clock import StageClock

STAGE_BUCKETS_S = (0.0005, 0.002, 0.005, 0.02, 0.05, 0.2, 0.5, 2.0, 5.0, 20.0, 60.0, 300.0, 1800.0)
"""Bucket limits in seconds, from a frame's hash (about 1 ms) to the longest generation that a trainer waits for."""

log = logging.getLogger(__name__)


class _Histogram:
    """Counts per bucket (not cumulative; the last is +Inf) and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(STAGE_BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(STAGE_BUCKETS_S, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        limits = (*map(str, STAGE_BUCKETS_S), "+Inf")
        return list(zip(limits, map(float, accumulate(self.counts)), strict=True))


_Key = tuple[str, ...]


class Metrics:
    """The numbers of one process. Any thread may count; several objects in one process do not meet.

    Only names in `METRICS` exist. A `role` label that is not given is this object's; `run` is a label of every series.
    Lifecycle: COUNTING -> serve() -> SERVING -> close() -> CLOSED; counting never stops, closing twice is fine.
    """

    def __init__(self, role: str, *, clock: StageClock | None = None, run: str = "") -> None:
        if role not in LABELS["role"]:
            raise UsageError(f"unknown role {role!r}; the roles are {', '.join(LABELS['role'])}")
        self.role, self.run = role, run
        self.target = ""
        """host:port of the page; empty while it is not served."""
        self.others: dict[str, str] = {}
        """Other processes of the run -> host:port of their pages, or empty. Listed beside this one at /targets."""
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Key, float]] = {name: {} for name in METRICS}
        self._watched: dict[str, dict[_Key, Callable[[], float]]] = {name: {} for name in METRICS}
        self._stages: defaultdict[_Key, _Histogram] = defaultdict(_Histogram)
        self._known: dict[tuple[Any, ...], _Key] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._file: Path | None = None
        self.clock = clock or StageClock(role)
        self.clock.subscribe(self._observe_stage)
        self.set("r3channel_build_info", 1, version=r3channel.__version__)

    @classmethod
    def of(
        cls, role: str, config: Any, *, clock: StageClock | None = None, offset: int = 0,
        address: Callable[[str], str] = str,
    ) -> Metrics:  # fmt: skip
        """Make metrics for a `ChannelConfig` or `EngineConfig`.

        These lie above this room. The metrics are served if the config names a port.

        Args:
            role: this process's role.
            config: gives `run_name`, `metrics_port`, `metrics_dir` and `interface`.
            clock: the process's clock; None makes one.
            offset: added to a fixed port, one for each process.
            address: from `interface` to the address on this machine at which the page is served.
        """
        metrics = cls(role, clock=clock, run=config.run_name)
        if config.metrics_port >= 0:
            port = config.metrics_port and config.metrics_port + offset
            metrics.serve(address(config.interface), port, folder=config.metrics_dir)
        return metrics

    @property
    def url(self) -> str:
        """Return the page's address; empty while it is not served."""
        return f"http://{self.target}/metrics" if self.target else ""

    def measure(self, name: str, **labels: str) -> None:
        """Create a counter at 0.

        A series that is born at 1 never raises an `increase() > 0` alert.

        Args:
            name: the counter.
            labels: a label that is not given takes all its values.
        """
        metric = _metric(name, "counter")
        if self.role not in metric.roles:
            raise UsageError(f"{name} is measured by {', '.join(metric.roles)}, not by {self.role}")
        every = [[labels[label]] if label in labels else LABELS[label] for label in metric.labels]
        with self._lock:
            for values in product(*every):
                key = self._key(metric, dict(zip(metric.labels, values, strict=True)))
                self._values[name].setdefault(key, 0.0)

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value`, which is not negative, to a counter."""
        if value < 0:
            raise UsageError(f"{name}: a counter cannot fall; got {value}")
        called = name, *labels.items()  # a name and its labels are checked once: `inc` runs for every frame
        with self._lock:
            if called not in self._known:
                self._known[called] = self._key(_metric(name, "counter"), labels)
                self._values[name].setdefault(self._known[called], 0.0)
            self._values[name][self._known[called]] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        metric = _metric(name, "gauge")
        key = self._key(metric, labels)
        with self._lock:
            self._values[metric.name][key] = float(value)

    def replace(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set a gauge for these label values, and forget all others.

        Args:
            name: the gauge.
            label: its label.
            values: from a value of this label to the gauge's value.
        """
        metric = _metric(name, "gauge")
        found = {self._key(metric, {label: key}): float(value) for key, value in values.items()}
        with self._lock:
            self._values[metric.name] = found

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Register a call that gives a gauge's value when it is read.

        Args:
            name: the gauge.
            read: called from any thread. If it raises, the gauge is left out.
            labels: the gauge's labels.
        """
        metric = _metric(name, "gauge")
        self._watched[metric.name][self._key(metric, labels)] = read

    def value(self, name: str, **labels: str) -> float:
        """Return what a counter or gauge holds now.

        The value is 0.0 for one that was never touched.
        """
        metric = _metric(name, "counter", "gauge")
        return self._read(metric).get(self._key(metric, labels), 0.0)

    def serve(self, host: str = "127.0.0.1", port: int = 0, *, folder: str = "") -> int:
        """Serve /metrics from a daemon thread and log where.

        /targets lists this page and `others` (http_sd).

        Args:
            host: the address to listen on.
            port: the port; 0 takes a free one.
            folder: if it is given, a file in it tells Prometheus where this page is (file_sd).

        Returns:
            The port; 0 if nothing is served, because prometheus_client is not installed.

        Raises:
            ConfigError: the port is taken or the folder cannot be written.
            UsageError: this object is serving already.
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
            self._server.set_app(self._with_targets(self._server.get_app()))
            port = int(self._server.server_port)
            self.target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if folder:
                self._file = self._announce(Path(folder), port)
        except (OSError, OverflowError) as error:
            self.close()
            raise ConfigError(
                f"metrics of this {self.role} at {host} port {port}, metrics_dir {folder!r}: {error}. Does another process have "
                "that port? metrics_port 0 takes a free one, and metrics_dir tells Prometheus which"
            ) from error
        log.info("r3channel: metrics of this %s: %s", self.role, self.url)
        return port

    def _with_targets(self, page: Any) -> Any:
        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            if environ["PATH_INFO"] != "/targets":
                return page(environ, start)
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(_groups({self.target, *self.others.copy().values()})).encode()]

        return answer

    def _announce(self, folder: Path, port: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.role}-{socket.gethostname()}-{port}.json"
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(_groups({self.target})))
        half.rename(path)  # so it is never read half written
        return path

    def collect(self) -> Iterator[Any]:
        """Yield one family for each metric that has a value.

        prometheus_client's registry calls this at each scrape.
        """
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
        """Stop serving.

        The port is free when this returns.
        """
        server, thread, file = self._server, self._thread, self._file
        self._server, self._thread, self._file, self.target = None, None, None, ""
        if file is not None:
            file.unlink(missing_ok=True)
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5.0)

    def _observe_stage(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._stages[self.role, stage].observe(seconds)

    def _stage_rows(self) -> list[tuple[_Key, list[tuple[str, float]], float]]:
        with self._lock:
            return [(key, h.cumulative(), h.sum) for key, h in self._stages.items()]

    def _read(self, metric: Metric) -> dict[_Key, float]:
        with self._lock:
            values = dict(self._values[metric.name])
        if metric.name == "r3channel_stage_open_seconds":
            for stage, seconds in self.clock.open().items():
                values[self.role, stage] = seconds
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


def _groups(targets: set[str]) -> list[dict[str, Any]]:
    # the form of Prometheus's file_sd and http_sd
    return [{"targets": sorted(targets - {""}), "labels": {"job": "r3channel"}}]


def _metric(name: str, *kinds: str) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind not in kinds:
        known = ", ".join(m.name for m in METRICS.values() if m.kind in kinds)
        raise UsageError(
            f"{name!r} is no {' or '.join(kinds)} of the table in metric_table.py; there are {known}"
        )
    return metric


def _label_value(metric: Metric, label: str, value: str) -> str:
    if value in LABELS[label]:
        return value
    if label == "reason":  # a new error must not stop the step that it describes
        return "other"
    raise UsageError(f"{metric.name}: {label}={value!r} is outside the closed set {', '.join(LABELS[label])}")
