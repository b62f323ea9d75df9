"""The report of `bench relay` as text tables. Knows the report's keys only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3channel.bench.relay.results import OWN

_TARGETS = {"vs_ray_numpy_int32": 8.0, "vs_best_peer": 2.5, "of_raw_gloo": 0.7}


def table(report: dict[str, Any]) -> str:
    """All of the report but the stages, which `--json` and `--plot` show."""
    lines = [
        f"{report['model']}, {report['tokens']:,} tokens, {report['layout']}, {report['rounds']} rounds; {report['machine']}",
        "",
        *_paths(report["paths"]),
        "",
        *_ratios(report["ratio"]),
        "",
        f"raw gloo {report['limit']['raw_gloo_wall_s'] * 1e3:.1f} ms, memcpy {report['limit']['memcpy_gbps']:.1f} GB/s",
        f"placed before the trainers come: {_exposed(report)}",
        f"seal {report['seal_ms']:.1f} ms (target 20), peak staging {report['peak_staging_bytes']} bytes",
        "from the socket, CPU us/token: "
        + ", ".join(f"{way} {cost:.2f}" for way, cost in report["socket_cpu_us_per_token"].items()),
    ]
    for name, values in report["sweep"].items():
        lines += ["", f"{name}:", *_paths(values["paths"]), *_ratios(values["ratio"])]
    lines += [f"skipped {path}: {reason}" for path, reason in report["skipped"].items()]
    return "\n".join(lines)


def _exposed(report: dict[str, Any]) -> str:
    exposed_s = report["paths"][OWN].get("exposed_wall_s")
    return "not measured" if exposed_s is None else f"they wait {exposed_s * 1e3:.1f} ms"


def _paths(paths: dict[str, Any]) -> list[str]:
    head = ["path", "wall ms", "x ours", "held ms", "CPU ms", "manager CPU us/token", "B/token"]
    ours = paths[OWN]["wall_s"]
    return aligned([head, *(_row(name, values, ours) for name, values in paths.items())])


def _row(name: str, values: dict[str, Any], ours_s: float) -> list[str]:
    manager = values["manager_cpu_us_per_token"]
    return [
        name,
        f"{values['wall_s'] * 1e3:.1f}",
        f"{values['wall_s'] / ours_s:.2f}",
        f"{values['held_wall_s'] * 1e3:.1f}",
        f"{values['cpu_s'] * 1e3:.1f}",
        "-" if manager is None else f"{manager:.3f}",
        f"{values['bytes_per_token']:.0f}",
    ]


def _ratios(ratios: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in ratios.items():
        target = f" (target {_TARGETS[name]})" if name in _TARGETS else ""
        lines.append(f"{name}: {value:.2f}{target}" if isinstance(value, float) else f"{name}: {value}")
    return lines


def scale_table(found: dict[str, Any]) -> str:
    """Points and fits of `--scale`."""
    lines = [f"{found['model']}, ours alone, {found['rounds']} rounds per point"]
    for name in ("tokens", "layers", "ranks"):
        lines += ["", *aligned([[name, "wall ms", "CPU ms", "manager CPU ms"], *_points(found[name])])]
        for cost, fit in found[name]["fit"].items():
            flat = f"; per token flat within {fit['flat_percent']:.0f} %" if name == "tokens" else ""
            lines.append(f"{cost} = {fit['fixed'] * 1e3:.2f} ms + {fit['slope'] * 1e6:.4f} us x {name}{flat}")
    return "\n".join(lines)


def _points(swept: dict[str, Any]) -> list[list[str]]:
    costs = ("wall_s", "cpu_s", "manager_cpu_s")
    return [
        [f"{point['size']:,}", *(f"{point[cost] * 1e3:.1f}" for cost in costs)] for point in swept["points"]
    ]


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
