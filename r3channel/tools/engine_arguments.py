"""The settings of an SGLang engine as they are typed: which are tested, read or refused, and why.

`r3channel doctor --engine-arguments` and `r3channel slime` use this module. It reads SGLang's sources, because SGLang cannot be
imported without a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3channel.config import REFUSALS, EngineConfig, load_values
from r3channel.engine import refusals
from r3channel.engine.refusals import REFUSED, Refusal, flag, judge
from r3channel.errors import nearest
from r3channel.observe.check import Check, CheckContext


def check_engine_arguments(context: CheckContext) -> Iterator[Check]:
    """Yield whether each typed setting is tested, read or refused.

    A refused setting is a fault unless R3CHANNEL_ALLOW has its word.
    """
    fields, allow = sglang_fields("--"), allowed_words(context.environment)
    names, defaults = {option: name for option, (name, _) in fields.items()}, dict(fields.values())
    for typed in (word.partition("=")[0] for word in context.engine_arguments if word not in fields):
        begun = [name for option, name in names.items() if option.startswith(typed)]
        names |= {typed: begun[0]} if len(begun) == 1 else {}  # SGLang's parser completes such a name, too
    values = parse(context.engine_arguments, names)
    for name, value in values.items():
        typed = flag(name, value)
        if fields and name not in defaults:
            found = f"no setting of the SGLang that is installed here{nearest(typed.split()[0], fields)}"
            yield Check(name=typed, ok=False, found=found)
        else:
            word, found = _judge(name, value, defaults.get(name))
            yield _check(typed, word, found, allow)
    values.setdefault("speculative_algorithm", None)
    for word, text in (*refusals.refused_together(values), *refusals.refused_chains(values)):
        yield _check("together", word, f"refused: {text}", allow)


def _judge(name: str, value: Any, default: Any) -> Refusal:
    """Return a refusal's word, empty if none, and what is known."""
    setting = judge(name, value)
    if setting is None and str(value) == str(default):
        return "", "SGLang's default"
    if setting is not None and setting.verdict is not REFUSED:
        return "", f"{setting.verdict}: {setting.why}"
    word = "unread" if setting is None else setting.why
    return word, f"refused: {REFUSALS[word]}"


def _check(name: str, word: str, found: str, allow: frozenset[str]) -> Check:
    ok = not word or word in allow
    return Check(name=name, ok=ok, found=found, remedy=f"R3CHANNEL_ALLOW={word} overrides")


def find_refused(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield (word, reason) for all that an engine would refuse.

    Args:
        values: the settings that were typed.
        defaults: the default of each setting that this SGLang has.
    """
    yield from refusals.find_refused(values)
    for name, default in defaults.items():
        word, _ = _judge(name, value := values.get(name, default), default)
        if word == "unread":
            yield word, f"{flag(name, value)}: {REFUSALS[word]}"


def allowed_words(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the words of R3CHANNEL_ALLOW in an environment."""
    return EngineConfig(allow=load_values(EngineConfig, environment=environment).get("allow", "")).allowed


def parse(words: Sequence[str], flags: Mapping[str, str]) -> dict[str, Any]:
    """Return name -> value of a command line.

    A value is True for a switch, and a list if several words follow.

    Args:
        words: what was typed. Words before the first flag are ignored. If a name comes twice, the last one counts.
        flags: the names of flags that do not say their name themselves.

    >>> parse(["train.py", "--moe-router-fusion", "--tp=2", "--lr", "1e-6", "--names", "a", "b"], {"--tp": "tp_size"})
    {'moe_router_fusion': True, 'tp_size': 2, 'lr': '1e-6', 'names': ['a', 'b']}
    """
    by_name, behind = dict[str, list[Any]](), list[Any]()
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "=", word)
        if option:
            behind = by_name[flags.get(option, option[2:].replace("-", "_"))] = []
        if equals:
            behind.append(int(value) if value.isdecimal() else value)
    return {name: values[0] if len(values) == 1 else values or True for name, values in by_name.items()}


def sglang_fields(prefix: str) -> dict[str, tuple[str, Any]]:
    """Return the settings of the installed SGLang by flag.

    Args:
        prefix: how flags begin. slime's begin with --sglang-, as do arguments of its own, which are not among these.

    Returns:
        flag -> name and plain default; empty without SGLang.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0], "srt")
    files = (*root.glob("server_args.py"), *root.glob("arg_groups/fields/*.py"))  # 0.5.23 uses both
    found = dict[str, tuple[str, Any]]()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            texts = [str(part.value) for part in ast.walk(node.annotation) if isinstance(part, ast.Constant)]
            flags = (node.target.id, *(text for text in texts if text.startswith("--") and " " not in text))
            names = [prefix + flag.removeprefix("--").replace("_", "-") for flag in flags]
            found |= dict.fromkeys(names, (node.target.id, getattr(node.value, "value", None)))
    return found
