"""The stages of one update of some engines, in order, and what a failure at any of them leaves behind.

    open (join, pause, begin) -> buckets through `push` -> close (end, verify) -> commit -> resume     else abort

Knows members' states and the registry; not what a bucket holds, where it comes from, or which version comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from r3channel.errors import EngineLeftBehind, R3Error
from r3channel.weights.enrolment import Enrolment
from r3channel.weights.fleet import REPAIR_S, Fleet
from r3channel.weights.manifest import Manifest
from r3channel.weights.member import EngineState, told
from r3channel.weights.progress import Run
from r3channel.weights.sender import BucketSender
from r3channel.weights.sglang import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The same for all updates of a session; what they mean says `WeightSync`."""

    pause: PauseMode
    verify: bool
    depth: int


class Transaction:
    """One update. One thread."""

    def __init__(
        self, fleet: Fleet, enrolment: Enrolment, rules: Rules, run: Run, *, alone: bool = False
    ) -> None:
        """`alone`: of engines that are brought to a version which counts already, whoever joins or leaves meanwhile."""
        self._alone = alone
        self._fleet, self._enrolment, self._rules, self._run = fleet, enrolment, rules, run
        self._sender = BucketSender(fleet, run, flush=rules.pause != "in_place", depth=rules.depth)
        self.push = self._sender.push

    def open(self) -> None:
        """Groups, handshake, pause; from here on nothing is routed to these engines."""
        run = self._run
        with run.stage("join"):
            self._fleet.ensure_links(run.deadline, self._enrolment.admit)
        with run.stage("pause"):
            self._enrolment.open(self._fleet.members, for_s=run.deadline.left_s())
            self._fleet.pause(self._rules.pause, run.deadline)
        with run.stage("begin"):
            self._fleet.begin(run.deadline)

    def close(self, checksums: Mapping[str, str]) -> None:
        """Wait for the last bucket, and compare what the engines report with `checksums`."""
        run = self._run
        self._sender.finish()
        with run.stage("end"):
            self._fleet.end(run.deadline)
        with run.stage("verify"):
            if self._rules.verify:
                run.verified = self._fleet.verify(checksums, run.deadline)

    def commit(self, version: int) -> None:
        """Returns when the first engine has taken the version: it decides. Raises StaleEpoch or, `alone`, RegistryRefused
        before any has."""
        with self._run.stage("commit"):
            if self._alone:
                self._enrolment.check_lives(self._fleet.members)
            else:
                self._enrolment.check()
            self._fleet.commit(version, self._run.deadline)

    def resume(self, version: int, manifest: Manifest) -> None:
        """Let those that have the version serve, and record them. Raises EngineLeftBehind naming the others.

        They get time for it also when an engine that did not answer has used up the update's.
        """
        fleet = self._fleet
        took = [member for member in fleet.members if member.state is EngineState.COMMITTED]
        failure: R3Error | None = None
        with self._run.stage("resume"):
            try:
                fleet.only(took).resume(self._run.deadline.at_least(REPAIR_S))
            except R3Error as error:
                failure = error
        self._enrolment.committed(fleet.members, version, manifest)
        left = [member for member in fleet.members if member.state is not EngineState.SERVING]
        if left:
            raise EngineLeftBehind(
                f"weight version {version} is committed, but {len(left)} of {len(fleet.members)} engines are left behind, "
                f"paused: {told(left)}; {failure or 'they did not take the version'}. Repair them one by one, or update all"
            ) from failure

    def abort(self) -> None:
        """Free everything that waits, then let the engines serve that still hold whole weights."""
        self._sender.settle()
        self._fleet.drop_broken()
        self._fleet.roll_back()
        self._enrolment.aborted(self._fleet.members)
