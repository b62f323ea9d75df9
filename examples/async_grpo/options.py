"""The demo's options, and what is refused before any part of it is started."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from examples.async_grpo.grpo import GROUP
from examples.embedded.model import ModelShape, config_of
from examples.embedded.nodes import NETWORK, become_nodes
from r3channel.config import ChannelConfig, add_arguments
from r3channel.errors import R3Error
from r3channel.integrations import preflight
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import add_options, recorder_of
from r3channel.tools import commands
from r3channel.tools.extras import ROLES, check_distribution

VERSIONS = {"sglang": ("0.5.15.post1", "0.5.23"), "megatron-core": ("0.16.1",)}
"""With which the demo was run."""
_FOLDERS = ("report", "dump", "record", "export")
_FILES = ("weights_manifest",)
_TEMPORARY_BYTES = 500_000_000
_LONGEST_BASE = 107 - len("/ray/session_2026-11-22_21-26-44_187123_1234567/sockets/plasma_store")
"""A Unix socket's path has 107 letters at most."""
_RAY_BYTES, _ENGINE_BYTES, _TRAINER_BYTES = 850 << 20, 900 << 20, 520 << 20

WEIGHTS = ("broadcast", "exact", "colocated")
_EXAMPLES = (
    "make demo",
    'make demo ARGS="--steps 2 --layout dp=1,tp=2"',
    'make demo ARGS="--record rec --report report"',
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = commands.Parser(
        prog="python -m examples.demo",
        description="The whole loop on this machine: SGLang, Ray, Megatron-core. `make demo` passes ARGS on to it.",
    )
    parser.examples = _EXAMPLES
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--layout",
        default="dp=2,tp=2,pp=1,cp=1",
        help="keys dp, tp, pp, cp, vpp, ep, packing (padded or thd), pad_policy (spread or live), ...",
    )
    parser.add_argument("--engines", type=int, default=1, help="SGLang servers")
    parser.add_argument(
        "--nodes", type=int, choices=(1, 3), default=1, help="3: engines, manager and trainers on nodes of their own; direct"
    )  # fmt: skip
    parser.add_argument("--engine-tp", type=int, default=1, help="ranks of each server that share a request")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: trainer rank r on GPU r, engines on the last GPU"
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=16, help="per step, in groups of 4")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--weight-bucket-bytes", type=int, default=8 << 20)
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="exact",
        help="how they reach the engines: SGLang loads a broadcast; each trainer sends its own part; through shared memory",
    )  # fmt: skip
    parser.add_argument(
        "--weights-wire", choices=("tcp", "gloo", "nccl"), default="tcp",
        help="what carries --weights exact: links while engines serve, or one group of all ranks while they are paused",
    )  # fmt: skip
    parser.add_argument(
        "--delivery", choices=("inband", "direct"), default="inband", help="rows in replies, or to the relay"
    )
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument(
        "--report", metavar="DIR", help="write report.html and .json, trace.json (for Perfetto), table.txt, endpoints.json"
    )  # fmt: skip
    parser.add_argument("--dump", metavar="DIR", help="write engine.npz, router.npz and bytes.json")
    add_options(parser)
    parser.add_argument(
        "--weights-manifest", metavar="FILE", help="write what the engines hold after each update"
    )
    parser.add_argument(
        "--export", metavar="DIR", help="at the end write the trainer's weights, and the engines' answers"
    )
    parser.add_argument(
        "--no-replay", action="store_true", help="carry routing but let the routers choose; differences follow"
    )  # fmt: skip
    parser.add_argument(
        "--fault", choices=("corrupt-id",),
        help="damage one id in a trainer's memory; its router refuses it, and the run ends with an error",
    )  # fmt: skip
    args = add_arguments(parser).parse_args(argv)
    args.r3_trace = args.report or args.r3_trace
    for name in (*_FILES, *_FOLDERS, "r3_trace"):  # a trainer in another folder writes some of them
        if getattr(args, name):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    if not args.use_r3_channel:
        args.weights = "broadcast"  # engines run without our half
    try:
        if args.nodes > 1:
            become_nodes()
            args.delivery, args.r3_interface = "direct", args.r3_interface or NETWORK
        preflight.refuse(_faults(args))
    except R3Error as error:
        parser.error(str(error))
    if args.use_r3_channel:
        args.r3_metrics_port = 0 if args.r3_metrics_port is None else args.r3_metrics_port
        args.r3_run_name = args.r3_run_name or "demo"
        if args.report and args.r3_metrics_dir is None:
            args.r3_metrics_dir = str(Path(args.report, "targets"))
    return args


def model_layers(layout: TrainerLayout) -> int:
    """Layers of the model that is made for the layout: at least two in every chunk; layer 0 is dense."""
    return max(4, 2 * layout.pp * layout.vpp)


def _faults(args: argparse.Namespace) -> Iterator[str]:
    """Said here, and not by a part when the others are up. Raises ConfigError for what cannot even be read."""
    layout = TrainerLayout.parse(args.layout)
    for name in ("steps", "engines", "engine_tp", "samples", "micro_batch_size"):
        if getattr(args, name) < 1:
            yield f"{_flag(name)} {getattr(args, name)}, expected at least 1"
            return
    yield _samples(args, layout)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "--layout: Megatron-core refuses to train MoE with tp > 1 without sequence parallelism; leave sp on"
    yield preflight.layout(
        f"--layout {args.layout}", layout, config_of(ModelShape(layers=model_layers(layout)))
    )
    if args.use_r3_channel:
        config = ChannelConfig.from_args(args)
        recorder_of(args)  # raises for limits that do not go together
        yield from preflight.of_channel(config, ranks=layout.world_size)
    elif args.dump or args.record or args.no_replay or args.fault or args.delivery == "direct":
        yield "--dump, --record, --no-replay, --fault, --delivery direct and --nodes need --use-r3-channel"
    if args.weights_wire != "tcp" and args.weights != "exact":
        yield f"--weights-wire {args.weights_wire} carries --weights exact, not {args.weights}"
    if args.weights_wire == "nccl" and args.device != "cuda":
        yield "--weights-wire nccl needs --device cuda; expected gloo, the same on hosts"
    yield from _machine(args, layout)


def packages(names: Iterable[str], versions: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield a line for each missing distribution, and each of a version that was not read.

    A distribution that is not in `versions` may have any.
    """
    for name in names:
        check, expected = check_distribution(name), versions.get(name, ())
        if not check.ok:
            yield f"{name} is {check.found}; {check.remedy}"
        elif expected and check.found not in expected:
            yield f"{name} {check.found} was not read, only {' and '.join(expected)}; pip install {name}=={expected[-1]}"


def _machine(args: argparse.Namespace, layout: TrainerLayout) -> Iterator[str]:
    for name in _FOLDERS:
        yield preflight.folder(_flag(name), getattr(args, name) or "")
    for name in _FILES:
        yield preflight.folder(_flag(name), (getattr(args, name) and Path(getattr(args, name)).parent) or "")
    yield from packages(ROLES["all"].needs, VERSIONS)
    yield _gpus(args.device, layout.world_size)
    base = tempfile.gettempdir()
    yield preflight.folder("TMPDIR", base, room_bytes=_TEMPORARY_BYTES)
    if len(base) > _LONGEST_BASE:
        yield f"TMPDIR: {base} has {len(base)} letters, and Ray's sockets below it leave {_LONGEST_BASE}; give a shorter path"
    engines, trainers = args.engines * args.engine_tp, layout.world_size
    needed = _RAY_BYTES + engines * _ENGINE_BYTES + trainers * _TRAINER_BYTES
    yield preflight.memory(
        needed,
        remedy=f"{engines} engine(s) and {trainers} trainer(s) of --engines and --layout; give smaller ones",
    )


def _gpus(device: str, ranks: int) -> str:
    if device == "cpu":
        return ""
    import torch  # seconds

    count = torch.cuda.device_count()
    return (
        ""
        if count >= ranks
        else f"--device cuda: {ranks} trainer rank(s) of --layout, and torch sees {count} GPU(s)"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _samples(args: argparse.Namespace, layout: TrainerLayout) -> str:
    unit = math.lcm(GROUP, layout.dp * args.micro_batch_size)
    if args.samples >= unit:  # more than that is cut to a multiple of it
        return ""
    return (
        f"--samples {args.samples}, expected at least {unit}: whole groups of {GROUP} that fill micro-batches of "
        f"{args.micro_batch_size} on {layout.dp} DP rank(s)"
    )
