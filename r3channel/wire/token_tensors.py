"""The tensors that each token brings beside its expert ids: what they are, by name. Every other room reads these declarations.

A tensor has rows, one per token; the row of a token lies at the position of the logits that made it: that of the token before.
A row has any number of entries, of one numpy dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from xxhash import xxh3_64_intdigest

from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metric_table import LABELS

KIND_EXPERT_IDS, KIND_ERROR = 1, 255
MOST_ENTRIES, LENGTH_BYTES = 0xFFFF, 2
"""Entries of one row at most: its length is a u16."""
MOST_TOPK, TOPK_VOCABULARY = 256, 1 << 18
"""Token ids of `topk_logprobs` have 18 bits: those of today's vocabularies."""
Values = np.ndarray[Any, np.dtype[Any]]


def _fields(entries_N: Values) -> tuple[Values, ...]:
    """The fields of entries, each an array; unsigned ones as int32, as torch can do little with those of more than a byte."""
    values = (entries_N[name] for name in entries_N.dtype.names or ())
    return tuple(value.astype(np.int32 if value.dtype.kind == "u" else value.dtype) for value in values)


def _likeliest(entries_N: Values) -> tuple[Values, ...]:
    """(token ids [N, k] int32, log-probs [N, k], the mass of all other tokens [N] float32)."""
    high_NQ = entries_N["high"][..., None].astype(np.int32) >> np.arange(0, 8, 2) & 3
    ids_NK = entries_N["low"] | high_NQ.reshape(entries_N["low"].shape) << 16
    return ids_NK, entries_N["logprob"].copy(), entries_N["tail"].copy()


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """One tensor per token."""

    option: str
    """As the option `token_tensors` says it: its name, then parameters."""
    kind: int
    """The kind of its frames: 3 to 254, never given to another tensor."""
    entry: np.dtype[Any]
    """One entry, little endian, a field for each of its values."""
    asked_by: str
    """What makes an engine return it, told where a reply has none."""
    made_by: str = ""
    """What of an engine's it is made from: `mask_rows`, `top_logprobs`, `router_weights`."""
    dense: bool = False
    """Whether a row has one entry, if it is there."""
    by_layer: bool = False
    """Whether the row of a token goes with its expert ids: a value for each of them, [layers, K]. Prompts have rows too."""
    entries: int = 1
    """Entries that a row has on average: what a plan reckons with."""
    chosen: str = ""
    """The field whose values in a row have the token that was sampled among them; empty where that is not sure."""
    stage: Literal["last", "every"] = "last"
    """Pipeline stages that get it: the one with the logits, or all."""
    values: Callable[[Values], tuple[Values, ...]] = _fields
    """What a trainer sees of [N] entries: [N, ...] each."""

    @property
    def name(self) -> str:
        return self.option.partition(":")[0]

    @property
    def digest(self) -> int:
        """Tells a frame of other parameters."""
        return xxh3_64_intdigest(self.option.encode())

    @property
    def bytes_per_token(self) -> int:
        """About; of a token that has a row."""
        return self.entry.itemsize * self.entries + LENGTH_BYTES

    def shaped(self, layers: int, top_k: int) -> TokenTensor:
        """As routers of so many layers have it."""
        if not self.by_layer:
            return self
        fields = [(name, self.entry[name].base, (layers, top_k)) for name in self.entry.names or ()]
        return replace(self, entry=np.dtype(fields))

    def reaches(self, pp: int, stages: int) -> bool:
        """Whether pipeline stage `pp` of so many gets it."""
        return self.stage == "every" or pp == stages - 1


_MASK, _TOKEN_ID, _LOGPROB = "return_sampling_mask", ("token_id", "<u4"), ("logprob", "<f4")
_FILTERED: dict[str, Any] = {"made_by": "mask_rows", "entries": 8, "chosen": "token_id"}
"""8 is the mean of what a filter leaves (prime-rl#2979)."""


def _sampling_masks() -> TokenTensor:
    return TokenTensor("sampling_masks", 3, np.dtype([_TOKEN_ID]), _MASK, **_FILTERED)


def _sampling_support() -> TokenTensor:
    asked_by = f'{_MASK} and sampling_logprobs_mode="support"'
    return TokenTensor("sampling_support", 4, np.dtype([_TOKEN_ID, _LOGPROB]), asked_by, **_FILTERED)


def _topk_logprobs(k: str = "128", dtype: str = "float16") -> TokenTensor:
    """The k likeliest tokens, a multiple of 4, of the distribution that sampled; float16 or float32."""
    count = int(k) if k.isdigit() else 0
    if not 0 < count <= MOST_TOPK or count % 4 or dtype not in ("float16", "float32"):
        raise ConfigError(
            f"topk_logprobs:{k}:{dtype}, expected 4 to {MOST_TOPK} in steps of 4, and float16 or float32"
        )
    ids = [("low", "<u2", (count,)), ("high", "u1", (count // 4,))]
    entry = np.dtype([*ids, ("logprob", np.dtype(dtype).newbyteorder("<"), (count,)), ("tail", "<f4")])
    made: dict[str, Any] = {"made_by": "top_logprobs", "dense": True, "values": _likeliest}
    asked_by = f"return_logprob and top_logprobs_num={count}"
    return TokenTensor(f"topk_logprobs:{count}:{dtype}", 5, entry, asked_by, **made)


def _combine_weights() -> TokenTensor:
    """What a router weighs its choices with, as it hands them to the experts."""
    made: dict[str, Any] = {"made_by": "router_weights", "dense": True, "by_layer": True, "stage": "every"}
    entry = np.dtype([("weight", "<f2")])
    return TokenTensor("combine_weights", 6, entry, "return_routed_experts", **made)


REGISTRY: dict[str, Callable[..., TokenTensor]] = {
    "sampling_masks": _sampling_masks, "sampling_support": _sampling_support, "topk_logprobs": _topk_logprobs,
    "combine_weights": _combine_weights,
}  # fmt: skip
"""Name -> what declares the tensor, given its parameters."""
LABELS["tensor"] = tuple(REGISTRY)


def kind_names() -> dict[int, str]:
    """The kinds of frames, of expert ids and errors too."""
    tensors = [declare() for declare in REGISTRY.values()]
    return {KIND_EXPERT_IDS: "expert_ids", KIND_ERROR: "error"} | {t.kind: t.name for t in tensors}


def tensors_of(options: str | Iterable[str], spec: RoutingSpec | None = None) -> tuple[TokenTensor, ...]:
    """The tensors that an option names, with commas, as tokens of a model have them; frames lie in this order. Raises ConfigError
    for an unknown name or parameter, and for a name that comes twice."""
    words = options.split(",") if isinstance(options, str) else options
    wanted = [word.strip().split(":") for word in words if word.strip()]
    names = [name for name, *_ in wanted]
    try:
        tensors = tuple(REGISTRY[name](*parameters) for name, *parameters in wanted)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"token_tensors {options!r}, expected some of {sorted(REGISTRY)}, e.g. topk_logprobs:128"
        ) from error
    if len(set(names)) < len(names):
        raise ConfigError(f"token_tensors {options!r}, expected each name at most once")
    return tensors if spec is None else tuple(t.shaped(spec.num_moe_layers, spec.top_k) for t in tensors)
