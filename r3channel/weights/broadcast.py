"""An update without our half in the engine: SGLang itself loads flattened buckets in place while it is paused."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch

from r3channel.errors import ManifestMismatch
from r3channel.transport.process_group import in_background
from r3channel.weights.checksums import engine_names
from r3channel.weights.engine import EngineHandle, EngineState
from r3channel.weights.executor import Feed, Work
from r3channel.weights.group import WeightGroup
from r3channel.weights.manifest import Bucket, is_scale
from r3channel.weights.pack import Packer
from r3channel.weights.progress import REPAIR_S, background, wait_all
from r3channel.weights.stages import Given

_SHOWN = 3


class Broadcast(Work):
    """One update. A bucket leaves in a thread while the next one is packed."""

    def __init__(self, *args: Any, packer: Packer, **options: Any) -> None:
        """`packer` makes buckets flat; for the rest see `Work`."""
        super().__init__(*args, **options)
        self._packer = packer
        self._buckets: Sequence[Bucket] = ()
        self._number = 0
        self._sending: Future[None] | None = None

    def open(self, given: Given) -> None:
        """Make the groups, shake hands and pause; from here on nothing is routed to these engines. ManifestMismatch unless what
        is given has a place there, and is all that there is."""
        assert given.manifest is not None
        self._buckets = given.manifest.buckets
        scale = next((meta.name for meta, _ in given.held if is_scale(meta.name)), None)
        if scale is not None and self._config.expected is None:  # SGLang skips a name that it does not have
            raise ManifestMismatch(
                f"tensor {scale} is the scale of a float8 weight, and an engine of plain weights would serve float8 ones without "
                "it; expected=None does not look"
            )
        with self._run.stage("join"):
            self.meet()
            self.each(self._link)
        self.pause()
        self._hold()
        with self._run.stage("begin"):
            self.each(EngineHandle.begin, within_s=self._config.engine_timeout_s)
        if self._config.expected is not None:
            names = engine_names(name for bucket in self._buckets for name in bucket.names)
            self.each(lambda member, left_s: _check_names(member, names, left_s))

    def _hold(self) -> None:
        """Open links that ask for no tensors: while they stand, our half refuses weights from other sessions."""
        fresh = [m for m in self.members if m.takes_orders and not m.staged(()) and not m.unheld]
        orders = {m: self._stages.order(m.url, op="hold") for m in fresh}
        held = self.each(
            lambda m, left_s: m.hold(orders[m], left_s), within_s=self._config.engine_timeout_s, among=fresh
        )
        wanted = {member.url: member.size for member, could in held.items() if could}
        links = self._stages.accept(wanted, self._run.deadline) if wanted else {}
        for member in fresh:
            member.ranks, member.metas, member.gives = links.get(member.url, []), (), None
            member.unheld = member.url not in links

    def deliver(self, feed: Feed) -> None:
        """Send, load and name the version; the update counts once the first engine has taken it."""
        feed(self._push)
        with self._run.stage("wait_send"):
            self._finish()
        with self._run.stage("end"):
            self.each(EngineHandle.end, within_s=self._config.engine_timeout_s)
        self.outcome = self.commit(lambda member, left_s: member.commit(self._version, left_s))

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Pack the next bucket, wait for the one before, then send it; raises the error of the one before."""
        number, bucket = self._number, self._buckets[self._number]
        payload = self._packer.pack(number, bucket, tensors, self._run)
        self._number += 1
        with self._run.stage("wait_send"):  # a new thread may have to wait for the interpreter
            self._finish()
            self._sending = background(partial(self._send, number, bucket, payload))

    def abort(self) -> None:
        """Free everything that waits, then let the engines that still hold whole weights serve."""
        if self._sending is not None:  # a healthy bucket has the time to end
            wait([self._sending], timeout=REPAIR_S)
        broken = [member for member in self._all if member.state is EngineState.FENCED]
        wait([background(member.leave) for member in broken], timeout=2 * REPAIR_S)
        self.roll_back()

    def _finish(self) -> None:
        """Wait for the bucket under way, which has its own deadline, and raise its error."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _link(self, member: EngineHandle, left_s: float) -> None:
        if member.group is not None:
            return
        config = self._config
        group = WeightGroup(
            f"{self._stages.session}-{secrets.token_hex(4)}",  # SGLang refuses a name that it has seen
            world_size=1 + member.size,
            host=config.host,
            backend=config.backend,
        )
        calls = {
            background(partial(member.init_group, group, timeout_s=left_s)): member.url,
            in_background(partial(group.join, timeout_s=left_s), name="weights-join"): "rank 0",
        }
        try:
            wait_all(calls, f"join of weight group {group.name} with {member.url}", left_s)
        except BaseException:
            group.close()  # its store goes with it, so engines that still wait there fail at once
            raise
        member.group = group

    def _send(self, number: int, bucket: Bucket, payload: torch.Tensor) -> None:
        begun_s, wires = self._run.deadline.elapsed_s, []
        flush = number == len(self._buckets) - 1 and self._config.flush

        def one(member: EngineHandle, left_s: float) -> None:
            group = member.group
            assert group is not None
            how = {"group_name": group.name, "flush_cache": flush, "timeout_s": left_s}
            load = background(partial(member.update_tensors, bucket.tensors, **how))
            wire = in_background(partial(group.broadcast, payload, timeout_s=left_s), name="weights-send")
            what = {load: member.url, wire: f"the broadcast to {member.url}"}
            wait_all(what, f"bucket {number} ({bucket})", left_s)
            wires.append(wire.result())

        self.each(one, within_s=self._config.engine_timeout_s)
        self._run.add("wire", max(wires))
        self._run.add("apply", max(self._run.deadline.elapsed_s - begun_s - max(wires), 0.0))


def _check_names(member: EngineHandle, names: frozenset[str], timeout_s: float) -> None:
    """ManifestMismatch unless an update of these names (the engine's own) fills every parameter and has no other."""
    if names == member.names:
        return
    held = {name for sums in member.weight_checksums(timeout_s=timeout_s) for name in sums}
    missing, unknown = sorted(held - names), sorted(names - held)
    if held and (missing or unknown):
        raise ManifestMismatch(
            f"engine {member.url}: {len(missing)} parameters would keep their old values, first {missing[:_SHOWN]}; "
            f"{len(unknown)} of the update have no place there, first {unknown[:_SHOWN]}. Is a name misspelt, or the model "
            "given in part? expected=None does not look"
        )
    member.names = names
