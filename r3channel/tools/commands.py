"""The commands: the module, the purpose and examples of each. A help begins with the examples.

This module imports no command.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple, NoReturn

from r3channel.errors import nearest


class Command(NamedTuple):
    module: str
    """Its `run(argv) -> exit status`."""
    what: str
    examples: tuple[str, ...]


def _row(module: str, what: str, *examples: str) -> Command:
    return Command(f"r3channel.{module}", what, examples)


COMMANDS = {
    "doctor": _row(
        "tools.doctor", "what is installed, and whether everything would work together",
        "doctor --role relay", "doctor --engine http://10.0.0.5:30000", "doctor --slime ~/slime -- $ARGUMENTS",
        'doctor --engine-arguments "--tp-size 2 --enable-dp-attention"'),
    "plan": _row(
        "tools.plan", "bytes, memory and times of a step before it is run",
        "plan --model qwen3-30b-a3b --layout dp=4,tp=4,cp=2,pp=4 --tokens 16000000",
        "plan --model ~/checkpoint --layout dp=2,tp=2 --lengths lengths.json --json"),
    "errors": _row("tools.errors", "what an error means, and what to do", "errors StoreFull", "errors frame_missing"),
    "bench": _row("bench", "measurements beside their peers", "bench wire --quick", "bench relay --quick --json"),
    "report": _row(
        "tools.report_page", "a run as one HTML page and as a trace for Perfetto, from the folder of its --r3-trace",
        "report trace", "report trace other-run"),
    "top": _row(
        "tools.top", "a running channel on one screen, from its metrics pages",
        "top report", "top http://10.0.0.5:9100/metrics http://10.0.0.5:9101/metrics", "top targets --once"),
    "slime": _row(
        "tools.slime", "slime's own script with the channel in it",
        "slime train_async.py $ARGUMENTS --use-r3-channel --r3-delivery direct"),
    "miles": _row(
        "integrations.miles.launch", "miles' own script: rows from its rollout manager to its trainers",
        "miles train_async.py $ARGUMENTS --use-rollout-routing-replay --use-r3-channel"),
    "record": _row(
        "tools.recordings", "record steps of a running channel", "record /data/rec --record-steps 3", "record --stop"),
    "inspect": _row("tools.recordings", "a recording (--record): steps, rows, versions, load", "inspect rec"),
    "check": _row(
        "tools.recordings", "silent misalignments, by name, in one recording or between two sides",
        "check rec", "check rec router-rec --strict"),
    "replay": _row(
        "tools.recordings", "the trainer's side of a recording under any layout",
        "replay rec", "replay rec --layout dp=1,tp=2 --gloo"),
    "diff": _row(
        "tools.recordings", "two recordings: the first difference, and how much of each layer", "diff rec other"),
    "import": _row(
        "tools.recordings", "a recording out of .npz files, or of slime's or miles's debug dumps",
        "import engine.npz --format npz --out rec", "import 3.pt --format slime-debug --model ~/checkpoint --out rec"),
    "export": _row("tools.recordings", "a recording as .npz files", "export rec --format npz --out folder"),
    "weights": _row(
        "tools.weights", "what engines hold, tensor by tensor",
        "weights verify --engine http://10.0.0.5:30000 --manifest committed.json",
        "weights verify --engine http://10.0.0.5:30000 --engine http://10.0.0.6:30000"),
    "patch": _row(
        "tools.patch", "hooks for an upstream that has none: check, apply, reverse",
        "patch check --target site-packages", "patch apply --target site-packages"),
}  # fmt: skip
_FIRST = ("doctor", "plan", "slime", "check")
"""Commands whose first example the overview shows."""


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with examples."""

    examples: tuple[str, ...] = ()
    """Whole lines."""

    def format_help(self) -> str:
        lines = [f"  {example}" for example in self.examples]
        return "\n".join([*lines, "", super().format_help()]) if lines else super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error, and what a mistyped option is near to.

        The usage is left out: it fills a screen for some commands.
        """
        for word in message.partition("unrecognized arguments: ")[2].split():
            message += nearest(word.partition("=")[0], self._option_string_actions) * word.startswith("--")
        self.exit(2, f"{self.prog} --help tells the options\n{self.prog}: {message}\n")


def parser(command: str, *, prog: str = "", description: str | None = None) -> Parser:
    """Make the parser of a command, with the command's examples.

    Args:
        command: a name of `COMMANDS`.
        prog: the command and its subcommand, if the command has subcommands.
        description: the text of the help; None: the command's purpose.
    """
    entry = COMMANDS[command]
    command_parser = Parser(prog=f"r3channel {prog or command}", description=description or f"{entry.what}.")
    examples = [example for example in entry.examples if example.startswith(prog or command)]
    command_parser.examples = tuple(f"r3channel {example}" for example in examples or [f"{prog} --quick"])
    return command_parser


def overview() -> str:
    """Return the text of `r3channel --help`."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            *(f"  r3channel {COMMANDS[name].examples[0]}" for name in _FIRST),
            "",
            "Rollout routing replay: expert choices from SGLang engines to Megatron routers, exactly.",
            "",
            "commands:",
            *(f"  {name:{width}}  {command.what}" for name, command in COMMANDS.items()),
            "",
            "r3channel COMMAND --help tells each command's options; r3channel --version the version.",
        ]
    )
