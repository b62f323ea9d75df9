"""Generates tables in pages from code (layouts, options, errors) or from kept figures; a test compares them.

python -m tests.support.pages [RESULT.json...]     # writes the tables anew, from benchmarks' fresh results too
"""

from __future__ import annotations

import ast
import itertools
import math
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.config import ENV_PREFIX, ChannelConfig, EngineConfig, field_texts
from r3channel.engine import refusals
from r3channel.integrations.slime import arguments
from r3channel.tools.errors import describe, every_error
from r3channel.trainer.adapters import megatron_refusals
from r3channel.weights import transaction
from tests.support import figures

PACKAGE = Path(__file__).parents[2] / "r3channel"
_MIB, _UNITS = 1 << 20, {"_s": "s", "_bytes": "bytes"}


class Table(NamedTuple):
    """A table between `<!-- NAME: generated -->` and `<!-- /NAME -->`."""

    page: Path
    lines: Callable[[], list[str]]


class Layout(NamedTuple):
    """A row of the table of supported layouts. Each has a proof: the rows are the parameters of tests/dist/test_layouts.py."""

    text: str
    """What `TrainerLayout.parse` and `--layout` take."""
    rows: str
    """What a rank's routers see."""
    when: str
    """Which command runs the proof."""


_TEST, _LONG, _FULL = "make test", "make test-long", "make test-full"

LAYOUTS = (
    Layout("dp=1", "all rows, sequence-major", _TEST),
    Layout("tp=2", "the rank's contiguous half of the rows (sequence parallel)", _FULL),
    Layout("dp=2,ep=2", "the rows of the DP rank, whoever owns the experts", _FULL),
    Layout("tp=2,ep=2", "as tp=2", _FULL),
    Layout("pp=2", "all rows of the stage's layers, 1F1B", _FULL),
    Layout("pp=2,vpp=2", "all rows of the layers of both chunks, interleaved", _FULL),
    Layout("pp=2,uniform=0", "as pp=2, each micro-batch of its own length", _FULL),
    Layout("pp=2,first_layers=3", "all rows of 3 and 5 layers", _FULL),
    Layout("cp=2", "zigzag chunks r and 2*cp-1-r of the sequence", _FULL),
    Layout("cp=2,packing=thd", "the same of each packed sequence, in pack order", _FULL),
    Layout("tp=2,cp=2,packing=thd", "the CP cut, then the contiguous half", _TEST),
    Layout("dp=2,tp=2", "the DP rank's rows, then the contiguous half", _FULL),
    Layout("dp=2,tp=2,ep=2", "the same", _FULL),
    Layout("dp=2,cp=2", "the DP rank's rows, then zigzag", _FULL),
    Layout("dp=2,pp=2,vpp=2", "the DP rank's rows of the layers of both chunks", _FULL),
    Layout("tp=2,pp=2", "the contiguous half of the stage's layers", _FULL),
    Layout("cp=2,pad_policy=live", "as cp=2; the live router chooses for padding and last tokens", _FULL),
    Layout("pp=2,cp=2,packing=thd", "zigzag of each packed sequence, the stage's layers", _FULL),
    Layout("tp=2,cp=2,pp=2,vpp=2,packing=thd", "the same of both chunks, then the contiguous half", _LONG),
)
WHEN = {layout.text: layout.when for layout in LAYOUTS}
_LAYOUT_NOTES = (
    "Each proof: real Megatron-core over gloo, several micro-batches, full recompute; every id that a router used, the loss",
    "and every gradient are compared with one rank's, and the bytes that each rank received with the plan's. Larger sizes",
    "follow the same rules (property tests of the plan). Planned and property-tested, but not run on Megatron here:",
    "`cp_split=contiguous` (all-gather attention; Megatron-core's own rotary embedding is zigzag). Tensor parallelism without",
    "sequence parallelism is tested in log-prob passes only: Megatron refuses to train MoE so.",
)


class Option(NamedTuple):
    flag: str
    """The flag; empty for options that only engines read, since SGLang's parser does not take our flags."""
    variable: str
    side: str
    default: Any
    unit: str
    meaning: str


def options() -> Iterator[Option]:
    """Options of relay and trainers, then those of engines alone, then those of `r3channel slime`."""
    both = {f.name for f in fields(ChannelConfig)} & {f.name for f in fields(EngineConfig)}
    for f in fields(ChannelConfig):
        side = "relay, trainers" + (", engines" if f.name in both else "")
        yield _option(f"--r3-{f.name.replace('_', '-')}", f.name, side, f.default, ChannelConfig)
    for f in fields(EngineConfig):
        if f.name not in both:
            yield _option("", f.name, "engines", f.default, EngineConfig)
    ours = {f"r3_{f.name}" for f in fields(ChannelConfig)} | {"help", "r3_config"}
    for action in arguments.add_arguments(ArgumentParser())._actions:
        if action.dest not in ours and action.dest.startswith("r3_"):
            flag = action.option_strings[0]
            yield Option(flag, "", "slime", action.default, _unit(action.dest), action.help or "")


def _option(flag: str, name: str, side: str, default: Any, config: type[Any]) -> Option:
    meaning = field_texts(config).get(name, "")
    return Option(flag, ENV_PREFIX + name.upper(), side, default, _unit(name), meaning)


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def _value(option: Option) -> str:
    """
    >>> _value(Option("", "", "", 8 << 20, "bytes", "")), _value(Option("", "", "", False, "", ""))
    ('8 MiB', 'off')
    """
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.unit == "bytes" and value and value % _MIB == 0:
        return f"{value // _MIB:,} MiB"
    return "" if value in ("", None) else f"{value:g}" if isinstance(value, float) else str(value)


def table_of(columns: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """Markdown of columns with bars between them, and rows of cells."""
    rule = "|---" * (columns.count("|") + 1) + "|"
    return [f"| {columns} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def layout_lines() -> list[str]:
    rows = ((f"`{layout.text}`", layout.rows, f"`{layout.when}`") for layout in LAYOUTS)
    return [*table_of("layout | a router's rows on one rank | proven by", rows), "", *_LAYOUT_NOTES]


def option_lines() -> list[str]:
    rows = ((_code(o.flag), _code(o.variable), o.side, _value(o), o.unit, o.meaning) for o in options())
    return table_of("option | environment | of | default | unit | meaning", rows)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def error_lines() -> list[str]:
    rows = (
        (f"`{e.__name__}`", _code(e.__mro__[1].__name__), f"`{e.reason}`", describe(e), e.remedy)
        for e in every_error()
    )
    return table_of("error | is a | reason | what happened | what to do", rows)


def setting_lines() -> list[str]:
    """What is refused and what is tested; what was judged by reading is the doctor's to say."""
    lines = [
        "| settings | values | | why; of what is refused also the word that overrides |",
        "|---|---|---|---|",
    ]
    names, word, why = refusals.TOGETHER
    lines.append(f"| `{names}` | | {refusals.REFUSED} | {why} (`{word}`) |")
    for setting in refusals.SETTINGS:
        if setting.verdict is refusals.Verdict.READ:
            continue
        refusal = setting.verdict is refusals.REFUSED
        why = f"{refusals.REFUSALS[setting.why]} (`{setting.why}`)" if refusal else setting.why
        names = " ".join(f"`{name}`" for name in setting.names.split())
        lines.append(f"| {names} | {setting.values} | {setting.verdict} | {why} |")
    asked = '`r3channel doctor --engine-arguments "--page-size 64"`'
    return [
        *lines,
        "",
        f"Many more were judged by reading: {asked} says of each setting what is known, and why.",
    ]


def refusal_lines() -> list[str]:
    """The rows as Markdown, for the room's page."""
    rows = ((f"`{row.setting}`", row.when, row.why, row.since) for row in megatron_refusals.REFUSALS)
    return table_of("setting | refused where | why | since", rows)


def transaction_lines() -> list[str]:
    """The table of the page: what is called when, and what becomes of an engine."""
    rows = list[tuple[str, ...]]()
    for name, (during, by, done, failed) in sorted(
        transaction.CALLS.items(), key=lambda call: call[1].during.value
    ):
        ways = ", ".join(
            way for way in transaction.ORDER if name in (*transaction.ORDER[way], *transaction.BESIDE[way])
        )
        ends = (state.name if state else "" for state in (done, failed))
        rows.append((during.name, f"`{name}`", by, ways, *ends))
    return table_of("update | call | by | in | an engine is then | else", rows)


# -- the rooms of the house: their levels, and what each module says of itself ------------------------------------------------

ROOMS = (
    *("errors", "model typed", "observe", "transport", "config", "wire", "plan", "recordings"),
    *("engine relay trainer weights", "integrations", "cli pytest_plugin bench tools"),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
"""Level of each room. A room imports itself and lower levels only; what people type (the highest level) may also import its
own level."""


def sentence_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return f"{' '.join(text.split())} ".partition(". ")[0].replace("|", r"\|")


def room_lines() -> list[str]:
    """Every room and module by level, each with the first sentence of its docstring."""
    rows = list[tuple[str, str]]()
    for room, level in LEVELS.items():
        folder = PACKAGE / room
        page = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        rows.append((f"**`{room}{'/' * folder.is_dir()}`**", f"level {level}: {sentence_of(page)}"))
        modules = (path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py")
        names = {path: path.relative_to(PACKAGE).with_suffix("").as_posix() for path in modules}
        rows += [(f"`{name}`", sentence_of(path)) for path, name in names.items()]
    return table_of("module | what it does", rows)


# -- seconds of a weight update by each way, computed from measured rates -------------------------------------------------------

MODELS = (("Qwen3-30B-A3B", 61, 4), ("Qwen3-235B-A22B", 470, 8), ("DeepSeek-V3, float8", 671, 16))
"""Name, GB, and ranks of an engine."""
LINKS_GBIT_S = (400, 12.5)
"""One rank's share of the network: a card of its own, or an eighth of 100 Gbit/s."""
STAGED_GB_S = {"tcp": 2.2, "shared_memory": 2.6}
"""Into one rank's copy, checked and verified: 542 MB in 0.24 and 0.21 s, the update less its pause (`bench weights --only large`,
two cores of an AMD EPYC for trainer and engine, load 0.7)."""
CHANGE_OVER_GB_S = 48
"""From a copy in locked memory into an H100's parameters (`make gpu`)."""
WAYS = (*STAGED_GB_S, "nccl", "broadcast")


def seconds_of(way: str, *, gigabytes: float, ranks: int, gbit_s: float) -> tuple[float, float]:
    """Return the seconds that an engine is paused, and those of the whole update.

    There are as many trainer ranks as engine ranks, so both ends of the network carry the same. Over `nccl` and in a broadcast
    bytes travel during the pause, as fast as the link allows.

    >>> [seconds_of(way, gigabytes=96, ranks=4, gbit_s=8) for way in ("tcp", "nccl", "broadcast")]
    [(0.5, 24.5), (24.5, 24.5), (96.0, 96.0)]
    >>> [round(seconds_of("tcp", gigabytes=2.2, ranks=1, gbit_s=gbit_s)[1], 2) for gbit_s in (400, 8)]
    [1.05, 2.25]
    >>> [round(seconds_of("shared_memory", gigabytes=2.6, ranks=1, gbit_s=gbit_s)[1], 2) for gbit_s in (400, 8)]
    [1.05, 1.05]
    """
    link_gb_s = math.inf if way == "shared_memory" else gbit_s / 8
    if way == "broadcast":  # each rank gets the whole model, and loads it as it comes
        return gigabytes / link_gb_s, gigabytes / link_gb_s
    part = gigabytes / ranks
    travel_s, change_over_s = part / min(link_gb_s, STAGED_GB_S.get(way, math.inf)), part / CHANGE_OVER_GB_S
    return change_over_s + (travel_s if way == "nccl" else 0.0), travel_s + change_over_s


def way_lines() -> list[str]:
    """What to choose a way by: how long an engine is paused, and how long the update takes."""
    rows = list[tuple[str, ...]]()
    for (model, gigabytes, ranks), gbit_s in itertools.product(MODELS, LINKS_GBIT_S):
        size = {"gigabytes": gigabytes, "ranks": ranks, "gbit_s": gbit_s}
        times = (" / ".join(map(_seconds, seconds_of(way, **size))) for way in WAYS)
        rows.append((f"{model}: {gigabytes} GB, {ranks} ranks", f"{gbit_s:g}", *times))
    tcp, shared = STAGED_GB_S.values()
    return [
        "Computed, not measured: seconds of the pause / of the whole update, with as many trainer ranks as engine ranks.",
        f"From measured rates of a rank in GB/s: {tcp} over `tcp` and {shared} in `shared_memory` (`bench weights --only large`,",
        f"2 x AMD EPYC), {CHANGE_OVER_GB_S} to change over (H100, `make gpu`). `nccl` and broadcast get all of the link,",
        "which no run has shown.",
        "",
        *table_of(
            "model, ranks of an engine | Gbit/s of a rank | `tcp` | `shared_memory` | `nccl` | broadcast",
            rows,
        ),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.{1 if seconds < 10 else 0}f}"


TABLES = {
    "rooms": Table(PACKAGE / "DESIGN.md", room_lines),
    "layouts": Table(PACKAGE / "plan" / "README.md", layout_lines),
    "options": Table(PACKAGE / "tools" / "README.md", option_lines),
    "errors": Table(PACKAGE / "errors.md", error_lines),
    "measured": Table(PACKAGE.parent / "README.md", partial(figures.lines, "measured")),
    **{t: Table(PACKAGE / "engine" / "README.md", partial(figures.lines, t)) for t in ("capture", "reply")},
    "settings": Table(PACKAGE / "engine" / "README.md", setting_lines),
    "refusals": Table(PACKAGE / "trainer" / "README.md", refusal_lines),
    "transaction": Table(PACKAGE / "weights" / "README.md", transaction_lines),
    "ways": Table(PACKAGE / "weights" / "README.md", way_lines),
}


def put_into(text: str, name: str) -> str:
    """The text with what lies between the table's marks made anew."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- /{name} -->\n"
    before, rest = text.split(begin)
    return before + begin + "\n".join(TABLES[name].lines()) + "\n" + end + rest.split(end)[1]


if __name__ == "__main__":
    for file in sys.argv[1:]:
        figures.keep(Path(file))
    for name, table in TABLES.items():
        table.page.write_text(put_into(table.page.read_text(), name))
