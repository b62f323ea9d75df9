"""One run as one HTML page without a network, and as a trace for Perfetto: `r3channel report RUN...`.

The page has a verdict, and pictures of the run's time, bytes, routing and samples. Pictures are matplotlib's (extra `plot`,
imported when one is drawn): inline SVG whose ink follows the reader's light or dark theme. Knows nothing of how a run is made:
spans are what every run has, and what else a run knows of itself is in a report.json beside them.
"""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import ROUTING_WAITS, Span, merge_intervals
from r3channel.observe.trace import chrome_trace, read, spans_of
from r3channel.tools import commands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORK = ("place", "send")
"""Stages of the relay's work for a step after it was sealed."""
_DOTS = 2000
"""Spans of a lane that lie closer than this part of the run are drawn as one."""
_INK, _FAINT = "#123456", "#654321"
"""Placeholders that become the page's own colours."""
_BLUE, _ORANGE, _GREEN, _RED = "#4c8dd6", "#e08a1e", "#3fa66b", "#d2504b"
_SHADES = (_BLUE, _GREEN, _ORANGE, "#8f6fc9")
_KINDS = {
    "generation": (_GREEN, ("generation", "http", "capture", "frame")),
    "relay": (_BLUE, ("ingest", "verify", "plan", *WORK, "assemble", "serialize")),
    "training": (_ORANGE, ("logprob", "forward", "backward", "optimizer", "train", "weights", "audit")),
    "routing at the trainer": ("#8f6fc9", ("recv", "rebroadcast")),
    "waits for routing": (_RED, ROUTING_WAITS),
}
"""Kinds of spans: colour and stages. Waits for the next rollout stay blank."""
_WAY = ("capture", "frame", "http", "ingest", "verify", "plan", "decode", *WORK, "rebroadcast", "bind")
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
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of --r3-trace, or the demo's --report")
    for folder in parser.parse_args(argv).runs:
        print(write_page(Path(folder)))
    return 0


def write_page(folder: Path) -> Path:
    """Write report.html and trace.json beside a run's spans, which may still be coming. Raises ConfigError where there are none,
    or no matplotlib for the page."""
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


# -- what spans say of a run -------------------------------------------------------------------------------------------------


def facts_of(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """What a page needs of any run, by the names of the demo's report.json."""
    trainers = [lane for name, lane in spans.items() if name.startswith("trainer")]
    each = [waits_of(trainer) for trainer in trainers]
    waits = {step: max(waited.get(step, 0.0) for waited in each) for step in sorted(set[int]().union(*each))}
    begin_s, end_s = _ends(spans)
    wall_s = end_s - begin_s
    return {
        "steps": len(waits),
        "wall_s": wall_s,
        "stages_by_process_s": {
            name: _sums((span.stage, span.seconds) for span in lane) for name, lane in spans.items()
        },
        "hidden_fraction": hidden_share(spans.get("relay", ()), chain(*trainers)),
        "wait_s_by_step": waits,
        "wait_fraction": sum(waits.values()) / wall_s if wall_s else 0.0,
    }


def hidden_share(relay: Iterable[Span], trainers: Iterable[Span]) -> float:
    """The share of the relay's work for its steps that no trainer waited for; 0.0 without work: nothing was shown to be hidden.

    Work is what the relay does between `seal` and the last acknowledgement (`WORK`). To wait is to wait for routing
    (`ROUTING_WAITS`): a trainer that waits for the next rollout waits for no relay.
    """
    waits = merge_intervals((span.start_s, span.end_s) for span in trainers if span.stage in ROUTING_WAITS)
    starts, ends = [start for start, _ in waits], [end for _, end in waits]
    total_s = exposed_s = 0.0
    for work in (span for span in relay if span.stage in WORK):
        total_s += work.seconds
        exposed_s += sum(
            max(0.0, min(work.end_s, end) - max(work.start_s, start))
            for start, end in waits[bisect_left(ends, work.start_s) : bisect_left(starts, work.end_s)]
        )
    return 1.0 - exposed_s / total_s if total_s > 0 else 0.0


def waits_of(spans: Iterable[Span]) -> dict[int, float]:
    """Step -> seconds that one trainer stood still for its routing."""
    mine = (span for span in spans if span.stage in ROUTING_WAITS and span.step is not None)
    return _sums((span.step, span.seconds) for span in mine)


def _sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """The values of each key added up, in the order in which keys came."""
    sums: dict[Any, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums


def _ends(spans: Mapping[str, Sequence[Span]]) -> tuple[float, float]:
    """When the trainers' first span began and their last one ended; anybody's without trainers, zeros without spans."""
    trainers = [lane for name, lane in spans.items() if name.startswith("trainer")]
    ends = [(span.start_s, span.end_s) for span in chain(*(trainers or spans.values()))] or [(0.0, 0.0)]
    return min(ends)[0], max(end for _, end in ends)


# -- the page -------------------------------------------------------------------------------------------------------------


def page(result: Mapping[str, Any], spans: Mapping[str, Sequence[Span]]) -> str:
    """`result` is `facts_of` the spans, with a run's report.json over it; a picture is there where its facts are."""
    good, verdict = verdict_of(result)
    cards = [
        _card(title, text, draw(result, spans), wide=draw in (_timeline, _load))
        for needed, title, text, draw in _CARDS
        if result.get(needed)
    ]
    parts = (("SGLang", "sglang_version"), ("Megatron-core", "megatron_version"))
    versions = "".join(f"{name} {html.escape(result[key])}, " for name, key in parts if key in result)
    title = f"r3channel: {result['steps']} steps" + (f", {result['layout']}" if "layout" in result else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>r3channel: {result['steps']} steps</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="faint">{versions}{result["wall_s"]:.0f} s</p>'
        f'<p class="verdict {"" if good is None else "good" if good else "bad"}">{html.escape(verdict)}</p>'
        f'<div class="cards">{"".join(cards)}</div></body></html>\n'
    )


def verdict_of(result: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Whether the run was well (None: it compared no ids), in a sentence, its pages' faults first; what trainers waited for, and
    a row's longest stage."""
    (process, stage), seconds = _longest(result, _WAY)
    (_, wait), _ = _longest(result, ROUTING_WAITS)
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


def _longest(result: Mapping[str, Any], stages: Sequence[str]) -> tuple[tuple[str, str], float]:
    """(process, stage) and seconds of the longest of these at any process. A relay's `http` is the engines' time to answer."""
    durations = {
        (process, stage): seconds
        for process, stage_seconds in result["stages_by_process_s"].items()
        for stage, seconds in stage_seconds.items()
        if stage in stages and (process, stage) != ("relay", "http")
    }
    return max(durations.items(), key=lambda item: item[1], default=(("any process", "none"), 0.0))


def _timeline(_: Any, spans: Mapping[str, Sequence[Span]]) -> Figure:
    lanes = sorted(spans, key=lambda name: ("trainer" in name, "relay" in name, name), reverse=True)
    begin_s, end_s = _ends(spans)
    dot_s = (end_s - begin_s) / _DOTS
    figure, axes = _axes(11, 0.55 * len(lanes) + 1.4)
    for lane, name in enumerate(lanes):
        for colour, stages in _KINDS.values():
            kind_spans = [span for span in spans[name] if span.stage in stages]
            merged = merge_intervals((span.start_s, span.end_s + dot_s) for span in kind_spans)
            bars = [(start - begin_s, end - start) for start, end in merged]
            axes.broken_barh(bars, (lane - 0.36, 0.72), color=colour, linewidth=0)
    handles = [axes.plot([], [], color=colour, linewidth=6)[0] for colour, _ in _KINDS.values()]
    axes.legend(
        handles, list(_KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_KINDS), frameon=False
    )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)  # engines and relay are probed long before anybody trains
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
    figure, axes = _axes(5.4, 3.0)
    waits = {int(step): 1000 * seconds for step, seconds in result["wait_s_by_step"].items()}
    axes.bar([str(step) for step in waits], list(waits.values()), color=_RED, width=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    return figure


def _mismatch(result: Mapping[str, Any], _: Any) -> Figure:
    """Audits of several ranks add up."""
    audited = [(audit["step"], counts) for audit in result["routing_mismatch"] for counts in audit["layers"]]
    rows = _sums(((step, counts["layer"]), counts["rows"]) for step, counts in audited)
    different = _sums(((step, counts["layer"]), counts["different"]) for step, counts in audited)
    steps, layers = sorted({step for step, _ in rows}), sorted({layer for _, layer in rows})
    share = {at: different[at] / max(rows[at], 1) for at in rows}
    grid = [[share.get((step, layer), float("nan")) for step in steps] for layer in layers]
    figure, axes = _axes(5.4, min(1.6 + 0.3 * len(layers), 8))
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
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
        int(step): {int(key): rows for key, rows in by_version.items()}
        for step, by_version in result["rows_by_version"].items()
    }
    versions = sorted({version for by_version in steps.values() for version in by_version})
    figure, axes = _axes(5.4, 3.0)
    below = dict.fromkeys(steps, 0)
    for number, version in enumerate(versions):
        rows = [by_version.get(version, 0) for by_version in steps.values()]
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
    differences, tokens = result["logprob_abs_diff"], result["logprobs"]
    figure, axes = _axes(5.4, 3.2)
    engine = [token[0] for token in tokens]
    for name, column, colour in (("replay_off", 2, _ORANGE), ("replay_on", 1, _BLUE)):
        label = f"{name.replace('_', ' ')}: {differences[name]:.4f} nats apart"
        apart = [token[column] - token[0] for token in tokens]
        axes.scatter(engine, apart, s=9, color=colour, linewidths=0, label=label)
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    axes.set_xlabel("engine's log-prob, nats")
    axes.set_ylabel("trainer's less engine's")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, markerscale=2)
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
    return re.sub(r'(id="|url\(#|href="#)', lambda match: match[1] + salt, text)
