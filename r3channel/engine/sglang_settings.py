"""SGLang's settings that rows can depend on: which are tested, which were judged by reading SGLang, which are refused.

The table is sglang_settings.toml. `refusals` and `r3channel doctor --engine` judge by it, and the table in this room's README is
made of it. A setting that is not there was neither tested nor read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.config import REFUSALS


class Verdict(StrEnum):
    TESTED = "tested"
    """A test runs the real SGLang with it and compares ids with a reference."""
    READ = "by reading"
    """The sources of the releases named in `sglang_hooks.READ_AGAINST` were read for what it does to rows."""
    REFUSED = "refused"
    """The engine does not start with it unless R3CHANNEL_ALLOW has its word."""


class Setting(NamedTuple):
    """One line of the table."""

    names: str
    """SGLang's server arguments, shell patterns, separated by blanks."""
    verdict: Verdict
    values: str
    """The values that the line is about, for the reader."""
    why: str
    """What was tested or read. For a refusal, the word that overrides it; the reason is in `config.REFUSALS`."""
    among: Sequence[Any] = ()
    not_among: Sequence[str] = ()
    above: int | None = None
    on: bool | None = None
    """The values that match, given by one of these four fields; if none is given, all values match."""

    def matches(self, name: str, value: Any) -> bool:
        if not any(fnmatchcase(name, pattern) for pattern in self.names.split()):
            return False
        if self.above is not None:
            return isinstance(value, int) and value > self.above
        if self.on is not None:
            return bool(value) is self.on
        # TOML has no None: "None" stands for it.
        if self.among:
            return value in self.among or str(value) in self.among
        return str(value) not in self.not_among


REFUSED = Verdict.REFUSED
_ASIDE = "no row depends on it"
_LINES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["setting"]
SETTINGS = tuple(Setting(**line | {"verdict": Verdict(line["verdict"])}) for line in _LINES)


def has_dp_attention(values: Mapping[str, Any]) -> bool:
    return bool(values.get("enable_dp_attention")) or (values.get("attn_dp_size") or 1) > 1


TOGETHER = (
    "moe_runner_backend flashinfer_cutlass with DP attention",
    "a2a",
    "with FP4 experts each rank routes its own tokens before they are gathered, and its rows are looked for where they would "
    "lie behind those of the ranks before it",
)
"""Settings that are taken one by one and refused together: their names for the reader, the word, and why."""


def refused_together(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (word, reason) of settings that are refused together."""
    names, word, why = TOGETHER
    if values.get("moe_runner_backend") == "flashinfer_cutlass" and has_dp_attention(values):
        yield word, f"{names}: {why}"


def judge(name: str, value: Any) -> Setting | None:
    """Return the first line of the table that matches this value.

    Returns:
        The line, or None if the value was neither tested nor read.

    >>> judge("pp_size", 2).verdict, judge("pp_size", 1).verdict, judge("enable_hisparse", True)
    (<Verdict.REFUSED: 'refused'>, <Verdict.READ: 'by reading'>, None)
    """
    return next((setting for setting in SETTINGS if setting.matches(name, value)), None)


def judgements(values: Mapping[str, Any], verdict: Verdict) -> Iterator[tuple[str, Any, Setting]]:
    """Yield the values that have this verdict, sorted by name.

    Values that no row depends on are left out.

    Args:
        values: Settings by argument name.
        verdict: The verdict to look for.

    Returns:
        An iterator of (name, value, line of the table).
    """
    for name in sorted(values):
        setting = judge(name, values[name])
        if setting is not None and setting.verdict is verdict and not setting.why.startswith(_ASIDE):
            yield name, values[name], setting


def find_refused(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (word, reason) of each refused value.

    Values that are refused only together follow.
    """
    for name, value, setting in judgements(values, Verdict.REFUSED):
        yield setting.why, f"{flag(name, value)}: {REFUSALS[setting.why]}"
    yield from refused_together(values)


def flag(name: str, value: Any) -> str:
    """Return a setting as it is written on SGLang's command line.

    >>> flag("pp_size", 2), flag("enable_pdmux", True)
    ('--pp-size 2', '--enable-pdmux')
    """
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {value}"
