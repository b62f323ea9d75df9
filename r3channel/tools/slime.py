"""`r3channel slime`: checks a job's command line before slime's script starts; the doctor checks it here, too.

slime's and Megatron's parsers ignore names that they do not know. The tables that refuse a setting are read only where a model
is built, on every GPU of the job. This module imports none of the three frameworks.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from r3channel.engine.refusals import flag
from r3channel.errors import nearest
from r3channel.integrations import guard, preflight
from r3channel.integrations.slime import api_check, launch
from r3channel.integrations.slime.arguments import add_arguments, refusals_of
from r3channel.observe.check import Check, CheckContext
from r3channel.tools.engine_arguments import allowed_words, find_refused, parse, sglang_fields
from r3channel.trainer.adapters import megatron_refusals

_OURS = ("--r3-", "--r3_", "--use-r3", "--use_r3")
_OF_SGLANG = "sglang_"
_SET_BY_US = "moe_enable_routing_replay"


def run(argv: Sequence[str]) -> int:
    """Check a job's arguments, then run it as `launch.run` does.

    Without the flag `guard.FLAG` only misspelt names are faults.

    Raises:
        ConfigError: the arguments have faults; the text has every one.
    """
    preflight.refuse(faults(argv, os.environ) if guard.FLAG in argv else misspelt(argv))
    return launch.run(argv)


def check_arguments(context: CheckContext) -> Iterator[Check]:
    """Yield a finding for each fault of the job's arguments.

    Faults that the launcher finds only after slime has parsed the arguments are among them.
    """
    if not context.arguments:
        return
    problems = [*faults(context.arguments, context.environment)]
    if guard.FLAG not in context.arguments:
        problems.append(
            f"{guard.FLAG} is not among them: without it slime runs, and nothing of r3channel happens"
        )
    detached = api_check.nearest(Path(context.slime or "")).version == api_check.NEWER
    problems += refusals_of(context.arguments, detached=detached)
    for fault in problems:
        yield Check(name="arguments", ok=False, found=fault)
    if not problems:
        yield Check(name="arguments", ok=True, found="nothing that is refused at start")


def misspelt(words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each mistyped option of ours.

    Such a word looks like one of our options and is none.
    """
    options = add_arguments(ArgumentParser(add_help=False))._option_string_actions
    for word in words:
        # the launcher knows its own flag without a value
        name = word if word.startswith(guard.FLAG) else word.partition("=")[0]
        if word.startswith(_OURS) and name not in options:
            yield f"{name} is no option of r3channel{nearest(name, options)}"


def faults(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each fault that the words themselves show.

    Args:
        words: the job's arguments.
        environment: its R3CHANNEL_ALLOW overrides faults of SGLang's settings.
    """
    yield from misspelt(words)
    fields = sglang_fields(f"--{_OF_SGLANG}".replace("_", "-"))
    values = parse(words, {flag: _OF_SGLANG + name for flag, (name, _) in fields.items()})
    for row in megatron_refusals.REFUSALS:
        if row.setting != _SET_BY_US and row.setting in values and row.refuses(values[row.setting]):
            yield f"{flag(row.setting, values[row.setting])}: {row.why}"
    engine = {
        name.removeprefix(_OF_SGLANG): value for name, value in values.items() if name.startswith(_OF_SGLANG)
    }
    for word, text in find_refused(engine, dict(fields.values())):
        if word not in allowed_words(environment):
            yield f"--sglang-{text.removeprefix('--')} [R3CHANNEL_ALLOW={word} overrides]"
