"""`r3channel doctor`: prints a line for each thing that must be there, and the remedy for each that is not.

The checks lie in the rooms that they are about; `CHECKS` lists them. Nothing heavy is imported into this process: versions come
from the installed metadata, and a child process with a deadline answers what only an upstream can answer.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Sequence

from r3channel.config import ChannelConfig
from r3channel.observe.check import Check, CheckContext
from r3channel.tools import commands, extras

_EVERY = tuple(extras.ROLES)
_ENGINES, _SETTINGS, _SLIME = "running engines", "an engine's settings", "a checkout of slime"
_TYPED = "--engine-arguments"
CHECKS = (
    (_EVERY, "r3channel.tools.extras", "check_packages"),
    (("engine", "all"), "r3channel.engine.probe", "check_plugin"),
    (_EVERY, "r3channel.integrations.preflight", "check_ports"),
    (("relay", "all"), "r3channel.integrations.preflight", "check_memory"),
    (("relay", "all"), "r3channel.integrations.preflight", "check_store"),
    (_EVERY, "r3channel.transport.network", "check_network"),
    (_EVERY, "r3channel.transport.network", "check_peers"),
    (_EVERY, "r3channel.transport.auth", "check_token"),
    (("engine", "all"), "r3channel.engine.probe", "check_hooks"),
    (("trainer", "all"), "r3channel.trainer.adapters", "check_adapters"),
    ((_ENGINES,), "r3channel.engine.probe", "check_engines"),
    ((_SETTINGS,), "r3channel.tools.engine_arguments", "check_engine_arguments"),
    ((_SLIME,), "r3channel.integrations.slime.api_check", "check_checkout"),
    ((_SLIME,), "r3channel.tools.slime", "check_arguments"),
)
"""Roles of this machine, or subjects that are checked instead of it; and of each check its room, imported when it is run, and its
name, of `name(context: CheckContext) -> Iterator[Check]`. In the order of the lines: the cheap ones first."""


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    if _TYPED in words[:-1]:  # argparse takes a single word that begins with a dash for an option
        at = words.index(_TYPED)
        words[at : at + 2] = ["=".join(words[at : at + 2])]
    options = vars(_parser().parse_args(words))
    ports, engines, peers = (options.pop(name) for name in ("port", "engine", "peer"))
    config = ChannelConfig.load(file=options.pop("config"))
    return examine(CheckContext(config=config, ports=ports, engines=engines, peers=peers, **options))


def _parser() -> commands.Parser:
    parser = commands.parser("doctor")
    parser.add_argument(
        "--role",
        choices=_EVERY,
        default="all",
        help="what this machine is to run: only what that place needs is looked at",
    )
    parser.add_argument("--port", type=int, action="append", default=[], help="must be free; repeatable")
    parser.add_argument(
        "--engine", metavar="URL", action="append", default=[], help="a running engine to ask; repeatable"
    )
    help_text = "SGLang's settings, as one word: is each tested, read or refused, and why"
    parser.add_argument(_TYPED, metavar="WORDS", type=shlex.split, default=[], help=help_text)
    parser.add_argument(
        "--nodes", type=int, default=1, help="machines of the run: with several, loopback is a fault"
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", action="append", default=[],
        help="of another node, to be reached from here; repeatable. R3CHANNEL_RELAY_URL is one",
    )  # fmt: skip
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


def examine(context: CheckContext) -> int:
    """Print every finding as soon as it is known.

    Returns:
        1 if anything is missing, else 0.
    """
    well = True
    for check in findings(context):
        print(check.line(), flush=True)
        well = well and check.ok
    return 0 if well else 1


def findings(context: CheckContext) -> Iterator[Check]:
    """Yield the findings about this machine's role, or about other subjects.

    Other subjects are running engines, an engine's settings and a checkout of slime, which lie elsewhere.
    """
    asked = {_ENGINES: context.engines, _SETTINGS: context.engine_arguments, _SLIME: context.slime}
    subjects = {subject for subject, given in asked.items() if given} or {context.role}
    for of, module, name in CHECKS:
        if subjects & {*of}:
            yield from getattr(importlib.import_module(module), name)(context)
