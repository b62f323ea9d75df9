"""One staged update, made by all trainer ranks together; one rank alone is the smallest case. No rank needs the whole model.

All trainer ranks make the same calls. The first speaks to engines over HTTP; bytes go from each trainer straight to each
engine rank. Steps of one update, with what the ranks tell one another between them:

    what changed (first: what each holds) -> rank 0 opens engines -> who takes part -> plan, send -> how it went
    -> rank 0 verifies and commits -> the outcome
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch

from r3channel import errors
from r3channel.weights.engine import EngineHandle, describe_states
from r3channel.weights.executor import Feed, Work
from r3channel.weights.progress import GRACE_S, REPAIR_S, background
from r3channel.weights.stages import Given, Sums, check_complete
from r3channel.weights.wires import RankLink


class Staged(Work):
    """A staged update on one rank. Every rank makes the same calls; each failure is raised on all. One thread."""

    def __init__(self, *crew: Any, **options: Any) -> None:
        super().__init__(*crew, **options)
        self._ranks = self._stages.ranks
        self._deciding = False
        """Whether engines may hold the new version by now."""
        self._coming: dict[int, tuple[str, Sums]] = {}
        self._bucket = 0
        self._sending: dict[Future[int], EngineHandle] = {}
        self._over = False
        self._lost: dict[str, str] = {}
        """Engines that this trainer could not reach."""

    def open(self, given: Given) -> None:
        """Link all engines and tell each what will come. Raises on every rank; CannotStage means that nothing has changed."""
        run, stages = self._run, self._stages
        with run.stage("plan"):
            changed = stages.survey(given, run.deadline)
        with run.stage("join"):
            self._link()
            self._check_rounded(given)
            links = [link for _, link in self._links()]
            # asked of all: one that failed alone, or came late, has another plan than the others
            aimed = not changed and stages.aimed_at(links, given.ends)
            agreed = all(self._ranks.exchange(aimed, run.deadline))
        with run.stage("plan"):
            if not agreed:
                stages.aim(links, given.ends, run.deadline)

    def deliver(self, feed: Feed) -> None:
        feed(self._push)
        self._landed()
        left_s = self._run.deadline.left_s()
        self._start(lambda link: link.end(timeout_s=left_s) or 0)
        self._landed()
        self._leave_out_the_lost()
        self._deciding = True
        left = self._lead(self._commit).get("left")
        self.outcome = errors.EngineLeftBehind(left) if left else self.outcome

    def abort(self) -> None:
        """Send no more, and let all serve as before: no parameter was touched, but at engines that are FENCED. Links that are
        still in use are given up."""
        self._over = True
        wait(self._sending, timeout=REPAIR_S)
        for call, member in self._sending.items():
            if not call.done():
                member.unlink()
        if self._ranks.leads:
            self.roll_back()

    # -- links ---------------------------------------------------------------------------------------------------------

    def _link(self) -> None:
        """Links to every engine that takes part."""
        deadline = self._run.deadline
        mine = [member.url for member in self.members if not member.staged(self._stages.metas)]
        without = set(itertools.chain(*self._ranks.exchange(mine, deadline)))
        told = self._lead(lambda: self._ask(without))
        for member in self.members:
            member.size = told["all"][member.url]
        fresh = [member for member in self.members if member.url in told["fresh"]]
        self._stages.attempts.update(told["fresh"])
        for member in fresh:
            if not self._ranks.leads:
                member.unlink()
        self._take(fresh)

    def _ask(self, without: Collection[str]) -> dict[str, Any]:
        """Have engines connect that have no links, or are named as such."""
        self.meet()
        unlinked = [m for m in self.members if not m.staged(self._stages.metas) or m.url in without]
        orders = {member: self._stages.order(member.url) for member in unlinked}
        # A dry run may take all the time there is: engine_timeout_s is meant for a bucket, and it grows with the tensors.
        fresh = self.each(lambda m, left_s: m.open(orders[m], left_s), among=unlinked)
        attempts = {member.url: self._stages.attempts[member.url] for member in fresh}
        return {"all": {m.url: m.size for m in self.members}, "fresh": attempts}

    def _take(self, fresh: Sequence[EngineHandle]) -> None:
        """Accept their links. ManifestMismatch where parameters are not given."""
        if fresh:
            links = self._stages.accept({m.url: m.size for m in fresh}, self._run.deadline)
            for member in fresh:
                member.ranks, member.metas = links[member.url], self._stages.metas
        ranks = [rank for member in self.members for rank in member.ranks]
        metas, names = self._stages.metas, self._config.expected is not None
        self._run.report.rounded, self._run.report.skipped = check_complete(ranks, metas, names=names)
        self._run.report.loaded = next((rank.whole for rank in ranks if rank.whole), "")

    def _check_rounded(self, given: Given) -> None:
        """Refuse tensors that the engine that is read keeps rounded, unless they are rounded alike where they go."""
        kept = self._run.report.rounded
        lost = next((name for name, how in given.rounded.items() if kept.get(name) != how), None)
        if lost is not None:
            raise errors.ManifestMismatch(
                f"the engine that is read keeps {lost} rounded ({given.rounded[lost]}), the one to be filled does not; "
                "give it the trainer's weights (`republish`)"
            )

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _links(self) -> Iterator[tuple[EngineHandle, RankLink]]:
        for member in self.members:
            if member.url not in self._lost:
                yield from ((member, link) for link in member.ranks)

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send this bucket while the caller makes the next one ready."""
        if self._over:
            raise errors.UsageError("the update has ended")
        self._ranks.check()
        self._landed()
        number, limit_s = self._bucket, self._config.engine_timeout_s
        how = {"deadline": self._run.deadline, "record_timeout_s": limit_s}
        self._bucket += 1
        self._start(lambda link: link.send(self._ranks.update, number, tensors, **how))

    def _start(self, call: Callable[[RankLink], int]) -> None:
        with self._run.stage("wait_send"):  # a new thread may have to wait for the interpreter
            self._sending = {background(partial(call, link)): member for member, link in self._links()}

    def _landed(self) -> None:
        """Wait for the bucket under way. An engine that did not take it gets no more; another failure is raised."""
        sending, self._sending = self._sending, {}
        if not sending:
            return
        left_s = self._run.deadline.left_s()
        with self._run.stage("wait_send"):
            wait(sending, timeout=left_s + GRACE_S)
        for call, member in sending.items():
            error = call.exception() if call.done() else TimeoutError(f"no end within {left_s:.1f} s")
            if not call.done():
                member.unlink()  # the call ends with it
            if isinstance(error, (errors.TransportError, TimeoutError)):
                self._lost.setdefault(member.url, str(error))
            elif error is not None:
                raise error
            else:
                self._run.report.sent_bytes += call.result()
        if not any(True for _ in self._links()):
            raise errors.EngineUnavailable(
                "; ".join(f"engine {url}: {why}" for url, why in self._lost.items())
            )

    def _leave_out_the_lost(self) -> None:
        """Engines that any trainer could not reach are lost to all."""
        words = self._ranks.exchange(self._lost, self._run.deadline.at_least(GRACE_S * 10))
        gone = {url: why for lost in words for url, why in lost.items()}
        for member in [m for m in self.members if m.url in gone]:
            self.lose(member, errors.EngineUnavailable(f"engine {member.url}: {gone[member.url]}"))

    # -- all ranks together --------------------------------------------------------------------------------------------

    def _lead(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let the first rank alone act and tell the others; its failure is raised on all."""
        told = call() | {"evicted": self._run.report.evicted} if self._ranks.leads else {}
        try:
            told = self._ranks.exchange(told, self._run.deadline.at_least(GRACE_S * 10))[0]
        except errors.TransportError as gone:
            if not self._deciding:
                raise
            self.outcome = lost = errors.TrainerRankLost(self._known(str(gone)))
            if not self._ranks.leads:
                raise lost from gone
        for member in [m for m in self.members if m.url in told["evicted"]]:
            self.leave_out(member, told["evicted"][member.url])
        return told

    def _known(self, gone: str) -> str:
        """What engines hold, for an error. The rank that commits knows it; the others ask."""
        version, members = self._version, self.members
        if self._ranks.leads:
            states = f"[engines now: {describe_states(members)}]"
            return (
                f"weight version {version} is committed, but not told to every trainer rank: {gone} {states}"
            )
        asked = ", ".join(f"{member.url}: {member.version_now()}" for member in members)
        return f"rank 0 was committing weight version {version}, and did not say how it went: {gone} [engines say: {asked}]"

    # -- rank 0 alone --------------------------------------------------------------------------------------------------

    def _commit(self) -> dict[str, Any]:
        """Verify, pause, and change over everywhere."""
        self._verify()
        self.pause()
        order = {"op": "commit", "session": self._stages.session, "update": self._ranks.update}
        order["version"] = self._version
        flush = self._config.flush
        left = self.commit(lambda m, left_s: m.change_over(order, self._version, flush, left_s))
        self._stages.committed = self._coming
        return {} if left is None else {"left": str(left)}

    def _verify(self) -> None:
        """Every trainer has sent everything, and every rank has placed it. Engines of equal ranks must agree."""
        with self._run.stage("verify"):
            found = self.each(self._verified)
        first = dict(self._stages.committed) if self._alone else {}
        for member, sums in found.items():
            other, wanted = first.setdefault(len(sums), (f"engine {member.url}", sums))
            if sums != wanted:
                raise errors.WeightsCorrupt(
                    f"engine {member.url} staged other bytes of version {self._version} than {other}: weights changed since, or "
                    "trainer ranks that hold the same parameter hold other values. Their replicas drift apart where gradients "
                    "are not reduced between them, as those of experts under TP > 1 with expert parallel sizes of 1 (Megatron's "
                    "`allreduce` mark)"
                )
        self._coming = {ranks: ("was committed", sums) for ranks, (_, sums) in first.items()}
        self._run.report.verified = sum(rank.compared for rank in next(iter(found)).ranks)
        if self._config.verify and not self._run.report.loaded:
            self._run.checksums = {str(n): [own for _, own in sums] for n, (_, sums) in first.items()}

    def _verified(self, member: EngineHandle, left_s: float) -> Sums:
        wanted = self._config.verify
        return [rank.verify(self._ranks.update, checksums=wanted, timeout_s=left_s) for rank in member.ranks]
