"""Carries out the actions of an update's transaction and reports their results to it.

Calls to several engines run at the same time, each with a limit. `transaction` decides; this module does not know where weights
come from, or which version comes next. The calls of a staged update are here, over links or in a joint group; `broadcast` has
its own calls.

All trainer ranks make the same calls; one rank alone is the smallest case, and no rank needs the whole model. Rank 0 speaks to
engines over HTTP; bytes go from each trainer straight to each engine rank. The ranks tell one another what changed (the first
time: what each holds), which engines have no links, what rank 0 linked, the plan, which engines each rank could not reach, and
how the update ended.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from traceback import clear_frames
from typing import Any, Self

import torch

from r3channel import errors
from r3channel.weights.engine import EngineHandle, Engines
from r3channel.weights.manifest import Push
from r3channel.weights.progress import AGAIN_S, CONTROL_S, GRACE_S, REPAIR_S, Run, T, background
from r3channel.weights.rank_link import RankLink
from r3channel.weights.send_planner import Feed, SendPlanner, UpdateSpec, check_complete
from r3channel.weights.staged_copy import staged_bytes
from r3channel.weights.transaction import CALLS, Action, Engine, EngineState, Event, Kind, Transaction, step
from r3channel.weights.transaction import UpdateState as State

LOSSES = (errors.EngineUnavailable, errors.TransportError)  # DeadlineExceeded is a TransportError
_STAGES = {State.LINK: "join", State.PAUSE: "pause", State.STAGE: "wait_send"}
"""The stage of a report that waiting for engines counts as; in other states, the stage has the call's name."""
_GROWING = ("link", "join", "send", "load", "hold", "check")
"""Calls whose time grows with the number of tensors: they have all the time that is left."""


class Update:
    """One update of some engines. Call `run` once; one thread calls.

    The method `_NAME` carries out the transaction's call NAME; a call to an engine runs in a thread of its own. Without such a
    method the engine's own method NAME is called."""

    way = ""
    _push: Push

    def __init__(
        self, members: Sequence[EngineHandle], run: Run, engines: Engines, planner: SendPlanner
    ) -> None:
        """Make an update of these engines.

        Args:
            members: The engines to update.
            run: The update's version, deadline and report.
            engines: All engines of the session.
            planner: Says which tensors go over which link; has the session's settings.
        """
        self._handles = {member.url: member for member in members}
        self._engines, self._config, self._run, self._planner = engines, planner.config, run, planner
        self._version, self._ranks = run.version, planner.ranks
        known = [Engine(m.url, m.now.state, m.now.why, m.now.holds if m.boot_id else None) for m in members]
        parts = {"number": self._ranks.update, "version": run.version, "way": self.way, "alone": run.alone}
        self.now = Transaction(**parts, engines=tuple(known), rank=self._ranks.rank, ranks=self._ranks.size)
        self._again = {member.url for member in members if not member.now.member}
        """Engines that the last update left out: the others wait for these at each update."""
        self._due: list[str] = []
        """This rank's own calls that are still to be made."""
        self._calls: dict[Future[None], tuple[Action, float]] = {}
        """Calls to engines that are under way: the action, and when waiting for it ends (`time.monotonic`)."""
        self._paused_s = 0.0

    @property
    def members(self) -> list[EngineHandle]:
        """Return the engines that the update goes on with."""
        return [self._handles[engine.url] for engine in self.now.engines if engine.member]

    def run(self, spec: UpdateSpec, feed: Feed) -> Self:
        """Run the update, which brings the engines to the version.

        It returns or raises once no call is under way and engines with whole weights serve. An interrupt ends the update as a
        failure does; after the commit the engines are resumed first.

        Args:
            spec: What the update gives.
            feed: Gives the update's tensors, bucket by bucket.

        Returns:
            This update, whose state says how it ended.

        Raises:
            Exception: What failed the update.
        """
        self._spec, self._feed = spec, feed
        try:
            self._happen(Kind.BEGIN)
            self._carry_on()
        except BaseException as error:
            self._happen(Kind.FAILED, error=error)
            self._carry_on()
            raise
        finally:
            self._run.report.evicted = self.now.left_out
            if self.now.state is State.DONE:
                self._engines.version = self._version
        if self.now.state is State.ABORT and self.now.error is not None:
            raise self.now.error
        return self

    def check_all_follow(self) -> None:
        """Check that all engines and trainer ranks follow an update that counts.

        Raises:
            EngineLeftBehind: An engine does not serve the committed version.
            TrainerRankLost: Not every trainer rank was told of the commit.
        """
        left = [e for e in self.now.engines if e.member and e.state is not EngineState.SERVING]
        if left:
            raise errors.EngineLeftBehind(
                f"weight version {self._version} is committed, but {len(left)} of {len(self.members)} engines are left behind: "
                f"{', '.join(map(str, left))}. Repair them one by one, or update all"
            )
        if self.now.error is not None:
            raise errors.TrainerRankLost(
                f"weight version {self._version} is committed, but not told to every trainer rank: {self.now.error} "
                f"[engines now: {', '.join(map(str, self.now.engines))}]"
            )

    # -- events and actions --------------------------------------------------------------------------------------------

    def _happen(self, kind: Kind, **what: Any) -> None:
        event = Event(kind=kind, number=self._ranks.update, over=self._run.deadline.timeout_error(), **what)
        self.now, actions = step(self.now, event)
        for engine in self.now.engines:
            self._handles[engine.url].now = engine
        for action in actions:
            if action.call == "fail":  # first, so that the other ranks do not wait for the cleaning up
                self._ranks.fail(self.now.error or errors.R3Error())
            elif action.call == "forget":
                self._handles[action.engine].boot_id = ""
                background(self._handles[action.engine].unlink)
            elif action.engine:
                self._ask(action)
            else:
                self._due.append(action.call)

    def _ask(self, action: Action) -> None:
        handle, left_s = self._handles[action.engine], self._limit_s(action)
        if action.call == "pause":
            self._paused_s = time.monotonic()
        handle.found = None
        method = getattr(self, f"_{action.call}", None)
        call = getattr(handle, action.call) if method is None else partial(method, handle)
        with self._run.stage(_STAGES.get(CALLS[action.call].during, action.call)):
            begun = background(partial(call, left_s))  # a new thread may have to wait for the interpreter
        self._calls[begun] = action, time.monotonic() + left_s + GRACE_S

    def _limit_s(self, action: Action) -> float:
        most_s, left_s = self._config.engine_timeout_s, self._run.deadline.at_least(GRACE_S).left_s()
        # "resume": also where an engine that did not answer has used up the update's time
        limits_s = {"undo": REPAIR_S, "leave": 2 * REPAIR_S, "resume": most_s}
        limits_s["meet"] = min(left_s, AGAIN_S if action.engine in self._again else CONTROL_S)
        # These calls read a rank's bytes once: a core copies and hashes 4.9 GB/s (AMD EPYC), and all ranks of a host share its
        # memory's bandwidth. A link that falls silent meanwhile must not fail the update for the other engines.
        sizes = (staged_bytes(rank.needs.params) for rank in self._handles[action.engine].ranks)
        limits_s |= dict.fromkeys(("commit", "verify"), min(left_s, max(most_s, max(sizes, default=0) / 1e9)))
        return limits_s.get(action.call, left_s if action.call in _GROWING else min(left_s, most_s))

    def _carry_on(self) -> None:
        while self._calls or self._due:
            self._answers()
            for call in self._due[:1]:
                del self._due[:1]
                try:
                    getattr(self, f"_{call}")()
                except Exception as error:
                    self._happen(Kind.FAILED, error=error)
                else:
                    self._happen(Kind.ANSWERED, call=call)

    def _answers(self) -> None:
        """Wait for engines until no answer is missing."""
        while self._calls:
            call = next(iter(self._calls.values()))[0].call
            during, until_s = CALLS[call].during, max(limit_s for _, limit_s in self._calls.values())
            if self.now.error is not None and during is State.STAGE:  # healthy buckets have time to end
                until_s = min(until_s, time.monotonic() + REPAIR_S)
            with self._run.stage(_STAGES.get(during, call)):
                done, _ = wait(self._calls, max(until_s - time.monotonic(), 0), FIRST_COMPLETED)
                for future in done or list(self._calls):  # none in time: later answers are dropped
                    self._answer(future, self._calls.pop(future)[0])
            if call == "resume" and not self._calls:
                self._run.report.paused_s = time.monotonic() - self._paused_s

    def _answer(self, future: Future[None], action: Action) -> None:
        handle, error = self._handles[action.engine], None
        if not future.done():
            if action.call == "send":
                handle.unlink()  # the call ends with its links
            error = errors.DeadlineExceeded(f"engine {action.engine}: no answer to {action.call} in time")
        error = error or future.exception()
        kind = Kind.LOST if isinstance(error, LOSSES) else Kind.REFUSED if error else Kind.ANSWERED
        self._happen(kind, call=action.call, engine=action.engine, error=error, found=handle.found)

    def _wait_bucket(self) -> None:
        self._answers()
        if self.now.error is not None:
            raise self.now.error

    # -- calls of all ways ---------------------------------------------------------------------------------------------

    def _meet(self, handle: EngineHandle, left_s: float) -> None:
        if not handle.boot_id:
            self._engines.meet(handle, left_s)

    def _pause(self, handle: EngineHandle, left_s: float) -> None:
        handle.pause(self._config.pause, left_s)

    def _give(self) -> None:
        self._feed(self._push)
        self._wait_bucket()

    def _vote(self) -> None:
        words = self._ranks.exchange(self.now.left_out, self._run.deadline.at_least(GRACE_S * 10))
        for rank, lost in enumerate(words):
            self._happen(Kind.VOTED, rank=rank, lost=tuple(lost.items()))

    def _tell(self) -> None:
        """Let all ranks know how the update ended."""
        try:
            self._hear({})
        except errors.TransportError as gone:
            if not self.now.rank:
                raise
            asked = ", ".join(f"{member.url}: {member.version_now()}" for member in self.members)
            raise errors.TrainerRankLost(
                f"rank 0 was committing weight version {self._version}, and did not say how it went: {gone} [engines: {asked}]"
            ) from gone

    def _hear(self, word: dict[str, Any]) -> dict[str, Any]:
        """Return what rank 0 says, and take over its engine states."""
        known = [(e.url, e.state.name, e.why, e.holds, e.member) for e in self.now.engines]
        word = word | {"engines": known} if self._ranks.leads else {}
        word = self._ranks.exchange(word, self._run.deadline.at_least(GRACE_S * 10))[0]
        engines = tuple(Engine(url, EngineState[state], *rest) for url, state, *rest in word["engines"])
        self._happen(Kind.TOLD, engines=engines)
        return word


class Staged(Update):
    """A staged update, as one trainer rank carries it out."""

    way = "staged"

    def __init__(self, *work: Any) -> None:
        super().__init__(*work)
        self._coming = dict(self._planner.committed) if self.now.alone else {}
        """By an engine's number of ranks: which engine staged first, and its digests."""
        self._fresh: dict[str, tuple[int, int]] = {}
        """Engines that were linked in this update: the order's number, and the engine's number of ranks."""
        self._bucket, self._adding = 0, threading.Lock()

    # -- links ---------------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        with self._run.stage("plan"):
            self._planner.survey(self._spec, self._run.deadline)
        with self._run.stage("join"):
            mine = [member.url for member in self.members if not member.is_linked_for(self._planner.metas)]
            self._unlinked = set(itertools.chain(*self._ranks.exchange(mine, self._run.deadline)))

    def _link(self, handle: EngineHandle, left_s: float) -> None:
        if handle.url in self._unlinked or not handle.is_linked_for(self._planner.metas):
            handle.open(self._planner.order(handle.url), left_s)
            self._fresh[handle.url] = self._planner.attempts[handle.url], handle.size

    def _plan(self) -> None:
        planner, deadline = self._planner, self._run.deadline
        with self._run.stage("join"):
            linked = self._hear({"fresh": self._fresh})["fresh"]
            fresh = [member for member in self.members if member.url in linked]
            for member in fresh:
                planner.attempts[member.url], member.size = linked[member.url]
                member.unlink()
            links = planner.accept({m.url: m.size for m in fresh}, deadline, planner.metas)
            for member in fresh:
                member.ranks, member.metas = links[member.url], planner.metas
            ranks = [link for member in self.members for link in member.ranks]
            self._check(ranks)
        with self._run.stage("plan"):
            planner.aim(ranks, deadline)

    def _check(self, ranks: Sequence[RankLink]) -> None:
        report, names = self._run.report, self._config.expected is not None
        report.rounded, report.skipped = check_complete(ranks, self._planner.metas, names=names)
        report.loaded = next((rank.whole for rank in ranks if rank.whole), "")
        for name, how in self._spec.rounded.items():
            if report.rounded.get(name) != how:
                raise errors.ManifestMismatch(
                    f"the engine read keeps {name} rounded ({how}), this one does not: `republish` the trainer's weights"
                )

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _give(self) -> None:
        super()._give()
        # Not all the time that is left: one silent link would end the update for all engines.
        most_s = self._config.engine_timeout_s
        self._bucket_call = lambda link, left_s: link.end(timeout_s=min(left_s, most_s)) or 0
        self._happen(Kind.BUCKET)
        self._wait_bucket()

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ranks.check()
        self._wait_bucket()
        # links send on threads, whose stream is the default one: it does not wait for the caller's
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        how = {"deadline": self._run.deadline, "record_timeout_s": self._config.engine_timeout_s}
        number, update, self._bucket = self._bucket, self._ranks.update, self._bucket + 1
        self._bucket_call = lambda link, _: link.send(update, number, tensors, **how)
        self._happen(Kind.BUCKET)  # it leaves while the caller makes the next one ready

    def _send(self, handle: EngineHandle, left_s: float) -> None:
        sent = sum(_at_once(handle, lambda link: self._bucket_call(link, left_s)))
        with self._adding:
            self._run.report.sent_bytes += sent

    # -- rank 0 alone --------------------------------------------------------------------------------------------------

    def _verify(self, handle: EngineHandle, left_s: float) -> None:
        how = {"checksums": self._config.verify, "timeout_s": left_s}
        sums = _at_once(handle, lambda link: link.verify(self._ranks.update, **how))
        # engines with equal numbers of ranks must agree
        other, wanted = self._coming.setdefault(len(sums), (f"engine {handle.url}", sums))
        if sums != wanted:
            raise errors.WeightsCorrupt(
                f"engine {handle.url} staged other bytes of version {self._version} than {other}: weights changed since, or "
                "trainer ranks that hold the same parameter hold other values. Their replicas drift apart where gradients "
                "are not reduced between them, as those of experts under TP > 1 with expert parallel sizes of 1 (Megatron's "
                "`allreduce` mark)"
            )
        self._run.report.verified = sum(link.compared for link in handle.ranks)

    def _commit(self, handle: EngineHandle, left_s: float) -> None:
        order = {"op": "commit", "session": self._planner.session, "update": self._ranks.update}
        flush = self._config.pause != "in_place"
        handle.change_over(order | {"version": self._version}, self._version, flush, left_s)
        self._planner.committed = {n: ("was committed", sums) for n, (_, sums) in self._coming.items()}
        if self._config.verify and not self._run.report.loaded:
            self._run.checksums = {str(n): [own for _, own in sums] for n, (_, sums) in self._coming.items()}


class Grouped(Staged):
    """A staged update over a joint group. NCCL needs the engines paused from the group's first call to its last."""

    way = "grouped"

    def _group(self) -> None:
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
        until_s = time.monotonic() + left_s  # of both: a late call would reach into the next update
        with suppress(errors.R3Error):  # an engine that serves may have no call of a group under way
            self._regroup(handle, left_s / 2, {})
        handle.undo(until_s - time.monotonic())


def _at_once(handle: EngineHandle, call: Callable[[RankLink], T]) -> list[T]:
    # of all, also where one fails at once: the next update uses these links
    wait(calls := [background(partial(_letting_go, call, link)) for link in handle.ranks])
    return [call.result() for call in calls]


def _letting_go(call: Callable[[RankLink], T], link: RankLink) -> T:
    try:
        return call(link)
    except BaseException as error:
        # the error is kept longer than the link, and its frames hold views of the rank's memory
        clear_frames(error.__traceback__)
        raise
