"""One run as one HTML page without a network: `r3channel report RUN...`.

The page has a verdict, and pictures of the run's time, bytes, routing and samples. Pictures are matplotlib's (extra `plot`,
imported when one is drawn): inline SVG whose ink follows the reader's light or dark theme. Knows nothing of how a run is made.
"""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import WAITS, Span
from r3channel.observe.trace import spans_of
from r3channel.tools import commands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORK = ("place", "send")
"""Stages of the relay's work for a step after it was sealed."""
ROUTING_WAITS = tuple(stage for stage in WAITS if stage != "wait_generation")
_INK, _FAINT = "#123456", "#654321"
"""Placeholders that become the page's own colours."""
_BLUE, _ORANGE, _GREEN, _RED = "#4c8dd6", "#e08a1e", "#3fa66b", "#d2504b"
_SHADES = (_BLUE, _GREEN, _ORANGE, "#8f6fc9")
_KINDS = {
    "generation": (_GREEN, ("generation", "http", "capture", "frame")),
    "relay": (_BLUE, ("ingest", "verify", "plan", *WORK, "assemble", "serialize")),
    "training": (_ORANGE, ("logprob", "forward", "backward", "optimizer", "weights", "audit", "bind")),
    "routing at the trainer": ("#8f6fc9", ("recv", "rebroadcast", "h2d")),
    "waits for routing": (_RED, ROUTING_WAITS),
}
"""Kinds of spans: colour and stages. Waits for the next rollout stay blank."""
_WAY = ("capture", "frame", "http", "ingest", "verify", "plan", "decode", *WORK, "h2d", "rebroadcast", "bind")
"""Stages that move or judge a row; `recv` is the time until its sender's `send`."""

_STYLE = """
:root { --ink: #1c2330; --faint: #667085; --paper: #ffffff; --card: #f5f7fa;
  --good: #1a7f4b; --bad: #b42318; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --faint: #98a2b3; --paper: #12161d; --card: #1b212b; --good: #4cc38a; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 24px 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 0 0 4px; }
p { margin: 0 0 8px; } .faint { color: var(--faint); font-size: .9rem; }
.verdict { font-size: 1.1rem; font-weight: 600; margin: 12px 0 20px; } .good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
section { background: var(--card); border-radius: 10px; padding: 16px; min-width: 0; } section.wide { grid-column: 1 / -1; }
.picture { overflow-x: auto; } svg { max-width: 100%; height: auto; display: block; } .wide svg { min-width: 640px; }
svg text { fill: var(--ink); }
"""


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that the demo's --report has filled")
    for folder in parser.parse_args(argv).runs:
        print(write_page(Path(folder)))
    return 0


def write_page(folder: Path) -> Path:
    """Write report.html beside report.json and trace.json. Raises ConfigError where one is missing or matplotlib is."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the page of a run needs matplotlib: pip install 'r3channel[plot]'")
    try:
        result = json.loads((folder / "report.json").read_text())
        trace = json.loads((folder / "trace.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: expected report.json and trace.json of a run with --report: {error}"
        ) from error
    path = folder / "report.html"
    path.write_text(page(result, spans_of(trace)))
    return path


# -- the page -------------------------------------------------------------------------------------------------------------


def page(result: Mapping[str, Any], spans: Mapping[str, Sequence[Span]]) -> str:
    """`result` is a run's report.json, `spans` its trace by process."""
    good, verdict = verdict_of(result)
    cards = [
        _card(title, text, figure(result, spans), wide=wide)
        for title, text, figure, wide in _CARDS
        if (title != "Mismatch by layer and step" or any(result["routing_mismatch"]))
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>r3channel: {result['steps']} steps</title><style>{_STYLE}</style></head><body>"
        f"<h1>r3channel: {result['steps']} steps, {html.escape(str(result['layout']))}</h1>"
        f'<p class="faint">SGLang {result["sglang_version"]}, Megatron-core {result["megatron_version"]}, '
        f"{result['wall_s']:.0f} s</p>"
        f'<p class="verdict {"good" if good else "bad"}">{html.escape(verdict)}</p>'
        f'<div class="cards">{"".join(cards)}</div></body></html>\n'
    )


def verdict_of(result: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the run was well, in a sentence; what trainers waited for, and which stage of a row's way took longest."""
    (process, stage), seconds = _longest(result, _WAY)
    (_, wait), _ = _longest(result, ROUTING_WAITS)
    time = (
        f"{result['hidden_fraction']:.0%} of the relay's work was hidden; the slowest trainer waited "
        f"{result['wait_fraction']:.1%} of its time for routing, longest in {wait}; the longest stage of a row's way was "
        f"{stage} at {process} ({seconds:.1f} s)."
    )
    different = result["ids_different"] + result["digests_different"]
    if different or not result["ids_compared"]:
        return False, f"{different:,} of {result['ids_compared']:,} ids and digests differ. {time}"
    return True, f"All {result['ids_compared']:,} ids at the routers are those that the engines chose. {time}"


def _longest(result: Mapping[str, Any], stages: Sequence[str]) -> tuple[tuple[str, str], float]:
    """(process, stage) and seconds of the longest of these at any process. A relay's `http` is the engines' time to answer."""
    found = {
        (process, stage): seconds
        for process, own in result["stages_by_process_s"].items()
        for stage, seconds in own.items()
        if stage in stages and (process, stage) != ("relay", "http")
    }
    return max(found.items(), key=lambda item: item[1], default=(("any process", "none"), 0.0))


def _timeline(result: Mapping[str, Any], spans: Mapping[str, Sequence[Span]]) -> Figure:
    lanes = sorted(spans, key=lambda name: ("trainer" in name, "relay" in name, name), reverse=True)
    figure, axes = _axes(11, 0.55 * len(lanes) + 1.4)
    for lane, name in enumerate(lanes):
        for colour, stages in _KINDS.values():
            bars = [(one.start_s, one.seconds) for one in spans[name] if one.stage in stages]
            axes.broken_barh(bars, (lane - 0.36, 0.72), color=colour, linewidth=0)
    handles = [axes.plot([], [], color=colour, linewidth=6)[0] for colour, _ in _KINDS.values()]
    axes.legend(
        handles, list(_KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_KINDS), frameon=False
    )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("seconds")
    return figure


def _bytes(result: Mapping[str, Any], _: Any) -> Figure:
    found = result["bytes_per_token"]
    legs = {
        "stock int32 through Ray": result["default_bytes_per_token"],
        "engine's HTTP reply": found["engine_http"],
        "engine's frame": found["engine_frame"],
        "through Ray": found["object_store"],
        "on the wire": found["wire"],
        "landed, a rank": max(found["landed_per_rank"].values(), default=0.0),
    }
    return _bars(legs, "bytes a token", first=_ORANGE)


def _waits(result: Mapping[str, Any], _: Any) -> Figure:
    figure, axes = _axes(5.4, 3.0)
    waits = {int(step): 1000 * seconds for step, seconds in result["wait_s_by_step"].items()}
    axes.bar([str(step) for step in waits], list(waits.values()), color=_RED, width=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    return figure


def _mismatch(result: Mapping[str, Any], _: Any) -> Figure:
    steps = [step for step in result["routing_mismatch"] if step]
    layers = sorted({layer["layer"] for step in steps for layer in step["layers"]})
    share = {
        (step["step"], layer["layer"]): layer["different"] / max(layer["rows"], 1)
        for step in steps
        for layer in step["layers"]
    }
    grid = [[share.get((step["step"], layer), float("nan")) for step in steps] for layer in layers]
    figure, axes = _axes(5.4, min(1.6 + 0.3 * len(layers), 8))
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(steps)), [str(step["step"]) for step in steps])
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xlabel("step")
    axes.set_ylabel("layer")
    _scale(figure, image, axes, "share of rows")
    return figure


def _load(result: Mapping[str, Any], _: Any) -> Figure:
    load = result["expert_load"]
    grid = [[100 * count / max(sum(counts), 1) for count in counts] for counts in load.values()]
    figure, axes = _axes(11, min(1.6 + 0.3 * len(grid), 8))
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0)
    axes.set_yticks(range(len(load)), list(load))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    _scale(figure, image, axes, "% of choices")
    return figure


def _versions(result: Mapping[str, Any], _: Any) -> Figure:
    """The rows of each step by weight version, stacked."""
    steps = {
        int(step): {int(key): rows for key, rows in own.items()}
        for step, own in result["rows_by_version"].items()
    }
    versions = sorted({version for own in steps.values() for version in own})
    figure, axes = _axes(5.4, 3.0)
    below = dict.fromkeys(steps, 0)
    for number, version in enumerate(versions):
        rows = [own.get(version, 0) for own in steps.values()]
        bottom = list(below.values())
        axes.bar(
            [str(step) for step in steps],
            rows,
            bottom=bottom,
            width=0.6,
            label=f"version {version}",
            color=_SHADES[number % len(_SHADES)],
        )
        below = {step: height + count for (step, height), count in zip(below.items(), rows, strict=True)}
    axes.set_xlabel("step")
    axes.set_ylabel("rows")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    return figure


def _logprobs(result: Mapping[str, Any], _: Any) -> Figure:
    """The difference in log-probs: a point for each token; at 0 both sides agree."""
    found, tokens = result["logprob_abs_diff"], result["logprobs"]
    figure, axes = _axes(5.4, 3.2)
    engine = [token[0] for token in tokens]
    for name, column, colour in (("replay_off", 2, _ORANGE), ("replay_on", 1, _BLUE)):
        label = f"{name.replace('_', ' ')}: {found[name]:.4f} nats apart"
        apart = [token[column] - token[0] for token in tokens]
        axes.scatter(engine, apart, s=9, color=colour, linewidths=0, label=label)
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    axes.set_xlabel("engine's log-prob, nats")
    axes.set_ylabel("trainer's less engine's")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, markerscale=2)
    return figure


def _outcomes(result: Mapping[str, Any], _: Any) -> Figure:
    rejected = {f"refused: {why}": count for why, count in result["rejected_by_reason"].items()}
    known = {name: count for name, count in result["samples_by_outcome"].items() if count}
    return _bars({**known, **rejected} or {"received": 0.0}, "samples")


_Draw = Callable[[Mapping[str, Any], Mapping[str, Sequence[Span]]], "Figure"]
_CARDS: tuple[tuple[str, str, _Draw, bool], ...] = (
    ("Where the time went", "Red is all that anybody waited for routing; blank is a wait for the next rollout.", _timeline, True),
    ("Bytes a token", "Routing on each leg, beside the default path's.", _bytes, False),
    ("The slowest trainer's wait for routing", "In each step; the rest of the relay's work is hidden.", _waits, False),
    ("Mismatch by layer and step", "Rows for which the live router would have chosen other experts.", _mismatch, False),
    ("Samples", "What became of those that the relay received, and why some were refused.", _outcomes, False),
    ("Log-probs", "Of each token of the first step, by engine and by trainer, the same weights.", _logprobs, False),
    ("Rows by weight version", "With which weights the engines made the rows of each step.", _versions, False),
    ("Expert load", "Choices of each expert, over the whole run.", _load, True),
)  # fmt: skip


def _bars(values: Mapping[str, float], unit: str, *, first: str = _BLUE) -> Figure:
    figure, axes = _axes(5.4, 0.42 * len(values) + 0.9)
    names = list(values)[::-1]
    bars = axes.barh(names, [values[name] for name in names], color=_BLUE, height=0.62)
    bars[-1].set_color(first)
    axes.bar_label(
        bars, fmt=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", padding=3, color=_INK
    )
    axes.set_xlim(0, 1.18 * max(1e-9, *values.values()))
    axes.set_xlabel(unit)
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK, labelsize=10)
    axes.xaxis.label.set_color(_FAINT)
    axes.yaxis.label.set_color(_FAINT)
    for side, line in axes.spines.items():
        line.set_visible(side in ("left", "bottom"))
        line.set_color(_FAINT)
    return figure, axes


def _scale(figure: Figure, image: Any, axes: Axes, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.ax.tick_params(colors=_INK)
    bar.ax.yaxis.label.set_color(_FAINT)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _card(title: str, text: str, figure: Figure, *, wide: bool) -> str:
    return (
        f'<section class="{"wide" if wide else ""}"><h2>{html.escape(title)}</h2><p class="faint">{html.escape(text)}</p>'
        f'<div class="picture" role="img" aria-label="{html.escape(title)}">{_svg(figure, title)}</div></section>'
    )


def _svg(figure: Figure, title: str) -> str:
    """The figure as SVG: text stays text, and ids of two pictures differ."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    salt = re.sub(r"\W", "", title)
    return re.sub(r'(id="|url\(#|href="#)', lambda found: found[1] + salt, text)
