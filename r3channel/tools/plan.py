"""`r3channel plan`: bytes, memory and times of a step before it is run, beside the default path."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.capacity import Machines, add_up, plan_of
from r3channel.plan.layout import TrainerLayout
from r3channel.tools import commands
from r3channel.wire.token_tensors import tensors_of

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    result = plan(options)
    print(json.dumps(result) if options.json else _plan_text(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("plan", description=__doc__)
    parser.add_argument("--model", help="a name of the table, a checkpoint folder, or its config.json")
    parser.add_argument("--layout", help="as in the demo, for example dp=4,tp=4,cp=2,pp=4")
    parser.add_argument("--tokens", type=count, help="of one step, over all samples: 16000000, 16e6 or 16M")
    parser.add_argument("--sequence", type=count, default=16384, help="tokens of a sample, about (16384)")
    parser.add_argument(
        "--lengths", metavar="FILE", help="JSON list of samples' tokens, instead of these two"
    )
    help_text = "what else each token brings, as the option of the relay names it"
    parser.add_argument("--token-tensors", type=tensors_of, default=(), metavar="NAMES", help=help_text)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=count, help="token budget of a micro-batch, instead of its size")
    for field in fields(Machines):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), help=f"default {field.default}")
    parser.add_argument("--json", action="store_true")
    return parser


def count(text: str) -> int:
    """Return a whole number of tokens as people write it.

    >>> count("16M"), count("16.8e6"), count("64k"), count("1024")
    (16000000, 16800000, 64000, 1024)
    """
    unit = _UNITS.get(text[-1:].lower(), 1)
    number = Fraction(text if unit == 1 else text[:-1]) * unit
    if number.denominator != 1:
        raise ValueError
    return number.numerator


def spec_of(model: str) -> RoutingSpec:
    """Return the routing shape of a model.

    Args:
        model: a checkpoint folder, the path of a Hugging Face config, or a name of the table.
    """
    path = Path(model)
    if path.suffix == ".json" or path.is_dir() or "/" in model:
        return RoutingSpec.from_hf_config(path)
    return model_named(model).spec


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Plan the step that the options describe.

    Returns:
        The totals by name. `plan_s` is the planner's time in seconds.

    Raises:
        ConfigError: the model, the layout or the samples are not given, or do not fit together.
    """
    if not options.model or not options.layout:
        raise ConfigError("plan needs --model and --layout")
    layout = TrainerLayout.parse(options.layout)
    lengths, spec = _lengths(options, layout), spec_of(options.model)
    values = {field.name: getattr(options, field.name) for field in fields(Machines)}
    machines = Machines(**{name: value for name, value in values.items() if value is not None})
    begin = time.perf_counter()
    cut = {"microbatch_size": options.microbatch_size, "max_tokens": options.max_tokens}
    plan = plan_of(lengths, spec=spec, layout=layout, **cut)
    totals, digest = add_up(plan, machines=machines, tensors=options.token_tensors), f"{plan.digest:#x}"
    extra = {"ranks": layout.world_size, "plan_digest": digest, "plan_s": time.perf_counter() - begin}
    return {"model": options.model, **asdict(totals), **extra, "machines": asdict(machines)}


def _lengths(options: argparse.Namespace, layout: TrainerLayout) -> list[int]:
    """Return sample lengths that fill whole micro-batches on every DP rank."""
    if options.lengths:
        return _read_lengths(Path(options.lengths))
    if not options.tokens:
        raise ConfigError("plan needs --tokens (all tokens of one step), or --lengths")
    if min(options.sequence, options.microbatch_size, options.tokens) < 1:
        raise ConfigError(
            f"--tokens {options.tokens}, --sequence {options.sequence}, --microbatch-size {options.microbatch_size}: expected at "
            "least 1 of each"
        )
    unit = layout.dp * (1 if options.max_tokens else options.microbatch_size)
    count = max(1, round(options.tokens / options.sequence / unit)) * unit
    return [(options.tokens + index) // count for index in range(count)]


def _read_lengths(file: Path) -> list[int]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {file}: expected a readable JSON file: {error}") from error
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ConfigError(f"--lengths {file}: expected a list of whole numbers, one for each sample")
    return values


_LINES = (
    ("engine -> relay, frames", "http_bytes", "default_http_bytes"),
    ("received by one TP0", "received_bytes_tp0", "default_bytes_per_rank"),
    ("shards of one TP0, used and next", "held_bytes_tp0", None),
    ("kept by one process", "landed_bytes_per_rank", "default_bytes_per_rank"),
    ("kept by all processes", "landed_bytes_all_ranks", "default_bytes_all_ranks"),
    ("a step at rest, relay or manager", "frame_bytes", "default_host_bytes"),
    ("a micro-batch, widened on a GPU", "widened_bytes_per_rank", None),
    ("staged for one receiver", "relay_staging_bytes", None),
    ("GPU of a relay over nccl, about", "relay_gpu_bytes", None),
)
_TIMES = (
    ("HTTP", "http_s", "default_http_s"),
    ("CPU of all rows, one core", "place_s", "default_manager_s"),
    ("wire, or fetch of one process", "wire_s", "default_fetch_s"),
)


def _plan_text(result: dict[str, Any]) -> str:
    beside = [f"{nbytes} of {name}" for name, nbytes in result["tensor_bytes_per_token"].items()]
    per_token = " + ".join([str(result["bytes_per_token"]), *beside])
    lines = [
        f"{result['model']}, {result['layout']} ({result['ranks']} ranks)",
        f"{result['samples']:,} samples, {result['tokens']:,} tokens ({result['padded_tokens']:,} padded), "
        f"{per_token} B/token, planned in {result['plan_s']:.2f} s, digest {result['plan_digest']}",
        "",
        f"{'':32s}{'r3channel':>14s}{'default path':>14s}",
    ]
    for label, ours, theirs in _LINES:
        default = _bytes(result[theirs]) if theirs else "-"
        lines.append(f"{label:32s}{_bytes(result[ours]):>14s}{default:>14s}")
    for label, ours, theirs in _TIMES:
        lines.append(f"{label:32s}{result[ours]:>12.2f} s{result[theirs]:>12.2f} s")
    lines.append(f"kept per process: 1/{1 / result['ratio']:.0f} of the default path")
    lines += [_rows_text(result), _store_text(result), _node_text(result)]
    return "\n".join(lines)


def _rows_text(result: dict[str, Any]) -> str:
    tcp_s, nccl_s = result["tcp_s"], result["nccl_s"]
    better = "tcp" if tcp_s < nccl_s else "nccl"
    text = f"rows to trainers: tcp {tcp_s:.2f} s, all at once; nccl {nccl_s:.2f} s, in turn through one core and GPU of the relay"
    return f"{text}: {better} is faster"


def _store_text(result: dict[str, Any]) -> str:
    need, allowed = _bytes(result["store_needed_bytes"]), _bytes(result["machines"]["store_bytes"])
    text = (
        f"store: rows of two steps, one delivered while the next is generated, need {need} of the relay's memory; "
        f"store_bytes allows {allowed}"
    )
    return text if result["store_fits"] else f"{text}. Raise store_bytes; else engines wait for room"


def _node_text(result: dict[str, Any]) -> str:
    machines, (memory, *needs) = result["machines"], result["relay_needs"].values()
    has = (machines[name] for name in ("node_bytes", "node_cores", "http_gbit_s", "wire_gbyte_s"))
    words = "{:.0f} GB of memory, {:.2f} cores, {:.2f} Gbit/s in and {:.2f} out"
    text = f"the relay's node, a step in {machines['step_s']:g} s: {words.format(memory / 1e9, *needs)}"
    memory, cores, inwards, outwards = has
    lacks = " and ".join(result["node_lacks"])
    has = words.format(memory / 1e9, cores, inwards, 8 * outwards)
    return f"{text}. WARNING: one node of {has} has too little {lacks}" if lacks else text


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:.0f} B"
