"""A process's /metrics page, read back: sums and values by name and labels. Knows no server and draws nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from r3channel.unproxied import urlopen

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


def stage_seconds(page: list[Series]) -> dict[str, float]:
    """Seconds per stage since the process began."""
    return {one.labels["stage"]: one.value for one in page if one.name == "r3channel_stage_seconds_sum"}
