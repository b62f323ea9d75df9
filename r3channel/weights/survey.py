"""What every rank holds, told to all: rank 0 gathers the reports over the group, once, before plans are made.

Metadata only, as JSON after its length: a transport cannot tell sizes. Used where no registry carries the maps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from r3channel.errors import PlanInvalid, R3Error
from r3channel.transport.base import Transport
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.shardmap import ShardMap

Report = Sequence[tuple[TensorMeta, Box]]

_LENGTH_BYTES = 8
_MAX_BYTES = 1 << 30


def survey(
    transport: Transport, mine: Report, *, trainers: int, timeout_s: float
) -> tuple[ShardMap, ShardMap]:
    """(trainers' map, engines' map) on every rank; the first `trainers` ranks are the trainers. All ranks call.

    `mine`: (whole tensor's meta, box) of all that this rank holds. Raises on every rank PlanInvalid, naming tensor and
    rank, when two ranks of a side disagree or a report is damaged; DeadlineExceeded, TransportError.
    """
    limit = time.monotonic() + timeout_s
    told = [[*meta.row(), list(box.start), list(box.stop)] for meta, box in mine]
    if transport.rank != 0:
        _send(transport, 0, told, limit)
        answer = _receive(transport, 0, limit)
    else:
        rows = [told, *(_receive(transport, peer, limit) for peer in range(1, transport.world_size))]
        answer = _gathered(rows, trainers)
        for peer in range(1, transport.world_size):
            _send(transport, peer, answer, limit)
    if "error" in answer:
        raise PlanInvalid(answer["error"])
    return ShardMap.from_dict(answer["trainer"]), ShardMap.from_dict(answer["engine"])


def _gathered(rows: Sequence[Any], trainers: int) -> dict[str, Any]:
    """What rank 0 tells everybody: both maps, or why there are none."""
    try:
        reports = {rank: _report(told) for rank, told in enumerate(rows)}
        sides = {
            "trainer": {rank: report for rank, report in reports.items() if rank < trainers},
            "engine": {rank: report for rank, report in reports.items() if rank >= trainers},
        }
        return {side: ShardMap.gathered(held).to_dict() for side, held in sides.items()}
    except (R3Error, TypeError, ValueError) as error:
        return {"error": str(error)}


def _report(told: Any) -> Report:
    return [(TensorMeta.from_row(row), Box(tuple(start), tuple(stop))) for *row, start, stop in told]


def _send(transport: Transport, dst: int, value: Any, limit: float) -> None:
    data = bytearray(json.dumps(value, separators=(",", ":")).encode())
    length = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little"))
    for part in (length, data):
        transport.send(dst, torch.frombuffer(part, dtype=torch.uint8), timeout_s=_left(limit))


def _receive(transport: Transport, src: int, limit: float) -> Any:
    length_N = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
    transport.recv(src, length_N, timeout_s=_left(limit))
    length = int.from_bytes(length_N.numpy().tobytes(), "little")
    if length > _MAX_BYTES:
        raise PlanInvalid(f"rank {src} announces a report of {length} bytes; at most {_MAX_BYTES} are taken")
    data_N = torch.empty(length, dtype=torch.uint8)
    transport.recv(src, data_N, timeout_s=_left(limit))
    return json.loads(data_N.numpy().tobytes())


def _left(limit: float) -> float:
    return max(0.001, limit - time.monotonic())
