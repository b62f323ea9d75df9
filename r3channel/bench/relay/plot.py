"""Every path's time from replies to routers, as a picture. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

_PARTS = {"replies read": "#b9c4d3", "until rows are held": "#3d7cc9", "widened for routers": "#e08a1e"}
"""What adds up to a path's time, in its order, and its colour."""


def check_drawing() -> None:
    """Asked before minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'r3channel[plot]'")


def plot(report: Mapping[str, Any], file: Path) -> None:
    figure_of(report).savefig(file, dpi=120)


def figure_of(report: Mapping[str, Any]) -> Any:
    """A bar per path, the fastest on top; its parts add up to the time that is written at its end."""
    from matplotlib.figure import Figure

    parts = {path: _parts_ms(values) for path, values in report["paths"].items()}
    paths = sorted(parts, key=lambda path: sum(parts[path]))
    figure = Figure(figsize=(10, 0.42 * len(paths) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    left, drawn = [0.0] * len(paths), []
    for number, (part, colour) in enumerate(_PARTS.items()):
        widths = [parts[path][number] for path in paths]
        drawn.append(axes.barh(paths, widths, left=left, color=colour, height=0.68, label=part))
        left = [at + width for at, width in zip(left, widths, strict=True)]
    labels = [
        f"{total:,.0f} ms" + ("" if report["paths"][path]["whole_wall_s"] else ", from placed rows on")
        for path, total in zip(paths, left, strict=True)
    ]
    axes.bar_label(drawn[-1], labels, padding=4)
    axes.set_xlim(0, 1.2 * max(left))
    axes.invert_yaxis()
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("r3channel") else "normal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms from engines' replies to routers, median")
    axes.set_title(f"{report['model']}, {report['tokens']:,} tokens, {report['layout']}", loc="left")
    axes.legend(loc="upper right", frameon=False)  # where the fastest leave room
    return figure


def _parts_ms(values: Mapping[str, Any]) -> tuple[float, ...]:
    wall_s, held_s = values["wall_s"], values["held_wall_s"]
    before_s = (values["whole_wall_s"] or wall_s) - wall_s
    return tuple(1e3 * max(seconds, 0.0) for seconds in (before_s, held_s, wall_s - held_s))
