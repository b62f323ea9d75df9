"""The tensors that each token brings beside its expert ids: what they are, by name. Every other room reads these declarations.

A tensor has rows, one per token; the row of a token lies at the position of the logits that made it: that of the token before.
A row has any number of entries, of one numpy dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
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
    values = (entries_N[name] for name in entries_N.dtype.names or ())
    # torch can do little with unsigned numbers of more than a byte
    return tuple(value.astype(np.int32 if value.dtype.kind == "u" else value.dtype) for value in values)


def _likeliest(entries_N: Values) -> tuple[Values, ...]:
    """Return the likeliest tokens of entries, and the mass of the rest.

    These are token ids [N, k] int32, log-probs [N, k], and the mass of all other tokens [N] float32.
    """
    high_NQ = entries_N["high"][..., None].astype(np.int32) >> np.arange(0, 8, 2) & 3
    ids_NK = entries_N["low"] | high_NQ.reshape(entries_N["low"].shape) << 16
    return ids_NK, entries_N["logprob"].copy(), entries_N["tail"].copy()


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """One kind of tensor that tokens bring."""

    option: str
    """Its name, then its parameters, as the option `token_tensors` has them."""
    kind: int
    """The kind of its frames: 3 to 254, never given to another tensor."""
    entry: np.dtype[Any]
    """One entry, little endian, a field for each of its values."""
    asked_by: str
    """The request settings that make an engine return it; the error for a reply without it names them."""
    made_by: str = ""
    """The data of an engine that it is made from: `mask_rows`, `top_logprobs`, `router_weights`."""
    dense: bool = False
    """Whether each row that is there has exactly one entry."""
    by_layer: bool = False
    """Whether the row of a token goes with its expert ids: a value for each of them, [layers, K]. Prompts have rows too."""
    entries: int = 1
    """Entries that a row has on average; plans use this number."""
    chosen: str = ""
    """The field whose values in a row include the sampled token; empty where that is not certain."""
    stage: Literal["last", "every"] = "last"
    """Pipeline stages that get it: the one with the logits, or all."""
    values: Callable[[Values], tuple[Values, ...]] = _fields
    """Turns [N] entries into what a trainer sees: arrays [N, ...]."""

    @property
    def name(self) -> str:
        return self.option.partition(":")[0]

    @property
    def digest(self) -> int:
        """Return the number that tells frames of other parameters apart."""
        return xxh3_64_intdigest(self.option.encode())

    @property
    def bytes_per_token(self) -> int:
        """Return about how many bytes a token with a row takes."""
        return self.entry.itemsize * self.entries + LENGTH_BYTES

    def reshape(self, layers: int, top_k: int) -> TokenTensor:
        """Return the tensor as routers of this model have it.

        Args:
            layers: MoE layers of the routers.
            top_k: Ids that each router chooses.
        """
        if not self.by_layer:
            return self
        fields = [(name, self.entry[name].base, (layers, top_k)) for name in self.entry.names or ()]
        return replace(self, entry=np.dtype(fields))


_MASK, _TOKEN_ID, _LOGPROB = "return_sampling_mask", ("token_id", "<u4"), ("logprob", "<f4")
_FILTERED: dict[str, Any] = {"made_by": "mask_rows", "entries": 8, "chosen": "token_id"}
"""8 is the mean of what a filter leaves (prime-rl#2979)."""
_OF_SUPPORT = f'{_MASK} and sampling_logprobs_mode="support"'
_ROUTER: dict[str, Any] = {"made_by": "router_weights", "dense": True, "by_layer": True, "stage": "every"}


def _topk_logprobs(k: str = "128", dtype: str = "float16") -> TokenTensor:
    """Return the tensor of the k likeliest tokens.

    The tokens are those of the distribution that sampled. `k` is a multiple of 4; `dtype` is float16 or float32.
    """
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


_MASKS = TokenTensor("sampling_masks", 3, np.dtype([_TOKEN_ID]), _MASK, **_FILTERED)
_SUPPORT = TokenTensor("sampling_support", 4, np.dtype([_TOKEN_ID, _LOGPROB]), _OF_SUPPORT, **_FILTERED)
_WEIGHTS = TokenTensor(
    "combine_weights", 6, np.dtype([("weight", "<f2")]), "return_routed_experts", **_ROUTER
)
"""The weights of a router's choices, which it hands to the experts."""
REGISTRY: dict[str, Callable[..., TokenTensor]] = {
    "sampling_masks": partial(replace, _MASKS), "sampling_support": partial(replace, _SUPPORT),
    "topk_logprobs": _topk_logprobs, "combine_weights": partial(replace, _WEIGHTS),
}  # fmt: skip
"""Name -> what declares the tensor, given its parameters."""
LABELS["tensor"] = tuple(REGISTRY)


def kind_names() -> dict[int, str]:
    """Return the names of all kinds of frames.

    Expert ids and errors are among them.
    """
    tensors = [declare() for declare in REGISTRY.values()]
    return {KIND_EXPERT_IDS: "expert_ids", KIND_ERROR: "error"} | {t.kind: t.name for t in tensors}


def tensors_of(options: str | Iterable[str], spec: RoutingSpec | None = None) -> tuple[TokenTensor, ...]:
    """Return the tensors that an option names; frames lie in this order.

    Args:
        options: Names with their parameters; commas separate them in a text.
        spec: The tensors then have the shape that tokens of this model have.

    Raises:
        ConfigError: A name or parameter is unknown, or a name comes twice.
    """
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
    return tensors if spec is None else tuple(t.reshape(spec.num_moe_layers, spec.top_k) for t in tensors)
