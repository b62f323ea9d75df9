"""Why an engine is refused when it starts: settings and routers with which its rows would be wrong without anybody noticing.

This module is pure: its callers know an engine and say what it was started with and what it has built. R3CHANNEL_ALLOW overrides
a refusal by its word (`config.REFUSALS`); what cannot be represented at all has no word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from r3channel.config import REFUSALS
from r3channel.engine.sglang_settings import find_refused, flag, has_dp_attention, judge
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec

log = logging.getLogger(__name__)

KERNEL_ROUTING = ("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4", "experimental_sgl_trtllm")
"""Values of moe_runner_backend with which a router of 0.5.15.post1 leaves the choice to a kernel."""

Refusal = tuple[str, str]
"""(word of R3CHANNEL_ALLOW or '', reason)."""


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
