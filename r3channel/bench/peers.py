"""How others send the same ids, each at its best on one core. Peers whose package is missing are left out."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np

from r3channel.routing import Ids
from r3channel.spec import RoutingSpec

_Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Peer:
    """`decode(encode())` gives the ids again, as the dtype that the peer works with."""

    name: str
    encode: Callable[[], _Bytes]
    decode: Callable[[_Bytes], Ids]


def peers(ids_TLK: Ids, *, spec: RoutingSpec) -> Iterator[Peer]:
    """Those that run here. The JSON ones carry int32 over all decoder layers, dense ones included, as SGLang does."""
    stock_TAK = np.zeros((len(ids_TLK), spec.num_layers, spec.top_k), np.int32)
    stock_TAK[:, list(spec.moe_layers)] = ids_TLK
    narrow_N = ids_TLK.astype(np.int16).reshape(-1)
    yield Peer(
        "json-base64-int32",
        lambda: json.dumps({"routed_experts": base64.b64encode(stock_TAK.data).decode()}).encode(),
        lambda wire: _int32(base64.b64decode(json.loads(bytes(wire))["routed_experts"])),
    )
    yield from _orjson(stock_TAK)
    yield Peer(
        "int16-lz4",
        lambda: lz4.block.compress(narrow_N.data, store_size=False),
        lambda wire: np.frombuffer(lz4.block.decompress(wire, uncompressed_size=narrow_N.nbytes), np.int16),
    )
    yield from _zstd(narrow_N)


def _int32(data: bytes) -> Ids:
    return np.frombuffer(data, np.int32)


def _orjson(stock_TAK: Ids) -> Iterator[Peer]:
    orjson, pybase64 = _module("orjson"), _module("pybase64")
    if orjson is not None and pybase64 is not None:
        yield Peer(
            "orjson-pybase64-int32",
            lambda: orjson.dumps({"routed_experts": pybase64.b64encode_as_string(stock_TAK)}),
            lambda wire: _int32(pybase64.b64decode(orjson.loads(wire)["routed_experts"], validate=True)),
        )


def _zstd(narrow_N: Ids) -> Iterator[Peer]:
    zstandard = _module("zstandard")
    if zstandard is not None:
        packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        yield Peer(
            "int16-zstd-1",
            lambda: packer.compress(narrow_N.data),
            lambda wire: np.frombuffer(unpacker.decompress(wire), np.int16),
        )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
