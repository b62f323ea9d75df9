"""The project's own alerts over the pages of a run, where a minute is six seconds: a job is short."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from tests.support.children import ROOT
from tests.support.prometheus import answer, prometheus

_TIMES = {"m": 6, "h": 360}
_FIRED = 'max by (alertname, reason, instance) (max_over_time(ALERTS{alertstate="firing"}[1d]))'


@contextmanager
def watched(work: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Alert -> the labels with which it has fired, filled at the end; empty where there is no Prometheus."""
    fired: dict[str, list[dict[str, str]]] = {}
    rules = (ROOT / "dashboards/alerts.yml").read_text()
    rules = re.sub(r"(\d+)([mh])\b", lambda time: f"{int(time[1]) * _TIMES[time[2]]}s", rules)
    with prometheus(work, work / "told", every="2s", rules=rules) as api:
        yield fired
        if not api:
            return
        time.sleep(2.0)  # the last evaluation
        for one in answer(api, f"query?query={quote(_FIRED)}"):
            fired.setdefault(one["metric"].pop("alertname"), []).append(one["metric"])
