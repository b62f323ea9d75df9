"""Bytes per token and speed of every codec, beside entropy, memcpy and what SGLang's reply does with the same ids.

GB are raw int16 GB of the ids (768 B per token of 48 layers x top-8) whatever travels, so that all rows compare. Times are CPU
times of one core. The ids are drawn here (`generate`), so that figures can be quoted with the data they were measured on:

    U     uniform random k-subsets in random order: the worst case for any codec
    Zmid  fitted to published statistics of real models: per-layer concentration, experts that cover 90 %, next-token overlap

Neither is a recorded trace. Zmid draws logits as popularity(layer, expert) + sequence bias + AR(1) over time + token identity +
white noise and keeps the k largest in descending order, as a router kernel emits them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from math import lgamma, log
from typing import Any, NamedTuple

import numpy as np

from r3channel.bench.harness import Effort, Parts, medians_s
from r3channel.model.presets import Model, model_named
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import AUTO, CODECS
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.routing import Ids

MODELS = ("qwen3-30b-a3b", "deepseek-v3", "kimi-k2", "qwen3-next")
_MIN_S = 0.02
_VOCABULARY = 512
_SEQUENCE_ROWS = 512
"""Rows after which another sequence, with its own bias, begins."""

_POPULARITY, _SEQUENCE, _TIME, _TOKEN, _NOISE = 0.63, 0.45, 0.72, 0.50, 0.38
"""Standard deviations of the parts of a logit."""
_RHO = 0.82
"""The AR(1) coefficient."""

_Floats = np.ndarray[Any, np.dtype[np.float32]]


class Way(NamedTuple):
    """A way to send ids. `decode(encode())` returns the ids again, in the dtype that the way works with."""

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]


def measure(effort: Effort) -> dict[str, Any]:
    """Measure every codec on each model and regime.

    Returns:
        `results`: one row per model, regime and way. `entropy_bytes_per_token` is that of the best memoryless model of the same
        ids, order dropped for `set`.
    """
    rows, rounds = effort.choose(4096, 256), effort.rounds_of(7, 3)
    results = [
        {"model": name, "regime": regime, **row}
        for name in MODELS
        for regime in REGIMES
        for row in _results(model_named(name), regime, rows, rounds)
    ]
    return {"rows": rows, "results": results}


PARTS: Parts = {"codecs": measure}


def _results(model: Model, regime: str, rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    ids_TLK = generate(model, regime=regime, rows=rows)
    ordered, unordered = entropy_bytes_per_token(ids_TLK, num_experts=model.num_experts)
    unordered_names = {codec.name for codec in CODECS.values() if not codec.keeps_order}
    for name, way in ways(ids_TLK, spec=model.spec).items():
        data = way.encode()
        calls = {"encode": way.encode, "decode": lambda way=way, data=data: way.decode(data)}
        seconds = medians_s(calls, rounds=rounds, min_s=_MIN_S)
        speeds = {f"{what}_gbps": round(ids_TLK.size * 2 / 1e9 / s, 3) for what, s in seconds.items()}
        entropy = round(unordered if name in unordered_names else ordered, 1)
        size = round(len(data) / rows, 2)
        yield {"codec": name, "bytes_per_token": size, **speeds, "entropy_bytes_per_token": entropy}


def ways(ids_TLK: Ids, *, spec: RoutingSpec) -> dict[str, Way]:
    """Return the ways to send these ids, by name.

    Ours have the header, the sections and, when encoding, the digests. SGLang's JSON has int32 over all decoder layers, dense
    ones too.
    """
    here = [codec for codec in CODECS.values() if not codec.needs or find_spec(codec.needs)]
    codecs = (AUTO, *(codec.name for codec in here if codec.encode(ids_TLK) is not None))
    stock_TAK = np.zeros((len(ids_TLK), spec.num_layers, spec.top_k), np.int32)
    stock_TAK[:, list(spec.moe_layers)] = ids_TLK
    stock = Way(
        lambda: json.dumps({"routed_experts": base64.b64encode(stock_TAK.data).decode()}).encode(),
        lambda data: np.frombuffer(base64.b64decode(json.loads(data)["routed_experts"]), np.int32),
    )
    return {codec: _ours(spec, ids_TLK, codec) for codec in codecs} | {"json-base64-int32": stock}


def _ours(spec: RoutingSpec, ids_TLK: Ids, codec: str) -> Way:
    out_TLK = np.empty_like(ids_TLK)

    def decode(data: bytes) -> Ids:
        parse_frame(data, spec=spec).decode_into(out_TLK)
        return out_TLK

    return Way(lambda: encode_frame(spec, expert_ids_TLK=ids_TLK, codec=codec), decode)


# -- drawn routing -------------------------------------------------------------------------------------------------------


def generate(model: Model, *, regime: str, rows: int, seed: int = 0) -> Ids:
    """Return drawn ids of some sequences, end to end.

    Equal arguments give equal ids.

    Args:
        model: The model.
        regime: A name of `REGIMES`.
        rows: Number of rows.
        seed: Seed of the random numbers.

    Returns:
        [rows, L, K] in the model's id dtype.
    """
    rng = np.random.default_rng(seed)
    spec = model.spec
    logits_of = REGIMES[regime](rng, (spec.num_moe_layers, spec.num_experts))
    ids_TLK = np.empty((rows, spec.num_moe_layers, spec.top_k), spec.id_dtype)
    for row in range(rows):
        logits_LE = next(logits_of)
        if model.groups is not None and regime != "U":
            logits_LE = _limit_groups(logits_LE, groups=model.groups[0], keep=model.groups[1])
        ids_TLK[row] = _top_k_descending(logits_LE, spec.top_k)
    return ids_TLK


def _uniform_logits(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    while True:
        yield rng.random(shape, dtype=np.float32)


def _latent_logits(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    def normal(weight: float, *extra: int) -> _Floats:
        return np.float32(weight) * rng.standard_normal((*extra, *shape), dtype=np.float32)

    popularity = normal(_POPULARITY)
    fixed, state = popularity, popularity
    identity = normal(_TOKEN, _VOCABULARY)
    zipf = 1 / np.arange(1, _VOCABULARY + 1)
    innovation = float(np.sqrt(1 - _RHO**2))
    for row in count():
        if row % _SEQUENCE_ROWS == 0:
            fixed, state = popularity + normal(_SEQUENCE), normal(1.0)
        token = rng.choice(_VOCABULARY, p=zipf / zipf.sum())
        state = np.float32(_RHO) * state + normal(innovation)
        yield fixed + np.float32(_TIME) * state + identity[token] + normal(_NOISE)


REGIMES = {"U": _uniform_logits, "Zmid": _latent_logits}


def _limit_groups(logits_LE: _Floats, *, groups: int, keep: int) -> _Floats:
    """Mask all experts outside the best groups (DeepSeek-V3).

    These are the `keep` groups whose two best experts sum highest.
    """
    grouped = logits_LE.reshape(len(logits_LE), groups, -1)
    score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    threshold = np.sort(score, axis=-1)[:, groups - keep][:, None]
    return np.where((score >= threshold)[..., None], grouped, np.float32(-1e9)).reshape(logits_LE.shape)


def _top_k_descending(logits_LE: _Floats, top_k: int) -> Ids:
    chosen = np.argpartition(-logits_LE, top_k - 1, axis=-1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(logits_LE, chosen, axis=-1), axis=-1)
    return np.take_along_axis(chosen, order, axis=-1)


def entropy_bytes_per_token(ids_TLK: Ids, *, num_experts: int) -> tuple[float, float]:
    """Return (order kept, order dropped): bytes of a row by entropy.

    Both are bytes under the best model without memory, fitted to these ids. Order dropped: the maximum-entropy k-subset with each
    layer's inclusion rates. Order kept: the smaller of that plus log2(k!) and of k independent draws. A model with memory could
    go lower (about 0.8 of it on Zmid).
    """
    rows, layers, top_k = ids_TLK.shape
    ordered = unordered = 0.0
    for layer in range(layers):
        count_E = np.bincount(ids_TLK[:, layer].reshape(-1), minlength=num_experts)
        set_bits = _set_bits(count_E / rows, top_k=top_k)
        share = count_E[count_E > 0] / (rows * top_k)
        draws_bits = -top_k * float((share * np.log2(share)).sum())
        unordered += set_bits
        ordered += min(draws_bits, set_bits + lgamma(top_k + 1) / log(2))
    return ordered / 8, unordered / 8


def _set_bits(inclusion_E: Any, *, top_k: int) -> float:
    """Return the mean code length of a set, in bits.

    The model is P(S) ~ product of odds over S, given how often each expert is in a set.
    """
    rate_E = np.clip(inclusion_E, 1e-6, 1 - 1e-6)
    odds_E = rate_E / (1 - rate_E)
    scale = odds_E.sum() / top_k
    symmetric = np.zeros(top_k + 1)
    symmetric[0] = 1
    for odds in odds_E / scale:
        symmetric[1:] = symmetric[1:] + symmetric[:-1] * odds
    log2_sum = np.log2(symmetric[top_k]) + top_k * np.log2(scale)
    return float(log2_sum - (inclusion_E * np.log2(odds_E)).sum())
