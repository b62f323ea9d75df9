"""`r3channel record | inspect | diff | replay | check | import | export`: the commands on recordings.

`record` asks a running relay to write one; the others need no engine, relay, GPU or Ray.

Exit status: 0 clean, 1 something was found, 2 it could not be read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError, UsageError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings import importers, summary
from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.consumed import ConsumedRows, consume_step, describe, fit
from r3channel.recordings.diagnose import CANNOT, judge, judge_alone, judge_beside
from r3channel.recordings.importers import DUMPS, import_dumps
from r3channel.recordings.mistakes import NOTES, Finding
from r3channel.recordings.recorder import add_limits, values_of
from r3channel.recordings.recording import Recording
from r3channel.recordings.run_ranks import Rank, run_ranks
from r3channel.recordings.step import RecordedStep
from r3channel.tools import commands

FORMATS = ("npz", *DUMPS)
"""Formats that `import` reads; `export` writes npz. Other formats are refused: their sources were not read, and a guess
would be silently wrong."""

_RANKS_S = 600.0


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` begins with.

    Its arguments are the rest of `argv`.
    """
    return _RUN[argv[0]](_parser(argv[0]).parse_args(argv[1:]))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = commands.parser(command)
    if command == "record":
        return _record_options(parser)
    if command == "import":
        parser.add_argument("source", nargs="+", type=Path, metavar="FILE")
        parser.add_argument("--out", type=Path, required=True, metavar="REC")
        help_text = "the checkpoint of a dump, which does not say where its experts are"
        parser.add_argument("--model", metavar="FOLDER", help=help_text)
    else:
        parser.add_argument("recording", type=Path, metavar="REC")
    if command == "export":
        parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    if command in ("import", "export"):
        formats = FORMATS if command == "import" else ("npz",)
        parser.add_argument("--format", required=True, help=f"one of {', '.join(formats)}")
    if command == "diff":
        parser.add_argument("other", type=Path, metavar="REC")
    if command == "check":
        help_text = "what routers used, as a recording"
        parser.add_argument("router", type=Path, nargs="?", metavar="ROUTER_REC", help=help_text)
        parser.add_argument("--strict", action="store_true", help="a suspicion is exit 1, too")
    if command in ("replay", "import"):
        help_text = "dp=2,tp=2,...; default: the recorded one"
        parser.add_argument("--layout", type=TrainerLayout.parse, help=help_text)
    if command == "replay":
        help_text = "a gloo process for each rank; default: all ranks in this process"
        parser.add_argument("--gloo", action="store_true", help=help_text)
    if command in ("inspect", "diff", "replay", "check"):
        parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _record_options(parser: commands.Parser) -> commands.Parser:
    parser.add_argument(
        "record", nargs="?", metavar="REC", help="a folder on the relay's node; new, or of this run"
    )
    add_limits(parser)
    parser.add_argument("--stop", action="store_true", help="end the recording that is being written")
    parser.add_argument(
        "--actor",
        action="append",
        metavar="NAME",
        help="Ray actor that holds a relay; repeatable. Default: the name that `RayRelay` gives it",
    )
    parser.add_argument("--address", default="auto", help="of the running Ray")
    return parser


def _record(options: argparse.Namespace) -> int:
    # Imported here, because only this command needs the relay's imports.
    from r3channel.relay.ray_host import NAME, RayRelay

    if options.stop == bool(options.record):  # "" is no folder: a shell's variable that is not set
        raise UsageError("expected either a folder to record into, or --stop")
    if options.record:
        options.record = str(Path(options.record).absolute())  # the relay has another working directory
    for name in options.actor or [NAME]:
        RayRelay.find_relay(name, address=options.address).record(values_of(options) or {})
        print(f"{name}: " + (f"records into {options.record}" if options.record else "records no more"))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    contents = summary.summarize(Recording.open(options.recording))
    _print(options, contents, summary.table_of)
    return int(not contents["steps"] or any(step["cut"] for step in contents["steps"]))


def _diff(options: argparse.Namespace) -> int:
    comparison = summary.compare(Recording.open(options.recording), Recording.open(options.other))
    _print(options, comparison, summary.text_of)
    return int(not comparison["equal"])


def _replay(options: argparse.Namespace) -> int:
    recording, results, findings = Recording.open(options.recording), [], list[Finding]()
    for number in recording.steps:
        step = fit(recording.step(number), options.layout)
        rows, seconds = _consume(options, step)
        results.append(describe(step, rows) | {"seconds": round(seconds, 3)})
        findings += [finding for sides in AlignedPair.align(step, rows.step()) for finding in judge(sides)]
    _print(options, {"steps": results, "findings": [asdict(finding) for finding in findings]}, _show_replay)
    lost = any(result["rows_of_layers"] != result["expected_rows_of_layers"] for result in results)
    return int(bool(findings) or lost or not results)


def _consume(options: argparse.Namespace, step: RecordedStep) -> tuple[ConsumedRows, float]:
    if options.gloo:
        return run_ranks(consume, step, options.recording, timeout_s=_RANKS_S)
    begin_s = time.monotonic()
    return consume_step(step), time.monotonic() - begin_s


def consume(rank: Rank) -> None:
    """Run one process of `replay --gloo`.

    The shard is placed at TP0, sent on over gloo, and read layer by layer as routers do.
    """
    import torch  # imported here, because replay in one process does not need it

    from r3channel.trainer.rank_shard import RankShard, slot_parts
    from r3channel.transport.tp_fanout import TensorParallelFanout

    shard, tp = rank.shard, rank.coords.tp
    fanout = TensorParallelFanout(rank.tp_group, device=torch.device("cpu"))
    whole_N = torch.from_numpy(rank.data_N) if tp == 0 else None
    part_N = torch.empty(shard.slot_bytes, dtype=torch.uint8)
    if shard.tp_slots == 1:  # all ranks have the same rows
        part_N = part_N if whole_N is None else whole_N
        fanout.rebroadcast(part_N)
    else:
        slots = [] if whole_N is None else zip(*slot_parts(shard, whole_N), strict=True)
        fanout.scatter([torch.cat(parts) for parts in slots] or None, part_N)
    rank_shard = RankShard(rank.step.ticket, shard, part_N, tp=tp, invalid_rows="live")
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            if layer in rank.consumed.spec.moe_layers:
                rank.record_used(microbatch, layer, rank_shard.layer_ids(microbatch, layer))


def _show_replay(data: dict[str, Any]) -> str:
    lines = [
        f"step {step['step']}: {step['ranks']} ranks of {step['layout']}: {step['rows_of_layers']:,} rows of layers, expected "
        f"{step['expected_rows_of_layers']:,}; {step['seconds']:.2f} s"
        for step in data["steps"]
    ]
    lines += [f"step {step['step']}: not tested: {gap}" for step in data["steps"] for gap in step["untested"]]
    return "\n".join([*lines, *(str(Finding(**fields)) for fields in data["findings"])])


def _check(options: argparse.Namespace) -> int:
    sides = [Recording.open(path) for path in (options.recording, options.router) if path]
    steps, findings, untested = _shared_steps(sides), list[Finding](), list[str]()
    for number in sorted(set().union(*(side.steps for side in sides)) - set(steps)):
        untested.append(f"step {number}, which one side has alone")
    whole = bool(steps)
    for number in steps:
        recorded = [side.step(number) for side in sides]
        for names in (step.cut for step in recorded if step.cut):
            untested.append(f"step {number}: {len(names)} samples that are not whole: {', '.join(names[:5])}")
            whole = False
        findings += judge_alone(*recorded) if len(recorded) == 1 else _judge_pair(*recorded)
    values: dict[str, Any] = {
        "findings": [asdict(finding) for finding in findings], "steps": steps, "untested": untested,
    }  # fmt: skip
    values["cannot_know"] = CANNOT if len(sides) == 1 else ""
    _print(options, values, _show_check)
    verdicts = [fault for fault in findings if (fault.verdict or options.strict) and fault.name not in NOTES]
    return int(bool(verdicts) or not whole)


def _shared_steps(sides: Sequence[Recording]) -> list[int]:
    shared = sorted(set.intersection(*(set(side.steps) for side in sides)))
    if len(sides) > 1 and not shared:
        has = [list(side.steps)[:10] for side in sides]
        raise ConfigError(f"engines' steps {has[0]}, routers' steps {has[1]}: expected one in both")
    return shared


def _judge_pair(engine: RecordedStep, router: RecordedStep) -> list[Finding]:
    findings = [finding for sides in AlignedPair.align(engine, router) for finding in judge(sides)]
    return [*findings, *judge_beside(engine)]


def _show_check(values: dict[str, Any]) -> str:
    lines = [str(Finding(**fields)) for fields in values["findings"]]
    lines = lines or [f"{len(values['steps'])} steps: nothing found"]
    lines += [f"not tested: {gap}" for gap in values["untested"]]
    return "\n".join([*lines, *filter(None, [values["cannot_know"]])])


def _import(options: argparse.Namespace) -> int:
    _check_format(options.format, FORMATS)
    if options.format == "npz":
        importers.import_npz(options.source, options.out, layout=options.layout)
    else:
        spec = RoutingSpec.from_hf_config(options.model) if options.model else None
        import_dumps(options.source, options.out, spec=spec, layout=options.layout)
    return 0


def _export(options: argparse.Namespace) -> int:
    _check_format(options.format, ("npz",))
    for path in importers.export_npz(Recording.open(options.recording), options.out):
        print(path)
    return 0


def _check_format(name: str, formats: Sequence[str]) -> None:
    if name not in formats:
        raise ConfigError(
            f"format {name!r}, expected one of {tuple(formats)}: the sources of other dumps were not read, and what they "
            "mean is not guessed. Write .npz files; r3channel.recordings.importers says which arrays"
        )


def _print(
    options: argparse.Namespace, values: dict[str, Any], as_text: Callable[[dict[str, Any]], str]
) -> None:
    print(json.dumps(values) if options.json else as_text(values))


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "record": _record, "inspect": _inspect, "diff": _diff, "replay": _replay, "check": _check, "import": _import,
    "export": _export,
}  # fmt: skip
