"""`r3channel doctor`: one line per thing that must be there, and what to do about each that is not.

Nothing heavy is imported into this process. Versions come from the installed metadata; the two questions that only the
upstreams can answer (would our hooks apply, do the names we rely on exist) are put to child processes with a deadline.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.engine.probe import ask_engine
from r3channel.errors import ConfigError
from r3channel.integrations import preflight
from r3channel.integrations.slime import api_check
from r3channel.integrations.slime.arguments import judged
from r3channel.observe.check import Check
from r3channel.tools import commands, extras
from r3channel.tools.network import check_network

LOOPBACK = "127.0.0.1"
_PLUGIN_GROUP = "sglang.srt.plugins"
_ANSWER = "R3CHANNEL-DOCTOR "
"""Marks the answer among whatever an upstream prints on import."""

_HOOKS = "from r3channel.engine.sglang_hooks import check_hooks as check"
_NAMES = "from r3channel.trainer.adapters.megatron import check_names as check"


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    return examine(
        role=options.role,
        ports=options.port,
        engines=options.engine,
        timeout_s=options.timeout_s,
        nodes=options.nodes,
        config=options.config,
        slime=options.slime,
        arguments=options.arguments,
    )


def _parser() -> commands.Parser:
    parser = commands.parser("doctor")
    parser.add_argument(
        "--role",
        choices=tuple(extras.ROLES),
        default="all",
        help="what this machine is to run: only what that place needs is looked at",
    )
    parser.add_argument("--port", type=int, action="append", default=[], help="must be free; repeatable")
    parser.add_argument(
        "--engine", metavar="URL", action="append", default=[], help="a running engine to ask; repeatable"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="machines of the run: with several, loopback is a fault"
    )
    parser.add_argument(
        "--slime", metavar="DIR", help="a checkout of slime: is it one that is known, what would be hooked"
    )
    parser.add_argument(
        "arguments", nargs="*", help="with --slime, after --: those of the job, to be looked through"
    )
    parser.add_argument("--config", metavar="FILE", help="channel options, as --r3-config")
    parser.add_argument(
        "--timeout-s", type=float, default=120.0, help="deadline of each check that imports an upstream"
    )
    return parser


def examine(
    *,
    role: str = "all",
    ports: Sequence[int] = (),
    engines: Sequence[str] = (),
    timeout_s: float = 120.0,
    nodes: int = 1,
    config: str | None = None,
    slime: str | None = None,
    arguments: Sequence[str] = (),
) -> int:
    """Print every finding as soon as it is known; 1 if anything is missing, else 0.

    With `engines` only those running engines are asked: their packages need not be installed here.
    `slime`: a checkout to look at instead. `nodes`: machines of the run; `config`: a file of channel options, beside those in the
    environment.
    """
    well = True
    channel = ChannelConfig.load(file=config)
    found = checks(role=role, ports=ports, timeout_s=timeout_s, channel=channel, nodes=nodes)
    if engines:
        found = (check for url in engines for check in ask_engine(url, timeout_s=timeout_s))
    elif slime is not None:
        found = check_slime(Path(slime), arguments)
    for check in found:
        print(check.line(), flush=True)
        well = well and check.ok
    return 0 if well else 1


def checks(
    *, role: str, ports: Sequence[int], timeout_s: float, channel: ChannelConfig, nodes: int = 1
) -> Iterator[Check]:
    """All findings about a place of a run, the cheap ones first. `timeout_s` is the deadline of each child process."""
    yield check_python(sys.version_info[:3])
    needed = extras.ROLES[role]
    for name in needed.needs:
        yield check_distribution(name, remedy=extras.remedy(name))
    for name, loss in needed.helps.items():
        yield check_helper(name, loss=loss)
    if role in ("engine", "all"):
        yield check_plugin()
    for port in (0, *ports) if role != "engine" else ports:
        yield check_port(port)
    if role in ("relay", "all"):
        yield check_memory(channel)
        yield check_store(channel)
    yield from check_network(channel, os.environ, nodes=nodes)
    if role in ("engine", "all"):
        yield check_hooks(timeout_s=timeout_s)
    if role in ("trainer", "all"):
        yield ask("Megatron names", _NAMES, timeout_s=timeout_s)


def check_slime(root: Path, arguments: Sequence[str] = ()) -> Iterator[Check]:
    """Whether a checkout has every name that the integration uses, which these are, and what is not supported in a job's
    arguments. Nothing of it is imported."""
    moved = api_check.moved(root)
    remedy = f"use {api_check.KNOWN}; to adapt: r3channel/integrations"
    yield Check(
        name=f"slime {root}",
        ok=not moved,
        found="; ".join(moved) or f"all names of {api_check.KNOWN}",
        remedy=remedy,
    )
    for line in () if moved else api_check.used():
        yield Check(name="used", ok=True, found=line)
    if arguments:
        yield Check(name="arguments", **_judged(arguments))


def _judged(arguments: Sequence[str]) -> dict[str, Any]:
    """The launcher's verdict on a job's arguments."""
    try:
        judged(arguments)
    except ConfigError as error:
        return {"ok": False, "found": str(error), "remedy": "change them"}
    return {"ok": True, "found": "nothing that is refused at start"}


def check_python(version: tuple[int, int, int]) -> Check:
    return Check(
        name="python",
        ok=version >= (3, 11, 0),
        found=f"{'.'.join(map(str, version))} ({platform.machine()}, {'GPU' if has_gpu() else 'no GPU'})",
        remedy="r3channel needs Python 3.11 or newer",
    )


def check_distribution(name: str, *, remedy: str) -> Check:
    """Whether a distribution is installed, by its metadata; it is not imported."""
    try:
        return Check(name=name, ok=True, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, found="not installed", remedy=remedy)


def check_helper(name: str, *, loss: str) -> Check:
    """Report a package that the channel works without: never a fault."""
    found = check_distribution(name, remedy=extras.remedy(name))
    return found if found.ok else Check(name=name, ok=True, found=f"not installed: {loss}; {found.remedy}")


def check_store(channel: ChannelConfig) -> Check:
    """Whether `store_dir` can take what a killed relay would leave: a fault if it cannot be written or has no room."""
    if not channel.store_dir:
        return Check(name="store_dir", ok=True, found="not set: what a killed relay holds is lost")
    fault = preflight.folder("store_dir", channel.store_dir, room_bytes=channel.store_bytes)
    takes = f"{channel.store_dir} takes up to {channel.store_bytes / 1e9:.1f} GB of rows (store_bytes), and so much is free"
    return Check(name="store_dir", ok=not fault, found=fault or takes, remedy="or lower store_bytes")


def check_plugin() -> Check:
    """SGLang finds our plug-in through installed metadata; a bare checkout on the path has none."""
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP)}
    return Check(
        name="SGLang plug-in",
        ok="r3channel" in found,
        found=found.get("r3channel", f"no entry point in group {_PLUGIN_GROUP}"),
        remedy="install the package itself: pip install -e . (make setup does)",
    )


def check_port(port: int) -> Check:
    """Whether `port` can be bound on loopback now; 0 asks for any port."""
    name = f"port {port}" if port else "a free port"
    fault = preflight.port(name, port, host=LOOPBACK)
    return Check(name=name, ok=not fault, found=fault or f"free on {LOOPBACK}")


def check_memory(channel: ChannelConfig, *, meminfo: Path = preflight.MEMINFO) -> Check:
    """Report memory for the rows that `store_bytes` allows: never a fault, because a relay may hold fewer, or run elsewhere."""
    lacking = preflight.memory(
        channel.store_bytes,
        remedy="the store may hold so many bytes of rows: lower store_bytes to twice a step (`r3channel plan` says it)",
        meminfo=meminfo,
    )
    found = lacking or f"room for the {channel.store_bytes / 2**30:.1f} GiB of rows that store_bytes allows"
    return Check(name="memory of the relay", ok=True, found=found)


def has_gpu() -> bool:
    """Whether there is an NVIDIA driver. The system is asked, since asking torch would import it."""
    return Path("/dev/nvidiactl").exists()


def check_hooks(*, timeout_s: float) -> Check:
    """Whether our hooks would apply; no fault where SGLang cannot be imported without a GPU."""
    if has_gpu() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return ask("SGLang hooks", _HOOKS, timeout_s=timeout_s)
    return Check(name="SGLang hooks", ok=True, found="not looked for: SGLang is not imported without a GPU")


def ask(name: str, imports: str, *, timeout_s: float) -> Check:
    """Run `check() -> list of problems`, as `imports` names it, in a child process."""
    program = f"import json; {imports}; print({_ANSWER!r} + json.dumps(check()))"
    remedy = f"see it whole with: {sys.executable} -c '{imports}; print(check())'"
    try:
        child = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            name=name, ok=False, found=f"no answer within {timeout_s:g} s", remedy="raise --timeout-s"
        )
    problems = _answer(child.stdout)
    if problems is None:
        return Check(
            name=name, ok=False, found=f"could not be asked: {_last_line(child.stderr)}", remedy=remedy
        )
    if problems:
        moved = "; ".join(problems)
        return Check(
            name=name, ok=False, found=moved, remedy="install the versions that this release was read against"
        )
    return Check(name=name, ok=True, found="all found")


def _answer(stdout: str) -> list[str] | None:
    for line in stdout.splitlines():
        if line.startswith(_ANSWER):
            return [str(problem) for problem in json.loads(line.removeprefix(_ANSWER))]
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
