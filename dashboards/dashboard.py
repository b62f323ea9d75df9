"""The Grafana dashboard, generated from the table of metrics so that the two cannot drift apart.

    python -m dashboards.dashboard > dashboards/r3channel.json        (or: make dashboard)

The first row answers "is it well?"; below it is what an engineer on call looks at. Every panel has a unit, a
description, and the datasource and the run that the reader picks at the top.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from r3channel.observe.metric_table import METRICS, Metric

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_VARIABLES = [
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
    {
        "name": "run", "label": "Run", "type": "query", "datasource": _DATASOURCE, "refresh": 2, "includeAll": True,
        "query": "label_values(r3channel_build_info, run)", "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    },
]  # fmt: skip
"""`.*` also matches processes that were given no name of their run."""
_WINDOW = "[$__rate_interval]"
_WIDTH, _COLUMNS_PER_ROW, _HEIGHT = 24, 3, 7
_GAUGE_UNITS, _RATE_UNITS = {"seconds": "s"}, {"bytes": "Bps", "seconds": "percentunit"}


class Panel(NamedTuple):
    """One graph: what it asks Prometheus for, and what its reader must know."""

    title: str
    unit: str
    """A Grafana unit id."""
    legend: str
    expr: str
    """Asks of all runs; the file asks for the chosen one."""
    description: str
    kind: str = "timeseries"


_FIRST_ROW = tuple(Panel(*line, kind="stat") for line in (
    ("Firing", "short", "{{alertname}}", 'sum by (alertname) (ALERTS{alertname=~"R3Channel.*",alertstate="firing"})',
        "Alerts of all runs; RUNBOOK.md says what to do. Needs alerts.yml among this Prometheus's rule files."),
    ("Delivered / s", "cps", "samples", f'sum(rate(r3channel_samples_total{{outcome="delivered"}}{_WINDOW}))',
        "Samples whose routing every rank that needs it has acknowledged. 0 while training: it stalled."),
    ("Rejected, last hour", "short", "samples", "sum(increase(r3channel_rejected_total[1h]))",
        "Samples whose routing could not be used. The panel 'rejected' below says why."),
    ("Oldest in flight", "s", "age", "max(r3channel_oldest_in_flight_seconds)",
        "Age of the oldest sealed step without acknowledgement. Rises steadily when a trainer is gone."),
    ("Trainer wait", "percentunit", "slowest rank",
        f'max(sum by (instance) (rate(r3channel_stage_seconds_sum{{role="trainer",stage=~"wait_.*"}}{_WINDOW})))',
        "Share of wall time that the slowest trainer rank stood still, for whatever reason."),
))  # fmt: skip
_ROWS: dict[str, tuple[str | Panel, ...]] = {
    "Stages: where the time goes": (
        "r3channel_stage_seconds", "r3channel_stage_open_seconds",
        Panel("Waits by cause", "percentunit", "{{role}} {{stage}}",
            f'max by (role, stage) (rate(r3channel_stage_seconds_sum{{stage=~"wait_.*"}}{_WINDOW}))',
            "Share of wall time spent waiting, by what for; the slowest process of each role."),
    ),
    "Samples and steps": ("r3channel_samples_total", "r3channel_rejected_total", "r3channel_step"),
    "Relay": (
        "r3channel_bytes_total", "r3channel_group_resets_total",
        Panel("Store", "percentunit", "{{instance}}", "r3channel_store_bytes / r3channel_store_limit_bytes",
            "How full a relay's store is; at 1 replies wait."),
    ),
    "Weights": ("r3channel_weight_version", "r3channel_weight_updates_total", "r3channel_weight_pause_seconds_total"),
    "Engine against router": (
        "r3channel_digests_different_total", "r3channel_live_rows_total", "r3channel_audit_logprob_k3",
        Panel("Live router against replay", "percentunit", "different",
            f"sum(rate(r3channel_audit_pairs_different_total{_WINDOW})) / sum(rate(r3channel_audit_pairs_total{_WINDOW}))",
            "Share of (token, layer) pairs for which the live router would choose other experts than were replayed."),
    ),
    "Engines": (
        "r3channel_engine_frames_total",
        Panel("Frames that wait to be sent", "percentunit", "{{instance}}",
            "r3channel_engine_queue_bytes / r3channel_engine_queue_limit_bytes",
            "How full an engine's queue is; at 1 frames go in the replies."),
    ),
}  # fmt: skip
"""Title -> panels, or the names of metrics that give them. Other metrics are on the pages; alerts on them are in `Firing`."""


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
    return [Panel(title, unit, legend, expr, metric.help)]


def _histogram_panels(metric: Metric, *, title: str, legend: str) -> list[Panel]:
    by = ", ".join(metric.labels)
    tail = f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric.name}_bucket{_WINDOW})))"
    share, help_text = f"avg by ({by}) (rate({metric.name}_sum{_WINDOW}))", metric.help
    mean = f"{help_text} Mean over the processes of a role; 1 is one whole thread."
    return [
        Panel(f"{title}: share of wall time", "percentunit", legend, share, mean),
        Panel(f"{title}: 95th percentile", "s", legend, tail, f"{help_text} The slowest one in twenty."),
    ]


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana's JSON model; the same table always gives the same model."""
    rows: list[tuple[str, list[Panel]]] = [("Is it well?", list(_FIRST_ROW))]
    for title, shown in _ROWS.items():
        panels = ([entry] if isinstance(entry, Panel) else panels_of(METRICS[entry]) for entry in shown)
        rows.append((title, [panel for group in panels for panel in group]))
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
        "templating": {"list": _VARIABLES},
        "panels": list(_laid_out(rows)),
    }


def _laid_out(rows: Iterable[tuple[str, list[Panel]]]) -> Iterable[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; the first row is as many stats wide as it has."""
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
            {
                "refId": "A",
                "datasource": _DATASOURCE,
                "expr": _of_run(panel.expr),
                "legendFormat": panel.legend,
            }
        ],
    }


def _of_run(expr: str) -> str:
    """
    >>> _of_run('r3channel_step / r3channel_bytes_total{leg="landed"}')
    'r3channel_step{run=~"$run"} / r3channel_bytes_total{run=~"$run",leg="landed"}'
    """
    named = re.sub(r"(r3channel_\w+)(?:{(.*?)})?", r'\1{run=~"$run",\2}', expr)
    return named.replace(",}", "}")


def text() -> str:
    """The file's content, to the last byte."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
