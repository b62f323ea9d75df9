"""One staged update, made by all trainer ranks together; one rank alone is the smallest case. No rank needs the whole model.

All trainer ranks make the same calls. The first speaks to engines over HTTP; bytes go from each trainer straight to each
engine rank. What the ranks tell one another: what changed (first: what each holds), who has no links; what rank 0 linked; the
plan; whom each could not reach; how it ended.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from traceback import clear_frames
from typing import Any

import torch

from r3channel import errors
from r3channel.weights.engine import EngineHandle
from r3channel.weights.executor import Update
from r3channel.weights.progress import T, background
from r3channel.weights.rank_link import RankLink
from r3channel.weights.send_planner import Sums, check_complete
from r3channel.weights.transaction import Kind


class Staged(Update):
    """A staged update on one rank."""

    way = "staged"

    def __init__(self, *work: Any, **options: Any) -> None:
        super().__init__(*work, **options)
        self._coming = dict(self._planner.committed) if self.now.alone else {}
        """By an engine's number of ranks: who staged it first, and what."""
        self._fresh: dict[str, int] = {}
        self._bucket, self._adding = 0, threading.Lock()

    # -- links ---------------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        with self._run.stage("plan"):
            self._planner.survey(self._spec, self._run.deadline)
        with self._run.stage("join"):
            mine = [member.url for member in self.members if not member.staged(self._planner.metas)]
            self._unlinked = set(itertools.chain(*self._ranks.exchange(mine, self._run.deadline)))

    def _link(self, handle: EngineHandle, left_s: float) -> None:
        """Have the engine connect if it has no links to every trainer. A dry run may take all the time there is."""
        if handle.url in self._unlinked or not handle.staged(self._planner.metas):
            handle.open(self._planner.order(handle.url), left_s)
            self._fresh[handle.url] = self._planner.attempts[handle.url]

    def _plan(self) -> None:
        """Accept the links, and plan unless every rank did for these. ManifestMismatch where parameters are not given."""
        planner, deadline = self._planner, self._run.deadline
        with self._run.stage("join"):
            linked = self._hear({"fresh": self._fresh, "sizes": {m.url: m.size for m in self.members}})
            planner.attempts.update(linked["fresh"])
            fresh = [member for member in self.members if member.url in linked["fresh"]]
            for member in fresh:
                member.size = linked["sizes"][member.url]
                member.unlink()
            links = planner.accept({m.url: m.size for m in fresh}, deadline, planner.metas)
            for member in fresh:
                member.ranks, member.metas = links[member.url], planner.metas
            ranks = [link for member in self.members for link in member.ranks]
            self._check(ranks)
        with self._run.stage("plan"):
            planner.aim(ranks, deadline)

    def _check(self, ranks: Sequence[RankLink]) -> None:
        """Refuse what leaves a parameter old, and tensors that the engine that is read keeps rounded, unless they are rounded
        alike where they go."""
        report, names = self._run.report, self._config.expected is not None
        report.rounded, report.skipped = check_complete(ranks, self._planner.metas, names=names)
        report.loaded = next((rank.whole for rank in ranks if rank.whole), "")
        for name, how in self._spec.rounded.items():
            if report.rounded.get(name) != how:
                raise errors.ManifestMismatch(
                    f"the engine that is read keeps {name} rounded ({how}), the one to be filled does not; "
                    "give it the trainer's weights (`republish`)"
                )

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _give(self) -> None:
        super()._give()
        # No longer than that: one silent link would end the update for all engines.
        most_s = self._config.engine_timeout_s
        self._bucket_call = lambda link, left_s: link.end(timeout_s=min(left_s, most_s)) or 0
        self._happen(Kind.BUCKET)
        self._landed()

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send this bucket while the caller makes the next one ready."""
        self._ranks.check()
        self._landed()
        how = {"deadline": self._run.deadline, "record_timeout_s": self._config.engine_timeout_s}
        number, update, self._bucket = self._bucket, self._ranks.update, self._bucket + 1
        self._bucket_call = lambda link, _: link.send(update, number, tensors, **how)
        self._happen(Kind.BUCKET)

    def _send(self, handle: EngineHandle, left_s: float) -> None:
        sent = sum(_at_once(handle, lambda link: self._bucket_call(link, left_s)))
        with self._adding:
            self._run.report.sent_bytes += sent

    # -- rank 0 alone --------------------------------------------------------------------------------------------------

    def _verify(self, handle: EngineHandle, left_s: float) -> None:
        """Every trainer has sent everything, and every rank has placed it. Engines of equal ranks must agree."""
        how = {"checksums": self._config.verify, "timeout_s": left_s}
        sums: Sums = _at_once(handle, lambda link: link.verify(self._ranks.update, **how))
        other, wanted = self._coming.setdefault(len(sums), (f"engine {handle.url}", sums))
        if sums != wanted:
            raise errors.WeightsCorrupt(
                f"engine {handle.url} staged other bytes of version {self._version} than {other}: weights changed since, or "
                "trainer ranks that hold the same parameter hold other values. Their replicas drift apart where gradients "
                "are not reduced between them, as those of experts under TP > 1 with expert parallel sizes of 1 (Megatron's "
                "`allreduce` mark)"
            )
        self._run.report.verified = sum(link.compared for link in handle.ranks)
        if self._config.verify and not self._run.report.loaded:
            self._run.checksums = {str(n): [own for _, own in sums] for n, (_, sums) in self._coming.items()}

    def _commit(self, handle: EngineHandle, left_s: float) -> None:
        order = {"op": "commit", "session": self._planner.session, "update": self._ranks.update}
        flush = self._config.pause != "in_place"
        handle.change_over(order | {"version": self._version}, self._version, flush, left_s)
        self._planner.committed = {n: ("was committed", sums) for n, (_, sums) in self._coming.items()}


class Grouped(Staged):
    """The same over a joint group: engines are paused before its first call and until its last, which NCCL asks for."""

    way = "grouped"

    def _group(self) -> None:
        """Begin to join the group of all trainer ranks and of the engines that are left."""
        self._hear({})
        self._links = [link for member in self.members for link in member.ranks]
        self._told = self._planner.joint.join(self._links, self._planner.trainers[0][0], self._run.deadline)

    def _gather(self, handle: EngineHandle, left_s: float) -> None:
        if self._told:
            first = self._ranks.size + self._links.index(handle.ranks[0])
            self._regroup(handle, left_s, self._told | {"rank": first})

    def _regroup(self, handle: EngineHandle, left_s: float, joint: dict[str, Any]) -> None:
        handle.order({"op": "regroup", "session": self._planner.session, "joint": joint}, left_s)

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ranks.check()
        with self._run.stage("wait_send"):
            sent = self._planner.joint.send(self._ranks.update, tensors, self._run.deadline)
        self._run.report.sent_bytes += sent

    def _undo(self, handle: EngineHandle, left_s: float) -> None:
        """Nothing of a group may be under way in an engine that serves."""
        with suppress(errors.R3Error):
            self._regroup(handle, left_s, {})
        handle.undo(left_s)


def _at_once(handle: EngineHandle, call: Callable[[RankLink], T]) -> list[T]:
    """Make a call over all links to an engine."""
    calls = [background(partial(_letting_go, call, link)) for link in handle.ranks]
    return [call.result() for call in calls]


def _letting_go(call: Callable[[RankLink], T], link: RankLink) -> T:
    """An error is kept longer than the link, and its frames hold views of the rank's memory: they are emptied."""
    try:
        return call(link)
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise
