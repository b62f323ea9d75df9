"""Engine settings under which a verified and committed update would still leave something old; each with its remedy.

Nothing here has side effects. `ANY_WAY` and `STAGED` are checked with what `/server_info` says, before a link opens; a model is
checked by our half in the engine. Written against SGLang 0.5.23 and 0.5.15.post1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from r3channel.weights.manifest import TensorMeta


class Setting(NamedTuple):
    """A server argument, and the values with which an update is refused."""

    name: str
    covers: Callable[[Any], bool]
    why: str
    remedy: str = "start it without"


def _is_above(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value > most


def _none_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _is_old(version: Any) -> bool:
    """Return whether a release is before 0.5.23, or unknown.

    >>> [_is_old(version) for version in ("0.5.15.post1", None, "0.5.23", "0.6.0.dev1")]
    [True, True, False, False]
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return numbers is None or tuple(map(int, numbers.groups())) < (0, 5, 23)


_QUANTISES = "it quantises a plain checkpoint at its start: plain weights would get its old scales"
_FLOAT8 = "start it without, or from a checkpoint of float8 blocks, and give float8 blocks (examples/float8_blocks.py)"
_PACKED = "they are not made here, and float32 ones do not fit (start it with an FP8 GEMM backend that keeps float32 scales)"
_DRAFT = (
    "start it without or with NGRAM: no draft can be kept frozen, since SGLang gives it the target's tensors where names agree. "
    "A draft whose tensors are in the update, too, SGLang loads: `staged=False, expected=None`"
)

ANY_WAY: tuple[Setting, ...] = (
    Setting("dp_size", _is_above(1), "weights reach one replica alone", "start one engine for each"),
    Setting("pp_size", _is_above(1), "only its first stage answers: others stay old unseen", "--pp-size 1"),
    Setting("weight_cache_mode", _none_of(None, "off"), "its weights are shared with a daemon and others"),
    Setting("offload_group_size", _is_above(0), "layers of a pass are fetched before it", "--cpu-offload-gb"),
    Setting("dcp_replicate_q_proj", bool, "queries use copies of weights that were made at its start"),
    Setting("enable_elastic_expert_backup", bool, "experts return as in the checkpoint it was started from"),
    Setting("modelopt_quant", bool, _QUANTISES, _FLOAT8),
    Setting("quantize_and_serve", bool, _QUANTISES, _FLOAT8),
    Setting("torchao_config", bool, _QUANTISES, _FLOAT8),  # of 0.5.15.post1
)
"""Settings that are refused for staged bytes and for broadcasts."""

_OURSELVES = "start it without, or let SGLang load by itself: `staged=False`"
OLD = Setting("version", _is_old, "it has no begin and end of updates", _OURSELVES)
"""An old release. It gets no order at all, because an exception in an order would end the engine."""

STAGED: tuple[Setting, ...] = (
    OLD,
    Setting("elastic_ep_backend", _none_of(None, "none"), "its ranks come and go, with experts", _OURSELVES),
    Setting("speculative_algorithm", _none_of(None, "NONE", "NGRAM"), "the draft would stay old", _DRAFT),
    Setting("moe_runner_backend", lambda v: "_trtllm" in str(v), "experts are kept repacked", _OURSELVES),
    Setting("load_format", lambda v: v == "flash_rl", "its loader quantises what it is given", _OURSELVES),
)
"""Settings that are refused where bytes are staged beside the parameters; SGLang's own loading is right with these."""


def find_refusal(values: Mapping[str, Any], settings: tuple[Setting, ...]) -> str:
    """Return why an update of such an engine would be wrong.

    Args:
        values: The engine's server arguments.
        settings: The settings to refuse.

    Returns:
        The reasons and what to do; empty where an update would be right.
    """
    wrong = ((row, values.get(row.name)) for row in settings if row.covers(values.get(row.name)))
    return "; ".join(f"{row.name}={value}: {row.why} ({row.remedy})" for row, value in wrong)


def refused_model(model: torch.nn.Module) -> Iterator[str]:
    """Yield why the model that a rank has built cannot be updated.

    The engine's settings do not matter for this. Nothing is changed.
    """
    modules = list(model.modules())
    methods = [getattr(module, "quant_method", None) for module in modules]
    configs = {id(config): config for method in methods if (config := getattr(method, "quant_config", None))}
    for config in configs.values():
        kept = [value for name, value in vars(config).items() if _SERIALISED.fullmatch(name)]
        if (kept and not any(kept)) or getattr(config, "is_nvfp4_online", False):
            yield f"online quantisation ({type(config).__name__}): {_QUANTISES} ({_FLOAT8})"
    if any(getattr(module, "use_intel_amx_backend", False) for module in modules):
        yield "weights are packed for AMX: new ones would land in the packed form (start it on other CPUs)"
    metas = (TensorMeta.of(name, param) for name, param in model.named_parameters() if "scale" in name)
    if packed := next((meta for meta in metas if meta.dtype == torch.int32), None):
        yield f"{packed} holds packed UE8M0 scales, four exponents a number: {_PACKED}"
    yield from {str(why) for m in modules if (why := getattr(m, "_derived_weight_cache_error", None))}


_SERIALISED = re.compile(r"is_checkpoint_\w+_serialized")
