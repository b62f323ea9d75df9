"""With which engines an update would be committed, verified, and leave something old: what is seen, why, and the remedy.

Pure: `SETTINGS` are judged by what `/server_info` says, before anything is linked; a model by what our half in the engine sees.
Read against SGLang 0.5.23 and 0.5.15.post1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """Server arguments, and values of them that an update is refused for."""

    names: str
    covers: Callable[[Any], bool]
    why: str
    remedy: str


def _above(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value > most


def _none_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


_REBALANCED = "experts change their places while it serves, and the map of them that was learned when it was linked does not follow"
_QUANTISES = (
    "it quantises a plain checkpoint when it starts: plain weights would land under scales of the old ones"
)
_UNQUANTISED = "start it without, or from a checkpoint that holds float8 blocks, and give `float8_blocks`"
_BROADCAST = "let SGLang load by itself (`staged=False`), or start it without"

ANY_WAY: tuple[Setting, ...] = (
    Setting(
        "dp_size", _above(1), "SGLang hands weights to one replica alone", "start one engine for each replica"
    ),
    Setting(
        "pp_size",
        _above(1),
        "only its first stage answers for an update, so that the others keep old layers unseen",
        "start it with --pp-size 1 and more --tp-size",
    ),
    Setting(
        "weight_cache_mode",
        _none_of(None, "off"),
        "the weights are shared with a daemon and with other engines, which would change unseen",
        "start it with --weight-cache-mode off",
    ),
    Setting(
        "offload_group_size",
        _above(0),
        "layers are fetched ahead, so that the next pass begins with old ones",
        "start it with --cpu-offload-gb instead",
    ),
    Setting(
        "enable_elastic_expert_backup",
        bool,
        "experts that are restored come from the checkpoint it was started from",
        "start it without",
    ),
    Setting("modelopt_quant quantize_and_serve torchao_config", bool, _QUANTISES, _UNQUANTISED),
)
"""Refused in either way. `torchao_config` is of 0.5.15.post1."""

STAGED: tuple[Setting, ...] = (
    Setting(
        "version",
        lambda value: _before(value, (0, 5, 23)),
        "it has no begin and end around an update, and what an order raises would end it",
        "let SGLang load by itself (`staged=False`), or install SGLang 0.5.23",
    ),
    Setting("enable_eplb", bool, _REBALANCED, _BROADCAST),
    Setting("elastic_ep_backend", _none_of(None, "none"), _REBALANCED, _BROADCAST),
    Setting(
        "speculative_algorithm",
        _none_of(None, "NONE", "NGRAM"),
        "the staged copy is the target's alone, so that the draft would stay old",
        "start it without or with NGRAM; or let SGLang load both (`staged=False, expected=None`) and give the draft's tensors too",
    ),
    Setting(
        "moe_runner_backend",
        lambda value: "flashinfer_trtllm" in str(value),
        "experts are kept repacked, not as the checkpoint has them",
        _BROADCAST,
    ),
    Setting(
        "load_format", lambda value: value == "flash_rl", "its loader quantises what it is given", _BROADCAST
    ),
)
"""Refused where bytes are staged beside the parameters; SGLang's own loading is right with these. `version` is no argument."""


def refused(values: Mapping[str, Any], settings: tuple[Setting, ...]) -> str:
    """Why an update of an engine with these server arguments would be wrong, and what to do; empty where it would not."""
    return "; ".join(
        f"{name}={values[name]}: {one.why} ({one.remedy})"
        for one in settings
        for name in one.names.split()
        if one.covers(values.get(name))
    )


def refused_model(model: torch.nn.Module) -> Iterator[str]:
    """Of what a rank has built, whatever it was started with. Nothing is changed."""
    modules = list(model.modules())
    configs = {id(found): found for one in modules if (found := _quantisation(one)) is not None}
    for config in configs.values():
        kept = [value for name, value in vars(config).items() if _SERIALISED.fullmatch(name)]
        if (kept and not any(kept)) or getattr(config, "is_nvfp4_online", False):
            yield f"online quantisation ({type(config).__name__}): {_QUANTISES} ({_UNQUANTISED})"
    if any(getattr(one, "use_intel_amx_backend", False) for one in modules):
        yield "weights are packed for AMX, which SGLang cannot undo: new ones would land in the packed form (start it on other CPUs)"
    yield from {str(why) for one in modules if (why := getattr(one, "_derived_weight_cache_error", None))}


_SERIALISED = re.compile(r"is_checkpoint_\w+_serialized")


def _quantisation(module: torch.nn.Module) -> Any:
    return getattr(getattr(module, "quant_method", None), "quant_config", None)


def _before(version: Any, first: tuple[int, ...]) -> bool:
    """
    >>> [_before(version, (0, 5, 23)) for version in ("0.5.15.post1", "0.5.23", "0.6.0.dev1", None)]
    [True, False, False, False]
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return found is not None and tuple(map(int, found.groups())) < first
