"""A process's /metrics page, read back: sums by name and labels, and what grew between two looks. Draws nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from r3channel.observe.metric_table import METRICS
from r3channel.transport.http import urlopen

_SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a page."""

    name: str
    labels: dict[str, str]
    value: float


def read_page(url: str, *, timeout_s: float) -> list[Series]:
    """What the process at `url` says now. Raises OSError when nobody answers."""
    with urlopen(url, timeout_s=timeout_s) as page:
        return list(parse_page(page.read().decode()))


def parse_page(text: str) -> Iterator[Series]:
    """Series in their order; comments and what is no series are passed over."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _SERIES.match(line)
        if found:
            yield Series(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3]))


def stage_seconds(page: Sequence[Series]) -> dict[str, float]:
    """Seconds per stage since the process began."""
    return {one.labels["stage"]: one.value for one in page if one.name == "r3channel_stage_seconds_sum"}


@dataclass(frozen=True, slots=True)
class Look:
    """What one page said at one moment, or why it said nothing."""

    url: str
    at_s: float
    page: list[Series]
    fault: str = ""

    @classmethod
    def at(cls, url: str, *, timeout_s: float) -> Look:
        """Look at a page now. Never raises: `top` shows a page that is down."""
        try:
            page, fault = read_page(url, timeout_s=timeout_s), ""
        except (OSError, ValueError) as error:  # ValueError: what answers there is no page
            page, fault = [], str(error) or type(error).__name__
        return cls(url, time.monotonic(), page, fault)

    @property
    def place(self) -> str:
        return self.url.removeprefix("http://").removesuffix("/metrics")

    @property
    def role(self) -> str:
        """The process's role, as its own series tell it."""
        for one in self.page:
            roles = METRICS[one.name].roles if one.name in METRICS else ()
            if "role" in one.labels or len(roles) == 1:
                return one.labels.get("role", *roles)
        return ""

    def labels_of(self, label: str) -> str:
        return next((one.labels[label] for one in self.page if label in one.labels), "")

    def found(self, name: str, **labels: str) -> list[Series]:
        return [one for one in self.page if one.name == name and labels.items() <= one.labels.items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(one.value for one in self.found(name, **labels))


@dataclass(frozen=True, slots=True)
class Between:
    """One process between two looks at its page."""

    before: Look
    now: Look

    def grew(self, name: str, **labels: str) -> float:
        """How much a value grew; the whole value where the process began anew."""
        now = self.now.sum(name, **labels)
        before = self.before.sum(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float:
        return self.grew(name, **labels) / max(self.now.at_s - self.before.at_s, 1e-9)
