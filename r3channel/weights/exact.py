"""The exact way: every trainer rank sends what engines' ranks need of its own shards, and no rank holds the whole model.

All trainer ranks make the same calls. The first speaks to engines over HTTP; bytes go from each trainer straight to each
engine rank. Steps of one update, with what the ranks tell one another between them:

    what changed (first: what each holds) -> rank 0 opens engines -> who takes part -> plan, send -> how it went
    -> rank 0 verifies and commits -> the outcome
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from r3channel.errors import (
    DeadlineExceeded,
    EngineLeftBehind,
    EngineUnavailable,
    NonFiniteWeights,
    PeerFailed,
    PlanInvalid,
    PlanMismatch,
    R3Error,
    TrainerRankLost,
    TransportError,
    WeightsError,
)
from r3channel.weights.convert import Shard, gathered_bytes
from r3channel.weights.dryrun import Part
from r3channel.weights.executor import Staged, background
from r3channel.weights.geometry import Box, Layout, ShardMap, report_of
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.member import told
from r3channel.weights.pack import check_finite
from r3channel.weights.plan import plan_reshard
from r3channel.weights.progress import GRACE_S, Deadline, Run
from r3channel.weights.wires import Entry, RankLink, Stages


class TrainerRanks:
    """The trainer ranks of one torch process group, which tell one another bytes."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def exchange(self, value: Any, deadline: Deadline) -> list[Any]:
        """Every rank's value (plain, as JSON), by rank. DeadlineExceeded, or PeerFailed when a rank has died."""
        return [json.loads(raw) for raw in self.exchange_bytes(json.dumps(value).encode(), deadline)]

    def exchange_bytes(self, raw: bytes, deadline: Deadline) -> list[bytes]:
        left_s, begun_s = deadline.left_s(), time.monotonic()
        try:
            return gathered_bytes(raw, group=self._group, device=self._device, until_s=begun_s + left_s)
        except RuntimeError as error:
            if time.monotonic() - begun_s >= left_s:
                raise DeadlineExceeded(f"a trainer rank did not come along within {left_s:.1f} s") from error
            raise PeerFailed(f"a trainer rank is gone: {str(error).splitlines()[0]}") from error


class ExactStages(Stages):
    """One trainer rank's part of all updates of a session."""

    def __init__(self, ranks: TrainerRanks, *, bucket_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._source: ShardMap | None = None
        self._report = b""
        self._shards: dict[str, list[Shard]] = {}
        self._pieces: dict[RankLink, list[Shard]] = {}
        """What each entry of a link's table is cut from."""

    def connect(self, deadline: Deadline) -> None:
        """All ranks listen, with the first one's secret, and know one another's addresses."""
        if self._ranks.rank == 0:
            self.listen()
        self.session, nonce = self._ranks.exchange([self.session, self.nonce], deadline)[0]
        self.trainers = [tuple(where) for where in self._ranks.exchange(self.listen(nonce), deadline)]

    def survey(self, shards: Sequence[Shard], deadline: Deadline) -> bool:
        """Tell what this rank holds and learn what all hold; whether that changed since the last call."""
        report = report_of((shard.meta, shard.box) for shard in shards)
        self._shards = {}
        for shard in shards:
            self._shards.setdefault(shard.meta.name, []).append(shard)
        changed = any(self._ranks.exchange(report != self._report, deadline))
        if changed:
            self._source = ShardMap.gathered(self._ranks.exchange_bytes(report, deadline))
            self.metas = self._source.metas
            self._report = report
        return changed

    def aimed_at(self, links: Sequence[RankLink]) -> bool:
        """Whether the last plan is for these engine ranks: all of the engines, or one that is brought back alone."""
        return self._pieces.keys() == set(links)

    def aim(self, links: Sequence[RankLink], deadline: Deadline) -> str:
        """Plan for these engine ranks (the same order on every trainer) and tell each what will come; the plan's hash."""
        assert self._source is not None
        held = [link.needs.parts for link in links]
        plan = plan_reshard(
            self._source,
            _target_map(self.metas, links, first=self._ranks.size),
            rank=self._ranks.rank,
            world_size=self._ranks.size + len(links),
        )
        sends = plan.sends()
        self._pieces = {}
        index_of = {meta.name: index for index, meta in enumerate(self.metas)}
        for number, link in enumerate(links):
            by_tensor: dict[int, list[tuple[int, Part]]] = {}
            for at, part in enumerate(held[number]):
                by_tensor.setdefault(part.tensor, []).append((at, part))
            entries, pieces = [], []
            for op in sends.get(self._ranks.size + number, []):
                name = plan.tensors[op.tensor].name
                shard = self._holder(name, op.box)
                for at, part in by_tensor[index_of[name]]:
                    if part.box.intersect(op.box) == op.box:
                        entries.append(Entry(at, op.box))
                        pieces.append(shard)
            link.tell(entries, timeout_s=deadline.left_s())
            self._pieces[link] = pieces
        return plan.hash

    def send_all(self, link: RankLink, version: int, left_s: float) -> int:
        """Everything this trainer has for one engine rank, bucket by bucket; returns the bytes."""
        deadline, sent, first = Deadline(left_s, f"sending to {link.engine}"), 0, 0
        pieces = self._current(link)
        while first < len(pieces):
            end, nbytes = first, 0
            while end < len(pieces) and (end == first or nbytes + pieces[end].nbytes <= self._bucket_bytes):
                nbytes += pieces[end].nbytes
                end += 1
            sent += link.send(version, first, pieces[first:end], timeout_s=deadline.left_s())
            first = end
        return sent

    def check_finite(self) -> None:
        named = [(shard.meta.name, shard.tensor) for shards in self._shards.values() for shard in shards]
        check_finite(named, where="this rank's shards")

    def _current(self, link: RankLink) -> list[torch.Tensor]:
        """The pieces of this update, in the dtype that is sent: shards may be other memory than when the plan was made."""
        found = []
        for entry, planned in zip(link.entries, self._pieces[link], strict=True):
            shard = self._holder(planned.meta.name, entry.box)
            found.append(shard.tensor[entry.box.within(shard.box)].to(shard.meta.dtype))
        return found

    def _holder(self, name: str, box: Box) -> Shard:
        for shard in self._shards.get(name, ()):
            if shard.box.intersect(box) == box:
                return shard
        raise PlanInvalid(f"tensor {name}: the plan needs {box} of this rank, which does not hold it")


def same_plan(hashes: Sequence[str]) -> None:
    """PlanMismatch with both hashes unless every rank planned the same."""
    other = next((rank for rank, seen in enumerate(hashes) if seen != hashes[0]), None)
    if other is not None:
        raise PlanMismatch(
            f"weights were not sent: rank {other} planned {hashes[other]}, rank 0 planned {hashes[0]}"
        )


def _target_map(metas: Sequence[TensorMeta], links: Sequence[RankLink], *, first: int) -> ShardMap:
    """What the engines' ranks need, numbered after the trainers, in the dtypes that they keep."""
    held: dict[int, dict[tuple[int, Box], None]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for number, link in enumerate(links):
        for part in link.needs.parts:
            if part.box.numel:
                held.setdefault(part.tensor, {})[first + number, part.box] = None
                dtypes.setdefault(part.tensor, link.needs.params[part.param].dtype)
    rows = []
    for tensor in sorted(held):
        meta = TensorMeta(name=metas[tensor].name, dtype=dtypes[tensor], shape=metas[tensor].shape)
        rows.append((meta, Layout.of(meta.shape, held[tensor])))
    return ShardMap(rows)


class JointUpdate:
    """One update, on one rank. Every rank makes the same calls; each failure becomes everybody's."""

    def __init__(
        self, work: Staged, stages: ExactStages, ranks: TrainerRanks, run: Run, version: int
    ) -> None:
        self._work, self._stages, self._ranks, self._run, self._version = work, stages, ranks, run, version
        self._deciding = False
        """Whether engines may hold the new version already."""
        self.outcome: R3Error | None = None
        """What is to be raised although the update counts: EngineLeftBehind, TrainerRankLost."""

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
            self._open()
        with run.stage("plan"):
            links = list(itertools.chain(*(member.ranks for member in self._work.members)))
            if changed or not self._stages.aimed_at(links):
                same_plan(self._ranks.exchange(self._stages.aim(links, run.deadline), run.deadline))
        with run.stage("wait_send"):
            self._send()
        self._deciding = True
        left = self._lead(self._commit).get("left")
        self.outcome = EngineLeftBehind(left) if left else self.outcome
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
            told["evicted"] = self._run.evicted
        try:
            told = self._ranks.exchange(told, self._run.deadline.at_least(GRACE_S * 10))[0]
        except TransportError as gone:
            error = error or gone
            if self._deciding and error is gone:
                self.outcome = error = TrainerRankLost(self._known(str(gone)))
                if self.leads:
                    return told
        if error is not None:
            raise error
        for member in [m for m in self._work.members if m.url in told["evicted"]]:
            self._work.leave_out(member, told["evicted"][member.url])
        self._raise([told["error"]] if "error" in told else [])
        return told

    def _known(self, gone: str) -> str:
        """What engines hold, for an error: known to the rank that commits; the others ask."""
        version, members = self._version, self._work.members
        if self.leads:
            states = f"[engines now: {told(members)}]"
            return (
                f"weight version {version} is committed, but not every trainer rank was told: {gone} {states}"
            )
        asked = ", ".join(f"{member.url}: {member.version_now()}" for member in members)
        return f"rank 0 was committing weight version {version}, and did not say how it went: {gone} [engines say: {asked}]"

    def _open(self) -> None:
        """Links to every engine that takes part."""
        work, deadline = self._work, self._run.deadline
        mine = [member.url for member in work.members if not member.staged(self._stages.metas)]
        without = set(itertools.chain(*self._ranks.exchange(mine, deadline)))

        def ask() -> dict[str, Any]:
            fresh = work.ask(without)
            attempts = {member.url: self._stages.attempts[member.url] for member in fresh}
            return {"all": {m.url: m.client.ranks for m in work.members}, "fresh": attempts}

        told = self._lead(ask)
        for member in work.members:
            member.client.ranks = told["all"][member.url]
        fresh = [member for member in work.members if member.url in told["fresh"]]
        self._stages.attempts.update(told["fresh"])
        for member in fresh:
            if not self.leads:
                member.unlink()
        self._together(lambda: work.take(fresh), True)

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
        try:
            self._work.resume(self._version)
        except EngineLeftBehind as error:
            return {"left": str(error)}
        return {}
