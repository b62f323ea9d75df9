"""A job's command line as it is typed: names that are nobody's, and settings of Megatron and SGLang that cannot work with replay.

slime's and Megatron's parsers pass over what they do not know, and the tables that refuse a setting are asked where a model is
built, on every GPU of the job. Here a launcher or the doctor asks before anything starts. Imports nothing of the three.
"""

from __future__ import annotations

import ast
import importlib.util
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3channel.config import REFUSALS
from r3channel.engine import sglang_settings
from r3channel.errors import nearest
from r3channel.integrations import guard
from r3channel.integrations.slime.arguments import add_arguments
from r3channel.trainer.adapters import megatron_refusals

_OURS = ("--r3-", "--r3_", "--use-r3")
_OF_SGLANG = "sglang_"
_SET_BY_US = "moe_enable_routing_replay"


def misspelt(words: Sequence[str]) -> Iterator[str]:
    """One line for each word that looks like one of our options and is none."""
    known = [*vars(add_arguments(ArgumentParser(add_help=False)))["_option_string_actions"]]
    for word in words:
        if word.startswith(_OURS) and (name := word.partition("=")[0]) not in known:
            yield f"{name} is no option of r3channel{nearest(name, known)}"


def faults(words: Sequence[str], *, allowed: Collection[str] = ()) -> Iterator[str]:
    """One line for each fault of a job's arguments. `allowed`: words of R3CHANNEL_ALLOW, for SGLang's settings."""
    yield from misspelt(words)
    if guard.FLAG not in words:
        yield f"{guard.FLAG} is not among the arguments: without it nothing of r3channel happens"
    values = settings(words)
    for row in megatron_refusals.REFUSALS:
        if row.setting != _SET_BY_US and row.setting in values and row.refused(values[row.setting]):
            yield f"{sglang_settings.flag(row.setting, values[row.setting])}: {row.why}"
    ours = {
        name.removeprefix(_OF_SGLANG): each for name, each in values.items() if name.startswith(_OF_SGLANG)
    }
    refused = [*sglang_settings.refused(ours)]
    for name, default in _sglangs_own().items():
        if ours.get(name, default) != default and sglang_settings.judged(name, ours[name]) is None:
            refused.append(("unread", f"{sglang_settings.flag(name, ours[name])}: {REFUSALS['unread']}"))
    for word, text in refused:
        if word not in allowed:
            yield f"--sglang-{text.removeprefix('--')} [R3CHANNEL_ALLOW={word} overrides]"


def settings(words: Sequence[str]) -> Mapping[str, Any]:
    """Name -> value of a command line: True for a switch, a list where several follow; of a name that comes twice the last one.

    >>> settings(["train.py", "--moe-router-fusion", "--sglang-pp-size=2", "--lr", "1e-6", "--names", "a", "b"])
    {'moe_router_fusion': True, 'sglang_pp_size': 2, 'lr': '1e-6', 'names': ['a', 'b']}
    """
    found, behind = dict[str, list[Any]](), list[Any]()
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            behind = found[name.replace("-", "_")] = [_number(value)] if given else []
        else:
            behind.append(_number(word))
    return {name: each[0] if len(each) == 1 else each or True for name, each in found.items()}


def _number(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


def _sglangs_own() -> dict[str, Any]:
    """The settings of the installed SGLang and their defaults where those are plain values; slime has arguments of its own with
    the same prefix. Empty without SGLang."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return {}
    root = Path(found.submodule_search_locations[0], "srt")
    files = (*root.glob("server_args.py"), *root.glob("arg_groups/fields/*.py"))  # 0.5.23 has them in both
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {
        node.target.id: getattr(node.value, "value", None)
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
