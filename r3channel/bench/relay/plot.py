"""Stages side by side, as a picture. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError


def check_drawing() -> None:
    """Asked before minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'r3channel[plot]'")


def plot(report: dict[str, Any], file: Path) -> None:
    """One bar per path, its stages in the order in which they begin, and a mark at the wall time of the timed section."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = report["paths"]
    figure = Figure(figsize=(11, 0.45 * len(paths) + 1.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = _colours(paths)
    for row, values in enumerate(paths.values()):
        _bar(axes, row, values, colours)
    axes.set_yticks(range(len(paths)), list(paths))
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms; stages run beside each other, so a bar may be longer than the wall time (black mark)"
    )
    axes.set_title(f"{report['model']}, {report['tokens']:,} tokens, {report['layout']}")
    axes.legend(
        handles=[axes.barh(0, 0, color=colour, label=name) for name, colour in colours.items()], ncols=2
    )
    figure.savefig(file, dpi=120)


def _bar(axes: Any, row: int, values: dict[str, Any], colours: dict[str, Any]) -> None:
    at = 0.0
    for name, seconds in values["stages_s"].items():
        axes.barh(row, seconds * 1e3, left=at, color=colours[name], height=0.7)
        at += seconds * 1e3
    axes.plot([values["wall_s"] * 1e3] * 2, [row - 0.45, row + 0.45], color="black", linewidth=2)


def _colours(paths: dict[str, Any]) -> dict[str, Any]:
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for values in paths.values() for name in values["stages_s"]))
    return {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}
