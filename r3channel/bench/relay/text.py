"""The report of `bench relay` as text tables. Knows the report's keys only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3channel.bench.relay.results import OWN

_TARGETS = {"vs_ray_numpy_int32": 8.0, "vs_best_peer": 2.5, "of_raw_gloo": 0.7}


def table(report: dict[str, Any]) -> str:
    """All of the report but the stages, which `--json` shows."""
    lines = [
        f"{report['model']}, {report['tokens']:,} tokens, {report['layout']}, {report['rounds']} rounds",
        "",
        *_paths(report["paths"]),
        "",
        *_ratios(report["ratio"]),
        "",
        f"raw gloo {report['limit']['raw_gloo_wall_s'] * 1e3:.1f} ms",
        f"ready before the trainers come: {_exposed(report)}",
        "from the socket, CPU us/token: " + _listed(report["socket_cpu_us_per_token"]),
        "",
        *_costs(report),
    ]
    lines += [f"skipped {path}: {reason}" for path, reason in report["skipped"].items()]
    return "\n".join(lines)


def _costs(report: dict[str, Any]) -> list[str]:
    seals = ", ".join(f"{samples} samples {ms:.1f}" for samples, ms in report["seal_ms"].items())
    ids = report["step_ids_bytes"] / 1e6
    return [
        "one process, CPU us/token (see r3channel.bench.relay.costs):",
        "  body to placed (JSON, base64, checks, seal, placing, digests; no sending): "
        + _listed(report["body_to_placed_cpu_us_per_token"]),
        "  of these base64, checks and placing alone: "
        + _listed(report["body_to_placed_floor_us_per_token"]),
        f"  {report['turns_us_per_token']:.2f} appending 30 turns of 2,000 rows",
        "  " + recording_line(report["recording_cpu_us_per_token"]),
        f"  {report['digest_cpu_us_per_token']:.2f} for digests: engine, relay, placing and routers, each kernel alone",
        f"seal, ticket there and back, CPU ms of one thread: {seals}; memory of a step with {ids:.0f} MB of ids: "
        f"{report['step_memory_bytes'] / 1e6:.0f} MB",
    ]


def recording_line(added: dict[str, float]) -> str:
    return (
        f"recording adds {added['median']:.3f} CPU us/token ({added['low']:.3f} .. {added['high']:.3f}; median and quartiles of "
        f"{added['pairs']} pairs)"
    )


def _listed(costs: dict[str, float]) -> str:
    return ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items())


def _exposed(report: dict[str, Any]) -> str:
    exposed_s = report["paths"][OWN].get("exposed_wall_s")
    return "not measured" if exposed_s is None else f"they wait {exposed_s * 1e3:.1f} ms"


def _paths(paths: dict[str, Any]) -> list[str]:
    head = [
        "path",
        "wall ms",
        "x ours",
        "held ms",
        "CPU ms",
        "whole ms",
        "whole CPU ms",
        "manager CPU us/token",
        "B/token",
    ]
    ours = paths[OWN]["wall_s"]
    return aligned([head, *(_row(name, values, ours) for name, values in paths.items())])


def _row(name: str, values: dict[str, Any], ours_s: float) -> list[str]:
    manager, whole = values["manager_cpu_us_per_token"], (values["whole_wall_s"], values["whole_cpu_s"])
    return [
        name,
        f"{values['wall_s'] * 1e3:.1f}",
        f"{values['wall_s'] / ours_s:.2f}",
        f"{values['held_wall_s'] * 1e3:.1f}",
        f"{values['cpu_s'] * 1e3:.1f}",
        *("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in whole),
        "-" if manager is None else f"{manager:.3f}",
        f"{values['bytes_per_token']:.0f}",
    ]


def _ratios(ratios: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in ratios.items():
        target = f" (target {_TARGETS[name]})" if name in _TARGETS else ""
        said = "not measured" if value is None else value
        lines.append(f"{name}: {value:.2f}{target}" if isinstance(value, float) else f"{name}: {said}")
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
