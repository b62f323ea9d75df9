"""A step's routing from the manager to every trainer rank, ours beside its peers and the limit; then our path part by part.

`steps`: one process tree, a manager and four ranks, Ray actors on two raylets of this machine, that run every path in turn on the
same data. The whole way begins with the bodies of engines' replies in memory (JSON and base64) and ends when every rank holds its
own rows, contiguous and writable per layer, and its routers have taken them in a dtype that Megatron's gather accepts; the timed
section ends there too, and begins with verified rows about to be sealed (peers: with decoded arrays in memory).
The other parts: `r3channel.bench.relay_parts`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import torch

import r3channel
from r3channel.bench import relay_parts
from r3channel.bench import relay_paths as paths
from r3channel.bench.harness import Effort, Parts, interleaved
from r3channel.bench.relay_paths import ALL, DIRECT, LIMIT, OWN, PEERS, Case, Seconds, spent
from r3channel.errors import R3Error
from r3channel.relay.actor import RayRelay, RelayHost
from r3channel.transport.base import Rendezvous

CASE = Case("qwen3-30b-a3b", tokens=262_144, dp=4)
BASE, DECODES = "ray_numpy_int32", "ray_numpy_uint8"
"""The peer that every ratio names; and the one whose decoding counts for Ray Direct Transport, too: it starts from its arrays."""
MANAGER_NODE, RANK_NODE = "bench_manager", "bench_rank"
_CALL_S = 180.0
"""Deadline of one call; nothing here takes a tenth of it on a quiet machine."""
_STORE_BYTES = 1 << 30
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


class EndStatesDiffer(R3Error):
    """Two paths did not leave the same rows at a rank; their times cannot be compared."""


class Round(NamedTuple):
    """One path's round. Seconds."""

    wall: float
    """Timed section: sealed (ours) or arrays in memory (peers) -> every rank's routers have taken their rows."""
    held: float
    """The same up to rows held, in the dtype they came in; raw gloo ends there."""
    cpu: float
    """Every process of the tree, Ray's own included, in the timed section."""
    manager_cpu: float
    """The manager's process, in the timed section."""
    before: Seconds
    """The manager, from the bodies of replies up to the timed section; zeros where that was left out."""


# -- processes -------------------------------------------------------------------------------------------------------------


@contextmanager
def two_nodes(*, store_bytes: int) -> Iterator[None]:
    """One for the manager, one for the ranks. Each raylet has its own object store, so an object crosses from one to the other as
    it would between machines, over loopback. `store_bytes`: each one's; it is reserved, not touched. Ray's own settings stay:
    chunks of 64 MiB instead of 5 took 1.6 to 2 times as long (262,144 tokens, int32 and uint8)."""
    from ray.cluster_utils import Cluster

    root = str(Path(r3channel.__file__).parents[1])
    folders = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(folders)}  # inherited by Ray's processes
    cluster = Cluster()
    try:
        for name in (MANAGER_NODE, RANK_NODE):
            cluster.add_node(num_cpus=8, resources={name: 64}, object_store_memory=store_bytes)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()  # ends the actors, too
        cluster.shutdown()


def start_actor(cls: type, *arguments: Any, node: str, threads: int = 1) -> Any:
    remote: Any = ray.remote
    options = {"num_cpus": 0, "resources": {node: 1}, "max_concurrency": threads, "max_restarts": 0}
    return remote(**options, enable_tensor_transport=True)(cls).remote(*arguments)


def call(references: Any) -> Any:
    """`ray.get` with a deadline."""
    return ray.get(references, timeout=_CALL_S)


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """CPU seconds that living processes have used, ended threads included; a process that is gone counts nothing.

    Reads each process's own CPU clock (Linux: clock id ~pid << 3 | 2, see clock_getcpuclockid(3)), in nanoseconds.
    """
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)
    return total


class Manager(RelayHost):
    """A Ray actor that holds the sending half of every path. The ranks' control calls come beside, on other threads."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self._work, self._ranks = paths.Workload(case), []
        self._own, self._raw = paths.ChannelSending(self._work), paths.RawSending(self._work)
        self._sending: dict[str, paths.Sending] = {OWN: self._own, LIMIT: self._raw}
        self._sending |= {path: paths.StoreSending(self._work, path) for path in PEERS}
        self.relay = self._own.relay
        gc.freeze()  # modules and the step's data need no collecting

    def meet(self, ranks: list[Any]) -> int:
        """All paths deliver to these; our process id."""
        self._ranks = ranks
        return os.getpid()

    def rendezvous(self, rank: int) -> dict[str, Any]:
        return self._raw.rendezvous(rank, 1).to_dict()

    def join(self) -> None:
        self._raw.join()

    def prepare(self, path: str, *, whole: bool) -> Seconds:
        return self._sending[path].prepare(whole=whole)

    def deliver(self, path: str) -> tuple[float, list[dict[str, float]]]:
        """(time.monotonic at which the timed section began, what each rank says of its end)."""
        answers: list[Any] = []
        start_s = self._sending[path].deliver(partial(self._start, path, answers))
        return start_s, call(answers)

    def ready(self) -> tuple[float, float]:
        """Ours, in a round in which the trainers come when the step was prepared, as they do in a loop.

        (CPU of this process up to there, apart from sending; seconds from calling the ranks until they hold their rows.)
        """
        _, prepared_s = self._own.prepare(whole=True)
        tickets: list[Any] = []
        _, sealed_s = spent(lambda: tickets.append(self._own.seal()))
        answers: list[Any] = []
        start_s = self._own.deliver(partial(self._start, OWN, answers), ticket=tickets[0])
        held_s = max(rank["held_s"] for rank in call(answers))
        self.settle(OWN)
        return prepared_s + sealed_s, held_s - start_s

    def _start(self, path: str, answers: list[Any], rank: int, payload: Any) -> None:
        answers.append(self._ranks[rank].take.remote(path, payload))

    def settle(self, path: str) -> None:
        self._sending[path].settle()
        gc.collect()

    @ray.method(tensor_transport="gloo")
    def tensors_of(self, dp: int) -> list[torch.Tensor]:
        """A DP rank's samples, kept here; Ray Direct Transport sends them."""
        return [torch.from_numpy(self._work.narrow[name]) for name in self._work.of_rank(dp)]

    def figures(self) -> tuple[dict[str, int], int]:
        """(Bytes sent per step, by path; our staging)."""
        return {path: half.bytes_sent for path, half in self._sending.items()}, self.relay.peak_staging_bytes

    def close(self) -> None:
        self.relay.close()


class Rank:
    """A Ray actor that holds a trainer rank's half of every path. It trains nothing."""

    def __init__(self, rank: int, case: Case, manager: Any, rendezvous: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        _, plan = case.plan()
        narrow, wide = (paths.HeldRows(plan, rank, dtype) for dtype in (case.spec.id_dtype, np.int32))
        self._taking: dict[str, paths.Taking] = {LIMIT: paths.RawTaking(narrow, Rendezvous(**rendezvous))}
        held = {path: narrow if "uint8" in path else wide for path in PEERS}
        self._taking |= {path: paths.ArraysTaking(held[path], path) for path in PEERS}
        self._taking[OWN] = self._own = paths.ChannelTaking(case, rank, RayRelay(manager))
        gc.freeze()

    def take(self, path: str, payload: Any) -> dict[str, float]:
        """Until the routers have taken all rows. Times are time.monotonic, comparable on one machine."""
        held_s = self._taking[path].take(payload)
        return {"held_s": held_s, "end_s": time.monotonic()}

    def blank(self, path: str) -> None:
        self._taking[path].blank()

    def digest(self, path: str) -> str:
        """Of what the last `take` left."""
        return paths.digest(self._taking[path].tensors())

    def settle(self) -> None:
        gc.collect()

    def close(self) -> None:
        self._own.receiver.close()


# -- rounds ----------------------------------------------------------------------------------------------------------------


class Tree:
    """The processes of a case, with every path opened. `whole` of a peer's rounds begin with its replies."""

    def __init__(self, case: Case, *, whole: int) -> None:
        from ray.experimental.collective import create_collective_group

        self.manager = start_actor(Manager, case, node=MANAGER_NODE, threads=32)
        where = call([self.manager.rendezvous.remote(rank) for rank in range(case.dp)])
        joined = self.manager.join.remote()
        self.ranks = [
            start_actor(Rank, rank, case, self.manager, meet, node=RANK_NODE)
            for rank, meet in enumerate(where)
        ]
        call([joined, *(rank.settle.remote() for rank in self.ranks)])
        create_collective_group([self.manager, *self.ranks], backend="gloo")
        self._manager_pid = call(self.manager.meet.remote(self.ranks))
        self._whole = whole
        self._rounds: dict[str, int] = dict.fromkeys(ALL, 0)

    def check_ends(self) -> None:
        """A warm-up round of every path, on blanked memory; all must end with the same ids."""
        ends = {}
        for path in ALL:
            call([rank.blank.remote(path) for rank in self.ranks])
            self.round(path)
            ends[path] = call([rank.digest.remote(path) for rank in self.ranks])
            if ends[path] != ends[OWN]:
                raise EndStatesDiffer(
                    f"{path}: ranks end with ids of digests {ends[path]}, {OWN} with {ends[OWN]}; is a path's placement wrong?"
                )

    def round(self, path: str) -> Round:
        whole, self._rounds[path] = 1 <= self._rounds[path] <= self._whole, self._rounds[path] + 1
        before = call(self.manager.prepare.remote(path, whole=whole and path != DIRECT))
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        cpu_s, manager_s = cpu_seconds_of(pids), cpu_seconds_of([self._manager_pid])
        start_s, ends = self._direct() if path == DIRECT else call(self.manager.deliver.remote(path))
        cpu_s, manager_s = cpu_seconds_of(pids) - cpu_s, cpu_seconds_of([self._manager_pid]) - manager_s
        call([self.manager.settle.remote(path), *(rank.settle.remote() for rank in self.ranks)])
        end_s, held_s = (max(rank[name] for rank in ends) - start_s for name in ("end_s", "held_s"))
        return Round(end_s, held_s, cpu_s, manager_s, before)

    def _direct(self) -> tuple[float, Any]:
        """Ray moves the tensors between two actor calls; this process submits both."""
        start_s = time.monotonic()
        kept = [self.manager.tensors_of.remote(dp) for dp in range(len(self.ranks))]
        return start_s, call([rank.take.remote(DIRECT, k) for rank, k in zip(self.ranks, kept, strict=True)])

    def close(self) -> None:
        call([actor.close.remote() for actor in (*self.ranks, self.manager)])


def steps(effort: Effort) -> dict[str, Any]:
    """Medians of interleaved rounds, ratios of the same round, per-token figures."""
    rounds = effort.rounds_of(20, 3)
    with two_nodes(store_bytes=_STORE_BYTES):
        tree = Tree(CASE, whole=effort.of(5, 1))
        tree.check_ends()
        seen = interleaved({path: partial(tree.round, path) for path in ALL}, rounds=rounds, warm_up=0)
        ready = [call(tree.manager.ready.remote()) for _ in range(max(2, rounds // 2))]
        sent, staging_bytes = call(tree.manager.figures.remote())
        tree.close()
    found = {path: path_of(path, seen, bytes_sent=sent[path]) for path in ALL}
    prepared_s, exposed_s = (median(values) for values in zip(*ready, strict=True))
    found[OWN] |= {"exposed_wall_s": exposed_s, "manager_cpu_us_per_token": prepared_s / CASE.tokens * 1e6}
    return {
        "model": CASE.model,
        "tokens": CASE.tokens,
        "layout": f"dp={CASE.dp}",
        "rounds": rounds,
        "paths": found,
        "ratio": ratios_of(seen, found),
        "limit": {"raw_gloo_wall_s": found[LIMIT]["wall_s"]},
        "peak_staging_bytes": staging_bytes,
    }


def path_of(path: str, seen: Mapping[str, Sequence[Round]], *, bytes_sent: int) -> dict[str, Any]:
    """The whole way and the manager's CPU are None for the limit, which begins with placed rows."""
    wall_s, held_s, cpu_s, manager_s = (median(column) for column in list(zip(*seen[path], strict=True))[:4])
    before = [row.before for row in seen[DECODES if path == DIRECT else path] if row.before[0]]
    before_s = [median(column) for column in zip(*before, strict=True)]
    return {
        "wall_s": wall_s,
        "held_wall_s": held_s,
        "cpu_s": cpu_s,
        "whole_wall_s": before_s[0] + wall_s if before_s else None,
        "whole_cpu_s": before_s[1] + cpu_s if before_s else None,
        "manager_cpu_us_per_token": (before_s[1] + manager_s) / CASE.tokens * 1e6 if before_s else None,
        "bytes_per_token": bytes_sent / CASE.tokens,
    }


def ratios_of(seen: Mapping[str, Sequence[Round]], medians: Mapping[str, Any]) -> dict[str, Any]:
    """Above 1 where ours is faster. Of the timed section: medians of per-round ratios, where a round's best peer is the fastest
    one of that round, and raw gloo ends where ours holds the bytes. Of the whole way: ratios of medians."""
    rounds = list(zip(*(seen[path] for path in ALL), strict=True))
    walls = [dict(zip(ALL, rows, strict=True)) for rows in rounds]
    found: dict[str, Any] = {
        "vs_ray_numpy_int32": median(rows[BASE].wall / rows[OWN].wall for rows in walls),
        "vs_best_peer": median(min(rows[path].wall for path in PEERS) / rows[OWN].wall for rows in walls),
        "best_peer": min(PEERS, key=lambda path: medians[path]["wall_s"]),
        "of_raw_gloo": median(rows[LIMIT].wall / rows[OWN].held for rows in walls),
    }
    for what in ("whole_wall", "whole_cpu"):
        values = {path: medians[path][f"{what}_s"] for path in (*PEERS, OWN)}
        found[f"{what}_vs_ray_numpy_int32"] = values[BASE] / values[OWN]
        found[f"{what}_vs_best_peer"] = min(values[path] for path in PEERS) / values[OWN]
    return found


PARTS: Parts = {"steps": steps, **relay_parts.PARTS}
