"""The alert rules and the dashboard: known names, a page in the runbook, and each fires and stays silent as promtool judges."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.dashboard import dashboard, text
from r3channel.observe.metric_table import LABELS, METRICS
from r3channel.tools.run_model import FAULTS
from tests.support.waits import PROGRAM_S

FOLDER = Path(__file__).parents[2] / "dashboards"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for rule in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")

SENT, OLD = 'r3channel_bytes_total{leg="wire_sent"}', "r3channel_oldest_in_flight_seconds"
LIVE, EXPIRED = (f'r3channel_samples_total{{outcome="{one}"}}' for one in ("live", "expired"))
RECEIVED, DELIVERED = (f'r3channel_samples_total{{outcome="{one}"}}' for one in ("received", "delivered"))
PAIRS, DIFFERENT = "r3channel_audit_pairs_total", "r3channel_audit_pairs_different_total"
WAIT = 'r3channel_stage_seconds_sum{role="trainer",stage="wait_wire"}'
IDLE = 'r3channel_stage_seconds_sum{role="trainer",stage="wait_generation"}'
UPDATES = 'r3channel_weight_updates_total{{result="{}"}}'
FALLBACK = "r3channel_fallback_shards_total"
FRAMES = 'r3channel_engine_frames_total{{way="{}"}}'
TRAINER, ENGINE = (f'r3channel_weight_version{{role="{one}"}}' for one in ("trainer", "engine"))

SILENT: dict[str, list[dict[str, str]]] = {
    "R3ChannelStalled": [
        {OLD: "0+60x60", SENT: "0+9x60"},  # a long step, and bytes move
        {OLD: "90x60", SENT: "500x60"},
    ],
    "R3ChannelThreadDead": [{"r3channel_background_thread_alive": "1x60"}],
    "R3ChannelFallbackActive": [{FALLBACK: "3x60", LIVE: "2x60"}],
    "R3ChannelRejected": [{'r3channel_rejected_total{reason="rows"}': "7x60"}],
    "R3ChannelNearCeiling": [
        {"r3channel_store_bytes": "50x57 95x3", "r3channel_store_limit_bytes": "100x60"}
    ],
    "R3ChannelNotHidden": [{WAIT: "0+1x60", IDLE: "0+50x60"}],
    "R3ChannelMismatch": [{"r3channel_digests_different_total": "0x60"}],
    "R3ChannelMismatchJumped": [{PAIRS: "0+100x60", DIFFERENT: "0+35x60"}],  # high, and as it was
    "R3ChannelLogprobsApart": [{"r3channel_audit_logprob_k3": "0.001x57 0.05 0.001x2"}],  # one step
    "R3ChannelWeightsFailed": [{UPDATES.format("failed"): "1x60", UPDATES.format("committed"): "0+1x60"}],
    "R3ChannelFramesGivenUp": [{FRAMES.format("given_up"): "8x60", FRAMES.format("direct"): "0+9x60"}],
    "R3ChannelRecordingLost": [{"r3channel_recording_lost_steps": "0x60"}],
    "R3ChannelVersionSkew": [{TRAINER: "9x60", ENGINE: "8x60"}],
    "R3ChannelEngineSilent": [{"r3channel_engines_silent": "0x60", "r3channel_engine_greeted": "1x60"}],
    "R3ChannelSamplesExpired": [{EXPIRED: "3x60"}],
    "R3ChannelUnbalanced": [{RECEIVED: "9x60", DELIVERED: "6x60", "r3channel_samples_in_flight": "3x60"}],
    "R3ChannelPageGone": [{'up{job="r3channel"}': "1x60"}],
}
"""Alert -> series of an hour, a sample a minute, at whose end it does not fire."""
FIRING: dict[str, list[dict[str, str]]] = {
    "R3ChannelFallbackActive": [{FALLBACK: "0x55 1x5"}],
    "R3ChannelNotHidden": [{WAIT: "0+6x60"}],  # a tenth of each minute
    "R3ChannelWeightsFailed": [{UPDATES.format("unknown"): "0x40 1x20"}],
    "R3ChannelEngineSilent": [{"r3channel_engines_silent": "1x60"}, {"r3channel_engine_greeted": "0x60"}],
}
"""Alert -> series at whose end it fires, beside the real faults of tests/contract/test_alerts_fire.py."""


def test_every_alert_has_a_case_that_does_not_fire() -> None:
    assert SILENT.keys() == RULES.keys() >= FIRING.keys()


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_known_names_and_has_its_page_in_the_runbook(alert: str) -> None:
    rule, runbook = RULES[alert], (FOLDER / "RUNBOOK.md").read_text()
    assert not {name for name in names_in(rule["expr"]) if name.startswith("r3channel_")} - METRICS.keys()
    for label, value in re.findall(r'(\w+)!?="([^"]+)"', rule["expr"]):
        assert label == "job" or value in LABELS[label], f"{label}={value}"
    assert rule["annotations"]["runbook_url"] == f"dashboards/RUNBOOK.md#{alert.lower()}"
    assert f"\n## {alert}\n" in runbook


def test_every_alert_is_a_row_of_the_table_of_faults_and_asks_for_its_series_and_limit() -> None:
    assert {fault.alert for fault in FAULTS} - {""} == RULES.keys()
    for fault in (fault for fault in FAULTS if fault.alert):
        expr = RULES[fault.alert]["expr"]
        assert fault.series in expr and fault.of in expr
        assert all(f'{k}="{v}"' in expr or f'{k}!="' in expr for k, v in fault.labels.items())
        limit = f"== {fault.most - 1:g}" if fault.least else f"> {fault.most:g}"
        assert not fault.says or limit in expr, fault


@needs_promtool
def test_every_alert_fires_where_it_must_and_nowhere_else(tmp_path: Path) -> None:
    """Judged over ALERTS as a whole: an alert of another name that fires on these series is a fault, too."""
    tests = [judged(alert, one, True) for alert, cases in FIRING.items() for one in cases]
    tests += [judged(alert, one, False) for alert, cases in SILENT.items() for one in cases]
    hold_rules_against(tests, tmp_path)


def judged(alert: str, series: dict[str, str], fires: bool) -> dict[str, Any]:
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else []
    given = [{"series": _of_a_run(name), "values": values} for name, values in series.items()]
    firing = 'max by (alertname) (ALERTS{alertstate="firing"})'
    test = {"expr": firing, "eval_time": "59m", "exp_samples": expected}
    return {"interval": "1m", "input_series": given, "promql_expr_test": [test]}


def _of_a_run(series: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{run="r",instance="h:1"{"," + labels if labels else "}"}'


def hold_rules_against(tests: list[dict[str, Any]], folder: Path) -> None:
    written = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yml").write_text(json.dumps(written))
    done = promtool("test", "rules", str(folder / "test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def promtool(*command: str, input: str = "") -> subprocess.CompletedProcess[str]:
    command = "promtool", *command
    return subprocess.run(command, input=input, capture_output=True, text=True, timeout=PROGRAM_S)


# -- the committed dashboard and the table of metrics say the same ---------------------------------------------------------


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
    assert (FOLDER / "r3channel.json").read_text() == text(), "run: make dashboard"


def test_an_engineer_on_call_has_few_panels_each_described_and_of_the_chosen_run_and_datasource() -> None:
    assert len(panels()) <= 24
    for panel in panels():
        (expr,) = (target["expr"] for target in panel["targets"])
        series = re.findall(r"r3channel_\w+({[^}]*})?", expr)
        assert all('run=~"$run"' in labels for labels in series), expr
        assert series or "ALERTS" in expr
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
    (run,) = (one for one in dashboard()["templating"]["list"] if one["name"] == "run")
    assert names_in(run["query"]) == {"r3channel_build_info"} and run["allValue"] == ".*"


def test_names_and_label_values_in_expressions_exist() -> None:
    assert {name for expr in exprs() for name in names_in(expr)} <= METRICS.keys()
    for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]+)"', " ".join(exprs())):
        if label in ("run", "alertname", "alertstate"):
            continue
        match = re.compile(value).fullmatch if operator == "=~" else value.__eq__
        assert any(match(known) for known in LABELS[label]), f"{label}{operator}{value}"


def test_panels_do_not_overlap() -> None:
    seen: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & seen, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        seen |= cells
