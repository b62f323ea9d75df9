"""One exact update as all trainer ranks make it together: the first drives the transaction, each sends its own shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from r3channel.errors import EngineUnavailable, NonFiniteWeights, R3Error, TransportError, WeightsError
from r3channel.weights.convert import Shard
from r3channel.weights.deadline import GRACE_S
from r3channel.weights.exact import ExactStages, TrainerRanks, same_plan
from r3channel.weights.executor import Staged, background
from r3channel.weights.manifest import Bucket, Manifest
from r3channel.weights.progress import Run
from r3channel.weights.ranklink import RankLink


class JointUpdate:
    """One update, on one rank. Every rank makes the same calls; each failure becomes everybody's."""

    def __init__(
        self, work: Staged, stages: ExactStages, ranks: TrainerRanks, run: Run, version: int
    ) -> None:
        self._work, self._stages, self._ranks, self._run, self._version = work, stages, ranks, run, version

    @property
    def leads(self) -> bool:
        return self._ranks.rank == 0

    def run(self, shards: Sequence[Shard], *, finite: bool) -> Manifest:
        """Up to the commit, on every rank. Raises on every rank."""
        run = self._run
        with run.stage("plan"):
            changed = self._together(
                lambda: self._stages.check_finite() if finite else None, self._survey(shards)
            )
        with run.stage("join"):
            changed |= self._open()
        with run.stage("plan"):
            links = list(itertools.chain(*(member.ranks for member in self._work.members)))
            if changed:
                same_plan(self._ranks.exchange(self._stages.aim(links, run.deadline), run.deadline))
        with run.stage("wait_send"):
            self._send()
        self._lead(self._commit)
        return Manifest.of([Bucket.of(self._stages.metas)])

    def _survey(self, shards: Sequence[Shard]) -> bool:
        return self._stages.survey(shards, self._run.deadline)

    def _together(self, step: Callable[[], None], result: bool) -> bool:
        """All ranks do the step, or all raise."""
        error: Exception | None = None
        try:
            step()
        except R3Error as failure:
            error = failure
        words = self._ranks.exchange(
            "" if error is None else f"{type(error).__name__}: {error}", self._run.deadline
        )
        if error is not None:
            raise error
        self._raise([f"trainer rank {rank}: {word}" for rank, word in enumerate(words) if word])
        return result

    def _raise(self, words: Sequence[str]) -> None:
        if words:
            kind = NonFiniteWeights if "NonFiniteWeights" in words[0] else WeightsError
            raise kind("; ".join(words))

    def _lead(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first rank alone does, and tells the others; its failure is everybody's."""
        told: dict[str, Any] = {}
        error: BaseException | None = None
        if self.leads:
            try:
                told = call()
            except Exception as failure:
                error = failure
                told = {"error": f"{type(failure).__name__}: {failure}"}
        told = self._ranks.exchange(told, self._run.deadline.at_least(GRACE_S * 10))[0]
        if error is not None:
            raise error
        self._raise([told["error"]] if "error" in told else [])
        return told

    def _open(self) -> bool:
        """Links to every engine that takes part; whether any of them is new."""
        work, deadline = self._work, self._run.deadline
        mine = [member.url for member in work.members if not member.staged]
        without = set(itertools.chain(*self._ranks.exchange(mine, deadline)))

        def ask() -> dict[str, Any]:
            fresh = work.ask(without)
            return {"all": {m.url: m.client.ranks for m in work.members}, "fresh": [m.url for m in fresh]}

        before = list(work.members)
        told = self._lead(ask)
        work.members = [member for member in before if member.url in told["all"]]
        for member in work.members:
            member.client.ranks = told["all"][member.url]
        fresh = [member for member in work.members if member.url in told["fresh"]]
        for member in fresh:
            if not self.leads:
                member.unlink()
        self._together(lambda: work.take(fresh), True)
        return bool(fresh) or len(work.members) != len(before)

    def _send(self) -> None:
        """This rank's shards to every engine rank; engines that a trainer could not reach are lost to all."""
        left_s = self._run.deadline.left_s()
        calls = {
            background(partial(self._to, link, left_s)): (member, link)
            for member in self._work.members
            for link in member.ranks
        }
        wait(calls, timeout=left_s + GRACE_S)
        lost: dict[str, str] = {}
        failed = ""
        for future, (member, link) in calls.items():
            error = future.exception() if future.done() else TimeoutError(f"no end within {left_s:.1f} s")
            if isinstance(error, (TransportError, TimeoutError)):
                lost[member.url] = f"rank {link.rank}: {error}"
            elif error is not None:
                failed = f"{type(error).__name__}: {error}"
        self._run.sent_bytes = sum(f.result() for f in calls if f.done() and f.exception() is None)
        told = self._ranks.exchange(
            {"lost": lost, "failed": failed}, self._run.deadline.at_least(GRACE_S * 10)
        )
        self._raise(
            [f"trainer rank {rank}: {one['failed']}" for rank, one in enumerate(told) if one["failed"]]
        )
        gone = {url: why for one in told for url, why in one["lost"].items()}
        for member in [m for m in self._work.members if m.url in gone]:
            self._work.lose(member, EngineUnavailable(f"engine {member.url} {gone[member.url]}"))

    def _to(self, link: RankLink, left_s: float) -> int:
        sent = self._stages.send_all(link, self._version, left_s)
        link.end(timeout_s=left_s)
        return sent

    def _commit(self) -> dict[str, Any]:
        self._work.verify()
        self._work.commit(self._version)
        return {}
