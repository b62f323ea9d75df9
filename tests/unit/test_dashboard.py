"""The committed dashboard and the table of metrics say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from r3channel.observe.metric_table import LABELS, METRICS
from r3channel.tools.dashboard import dashboard, text

FILE = Path(__file__).parents[2] / "dashboards" / "r3channel.json"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def names_in(expr: str) -> set[str]:
    """Metric names of an expression, a histogram's series reduced to its name."""
    found = re.findall(r"r3channel_\w+", expr)
    histograms = {name for name, metric in METRICS.items() if metric.kind == "histogram"}
    reduced = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in found}
    return {reduced[name] if reduced[name] in histograms else name for name in found}


def exprs() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_committed_file_is_what_the_table_gives() -> None:
    assert FILE.read_text() == text(), "run: make dashboard"


def test_panels_ask_for_names_of_the_table_only() -> None:
    assert {name for expr in exprs() for name in names_in(expr)} <= METRICS.keys()


def test_a_foreign_name_would_be_noticed() -> None:
    assert names_in("rate(r3channel_stage_seconds_sum[1m]) / r3channel_wrong") == {
        "r3channel_stage_seconds",
        "r3channel_wrong",
    }


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_a_panel(name: str) -> None:
    assert any(name in names_in(expr) for expr in exprs())


def test_every_panel_has_unit_description_and_the_chosen_datasource() -> None:
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]


def test_label_values_in_expressions_exist() -> None:
    for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]+)"', " ".join(exprs())):
        match = re.compile(value).fullmatch if operator == "=~" else value.__eq__
        assert any(match(known) for known in LABELS[label]), f"{label}{operator}{value}"


def test_the_first_row_is_the_four_questions() -> None:
    titles = [panel["title"] for panel in dashboard()["panels"][:5]]
    assert titles == [
        "Is it well?",
        "Delivered / s",
        "Rejected, last hour",
        "Oldest in flight",
        "Trainer wait",
    ]


def test_panels_do_not_overlap() -> None:
    seen: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & seen, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        seen |= cells
