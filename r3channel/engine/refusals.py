"""Why an engine is refused when it starts: settings and routers with which its rows would be wrong without anybody noticing.

This module is pure: its callers know an engine and say what it was started with and what it has built. R3CHANNEL_ALLOW overrides
a refusal by its word (`config.REFUSALS`); what cannot be represented at all has no word.

sglang_settings.toml is the table of SGLang's settings that rows can depend on: which are tested, which were judged by reading
SGLang, which are refused. `r3channel doctor --engine` judges by it, too, and the table in this room's README is made of it. A
setting that is not there was neither tested nor read.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.config import REFUSALS
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec

log = logging.getLogger(__name__)

KERNEL_ROUTING = ("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4", "experimental_sgl_trtllm")
"""Values of moe_runner_backend with which a router of 0.5.15.post1 leaves the choice to a kernel."""

Refusal = tuple[str, str]
"""(word of R3CHANNEL_ALLOW or '', reason)."""


# -- settings ---------------------------------------------------------------------------------------------------------------


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
_LINES = tomllib.loads(Path(__file__).with_name("sglang_settings.toml").read_text())["setting"]
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


def refused_together(values: Mapping[str, Any]) -> Iterator[Refusal]:
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


def find_refused(values: Mapping[str, Any]) -> Iterator[Refusal]:
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


# -- an engine --------------------------------------------------------------------------------------------------------------


class Router(NamedTuple):
    """One router of a built model."""

    layer: int
    unseen: str = ""
    """Why the router's choices never reach the capturer; empty if they do."""


def parse_weight_version(text: str) -> int:
    """Return SGLang's weight version string as a count.

    "default" means that the version was never set, and counts as 0.

    Args:
        text: A decimal count of at most 18 digits, such as "0" or "7", or "default".

    Raises:
        ConfigError: For any other text.

    >>> parse_weight_version("7"), parse_weight_version("default")
    (7, 0)
    """
    if text == "default":
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ConfigError(
            f"weight version {text!r}: expected a decimal count such as '0' or '7'. Rows are told apart by it; start the engine "
            "with --weight-version 0 and count up with each update"
        )
    return int(text)


def refusals(
    values: Mapping[str, Any], *, spec: RoutingSpec, routers: Iterable[Router] | None = None
) -> Iterator[Refusal]:
    """Yield every reason not to trust an engine of these settings.

    Args:
        values: Settings by argument name.
        spec: The model's routing.
        routers: Routers of the built model, or None if they are not known.
    """
    yield from find_refused(values)
    if spec.num_experts == 256 and spec.top_k == 1:  # ids are narrowed to a byte, the padding id -1 too
        yield (
            "",
            "256 experts with top-1: -1 and expert 255 are the same byte, so a missing row would look real",
        )
    try:
        parse_weight_version(values["weight_version"])
    except ConfigError as error:
        yield "", str(error)
    if routers is not None:
        yield from _refused_routers(list(routers), spec=spec)


def _refused_routers(routers: list[Router], *, spec: RoutingSpec) -> Iterator[Refusal]:
    unseen = [f"layer {router.layer}: {router.unseen}" for router in routers if router.unseen]
    if unseen:
        yield "kernel_routing", f"{REFUSALS['kernel_routing']} ({', '.join(unseen)})"
    built = sorted({router.layer for router in routers})
    if tuple(built) != spec.moe_layers:
        told = f"the checkpoint's configuration says {list(spec.moe_layers)}: {REFUSALS['routers']}"
        yield "routers", f"the engine built routers in layers {built}, {told}"


def refused_chains(values: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a refusal of speculative decoding with DP attention.

    It applies where a capturer is told a graph's size in requests (0.5.15.post1, 0.5.23), and not in tokens, as in slime's image.
    """
    algorithm = values["speculative_algorithm"]
    if algorithm not in (None, "NONE") and has_dp_attention(values):
        yield (
            "speculative",
            f"--speculative-algorithm {algorithm} with DP attention: a graph that verifies has several rows of a request, and a "
            "rank's are looked for as if it had one",
        )


def unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were neither tested nor read."""
    return {name: value for name, value in values.items() if judge(name, value) is None}


def refused_unread(values: Mapping[str, Any]) -> Iterator[Refusal]:
    if values:
        names = " ".join(flag(name, value) for name, value in values.items())
        yield "unread", f"{names}: {REFUSALS['unread']}"


def refuse(found: Iterable[Refusal], *, allowed: frozenset[str]) -> None:
    """Raise for every refusal that is not overridden.

    Args:
        found: Refusals.
        allowed: Words of R3CHANNEL_ALLOW. A refusal with one of these words is logged.

    Raises:
        ConfigError: With every reason that is not overridden.
    """
    reasons = []
    for word, text in found:
        if word in allowed:
            log.warning("r3channel: R3CHANNEL_ALLOW overrides the refusal of this engine: %s", text)
        else:
            reasons.append(f"{text} [{word}]" if word else text)
    if reasons:
        raise ConfigError("r3channel refuses this engine: " + "; ".join(reasons))
