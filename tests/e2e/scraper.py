"""Each panel of the dashboard, answered by a real Prometheus beside a run."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dashboards.dashboard import dashboard
from tests.support.prometheus import answer, prometheus


@contextmanager
def scraped(folder: Path) -> Iterator[dict[str, int]]:
    """Scrapes what `folder`/report/targets names; on the way out the yielded dict has, per expression of the dashboard, how
    many series it gave over the run. Stays empty where there is no Prometheus."""
    answers, begin_s = dict[str, int](), time.time()
    with prometheus(folder, folder / "report/targets", every="1s") as api:
        yield answers
        for panel in dashboard()["panels"] if api else ():
            for target in panel.get("targets", ()):
                answers[target["expr"]] = _series(api, target["expr"], begin_s)


def _series(api: str, expr: str, begin_s: float) -> int:
    expr = expr.replace("$__rate_interval", "20s").replace("$run", ".*")
    query = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": time.time(), "step": 1})
    found = answer(api, f"query_range?{query}")
    return sum(any(value != "NaN" for _, value in series["values"]) for series in found)
