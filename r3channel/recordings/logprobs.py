"""Log-probs of a recorded step, of one side: a safetensors file beside its segments, whole or not there.

u64 bytes of JSON, JSON {"sample": {"dtype": "F32", "shape": [n], "data_offsets": [begin, end]}, ...}, the numbers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.recordings.manifest import SIDES
from r3channel.routing import Ids

_MOST_JSON = 1 << 28


def logprobs_name(step: int, side: str) -> str:
    if side not in SIDES:
        raise RecordingInvalid(f"log-probs of side {side!r}, expected one of {SIDES}")
    return f"step-{step:06d}.logprobs-{side}.safetensors"


def write_logprobs(folder: Path, step: int, side: str, values: Mapping[str, Ids]) -> Path:
    """One value per token of each sample. Raises OSError."""
    path, head, at = folder / logprobs_name(step, side), dict[str, object](), 0
    arrays = {name: np.ascontiguousarray(own, "<f4") for name, own in values.items()}
    for name, own in arrays.items():
        head[name] = {"dtype": "F32", "shape": list(own.shape), "data_offsets": [at, at + own.nbytes]}
        at += own.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(
        b"".join([len(text).to_bytes(8, "little"), text, *(own.data for own in arrays.values())])
    )
    return scratch.rename(path)


def read_logprobs(folder: Path, step: int, side: str) -> dict[str, Ids]:
    """By sample. Raises RecordingInvalid for a file that is not there or damaged."""
    path = folder / logprobs_name(step, side)
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if not 8 <= size + 8 <= min(len(data), _MOST_JSON):
            raise ValueError(f"{size} bytes of JSON in a file of {len(data)}")
        body = memoryview(data)[8 + size :]
        head = {
            name: _view(body, one)
            for name, one in json.loads(data[8 : 8 + size]).items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingInvalid(f"{path}: expected a safetensors file of F32 log-probs: {error!r}") from error
    return head


def _view(body: memoryview, one: Mapping[str, object]) -> Ids:
    begin, end = one["data_offsets"]  # type: ignore[misc]
    if one["dtype"] != "F32" or not 0 <= begin <= end <= len(body):
        raise ValueError(f"a tensor of {one['dtype']} at {begin}..{end} of {len(body)} bytes")
    return np.frombuffer(body[begin:end], "<f4").reshape(one["shape"])  # type: ignore[call-overload]
