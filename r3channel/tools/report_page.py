"""One run as one HTML page without a network, and as a trace for Perfetto: `r3channel report RUN...`.

The page (report_page.html) has a verdict, and pictures of the run's time, bytes, routing and samples. matplotlib draws the
pictures (extra `plot`, imported when one is drawn): inline SVG whose ink follows the reader's light or dark theme. This module
does not know how a run is made. Every run has spans; what else a run knows of itself is in a report.json beside them.
"""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import ROUTING_WAITS, merge_intervals
from r3channel.observe.trace import Span, chrome_trace, read, spans_of
from r3channel.tools import commands
from r3channel.tools.run_model import WORK, ends_of, facts_of, longest, sums

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS = 2000
"""Spans of a lane are drawn as one if the gap between them is less than the run's time divided by this number."""
_INK, _FAINT = "#123456", "#654321"
"""Placeholders that become the page's own colours."""
_PICTURES: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "r3channel", "font.family": "sans-serif", "savefig.facecolor": "none",
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": _FAINT, "axes.labelcolor": _FAINT, "xtick.color": _INK, "ytick.color": _INK, "xtick.labelsize": 10,
    "ytick.labelsize": 10, "text.color": _INK,
}  # fmt: skip
"""How pictures look, as matplotlib's settings."""
_BLUE, _ORANGE, _GREEN, _RED = "#4c8dd6", "#e08a1e", "#3fa66b", "#d2504b"
_SHADES = (_BLUE, _GREEN, _ORANGE, "#8f6fc9")
_KINDS = {
    "generation": (_GREEN, ("generation", "http", "capture", "frame")),
    "relay": (_BLUE, ("ingest", "verify", "plan", *WORK, "assemble", "serialize")),
    "training": (_ORANGE, ("logprob", "forward", "backward", "optimizer", "train", "weights", "audit")),
    "routing at the trainer": ("#8f6fc9", ("recv", "rebroadcast")),
    "waits for routing": (_RED, ROUTING_WAITS),
}
"""Kind of span -> colour and stages. Waits for the next rollout stay blank."""
_WAY = ("capture", "frame", "http", "ingest", "verify", "plan", "decode", *WORK, "rebroadcast", "bind")
"""Stages that move or judge a row. `recv` is not among them: it is the time until its sender's `send`."""


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of --r3-trace, or the demo's --report")
    for folder in parser.parse_args(argv).runs:
        print(write_page(Path(folder)))
    return 0


def write_page(folder: Path) -> Path:
    """Write report.html and trace.json beside a run's spans.

    The run may still be writing spans.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: the folder has no spans, or matplotlib is missing, which the page needs.
    """
    events, warnings = read(folder)
    print(*warnings, sep="\n", end="\n" if warnings else "", file=sys.stderr)
    (folder / "trace.json").write_text(json.dumps(chrome_trace(events)))
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the page of a run needs matplotlib: pip install 'r3channel[plot]'")
    path, facts_file = folder / "report.html", folder / "report.json"
    spans = spans_of(events)
    audits = [event["args"] for event in events if event.get("cat") == "note" and "layers" in event["args"]]
    result = facts_of(spans) | {"routing_mismatch": audits}
    result |= json.loads(facts_file.read_text()) if facts_file.is_file() else {}
    path.write_text(page(result, spans))
    return path


# -- the page -------------------------------------------------------------------------------------------------------------


def page(result: Mapping[str, Any], spans: Mapping[str, Sequence[Span]]) -> str:
    """Return the page as HTML.

    A picture is there if its facts are.

    Args:
        result: `facts_of` the spans, with a run's report.json over it.
        spans: the spans of each process.
    """
    good, verdict = verdict_of(result)
    cards = [
        _card(title, text, draw, result, spans) for needed, title, text, draw in _CARDS if result.get(needed)
    ]
    title = f"r3channel: {result['steps']} steps"
    parts = (("SGLang", "sglang_version"), ("Megatron-core", "megatron_version"))
    versions = [f"{name} {result[key]}" for name, key in parts if key in result]
    well = "" if good is None else "good" if good else "bad"
    texts = {
        "title": title, "heading": f"{title}, {result['layout']}" if "layout" in result else title, "verdict": verdict,
        "versions": ", ".join([*versions, f"{result['wall_s']:.0f} s"]), "good": well,
    }  # fmt: skip
    template = Template(Path(__file__).with_suffix(".html").read_text())
    return template.substitute({key: html.escape(text) for key, text in texts.items()}, cards="".join(cards))


def verdict_of(result: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Return whether the run was well, and the verdict's text.

    The text has the faults of the run's pages first, then what trainers waited for, and a row's longest stage.

    Returns:
        True or False, or None for a run that compared no ids; and the text.
    """
    (process, stage), seconds = longest(result, _WAY)
    (_, wait), _ = longest(result, ROUTING_WAITS)
    time = (
        f"{result['hidden_fraction']:.0%} of the relay's work was hidden. The slowest trainer waited "
        f"{result['wait_fraction']:.1%} of its time for routing, longest in {wait}. Of all that moves or judges a row, {stage} "
        f"at {process} took longest: {seconds:.1f} s."
    )
    if "ids_compared" not in result:
        return None, time
    different = result["ids_different"] + result["digests_different"]
    if different or not result["ids_compared"]:
        return False, f"{different:,} of {result['ids_compared']:,} ids and digests differ. {time}"
    well = f"All {result['ids_compared']:,} ids at the routers are those that the engines chose. {time}"
    faults = result.get("faults", [])
    return not faults, "; ".join([*faults, well])


def _timeline(_: Any, spans: Mapping[str, Sequence[Span]]) -> Figure:
    lanes = sorted(spans, key=lambda name: ("trainer" in name, "relay" in name, name), reverse=True)
    begin_s, end_s = ends_of(spans)
    dot_s = (end_s - begin_s) / _DOTS
    figure, axes = _axes(11, 0.55 * len(lanes) + 1.4, xlabel="seconds")
    for lane, name in enumerate(lanes):
        for colour, stages in _KINDS.values():
            kind_spans = [span for span in spans[name] if span.stage in stages]
            merged = merge_intervals((span.start_s, span.end_s + dot_s) for span in kind_spans)
            bars = [(start - begin_s, end - start) for start, end in merged]
            axes.broken_barh(bars, (lane - 0.36, 0.72), color=colour, linewidth=0)
    handles = [axes.plot([], [], color=colour, linewidth=6)[0] for colour, _ in _KINDS.values()]
    _legend(axes, handles, list(_KINDS), ncols=len(_KINDS))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(left=0)  # engines and relay are probed long before training begins
    return figure


def _bytes(result: Mapping[str, Any], _: Any) -> Figure:
    per_token = result["bytes_per_token"]
    legs = {
        "stock int32 through Ray": result["default_bytes_per_token"],
        "engine's HTTP reply": per_token["engine_http"],
        "engine's frame": per_token["engine_frame"],
        "through Ray": per_token["object_store"],
        "on the wire": per_token["wire"],
        "landed, a rank": max(per_token["landed_per_rank"].values(), default=0.0),
    }
    return _bars(legs, "bytes a token", first=_ORANGE)


def _waits(result: Mapping[str, Any], _: Any) -> Figure:
    figure, axes = _axes(5.4, 3.0, xlabel="step", ylabel="milliseconds")
    waits_ms = [1000 * seconds for seconds in result["wait_s_by_step"].values()]
    axes.bar([*map(str, result["wait_s_by_step"])], waits_ms, color=_RED, width=0.6)
    return figure


def _mismatch(result: Mapping[str, Any], _: Any) -> Figure:
    # Audits of several ranks add up.
    audited = [(audit["step"], counts) for audit in result["routing_mismatch"] for counts in audit["layers"]]
    rows = sums(((step, counts["layer"]), counts["rows"]) for step, counts in audited)
    different = sums(((step, counts["layer"]), counts["different"]) for step, counts in audited)
    steps, layers = sorted({step for step, _ in rows}), sorted({layer for _, layer in rows})
    share = {at: different[at] / max(rows[at], 1) for at in rows}
    grid = [[share.get((step, layer), float("nan")) for step in steps] for layer in layers]
    return _grid(grid, {"step": steps}, layers, width=5.4, unit="share of rows", most=1)


def _load(result: Mapping[str, Any], _: Any) -> Figure:
    load = result["expert_load"]
    grid = [[100 * count / max(sum(counts), 1) for count in counts] for counts in load.values()]
    return _grid(grid, {"expert": ()}, list(load), width=11, unit="% of choices")


def _versions(result: Mapping[str, Any], _: Any) -> Figure:
    steps = {
        int(step): {int(key): rows for key, rows in by_version.items()}
        for step, by_version in result["rows_by_version"].items()
    }
    versions = sorted({version for by_version in steps.values() for version in by_version})
    figure, axes = _axes(5.4, 3.0, xlabel="step", ylabel="rows")
    names, below = [str(step) for step in steps], [0] * len(steps)
    for number, version in enumerate(versions):
        rows = [by_version.get(version, 0) for by_version in steps.values()]
        colour = _SHADES[number % len(_SHADES)]
        axes.bar(names, rows, bottom=below, width=0.6, label=f"version {version}", color=colour)
        below = [height + count for height, count in zip(below, rows, strict=True)]
    _legend(axes, ncols=4)
    return figure


def _logprobs(result: Mapping[str, Any], _: Any) -> Figure:
    differences, tokens = result["logprob_abs_diff"], result["logprobs"]
    figure, axes = _axes(5.4, 3.2, xlabel="engine's log-prob, nats", ylabel="trainer's less engine's")
    engine = [token[0] for token in tokens]
    for name, column, colour in (("replay_off", 2, _ORANGE), ("replay_on", 1, _BLUE)):
        label = f"{name.replace('_', ' ')}: {differences[name]:.4f} nats apart"
        apart = [token[column] - token[0] for token in tokens]
        axes.scatter(engine, apart, s=9, color=colour, linewidths=0, label=label)
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    _legend(axes, ncols=2, markerscale=2)
    return figure


def _outcomes(result: Mapping[str, Any], _: Any) -> Figure:
    rejected = {f"refused: {why}": count for why, count in result["rejected_by_reason"].items()}
    outcomes = {name: count for name, count in result["samples_by_outcome"].items() if count}
    return _bars({**outcomes, **rejected}, "samples")


_Draw = Callable[[Mapping[str, Any], Mapping[str, Sequence[Span]]], "Figure"]
_CARDS: tuple[tuple[str, str, str, _Draw], ...] = (
    ("stages_by_process_s", "Where the time went", "Red: waits for routing. Blank: waits for the next rollout.", _timeline),
    ("bytes_per_token", "Bytes a token", "Routing on each leg, beside the default path's.", _bytes),
    ("wait_s_by_step", "The slowest trainer's wait for routing", "In each step; the rest of the relay's work is hidden.", _waits),
    ("routing_mismatch", "Mismatch by layer and step", "Rows whose live router would have chosen other experts.", _mismatch),
    ("samples_by_outcome", "Samples", "What became of those that the relay received, and why some were refused.", _outcomes),
    ("logprobs", "Log-probs", "Of each token of the first step, by engine and by trainer, the same weights.", _logprobs),
    ("rows_by_version", "Rows by weight version", "With which weights the engines made the rows of each step.", _versions),
    ("expert_load", "Expert load", "Choices of each expert, over the whole run.", _load),
)  # fmt: skip


def _bars(values: Mapping[str, float], unit: str, *, first: str = _BLUE) -> Figure:
    figure, axes = _axes(5.4, 0.42 * len(values) + 0.9, xlabel=unit)
    names = list(values)[::-1]
    bars = axes.barh(names, [values[name] for name in names], color=_BLUE, height=0.62)
    bars[-1].set_color(first)
    axes.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", padding=3)
    axes.set_xlim(0, 1.18 * max(1e-9, *values.values()))
    return figure


def _axes(width: float, height: float, **labels: Any) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(**labels)
    return figure, axes


def _legend(axes: Axes, *entries: Any, **options: Any) -> None:
    axes.legend(*entries, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, **options)


def _grid(
    values: Sequence[Sequence[float]], columns: Mapping[str, Sequence[Any]], rows: Sequence[Any], *, width: float, unit: str,
    most: float | None = None,
) -> Figure:  # fmt: skip
    ((label, names),) = columns.items()
    figure, axes = _axes(width, min(1.6 + 0.3 * len(rows), 8), xlabel=label, ylabel="layer")
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=most)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    if names:
        axes.set_xticks(range(len(names)), [str(name) for name in names])
    figure.colorbar(image, ax=axes, label=unit).outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _card(
    title: str, text: str, draw: _Draw, result: Mapping[str, Any], spans: Mapping[str, Sequence[Span]]
) -> str:
    from matplotlib import rc_context

    with rc_context(_PICTURES):
        picture = _svg(draw(result, spans), title)
    wide, title = "wide" * (draw in (_timeline, _load)), html.escape(title)
    return (
        f'<section class="{wide}"><h2>{title}</h2><p class="faint">{html.escape(text)}</p>'
        f'<div class="picture" role="img" aria-label="{title}">{picture}</div></section>'
    )


def _svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # The ids of two pictures on one page must differ.
    salt = re.sub(r"\W", "", title)
    return re.sub(r'(id="|url\(#|href="#)', lambda match: match[1] + salt, text)
