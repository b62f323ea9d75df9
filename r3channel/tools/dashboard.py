"""The Grafana dashboard, generated from the table of metrics so that the two cannot drift apart.

    python -m r3channel.tools.dashboard > dashboards/r3channel.json        (or: make dashboard)

The first row answers "is it well?"; below it each group of the table has a row with a panel per metric. Every panel
has a unit, a description, and the datasource that the reader picks at the top.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from r3channel.observe.metric_table import METRICS, Metric

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "[$__rate_interval]"
_WIDTH, _COLUMNS_PER_ROW, _HEIGHT = 24, 3, 7

_GROUP_TITLES = {
    "stages": "Stages: where the time goes",
    "samples": "Samples",
    "bytes": "Bytes on each leg",
    "store": "Relay store",
    "health": "Health of the transport",
    "weights": "Weights: the reverse path",
    "audit": "Audit: engine against router",
    "engine": "Engines",
}
_GAUGE_UNITS = {"seconds": "s", "bytes": "bytes", "bool": "bool_yes_no"}
_RATE_UNITS = {"bytes": "Bps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph: what it asks Prometheus for, and what its reader must know."""

    title: str
    expr: str
    legend: str
    unit: str
    """A Grafana unit id."""
    description: str
    kind: str = "timeseries"


_FIRST_ROW = (
    Panel(
        title="Delivered / s",
        expr=f'sum(rate(r3channel_samples_total{{outcome="delivered"}}{_WINDOW}))',
        legend="samples",
        unit="cps",
        description="Samples whose routing every rank that needs it has acknowledged. 0 while training: it stalled.",
        kind="stat",
    ),
    Panel(
        title="Rejected, last hour",
        expr="sum(increase(r3channel_rejected_total[1h]))",
        legend="samples",
        unit="short",
        description="Samples whose routing could not be used. The panel 'rejected' below says why.",
        kind="stat",
    ),
    Panel(
        title="Oldest in flight",
        expr="max(r3channel_oldest_in_flight_seconds)",
        legend="age",
        unit="s",
        description="Age of the oldest sealed step without acknowledgement. Rises steadily when a trainer is gone.",
        kind="stat",
    ),
    Panel(
        title="Trainer wait",
        expr=f'max(sum by (instance) (rate(r3channel_stage_seconds_sum{{role="trainer",stage=~"wait_.*"}}{_WINDOW})))',
        legend="slowest rank",
        unit="percentunit",
        description="Share of wall time that the slowest trainer rank stood still, for whatever reason.",
        kind="stat",
    ),
)

_DERIVED = {
    "stages": (
        Panel(
            title="Waits by cause",
            expr=f'max by (role, stage) (rate(r3channel_stage_seconds_sum{{stage=~"wait_.*"}}{_WINDOW}))',
            legend="{{role}} {{stage}}",
            unit="percentunit",
            description="Share of wall time spent waiting, by what for; the slowest process of each role.",
        ),
    ),
    "bytes": (
        Panel(
            title="Frame bytes per token",
            expr=(
                f'sum(rate(r3channel_bytes_total{{leg="engine_frame"}}{_WINDOW}))'
                f" / sum(rate(r3channel_rows_total{_WINDOW}))"
            ),
            legend="B/token",
            unit="bytes",
            description="What one row costs between engine and relay; stock int32 over all layers is 4 x layers x top-k.",
        ),
    ),
}


def panels_of(metric: Metric) -> list[Panel]:
    """The panels that show one line of the table: a rate for a counter, the value of a gauge, time and tail of stages."""
    title = metric.name.removeprefix("r3channel_").removesuffix("_total").replace("_", " ")
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or title
    if metric.kind == "histogram":
        return _histogram_panels(metric, title=title, legend=legend)
    by = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    if metric.kind == "counter":
        expr, unit = f"sum{by} (rate({metric.name}{_WINDOW}))", _RATE_UNITS.get(metric.unit, "cps")
        title += " / s"
    else:
        by = f" by ({', '.join(('instance', *metric.labels))})"
        expr, unit = f"max{by} ({metric.name})", _GAUGE_UNITS.get(metric.unit, "short")
        legend = f"{legend} {{{{instance}}}}"
    return [Panel(title=title, expr=expr, legend=legend, unit=unit, description=metric.help)]


def _histogram_panels(metric: Metric, *, title: str, legend: str) -> list[Panel]:
    by = ", ".join(metric.labels)
    tail = f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric.name}_bucket{_WINDOW})))"
    return [
        Panel(
            title=f"{title}: share of wall time",
            expr=f"avg by ({by}) (rate({metric.name}_sum{_WINDOW}))",
            legend=legend,
            unit="percentunit",
            description=f"{metric.help} Mean over the processes of a role; 1 is one whole thread.",
        ),
        Panel(
            title=f"{title}: 95th percentile",
            expr=tail,
            legend=legend,
            unit="s",
            description=f"{metric.help} The slowest one in twenty.",
        ),
    ]


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana's JSON model; the same table always gives the same model."""
    rows: list[tuple[str, list[Panel]]] = [("Is it well?", list(_FIRST_ROW))]
    for group, title in _GROUP_TITLES.items():
        own = [panel for metric in METRICS.values() if metric.group == group for panel in panels_of(metric)]
        rows.append((title, own + list(_DERIVED.get(group, ()))))
    return {
        "uid": "r3channel",
        "title": "r3channel",
        "description": "Routing of inference engines on its way to the routers of the trainers.",
        "tags": ["r3channel"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable()]},
        "panels": list(_laid_out(rows)),
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _laid_out(rows: Iterable[tuple[str, list[Panel]]]) -> Iterable[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; the first row is four stats wide."""
    y = number = 0
    for title, panels in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y, _WIDTH, 1),
        }
        y += 1
        columns = len(panels) if panels[0].kind == "stat" else _COLUMNS_PER_ROW
        width = _WIDTH // columns
        for index, panel in enumerate(panels):
            number += 1
            line, column = divmod(index, columns)
            yield _panel_json(
                panel, number=number, grid=_at(column * width, y + line * _HEIGHT, width, _HEIGHT)
            )
        y += -(-len(panels) // columns) * _HEIGHT


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel_json(panel: Panel, *, number: int, grid: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": "A", "datasource": _DATASOURCE, "expr": panel.expr, "legendFormat": panel.legend}
        ],
    }


def text() -> str:
    """The file's content, to the last byte."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
