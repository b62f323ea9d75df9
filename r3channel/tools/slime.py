"""`r3channel slime`: a job's command line as it is typed, looked through before slime's script starts; the doctor asks here too.

slime's and Megatron's parsers pass over names that they do not know, and the tables that refuse a setting are asked where a
model is built, on every GPU of the job. Imports neither of the three frameworks: SGLang's settings are read in its sources.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3channel.config import REFUSALS, EngineConfig, load_values
from r3channel.engine import sglang_settings
from r3channel.errors import nearest
from r3channel.integrations import guard, preflight
from r3channel.integrations.slime import api_check, launch
from r3channel.integrations.slime.arguments import add_arguments, refusals_of
from r3channel.observe.check import Check, CheckContext
from r3channel.trainer.adapters import megatron_refusals

_OURS = ("--r3-", "--r3_", "--use-r3", "--use_r3")
_OF_SGLANG = "sglang_"
_SET_BY_US = "moe_enable_routing_replay"


def run(argv: Sequence[str]) -> int:
    """As `launch.run`. Raises ConfigError with every fault of the arguments; without the flag, only with misspelt names."""
    preflight.refuse(faults(argv, os.environ) if guard.FLAG in argv else misspelt(argv))
    return launch.run(argv)


def check_arguments(context: CheckContext) -> Iterator[Check]:
    """One finding for each fault of the job's arguments, those that the launcher would find once slime has parsed them too."""
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
    """One line for each word that looks like one of our options and is none."""
    options = add_arguments(ArgumentParser(add_help=False))._option_string_actions
    for word in words:
        if word.startswith(_OURS) and (name := word.partition("=")[0]) not in options:
            yield f"{name} is no option of r3channel{nearest(name, options)}"


def faults(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """One line for each fault that the words themselves show. SGLang's are overridden by R3CHANNEL_ALLOW in the environment."""
    yield from misspelt(words)
    sglangs = sglang_fields()
    values = settings(words, {flag: _OF_SGLANG + name for flag, (name, _) in sglangs.items()})
    for row in megatron_refusals.REFUSALS:
        if row.setting != _SET_BY_US and row.setting in values and row.refused(values[row.setting]):
            yield f"{sglang_settings.flag(row.setting, values[row.setting])}: {row.why}"
    engine = {
        name.removeprefix(_OF_SGLANG): value for name, value in values.items() if name.startswith(_OF_SGLANG)
    }
    refused = [*sglang_settings.refused(engine)]
    for name, default in dict(sglangs.values()).items():
        if str(value := engine.get(name, default)) != str(default) and not sglang_settings.judged(
            name, value
        ):
            refused.append(("unread", f"{sglang_settings.flag(name, value)}: {REFUSALS['unread']}"))
    allow, _ = load_values(EngineConfig, flags=None, file=None, environment=environment).get(
        "allow", ("", "")
    )
    for word, text in refused:
        if word not in EngineConfig(allow=allow).allowed:
            yield f"--sglang-{text.removeprefix('--')} [R3CHANNEL_ALLOW={word} overrides]"


def settings(words: Sequence[str], flags: Mapping[str, str]) -> dict[str, Any]:
    """Name -> value of a command line: True for a switch, a list where several follow; of a name that comes twice the last one.
    `flags`: names that a flag does not say itself.

    >>> settings(["train.py", "--moe-router-fusion", "--tp=2", "--lr", "1e-6", "--names", "a", "b"], {"--tp": "tp_size"})
    {'moe_router_fusion': True, 'tp_size': 2, 'lr': '1e-6', 'names': ['a', 'b']}
    """
    by_name, behind = dict[str, list[Any]](), list[Any]()
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "=", word)
        if flag:
            behind = by_name[flags.get(flag, flag[2:].replace("-", "_"))] = []
        if equals:
            behind.append(int(value) if value.isdecimal() else value)
    return {name: values[0] if len(values) == 1 else values or True for name, values in by_name.items()}


def sglang_fields() -> dict[str, tuple[str, Any]]:
    """Flag in slime -> name and plain default of each setting of the installed SGLang, read in its sources: to be imported it
    wants a GPU. Empty without SGLang. slime has arguments of its own with the same prefix; they are not among these."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0], "srt")
    files = (*root.glob("server_args.py"), *root.glob("arg_groups/fields/*.py"))  # 0.5.23 has them in both
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {
        "--sglang-" + flag.removeprefix("--").replace("_", "-"): (
            node.target.id,
            getattr(node.value, "value", None),
        )
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for flag in (node.target.id, *_aliases(node.annotation))
    }


def _aliases(annotation: ast.expr) -> list[str]:
    """The flags that SGLang's annotation of a setting names beside that of its own name."""
    texts = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.startswith("--") and " " not in text]
