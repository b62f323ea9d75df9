"""What an engine is refused for when it starts: settings under which its rows would be wrong without anybody noticing.

Pure: the places that know an engine fill in `Settings`. R3CHANNEL_ALLOW overrides by word (`config.REFUSALS`); what cannot be
represented at all has no word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from r3channel.engine.capture import check_representable, parse_weight_version
from r3channel.errors import ConfigError
from r3channel.spec import RoutingSpec

log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """The resolved values of an engine that decide whether its rows can be right."""

    capture: bool
    speculative: str | None
    disaggregation: str
    pp_size: int
    external_cache: bool
    mixed_chunk: bool
    two_batch_overlap: bool
    pdmux: bool
    a2a: str
    """The all-to-all backend whose scattered ids this SGLang's capture does not gather; empty where there is none."""
    weight_version: str

    @classmethod
    def from_server_args(cls, args: Any, *, gathered: frozenset[str] = frozenset()) -> Settings:
        """From the one object of settings that SGLang had until its bags (0.5.9, 0.5.15.post1).

        `gathered`: the all-to-all backends whose ids its capture gathers; 0.5.9 knows none.
        """
        return cls(
            capture=args.enable_return_routed_experts,
            speculative=args.speculative_algorithm,
            disaggregation=args.disaggregation_mode,
            pp_size=args.pp_size,
            external_cache=args.enable_hierarchical_cache or args.enable_lmcache,
            mixed_chunk=args.enable_mixed_chunk,
            two_batch_overlap=args.enable_two_batch_overlap,
            pdmux=args.enable_pdmux,
            a2a=not_gathered(args.moe_a2a_backend, gathered=gathered),
            weight_version=args.weight_version,
        )


def not_gathered(backend: str | None, *, gathered: frozenset[str]) -> str:
    """The all-to-all backend if it scatters tokens over an attention group and its ids are not gathered; else empty."""
    return "" if backend in (None, "none") or backend in gathered else backend


Refusal = tuple[str, str]
"""(word of R3CHANNEL_ALLOW or '', reason)."""


def refusals(
    settings: Settings, *, spec: RoutingSpec, router_layers: Iterable[int] = ()
) -> Iterator[Refusal]:
    """Every reason not to trust this engine. `router_layers`: where the built model has routers, if that is known."""
    if settings.speculative not in (None, "NONE"):
        yield (
            "speculative",
            f"speculative decoding ({settings.speculative}): rows of draft trees are moved without their ids",
        )
    if settings.disaggregation != "null":
        yield (
            "disaggregation",
            f"disaggregation ({settings.disaggregation}): nothing carries the prefill engine's rows to decode; join both "
            "engines' rows with r3channel.relay.arrival.splice.merge and set R3CHANNEL_ALLOW=disaggregation",
        )
    if settings.pp_size > 1:
        yield (
            "pp",
            f"pipeline-parallel engine (pp_size {settings.pp_size}): each stage holds its own layers only",
        )
    if settings.external_cache:
        yield (
            "external_cache",
            "hierarchical or external KV cache: slots are reloaded without their ids, so old rows would pass for new",
        )
    if settings.mixed_chunk:
        yield "mixed_chunk", "--enable-mixed-chunk: decoded and prefilled rows cannot be told apart"
    if settings.two_batch_overlap:
        yield (
            "two_batch_overlap",
            "--enable-two-batch-overlap: each half of a batch captures its ids from the buffer's first row on, so the second "
            "half's rows pass for the first's",
        )
    if settings.pdmux:
        yield (
            "pdmux",
            "--enable-pdmux: decode passes run between the layers of a prefill and write their ids into the same buffer, over "
            "the prefill's first rows",
        )
    if settings.a2a:
        yield (
            "a2a",
            f"--moe-a2a-backend {settings.a2a}: each rank of an attention group routes a part of the tokens, and this SGLang's "
            "capture does not gather them, so rows of other tokens would pass for the rest",
        )
    for check, value in ((check_representable, spec), (parse_weight_version, settings.weight_version)):
        try:
            check(value)  # type: ignore[arg-type]
        except ConfigError as error:
            yield "", str(error)
    built = tuple(sorted(set(router_layers)))
    if built and built != spec.moe_layers:
        yield (
            "routers",
            f"the engine built routers in layers {list(built)}, the checkpoint's configuration says {list(spec.moe_layers)}; "
            "SGLang's class for this model may ignore dense layers",
        )


def refuse(found: Iterable[Refusal], *, allowed: frozenset[str]) -> None:
    """Raise ConfigError with every reason that is not overridden; log those that are."""
    reasons = []
    for word, text in found:
        if word in allowed:
            log.warning("r3channel: R3CHANNEL_ALLOW overrides the refusal of this engine: %s", text)
        else:
            reasons.append(text)
    if reasons:
        raise ConfigError("r3channel refuses this engine: " + "; ".join(reasons))
