"""Runs the paths of one case in turn and keeps what each round showed. Knows how to run a path, not what it is compared to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from r3channel.bench.relay.cluster import (
    MANAGER_NODE,
    RANK_NODE,
    call,
    process_ids,
    start_actor,
    stop_actors,
)
from r3channel.bench.relay.manager import Manager
from r3channel.bench.relay.paths import DIRECT, LIMIT, OURS
from r3channel.bench.relay.rank import Rank
from r3channel.bench.relay.stages import cpu_seconds_of
from r3channel.bench.relay.workload import Case
from r3channel.bench.timing import rounds_of
from r3channel.errors import R3Error


class EndStatesDiffer(R3Error):
    """Two paths did not leave the same rows at a rank; their times cannot be compared."""


@dataclass
class Seen:
    """One path's rounds, in order. Lists of equal length are rounds of the same kind."""

    wall_s: list[float] = field(default_factory=list)
    """Timed section: sealed (ours) or arrays in memory (peers) -> every rank's routers have taken their rows."""
    held_s: list[float] = field(default_factory=list)
    """The same up to rows held, contiguous and writable per layer, in the dtype they came in."""
    exposed_s: list[float] = field(default_factory=list)
    """Ours: the ranks are called -> rows held, in rounds in which all was ready to be sent before they were called."""
    cpu_s: list[float] = field(default_factory=list)
    """Of every process of the tree, Ray's own included, in the timed section."""
    manager_cpu_s: list[float] = field(default_factory=list)
    """Of the manager's process: what comes before the timed section, plus its part up to ready or put."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Wall seconds by stage; of ranks, the slowest."""
    preparing: list[dict[str, float]] = field(default_factory=list)
    """Wall seconds of the stages before the timed section: from the bodies of replies on."""
    preparing_cpu: list[dict[str, float]] = field(default_factory=list)
    """The manager's CPU seconds of them."""
    cpu_stages: list[dict[str, float]] = field(default_factory=list)
    """The manager's CPU seconds of its own stages."""
    bytes_sent: int = 0
    reply_bytes: int = 0

    def stages_s(self) -> dict[str, float]:
        return _medians([*self.preparing]) | _medians(self.stages)


class Rounds:
    """The processes of one layout, reused for all its cases. `close` ends them."""

    def __init__(self, world_size: int) -> None:
        self.manager = start_actor(Manager, node=MANAGER_NODE, threads=32)
        self._direct = False
        self.ranks = [start_actor(Rank, rank, node=RANK_NODE) for rank in range(world_size)]
        self.skipped: dict[str, str] = {}
        self.peak_staging_bytes: dict[str, int] = {}

    def close(self) -> None:
        stop_actors([self.manager, *self.ranks])

    def run(self, case: Case, paths: Sequence[str], *, rounds: int, whole: int) -> dict[str, Seen]:
        """`whole` of the rounds of a peer begin with its replies; the others with the arrays that those give."""
        ranks = self.ranks[: case.trainer.world_size]
        call([self.manager.load.remote(case, ranks), *(rank.load.remote(case) for rank in ranks)])
        usable = [path for path in paths if self._open(path, ranks)]
        try:
            self._check_ends(usable, ranks)
            return self._rounds(usable, ranks, rounds=rounds, whole=whole)
        finally:
            call([actor.unload.remote() for actor in (self.manager, *ranks)])

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self, path: str, ranks: Sequence[Any]) -> bool:
        """False, with a reason kept, for a peer that does not run here."""
        try:
            if path in DIRECT:
                self._open_direct(ranks)
            else:
                call(self.manager.open.remote(path))
            self._open_ranks(path, ranks)
        except Exception as error:  # whatever a peer's own code raises; ours must not fail
            if path in OURS:
                raise
            self.skipped[path] = _reason(error)
            return False
        return True

    def _open_ranks(self, path: str, ranks: Sequence[Any]) -> None:
        if path not in LIMIT:
            call([rank.open.remote(path, self.manager) for rank in ranks])
            return
        where = [self.manager.rendezvous.remote(path, index) for index in range(len(ranks))]
        joins = [rank.open.remote(path, None, found) for rank, found in zip(ranks, where, strict=True)]
        call([self.manager.join.remote(path), *joins])

    def _open_direct(self, ranks: Sequence[Any]) -> None:
        from ray.experimental.collective import create_collective_group

        if not self._direct:
            create_collective_group([self.manager, *ranks], backend="gloo")
            self._direct = True

    # -- running -------------------------------------------------------------------------------------------------------

    def _check_ends(self, paths: list[str], ranks: Sequence[Any]) -> None:
        """A warm-up round of every path, on blanked memory; all must end with the same ids."""
        expected: list[str] | None = None
        for path in paths:
            call([rank.blank.remote(path) for rank in ranks])
            self._round(path, ranks, Seen(), whole=False)
            found = call([rank.digest.remote(path) for rank in ranks])
            expected = expected or found
            if found != expected:
                raise EndStatesDiffer(
                    f"{path}: ranks end with ids of digests {found}, {paths[0]} with {expected}; is a path's placement wrong?"
                )

    def _rounds(self, paths: list[str], ranks: Sequence[Any], *, rounds: int, whole: int) -> dict[str, Seen]:
        seen = {path: Seen() for path in paths}
        for index in rounds_of(rounds, "rounds"):
            for path in paths[index % len(paths) :] + paths[: index % len(paths)]:
                self._round(path, ranks, seen[path], whole=index < whole)
        for path in paths:
            seen[path].bytes_sent = call(self.manager.bytes_sent.remote(path))
            seen[path].reply_bytes = call(self.manager.reply_bytes.remote(path))
            if path in OURS:
                self._ready(path, seen[path], rounds=rounds)
                self.peak_staging_bytes[path] = call(self.manager.peak_staging_bytes.remote(path))
        return seen

    def _round(self, path: str, ranks: Sequence[Any], seen: Seen, *, whole: bool) -> None:
        if path in DIRECT:
            self._direct_round(path, ranks, seen)
            return
        before = call(self.manager.prepare.remote(path, whole=whole))
        pids = process_ids()
        begin_s = cpu_seconds_of(pids)
        result = call(self.manager.deliver.remote(path))
        seen.cpu_s.append(cpu_seconds_of(pids) - begin_s)
        own = call(self.manager.settle.remote(path))
        call([rank.settle.remote() for rank in ranks])
        _keep(seen, result["start_s"], result["ranks"], result["stages"]["wall_s"] | own)
        if before["wall_s"]:
            seen.preparing.append(before["wall_s"])
            seen.preparing_cpu.append(before["cpu_s"])
            seen.cpu_stages.append(before["cpu_s"] | result["stages"]["cpu_s"])
            if path not in OURS:
                seen.manager_cpu_s.append(sum(before["cpu_s"].values()) + result["cpu_s"])

    def _direct_round(self, path: str, ranks: Sequence[Any], seen: Seen) -> None:
        """Ray moves the tensors between two actor calls; this process submits both."""
        pids, manager = process_ids(), [call(self.manager.pid.remote())]
        begin_s, manager_s, start_s = cpu_seconds_of(pids), cpu_seconds_of(manager), time.monotonic()
        kept = [self.manager.tensors_of.remote(index) for index in range(len(ranks))]
        answers = [rank.take.remote(path, tensors) for rank, tensors in zip(ranks, kept, strict=True)]
        found = call(answers)
        seen.cpu_s.append(cpu_seconds_of(pids) - begin_s)
        seen.manager_cpu_s.append(cpu_seconds_of(manager) - manager_s)
        del kept, answers
        _keep(seen, start_s, found, {})
        call([rank.settle.remote() for rank in ranks])

    def _ready(self, path: str, seen: Seen, *, rounds: int) -> None:
        """Rounds in which the trainers come when the step was prepared, as they do in a loop: the relay's CPU up to there, apart
        from sending, which shares its process; and what the trainers then wait for."""
        for _ in range(max(2, rounds // 2)):
            result = call(self.manager.ready.remote(path))
            call(self.manager.settle.remote(path))
            seen.exposed_s.append(max(rank["held_s"] for rank in result["ranks"]) - result["start_s"])
            seen.cpu_stages.append(result["ready"])
            seen.manager_cpu_s.append(sum(result["ready"].values()))


def _keep(seen: Seen, start_s: float, ranks: Sequence[dict[str, Any]], stages: dict[str, float]) -> None:
    seen.wall_s.append(max(rank["end_s"] for rank in ranks) - start_s)
    seen.held_s.append(max(rank["held_s"] for rank in ranks) - start_s)
    names = {name for rank in ranks for name in rank["stages"]}
    slowest = {name: max(rank["stages"].get(name, 0.0) for rank in ranks) for name in names}
    seen.stages.append(stages | slowest)


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for values in rounds for name in values))
    return {name: median(values[name] for values in rounds if name in values) for name in names}


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    first = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {first[-1] if first else ''}"[:300]
