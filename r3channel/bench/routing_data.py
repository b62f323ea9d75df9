"""Synthetic routing and its entropy, so that figures can be quoted with the data they were measured on.

    U      uniform random k-subsets in random order: the worst case for any codec
    Zlow   weak skew and weak time correlation (a bracket chosen by assumption)
    Zmid   fitted to published statistics of real models: per-layer concentration, experts that cover 90 %, next-token overlap
    Zhigh  strong time correlation (a bracket chosen by assumption)

None is a recorded trace. The Z regimes draw logits as popularity(layer, expert) + sequence bias + AR(1) over time + token
identity + white noise and keep the k largest in descending order, as a router kernel emits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import lgamma, log
from typing import Any

import numpy as np

from r3channel.model.presets import Model
from r3channel.wire.routing import Ids

_Floats = np.ndarray[Any, np.dtype[np.float32]]
_VOCABULARY = 512
_SEQUENCE_ROWS = 512
"""Rows after which another sequence, with its own bias, begins."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Standard deviations of the parts of a logit, and the AR(1) coefficient."""

    popularity: float
    sequence: float
    time: float
    rho: float
    token: float
    noise: float


REGIMES: dict[str, Regime | None] = {
    "U": None,
    "Zlow": Regime(0.35, 0.15, 0.50, 0.60, 0.40, 0.80),
    "Zmid": Regime(0.63, 0.45, 0.72, 0.82, 0.50, 0.38),
    "Zhigh": Regime(0.65, 0.70, 0.85, 0.93, 0.40, 0.20),
}


def generate(model: Model, *, regime: str, rows: int, seed: int = 0) -> Ids:
    """[rows, L, K] of some sequences, end to end, in the model's id dtype; equal arguments give equal ids."""
    rng = np.random.default_rng(seed)
    kind, spec = REGIMES[regime], model.spec
    shape = (spec.num_moe_layers, spec.num_experts)
    logits_of = _uniform_logits(rng, shape) if kind is None else _latent_logits(rng, shape, kind)
    ids_TLK = np.empty((rows, spec.num_moe_layers, spec.top_k), spec.id_dtype)
    for row in range(rows):
        logits_LE = next(logits_of)
        if model.groups is not None and kind is not None:
            logits_LE = _limit_groups(logits_LE, groups=model.groups[0], keep=model.groups[1])
        ids_TLK[row] = _top_k_descending(logits_LE, spec.top_k)
    return ids_TLK


def _uniform_logits(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    while True:
        yield rng.random(shape, dtype=np.float32)


def _latent_logits(rng: np.random.Generator, shape: tuple[int, int], regime: Regime) -> Any:
    def normal(weight: float, *extra: int) -> _Floats:
        return np.float32(weight) * rng.standard_normal((*extra, *shape), dtype=np.float32)

    popularity = normal(regime.popularity)
    fixed, state = popularity, popularity
    identity = normal(regime.token, _VOCABULARY)
    zipf = 1 / np.arange(1, _VOCABULARY + 1)
    innovation = float(np.sqrt(1 - regime.rho**2))
    for row in count():
        if row % _SEQUENCE_ROWS == 0:
            fixed, state = popularity + normal(regime.sequence), normal(1.0)
        token = rng.choice(_VOCABULARY, p=zipf / zipf.sum())
        state = np.float32(regime.rho) * state + normal(innovation)
        yield fixed + np.float32(regime.time) * state + identity[token] + normal(regime.noise)


def _limit_groups(logits_LE: _Floats, *, groups: int, keep: int) -> _Floats:
    """Mask all experts outside the `keep` groups whose two best experts sum highest (DeepSeek-V3)."""
    grouped = logits_LE.reshape(len(logits_LE), groups, -1)
    score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    threshold = np.sort(score, axis=-1)[:, groups - keep][:, None]
    return np.where((score >= threshold)[..., None], grouped, np.float32(-1e9)).reshape(logits_LE.shape)


def _top_k_descending(logits_LE: _Floats, top_k: int) -> Ids:
    chosen = np.argpartition(-logits_LE, top_k - 1, axis=-1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(logits_LE, chosen, axis=-1), axis=-1)
    return np.take_along_axis(chosen, order, axis=-1)


def entropy_bytes_per_token(ids_TLK: Ids, *, num_experts: int) -> tuple[float, float]:
    """(order kept, order dropped): bytes of a row under the best model without memory, fitted to these ids.

    Order dropped: the maximum-entropy k-subset with each layer's inclusion rates. Order kept: the smaller of that plus
    log2(k!) and of k independent draws. A model with memory could go lower (about 0.8 of it on Zmid).
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
    """Mean code length of a set under P(S) ~ product of odds over S, given how often each expert is in a set."""
    rate_E = np.clip(inclusion_E, 1e-6, 1 - 1e-6)
    odds_E = rate_E / (1 - rate_E)
    scale = odds_E.sum() / top_k
    symmetric = np.zeros(top_k + 1)
    symmetric[0] = 1
    for odds in odds_E / scale:
        symmetric[1:] = symmetric[1:] + symmetric[:-1] * odds
    log2_sum = np.log2(symmetric[top_k]) + top_k * np.log2(scale)
    return float(log2_sum - (inclusion_E * np.log2(odds_E)).sum())
