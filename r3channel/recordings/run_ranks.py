"""A recorded step as one trainer rank has it, for tests of a user's own code, in one process or in gloo processes.

    rank = Rank(step, coords)
    for number in rank.microbatches:
        for layer in rank.layers:
            ids_RK = rank.rows(number, layer)             # what this rank's router is to use, in its row order
            rank.record_used(number, layer, my_router(...))      # what it did use

Only the child processes need torch. Each child loads the function's file by its path, so nothing of the parent is copied.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from r3channel.errors import PeerFailed, UsageError
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.placement import place_shard
from r3channel.plan.stream import Stream
from r3channel.recordings.consumed import ConsumedRows, fit
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids


class Rank:
    """One rank of the step's layout. Its shard is placed at the first use."""

    def __init__(self, step: RecordedStep, coords: RankCoords, *, tp_group: Any = None) -> None:
        self.step, self.coords, self.tp_group = step, coords, tp_group
        """`tp_group`: this rank's gloo group in `run_ranks`; None in one process, and if tp is 1."""
        self.shard = step.ticket.plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)
        self.layers = self.shard.layers
        """Global decoder layers of its routers."""
        self.microbatches = range(len(self.shard.microbatches))
        self.consumed = ConsumedRows(step.ticket, step.ticket.spec)

    @cached_property
    def data_N(self) -> Ids:
        """Return the shard's bytes, of all TP slots.

        As a tensor they are the argument of `RankShard.from_whole`.
        """
        return place_shard(Stream.of(self.step.ticket, self.shard), ids_of=self.step.rows)

    def tokens(self, microbatch: int) -> Ids:
        """Return this rank's model input of one micro-batch.

        Returns:
            [b, s / cp] int64, or [1, t / cp] for a pack; 0 at padding.
        """
        names = self.shard.microbatches[microbatch].sample_ids
        return self.shard.lay_out(microbatch, [self.step.tokens[name].astype(np.int64) for name in names])

    def rows(self, microbatch: int, layer: int) -> Ids:
        """Return the ids that one router is to use.

        Args:
            microbatch: number of the micro-batch on this DP rank.
            layer: global number of the router's layer.

        Returns:
            [rows, K], in the router's row order.
        """
        slot = self.coords.tp if self.shard.tp_slots > 1 else 0
        return self.shard.views(self.data_N)[microbatch][slot, self.layers.index(layer)]

    def record_used(self, microbatch: int, layer: int, ids_RK: Any, *, of_pass: str = "forward") -> None:
        """Report the ids that a router used.

        Args:
            microbatch: number of the micro-batch on this DP rank.
            layer: global number of the router's layer.
            ids_RK: [rows, K], a tensor or an array, in the router's row order.
            of_pass: the pass in which the router ran.
        """
        plain = np.asarray(ids_RK.detach().cpu() if hasattr(ids_RK, "detach") else ids_RK)
        place: dict[str, Any] = {"microbatch": microbatch, "layer": layer, "tp": self.coords.tp}
        self.consumed.add_call(self.shard, plain, of_pass=of_pass, **place)


def all_ranks(step: RecordedStep) -> list[Rank]:
    """Return all ranks of the step's layout, in this process.

    The ranks are in the layout's order.
    """
    return [Rank(step, step.ticket.layout.coords(rank)) for rank in range(step.ticket.layout.world_size)]


def run_ranks(
    function: Callable[[Rank], object], step: RecordedStep, folder: Path, *, timeout_s: float
) -> tuple[ConsumedRows, float]:
    """Call a function in a gloo process for each rank.

    Args:
        function: a function of a module; another process must be able to find it by name.
        step: the recorded step; the ranks are those of its layout.
        folder: the recording that `step` was read from.
        timeout_s: seconds until ranks that are not done count as late.

    Returns:
        The ids that all routers used, added up over ranks, and the slowest rank's seconds for its shard and the function.

    Raises:
        UsageError: no other process can find the function.
        PeerFailed: a rank failed or is late; the text has the output of the first such rank.
    """
    name = function.__qualname__
    if "." in name or "<" in name:
        raise UsageError(f"{name}: expected a function of a module, not inside of something, to be loaded")
    total, layout = ConsumedRows(step.ticket, step.ticket.spec), step.ticket.layout
    with tempfile.TemporaryDirectory(prefix="r3channel-") as temporary:
        job = {
            "module": function.__module__, "file": inspect.getfile(function), "function": name,
            "recording": str(Path(folder).absolute()), "step": step.number, "layout": layout.to_dict(),
        }  # fmt: skip
        work = Path(temporary)
        (work / "job.json").write_text(json.dumps(job))
        _run(work, layout.world_size, timeout_s)
        seconds = max(_merge(work / f"rank-{rank}.npz", total) for rank in range(layout.world_size))
    return total, seconds


def _run(work: Path, world_size: int, timeout_s: float) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            command = [sys.executable, "-m", "r3channel.recordings.run_ranks", str(work), str(rank)]
            with open(work / f"rank-{rank}.log", "wb") as log:
                child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
                children.append(child)
        deadline_s = time.monotonic() + timeout_s
        while (codes := [child.poll() for child in children]) != [0] * world_size:
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or time.monotonic() > deadline_s:
                late = [rank for rank, code in enumerate(codes) if code is None]
                who = failed or late
                log_tail = (work / f"rank-{who[0]}.log").read_text(errors="replace")[-2000:]
                raise PeerFailed(
                    f"ranks {failed} failed and {late} were not done after {timeout_s:.0f} s; rank {who[0]}:\n{log_tail}"
                )
            time.sleep(0.01)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _save(path: Path, rows: ConsumedRows, seconds: float) -> None:
    arrays: dict[str, Any] = {json.dumps([0, *key]): ids_TLK for key, ids_TLK in rows.ids.items()}
    arrays |= {json.dumps([1, *key]): there_TL for key, there_TL in rows.there.items()}
    np.savez(path, **arrays, seconds=np.asarray(seconds))


def _merge(path: Path, total: ConsumedRows) -> float:
    rows = ConsumedRows(total.ticket, total.spec)
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files[:-1]:
            which, of_pass, sample = json.loads(name)
            (rows.ids, rows.there)[which][of_pass, sample] = arrays[name]
        total.merge(rows)
        return float(arrays["seconds"])


def _child(work: Path, number: int) -> None:
    import torch.distributed as dist

    job = json.loads((work / "job.json").read_text())
    layout = TrainerLayout.from_dict(job["layout"])
    function = getattr(_module(job["module"], Path(job["file"])), job["function"])
    meeting = f"file://{work}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=layout.world_size)
    # TP changes fastest in the order of ranks.
    group = dist.new_subgroups(layout.tp)[0] if layout.tp > 1 else None
    dist.barrier()
    begin_s = time.monotonic()
    recorded = Recording.open(job["recording"]).step(job["step"])
    rank = Rank(fit(recorded, layout), layout.coords(number), tp_group=group)
    function(rank)
    seconds = time.monotonic() - begin_s
    dist.barrier()
    dist.destroy_process_group()
    _save(work / f"rank-{number}.npz", rank.consumed, seconds)


def _module(name: str, file: Path) -> ModuleType:
    # A user's module is loaded by its file, because tests cannot be imported by name.
    if name.startswith("r3channel."):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("r3channel_users_test", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
