"""An update without our half in the engine: SGLang itself loads flattened buckets in place while it is paused.

Each trainer rank that has tensors (a source, for example a pipeline stage) has one group with all engines' ranks, since SGLang
takes bytes from rank 0 of a group only. A bucket is broadcast once, however many engines there are. Trainer rank 0 orders the
buckets of all sources one after another, as they become ready: engines that took buckets in different orders would wait for one
another for ever. Rank 0 says to a source: `join`, `stand_in`, `send`, `leave`, `loaded`. A source says to rank 0: `where`,
`ready`, `sent`.

No group can lose a member. After an engine is lost, all groups are made anew without it, and the bucket under way is broadcast
again: the engines that are left have the buckets before, and SGLang takes more until `end`. An engine that hangs holds up the
engines to which it passes bytes on (gloo: a tree; NCCL: all), and these may be lost with it. An engine that refuses fails the
update.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed, wait
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch

from r3channel.errors import ManifestMismatch, R3Error, WeightsError
from r3channel.weights.engine import EngineHandle
from r3channel.weights.groups import WeightGroup
from r3channel.weights.loader_map import NAMES_UNKNOWN
from r3channel.weights.manifest import SHOWN, Bucket, TensorMeta, engine_names, is_scale
from r3channel.weights.progress import REPAIR_S, background
from r3channel.weights.send_planner import check_complete
from r3channel.weights.transaction import Action, EngineState, Kind
from r3channel.weights.update import LOSSES, Update

Order = Callable[[EngineHandle], None]
_ANSWER_S = 2.0
"""Seconds that an engine may take longer for a bucket than its source: once the source has given up, engines that waited for it
say so."""


class Broadcast(Update):
    """One update by broadcasts. A bucket leaves in a thread while the next one is packed."""

    way = "broadcast"

    def __init__(self, *work: Any) -> None:
        super().__init__(*work)
        self._source, self._say = self._planner.source, partial(self._ranks.tell, self.now.number)
        self._payloads: dict[int, torch.Tensor] = {}
        self._packed = self._loaded = 0
        """How many buckets of this rank are packed, and how many are loaded."""
        self._words: dict[str, Iterator[tuple[int, Any]]] = {}
        """The words to this rank that are not read yet, by kind."""
        self._left: list[EngineHandle] = []
        """At rank 0: the engines that orders go to."""
        self._under_way, self._orders = "", Future[None]()
        """The call that rank 0 gives orders for, and the thread that gives them."""
        self._lost: dict[str, BaseException] = {}
        self._begun = False
        """Whether an engine was told to load a bucket."""

    # -- before a byte -------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        """Share what each rank gives, and start to serve buckets."""
        manifest, source, group = self._spec.manifest, self._source, self._source.group
        assert manifest is not None
        self._buckets = manifest.buckets
        scale = next((meta.name for meta, *_ in manifest.arrivals if is_scale(meta.name)), None)
        if scale is not None and self._config.expected is None:  # SGLang skips a name that it does not have
            raise ManifestMismatch(
                f"{scale} is the scale of a float8 weight: a plain engine would skip it, and expected=None does not look"
            )
        rows = [[meta.row() for meta in bucket.tensors] for bucket in self._buckets]
        rows = [] if source.manifest is manifest else rows  # nothing changed
        mine = [len(self._buckets), rows, group.name if group else ""]
        words = dict(enumerate(self._ranks.exchange(mine, self._run.deadline)))
        self._groups = {rank: name for rank, (buckets, _, name) in words.items() if buckets}
        source.manifest = manifest
        for rank, (buckets, rows, _) in words.items():
            if rows or not buckets:
                source.buckets[rank] = [Bucket.of(list(map(TensorMeta.from_row, each))) for each in rows]
        given = chain.from_iterable(bucket.tensors for part in source.buckets.values() for bucket in part)
        self._metas = tuple({meta.name: meta for meta in given if self._config.expected is not None}.values())
        self._names = frozenset(meta.name for meta in self._metas)
        if self._buckets:
            background(self._serve)

    def _hold(self, handle: EngineHandle, left_s: float) -> None:
        """Open links that stage nothing.

        The links tell what the model's own loader makes of the names. While they stand, our half refuses weights from other
        sessions.
        """
        if handle.unheld or (handle.is_linked_for(()) and handle.names == self._names):
            return
        order = self._planner.order(handle.url, op="hold") | {"tensors": [meta.row() for meta in self._metas]}
        handle.unheld = not handle.hold(order, left_s)
        handle.ranks, handle.metas, handle.gives = [], (), None

    def _accept(self) -> None:
        wanted = {m.url: m.size for m in self.members if self._ranks.leads and not (m.unheld or m.ranks)}
        for url, links in self._planner.accept(wanted, self._run.deadline, self._metas).items():
            self._handles[url].ranks = links

    def _check(self, handle: EngineHandle, left_s: float) -> None:
        """Check that an update of these names fills every parameter."""
        # The target's loader knows nothing of a draft.
        if self._metas and "speculative_algorithm" in handle.unstaged:
            held = {name for sums in handle.weight_checksums(timeout_s=left_s) for name in sums}
            if draft := sorted(name for name in held if name.startswith(("draft.", "draft_step_"))):
                raise ManifestMismatch(
                    f"engine {handle.url}: {len(draft)} parameters of its draft may stay old, first {draft[:SHOWN]}. "
                    f"{handle.unstaged}"
                )
        why = next((link.whole for link in handle.ranks if NAMES_UNKNOWN in link.whole), "")
        if why or not handle.ranks:
            why = why or "without R3CHANNEL_WEIGHTS=1 its loader cannot be asked"
            self._compare_names(handle, why, left_s)
        elif self._metas:
            report = self._run.report
            report.rounded, report.skipped = check_complete(handle.ranks, self._metas, names=True)
        handle.names = self._names

    def _compare_names(self, handle: EngineHandle, why: str, left_s: float) -> None:
        if handle.names == self._names:
            return
        names = engine_names(self._names)
        held = {name for sums in handle.weight_checksums(timeout_s=left_s) for name in sums}
        missing, unknown = sorted(held - names), sorted(names - held)
        if held and (missing or unknown):
            raise ManifestMismatch(
                f"engine {handle.url}: {len(missing)} parameters would keep their old values, first {missing[:SHOWN]}; "
                f"{len(unknown)} of the update have no place there, first {unknown[:SHOWN]}. The names of this family are "
                f"not known here, or the model is given in part, and {why}; expected=None does not look"
            )

    # -- a source ------------------------------------------------------------------------------------------------------

    def _give(self) -> None:
        try:
            self._happen(Kind.BUCKET)
            self._feed(self._push)
            self._wait_loaded(len(self._buckets))
        except BaseException as error:
            self._ranks.fail(error, update=self.now.number)  # rank 0 stops giving orders
            raise
        self._wait_bucket()

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ranks.check()
        number, self._packed = self._packed, self._packed + 1
        self._wait_loaded(number - 1)  # of two buffers, the bucket before the last has this one's
        self._payloads[number % 2] = self._source.pack(number, self._buckets[number], tensors, self._run)
        self._say(["ready", number], to=0)

    def _wait_loaded(self, loaded: int) -> None:
        with self._run.stage("wait_send"):
            while self._loaded < loaded:
                self._next("loaded")
                self._loaded += 1

    def _serve(self) -> None:
        """Handle rank 0's orders, in a thread, until all buckets are loaded."""
        try:
            for _, (what, *arguments) in self._ranks.words(self.now.number, self._run.deadline):
                if what in ("join", "leave"):
                    self._source.leave()
                if what == "join":
                    self._join_group(*arguments)
                elif what == "send" and (group := self._source.group):
                    # of the group as it is now: `leave` may be carried out before the thread begins
                    background(partial(self._send, group, *arguments))
                elif what == "stand_in" and (group := self._source.group):
                    first, count = arguments
                    for member in range(first, first + count):  # so that the join ends for the others
                        background(partial(group.join, member, timeout_s=REPAIR_S))
                elif what == "loaded" and arguments == [len(self._buckets) - 1]:
                    return
        except BaseException as error:
            self._ranks.fail(error, update=self.now.number)
            if self._ranks.update == self.now.number:  # a later update may have a new group
                self._source.leave()

    def _join_group(self, name: str, world_size: int) -> None:
        host, backend = self._config.host, self._config.backend
        self._source.group = group = WeightGroup(name, world_size=world_size, host=host, backend=backend)
        self._source.joining = background(partial(group.join, timeout_s=self._run.deadline.left_s()))
        self._say(["where", group.where], to=0)

    def _send(self, group: WeightGroup, number: int, limit_s: float) -> None:
        why = ""
        try:
            self._source.joining.result(limit_s)
            group.broadcast(self._payloads[number % 2], timeout_s=limit_s)
        except Exception as error:
            group.close()
            why = f"trainer rank {self._ranks.rank}: {type(error).__name__}: {error}"
        self._say(["sent", why], to=0)

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _ask(self, action: Action) -> None:
        """Start to give orders when the first engine is asked."""
        work = {"join": self._join_all, "load": self._load_all}.get(action.call)
        if work is not None and self._under_way != action.call:
            self._under_way, self._left = action.call, self.members
            # Counted like calls to engines: this new thread, too, may have to wait for the interpreter.
            with self._run.stage("join" if action.call == "join" else "wait_send"):
                self._orders = background(partial(self._conduct, work))
        super()._ask(action)

    def _conduct(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._ranks.fail(error, update=self.now.number)  # this rank's own thread waits for words, too
            if isinstance(error, R3Error) and not isinstance(error, LOSSES):
                raise
            # a loss that is no engine's must not look like one
            raise WeightsError(f"{type(error).__name__}: {error}") from error

    def _join(self, handle: EngineHandle, left_s: float) -> None:
        wait([self._orders])
        if handle.url in self._lost:
            raise self._lost[handle.url]
        self._orders.result()

    def _load(self, handle: EngineHandle, left_s: float) -> None:
        wait([self._orders])
        handle.found = None if self._begun else EngineState.PAUSED
        self._join(handle, left_s)

    def _commit(self, handle: EngineHandle, left_s: float) -> None:
        handle.commit(self._version, left_s)

    def _join_all(self) -> None:
        while self._source.formed != (lives := [(e.url, e.boot_id) for e in self._left], self._groups):
            for handle in self._left:
                handle.leave_groups(REPAIR_S)
            # SGLang refuses a name that it has seen
            names = {rank: f"{self._planner.session}-{secrets.token_hex(4)}" for rank in self._groups}
            if all(self._join_source(rank, name) for rank, name in names.items()):
                self._source.formed, self._groups = (lives, names), names

    def _join_source(self, rank: int, name: str) -> bool:
        ends = list(accumulate((handle.size for handle in self._left), initial=1))
        first = dict(zip((handle.url for handle in self._left), ends, strict=False))
        self._say(["join", name, ends[-1]], to=rank)
        _, (where,) = self._next("where")
        left_s = self._run.deadline.left_s()

        def join(handle: EngineHandle) -> None:
            handle.init_group(where, rank_offset=first[handle.url], timeout_s=left_s)

        def stand_in(handle: EngineHandle) -> None:  # else SGLang waits half an hour for a member or a store
            self._say(["stand_in", first[handle.url], handle.size], to=rank)

        return self._order_all(join, stand_in, f"join of weight group {name}")

    def _load_all(self) -> None:
        self._join_all()  # again, where an engine was lost meanwhile
        for left in reversed(range(sum(map(len, self._source.buckets.values())))):
            rank, (number,) = self._next("ready")
            while not self._loaded_by_all(rank, number, flush=self._config.pause != "in_place" and not left):
                self._join_all()
            self._say(["loaded", number], to=rank)

    def _loaded_by_all(self, rank: int, number: int, *, flush: bool) -> bool:
        bucket = self._source.buckets[rank][number]
        what, self._begun = f"bucket {number} ({bucket})", True
        limit_s = min(self._run.deadline.left_s(), self._config.engine_timeout_s)
        how = {"group_name": self._groups[rank], "flush_cache": flush, "timeout_s": limit_s + _ANSWER_S}
        self._say(["send", number, limit_s], to=rank)

        def leave(handle: EngineHandle) -> None:
            self._say(["leave"], to=rank)
            background(partial(handle.leave_groups, REPAIR_S))

        done = self._order_all(lambda handle: handle.update_tensors(bucket.tensors, **how), leave, what)
        _, (why,) = self._next("sent")
        if done and why:
            raise WeightsError(f"{what}: {why}")
        return done

    def _order_all(self, call: Order, release: Order, what: str) -> bool:
        """Give all engines an order at once; return whether all did it.

        False: some engines are lost, and others are left to go on with. Otherwise an engine's error is raised. `release` ends the
        others' wait in the group for an engine that failed.
        """
        calls = {background(partial(call, handle)): handle for handle in self._left}
        errors = dict[str, BaseException]()
        for each in as_completed(calls):
            if error := each.exception():
                errors[calls[each].url] = error
                release(calls[each])
        lost = {url: error for url, error in errors.items() if isinstance(error, LOSSES)}
        self._left = [handle for handle in self._left if handle.url not in lost]
        self._lost |= lost
        if errors and not (lost and self._left and not self.now.alone):
            error = next(iter(errors.values()))
            raise error.prefix(what) if isinstance(error, R3Error) else R3Error(f"{what}: {error}") from error
        return not errors

    def _next(self, what: str) -> tuple[int, Any]:
        words = self._words.setdefault(what, self._ranks.words(self.now.number, self._run.deadline))
        return next((rank, arguments) for rank, (kind, *arguments) in words if kind == what)
