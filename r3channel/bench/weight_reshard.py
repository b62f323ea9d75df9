"""Exact reshard over gloo between real processes: 2 trainer ranks to 2 engine ranks, packing, digests and NaN check included.

    python -m r3channel.bench.weight_reshard JOB      one rank; `measure` starts four of them

The mix is that of a MoE model: embedding, fused and plain attention, a router in float32, norms, many experts. Trainers cut
dense weights along rows 2 ways and deal out whole experts; engines cut everything 2 ways, down projections along columns.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from r3channel.errors import EngineUnavailable, WeightsDiffer
from r3channel.transport.base import Rendezvous
from r3channel.transport.joining import join
from r3channel.transport.process_group import RendezvousStore
from r3channel.weights.geometry import Box, Layout
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.reshard import plan_reshard
from r3channel.weights.resharder import Resharder
from r3channel.weights.shardmap import ShardMap

TIMEOUT_S = 180.0
WORLD_SIZE = 4
TRAINERS, ENGINES = (0, 1), (2, 3)
MESSAGE_BYTES = 16 << 20
ROWS, COLUMNS = 0, 1
HIDDEN, WIDTH, EXPERTS, VOCABULARY = 1024, 768, 32, 8192

Row = tuple[str, torch.dtype, tuple[int, ...], int | None, int | None]
"""(name, dtype, shape, the axis that engines cut, expert)."""


def tensors(total_bytes: int) -> Iterator[Row]:
    """Layers until `total_bytes` are reached; a layer is some 160 MB."""
    bfloat16 = torch.bfloat16
    yield "embed", bfloat16, (VOCABULARY, HIDDEN), ROWS, None
    left, layer = total_bytes - 2 * VOCABULARY * HIDDEN, 0
    while left > 0:
        head = f"layers.{layer}"
        yield f"{head}.qkv", bfloat16, (2 * HIDDEN, HIDDEN), ROWS, None
        yield f"{head}.o", bfloat16, (HIDDEN, HIDDEN), COLUMNS, None
        yield f"{head}.norm", bfloat16, (HIDDEN,), None, None
        yield f"{head}.gate", torch.float32, (EXPERTS, HIDDEN), None, None
        left -= 6 * HIDDEN * HIDDEN
        for expert in range(EXPERTS):
            if left > 0:
                yield f"{head}.experts.{expert}.gate_up", bfloat16, (2 * WIDTH, HIDDEN), ROWS, expert
                yield f"{head}.experts.{expert}.down", bfloat16, (HIDDEN, WIDTH), COLUMNS, expert
                left -= 6 * WIDTH * HIDDEN
        layer += 1


def sides(total_bytes: int) -> tuple[ShardMap, ShardMap]:
    """Where every tensor lies at the trainers, and where at the engines."""
    source, target = [], []
    for name, dtype, shape, cut, expert in tensors(total_bytes):
        meta = TensorMeta(name=name, dtype=dtype, shape=shape)
        source.append((meta, _held_by_trainers(shape, cut, expert)))
        target.append((meta, _cut(shape, cut, ENGINES)))
    return ShardMap(source), ShardMap(target)


def _held_by_trainers(shape: tuple[int, ...], cut: int | None, expert: int | None) -> Layout:
    if expert is not None:
        return Layout.replicated(shape, [TRAINERS[expert % len(TRAINERS)]])
    return _cut(shape, None if cut is None else ROWS, TRAINERS)


def _cut(shape: tuple[int, ...], axis: int | None, ranks: tuple[int, ...]) -> Layout:
    if axis is None:
        return Layout.replicated(shape, ranks)
    return Layout.chunked(shape, axis, [[rank] for rank in ranks])


def measure(*, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Median over the updates of the slowest rank's seconds; `bytes` are those that crossed ranks in one update."""
    store = RendezvousStore("127.0.0.1")
    job = {"host": store.host, "port": store.port, "total_bytes": total_bytes, "rounds": rounds}
    with contextlib.closing(store), tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        found = _ranks(job, Path(folder))
    walls_s = [max(seconds) for seconds in zip(*(rank["wall_s"] for rank in found), strict=True)]
    return {
        "wall_s": statistics.median(walls_s),
        "bytes": sum(rank["sent_bytes"] for rank in found),
        "tensors": found[0]["tensors"],
        "messages": sum(rank["messages"] for rank in found) // 2,
        "rounds": rounds,
    }


def _ranks(job: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run all ranks to their end; each writes its result to a file."""
    outs = [folder / f"{rank}.json" for rank in range(WORLD_SIZE)]
    children = []
    for rank, out in enumerate(outs):
        told = json.dumps({**job, "rank": rank, "out": str(out)})
        children.append(subprocess.Popen([sys.executable, "-m", "r3channel.bench.weight_reshard", told]))
    try:
        codes = [child.wait(TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    if any(codes):
        raise EngineUnavailable(f"ranks of the reshard benchmark ended with {codes}; their errors are above")
    return [json.loads(out.read_text()) for out in outs]


def _rank(job: Mapping[str, Any]) -> dict[str, Any]:
    rank, (source, target) = job["rank"], sides(job["total_bytes"])
    where = Rendezvous(
        backend="gloo",
        name="bench-reshard",
        epoch=1,
        rank=rank,
        world_size=WORLD_SIZE,
        host=job["host"],
        port=job["port"],
    )
    transport = join(where, timeout_s=TIMEOUT_S)
    plan = plan_reshard(source, target, rank=rank)
    resharder = Resharder(plan, transport, max_message_bytes=MESSAGE_BYTES)
    resharder.agree(timeout_s=TIMEOUT_S)
    held, filled = _shards(source, rank, empty=False), _shards(target, rank, empty=True)
    reports = [resharder.run(held, filled, timeout_s=TIMEOUT_S) for _ in range(1 + job["rounds"])]
    for name, parts in filled.items():
        if any(bool((tensor != _value(name)).any()) for _, tensor in parts):
            raise WeightsDiffer(f"rank {rank} holds other values of {name} than the trainers sent")
    transport.close()
    last = reports[-1]
    return {
        "wall_s": [report.wall_s for report in reports[1:]],  # the first touches all memory
        "sent_bytes": last.sent_bytes,
        "messages": last.messages,
        "tensors": len(plan.tensors),
    }


def _shards(side: ShardMap, rank: int, *, empty: bool) -> dict[str, list[tuple[Box, torch.Tensor]]]:
    """This rank's tensors, all of one value per name; zero where they are to be received."""
    return {
        name: [
            (
                box,
                torch.full(
                    box.shape, 0.0 if empty else _value(name), dtype=side.metas[side.index_of[name]].dtype
                ),
            )
            for box in boxes
        ]
        for name, boxes in side.held_by(rank).items()
    }


def _value(name: str) -> float:
    """1 to 97, which every float type of the mix holds exactly."""
    return 1.0 + zlib.crc32(name.encode()) % 97


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    Path(arguments["out"]).write_text(json.dumps(_rank(arguments)))
