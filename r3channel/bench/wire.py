"""Bytes per token and speed of every codec, beside entropy, memcpy and how others send the same ids.

GB are raw int16 GB of the ids (768 B per token of 48 layers x top-8) whatever travels, so that all rows compare; times are
CPU times of one core. Nothing here is a recorded trace: see `bench.routing_data`.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lz4.block
import numpy as np

from r3channel.bench.harness import Effort, Parts, medians_s
from r3channel.bench.routing_data import REGIMES, entropy_bytes_per_token, generate
from r3channel.model.presets import Model, model_named
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import AUTO, CODECS
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.routing import Ids

MODELS = ("qwen3-30b-a3b", "deepseek-v3", "kimi-k2", "qwen3-next")
_COPY_BYTES = 192 << 20
_MIN_S = 0.02


class Way(NamedTuple):
    """How one sends ids. `decode(encode())` gives them again, as the dtype that it works with."""

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]


def measure(effort: Effort) -> dict[str, Any]:
    """`results`: one row per model, regime and way; `entropy_bytes_per_token` is that of the best memoryless model of the same
    ids, order dropped for `set`."""
    rows, rounds = effort.of(4096, 256), effort.rounds_of(7, 3)
    results = [
        {"model": name, "regime": regime, **row}
        for name in MODELS
        for regime in REGIMES
        for row in _results(model_named(name), regime, rows, rounds)
    ]
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    copied_s = medians_s({"": lambda: np.copyto(target, source)}, rounds=rounds)
    return {"memcpy_gbps": round(2 * _COPY_BYTES / 1e9 / copied_s[""], 2), "rows": rows, "results": results}


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
    """Ours and those of others that run here; what needs a missing package is left out. The JSON ones carry int32 over all
    decoder layers, dense ones included, as SGLang does. Header, sections and, encoding, digests are part of ours."""
    orjson, pybase64, zstandard = map(_module, ("orjson", "pybase64", "zstandard"))
    here = [codec for codec in CODECS.values() if not codec.needs or _module(codec.needs)]
    fitting = [codec.name for codec in here if codec.encode(ids_TLK) is not None]
    found = {name: _ours(spec, ids_TLK, name) for name in (AUTO, *fitting)}
    stock_TAK = np.zeros((len(ids_TLK), spec.num_layers, spec.top_k), np.int32)
    stock_TAK[:, list(spec.moe_layers)] = ids_TLK
    narrow_N = ids_TLK.astype(np.int16).reshape(-1)
    found["json-base64-int32"] = Way(
        lambda: json.dumps({"routed_experts": base64.b64encode(stock_TAK.data).decode()}).encode(),
        lambda data: np.frombuffer(base64.b64decode(json.loads(data)["routed_experts"]), np.int32),
    )
    if orjson and pybase64:
        found["orjson-pybase64-int32"] = Way(
            lambda: orjson.dumps({"routed_experts": pybase64.b64encode_as_string(stock_TAK)}),
            lambda data: pybase64.b64decode(orjson.loads(data)["routed_experts"], validate=True),
        )
    found["int16-lz4"] = Way(
        lambda: lz4.block.compress(narrow_N.data, store_size=False),
        lambda data: lz4.block.decompress(data, uncompressed_size=narrow_N.nbytes),
    )
    if zstandard:
        packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        found["int16-zstd-1"] = Way(lambda: packer.compress(narrow_N.data), unpacker.decompress)
    return found


def _ours(spec: RoutingSpec, ids_TLK: Ids, codec: str) -> Way:
    out_TLK = np.empty_like(ids_TLK)

    def decode(data: bytes) -> Ids:
        parse_frame(data, spec=spec).decode_into(out_TLK)
        return out_TLK

    return Way(lambda: encode_frame(spec, expert_ids_TLK=ids_TLK, codec=codec), decode)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
