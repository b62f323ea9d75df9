"""A run as `r3channel top` and its report read it: its processes, where their time goes, and what is a fault.

While a run goes on, the source is its metrics pages, and what grew between two looks at one. Afterwards it is the spans that its
processes left. This module draws nothing.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import ROUTING_WAITS, merge_intervals
from r3channel.observe.trace import Span
from r3channel.transport.network import urlopen

TIMEOUT_S = 5.0
WORK = ("place", "send")
"""Stages of the relay's work for a step after it was sealed."""
_SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


# -- what is a fault ---------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


class Fault(NamedTuple):
    """One row of faults.toml, which says what each column is."""

    series: str
    says: str = ""
    do: str = ""
    alert: str = ""
    labels: Mapping[str, str] = {}
    of: str = ""
    least: float = 0
    most: float = 0

    def faulty_series(self, page: Sequence[Series]) -> Iterator[Series]:
        """Yield a page's series that show this fault.

        Each has the value that is judged.
        """
        whole = next((series.value for series in page if series.name == self.of and series.value), 1.0)
        for series in page if self.says else ():
            asked = series.name == self.series and self.labels.items() <= series.labels.items()
            if asked and not self.least <= series.value / whole <= self.most:
                yield series._replace(value=series.value / whole)


FAULTS = tuple(
    Fault(**row) for row in tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]
)


# -- metrics pages, while it runs --------------------------------------------------------------------------------------------


def urls_of(target: str) -> list[str]:
    """Return the pages that a target names now.

    Args:
        target: a page's URL, a URL that ends in /targets, a folder of targets, or a folder that holds one named targets.

    Raises:
        ConfigError: the target can never name a page.
    """
    if "://" in target:
        return _list_pages(target) if target.endswith("/targets") else [target]
    folder = Path(target, "targets") if Path(target, "targets").is_dir() else Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target}: neither a URL nor a folder. Processes that serve /metrics leave a file each in their --r3-metrics-dir"
        )
    return _pages(group for file in sorted(folder.glob("*.json")) for group in _groups(file))


def _pages(groups: Iterable[dict[str, list[str]]]) -> list[str]:
    return [f"http://{address}/metrics" for group in groups for address in group["targets"]]


def _list_pages(url: str) -> list[str]:
    try:
        with urlopen(url, timeout_s=TIMEOUT_S) as page:
            return _pages(json.loads(page.read()))
    except (OSError, ValueError, TypeError, HTTPException):  # the server at that URL is no relay
        return [url]  # it is then reported as down


def _groups(file: Path) -> list[dict[str, list[str]]]:
    try:
        groups = json.loads(file.read_text())
    except FileNotFoundError:  # its process ended between two looks
        return []
    except ValueError as error:
        raise ConfigError(f"{file}: expected Prometheus's file_sd targets: {error}") from error
    if not isinstance(groups, list) or not all("targets" in group for group in groups):
        raise ConfigError(f"{file}: expected a list of file_sd groups. Is {file.parent} a folder of targets?")
    return groups


def parse_page(text: str) -> Iterator[Series]:
    """Yield a page's series in their order.

    Comments, and lines that are no series, are ignored.
    """
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SERIES.match(line)):
            yield Series(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3]))


@dataclass(frozen=True, slots=True)
class Look:
    """The content of one page at one moment, or why there was none."""

    url: str
    at_s: float
    page: list[Series]
    fault: str = ""

    @classmethod
    def read(cls, url: str, *, timeout_s: float) -> Look:
        """Read a page now.

        This method never raises: `top` shows a page that is down.
        """
        try:
            with urlopen(url, timeout_s=timeout_s) as answer:
                page = list(parse_page(answer.read().decode()))
            fault = "" if page else "no page of metrics"
        except (OSError, ValueError, HTTPException) as error:  # no server, or no page of metrics
            page, fault = [], str(error) or type(error).__name__
        return cls(url, time.monotonic(), page, fault)

    @property
    def place(self) -> str:
        return self.url.removeprefix("http://").removesuffix("/metrics")

    @property
    def role(self) -> str:
        """Return the process's role, which `r3channel_build_info` says."""
        return self.labels_of("role")

    def labels_of(self, label: str) -> str:
        return next((line.labels[label] for line in self.page if label in line.labels), "")

    def find(self, name: str, **labels: str) -> list[Series]:
        return [line for line in self.page if line.name == name and labels.items() <= line.labels.items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(line.value for line in self.find(name, **labels))


@dataclass(frozen=True, slots=True)
class Between:
    """One process between two looks at its page."""

    before: Look
    now: Look

    def grew(self, name: str, **labels: str) -> float:
        """Return how much a value grew between the looks.

        If the process began anew, the growth is the whole value.
        """
        now = self.now.sum(name, **labels)
        before = self.before.sum(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float:
        return self.grew(name, **labels) / max(self.now.at_s - self.before.at_s, 1e-9)


def faults_of(processes: Iterable[Between]) -> Iterator[str]:
    """Yield the faults since each process began, as texts.

    Each text says how much of the fault is new.
    """
    for process in processes:
        if process.now.fault:
            yield f"{process.now.place} does not answer: {process.now.fault}"
        for fault in FAULTS:
            for series in fault.faulty_series(process.now.page):
                new = process.grew(fault.series, **series.labels)
                text = f"{fault.says}. {fault.do}".format(value=series.value, new=new, **series.labels)
                yield f"{process.now.role} {process.now.place}: {text}"


# -- spans, afterwards -------------------------------------------------------------------------------------------------------


def facts_of(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Return the facts that a page needs of any run.

    Their names are those of the demo's report.json.
    """
    trainers = [lane for name, lane in spans.items() if name.startswith("trainer")]
    each = [waits_of(trainer) for trainer in trainers]
    waits = {step: max(waited.get(step, 0.0) for waited in each) for step in sorted(set[int]().union(*each))}
    begin_s, end_s = ends_of(spans)
    wall_s = end_s - begin_s
    return {
        "steps": len(waits),
        "wall_s": wall_s,
        "stages_by_process_s": {
            name: sums((span.stage, span.seconds) for span in lane) for name, lane in spans.items()
        },
        "hidden_fraction": hidden_share(spans.get("relay", ()), chain(*trainers)),
        "wait_s_by_step": waits,
        "wait_fraction": sum(waits.values()) / wall_s if wall_s else 0.0,
    }


def hidden_share(relay: Iterable[Span], trainers: Iterable[Span]) -> float:
    """Return the share of the relay's work that no trainer waited for.

    Work is what the relay does between `seal` and the last acknowledgement (`WORK`). Waits are those for routing
    (`ROUTING_WAITS`): a trainer that waits for the next rollout waits for no relay.

    Returns:
        0.0 to 1.0; 0.0 without work, because nothing was shown to be hidden.
    """
    waits = merge_intervals((span.start_s, span.end_s) for span in trainers if span.stage in ROUTING_WAITS)
    starts, ends = [start for start, _ in waits], [end for _, end in waits]
    total_s = exposed_s = 0.0
    for work in (span for span in relay if span.stage in WORK):
        total_s += work.seconds
        exposed_s += sum(
            max(0.0, min(work.end_s, end) - max(work.start_s, start))
            for start, end in waits[bisect_left(ends, work.start_s) : bisect_left(starts, work.end_s)]
        )
    return 1.0 - exposed_s / total_s if total_s > 0 else 0.0


def waits_of(spans: Iterable[Span]) -> dict[int, float]:
    """Return step -> seconds that one trainer waited for its routing."""
    mine = (span for span in spans if span.stage in ROUTING_WAITS and span.step is not None)
    return sums((span.step, span.seconds) for span in mine)


def sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Add up the values of each key.

    Keys are in the order in which they came.
    """
    sums: dict[Any, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums


def ends_of(spans: Mapping[str, Sequence[Span]]) -> tuple[float, float]:
    """Return when the trainers' first span began and last one ended.

    Without trainers the spans of all processes count. Without spans both times are 0.
    """
    trainers = [lane for name, lane in spans.items() if name.startswith("trainer")]
    ends = [(span.start_s, span.end_s) for span in chain(*(trainers or spans.values()))] or [(0.0, 0.0)]
    return min(ends)[0], max(end for _, end in ends)


def longest(result: Mapping[str, Any], stages: Sequence[str]) -> tuple[tuple[str, str], float]:
    """Return the longest of these stages at any process.

    A relay's `http` does not count: it is the engines' time to answer.

    Returns:
        (process, stage) and its seconds.
    """
    durations = {
        (process, stage): seconds
        for process, stage_seconds in result["stages_by_process_s"].items()
        for stage, seconds in stage_seconds.items()
        if stage in stages and (process, stage) != ("relay", "http")
    }
    return max(durations.items(), key=lambda item: item[1], default=(("any process", "none"), 0.0))
