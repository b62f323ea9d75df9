"""The trainer ranks of a session, and how they agree: over links of our own, with rank 0 as the hub.

Each message carries the number of its update and of its step there. A rank that comes late finds that its update has failed; what
it still says of it is dropped, and the next update is another one. A rank that fails alone says so at once, whoever is waiting
for what. Nothing here travels on the caller's process group, whose collectives have no number.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from r3channel import errors
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener, connect
from r3channel.weights.progress import Deadline
from r3channel.weights.rank_link import receive_blob, send_blob, session_token

WELCOME, VALUE, FAILED, GONE, WORD = range(5)
_HEAD = struct.Struct("<qII")
"""Update, step, and the rank that says it; the length of what it says follows."""
_NO_STEP = (1 << 32) - 1
"""The step of a word, which belongs to none."""
_SILENT_S = 2.0
"""After so long a wait it is said in the log who is waited for."""
_RETRY_S = 0.1
_KINDS = {kind.__name__: kind for kind in (errors.NonFiniteWeights, errors.CannotStage, errors.GiverChanged)}
"""Failures of another rank that are raised under their own class."""

log = logging.getLogger(__name__)


class TrainerRanks:
    """The ranks of a torch process group; without a group this rank alone. NEW -> `connect` -> `close`. One thread calls."""

    def __init__(self, group: Any = None) -> None:
        self._key, self.rank, self.size = "", 0, 1
        if group is not None:  # which is not kept: gloo's threads would outlive it
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._key = f"r3channel/weights/{dist.get_process_group_ranks(group)}"
        self.update = 0
        """The number of the update under way, the same on every rank: each counts the calls."""
        self._step = 0
        self._outgoing: dict[int, queue.SimpleQueue[tuple[int, bytes, bytes] | None]] = {}
        self._changed = threading.Condition()
        """Guards what is below."""
        self._said: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """By update and step: who said what."""
        self._failed: dict[tuple[int, int], BaseException] = {}
        """By update and rank: why it will say no more in this update, this one too."""
        self._gone: dict[int, str] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank speaks to engines."""
        return self.rank == 0

    def connect(self, host: str, run_token: str, deadline: Deadline) -> tuple[str, str, Listener]:
        """Link all ranks. Returns the session's name, its secret, and where this rank listens, for engines too."""
        hub = {"session": f"r3channel-weights-{secrets.token_hex(4)}", "nonce": secrets.token_hex(16)}
        links: dict[int, Connection] = {}
        if not self.leads:
            hub, links[0] = self._to_hub(run_token, deadline)
        listener = Listener(host, token=session_token(run_token, hub["nonce"]))
        if self.leads and self.size > 1:
            _get_default_store().set(self._key, json.dumps(hub | {"host": host, "port": listener.port}))
        while self.leads and len(links) < self.size - 1:
            link = listener.accept(deadline.left_s())
            link.send_record(WELCOME, timeout_s=deadline.left_s())
            links[json.loads(link.hello)["trainer"]] = link
        # before any link is read: to whom words are passed on
        self._outgoing = {rank: queue.SimpleQueue() for rank in links}
        for rank, link in links.items():
            for call in (self._send, self._receive):
                name = f"weights-rank-{rank}"
                threading.Thread(target=call, args=(rank, link), name=name, daemon=True).start()
        return hub["session"], hub["nonce"], listener

    def _to_hub(self, run_token: str, deadline: Deadline) -> tuple[dict[str, Any], Connection]:
        """The link to rank 0, whose address lies in the store in which the caller's ranks met: no collective is needed. A session
        that was closed may have left its own there: until this one's is there, ask again."""
        store = _get_default_store()
        while True:
            try:
                store.wait([self._key], timedelta(seconds=deadline.left_s()))
                hub = json.loads(store.get(self._key))
                token, hello = session_token(run_token, hub["nonce"]), json.dumps({"trainer": self.rank})
                left_s = deadline.left_s()
                link = connect(hub["host"], hub["port"], token, timeout_s=left_s, hello=hello.encode())
                link.recv_record(timeout_s=left_s)
                return hub, link
            except errors.TransportError as error:
                log.debug("trainer rank %d does not reach rank 0 yet: %s", self.rank, error)
                time.sleep(min(_RETRY_S, deadline.left_s()))
            except RuntimeError as error:
                raise errors.DeadlineExceeded(f"rank 0 did not say where it listens: {error}") from error

    def close(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.put(None)

    # -- what ranks tell one another -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next update begins on this rank; what was said of those before is void."""
        with self._changed:
            self.update, self._step = self.update + 1, 0
            self._said = {key: said for key, said in self._said.items() if key[0] >= self.update}
            self._failed = {key: why for key, why in self._failed.items() if key[0] >= self.update}

    def fail(self, error: BaseException, *, update: int = 0) -> None:
        """Say that this rank has given the update up, once; the others raise where they wait for it, or `check`. Nothing where
        another one has begun than the `update` named. Any thread."""
        with self._changed:
            if (self.update, self.rank) in self._failed or update not in (0, self.update):
                return
            self._failed[self.update, self.rank] = error
            self._changed.notify_all()
        failure = {"kind": type(error).__name__, "why": str(error), "engines": getattr(error, "engines", ())}
        head = _HEAD.pack(self.update, self._step, self.rank)
        self._pass_on(FAILED, head, json.dumps(failure).encode(), came_from=self.rank)

    def check(self) -> None:
        """Raise what a rank has failed with."""
        with self._changed:
            self._raise_for(range(self.size))

    def exchange(self, value: Any, deadline: Deadline) -> list[Any]:
        """Every rank's value (plain, as JSON), by rank. Raises DeadlineExceeded naming who did not come along, PeerFailed when a
        rank has died, WeightsError (or NonFiniteWeights, CannotStage, GiverChanged) when one has failed."""
        return [json.loads(raw) for raw in self.exchange_bytes(json.dumps(value).encode(), deadline)]

    def exchange_bytes(self, raw: bytes, deadline: Deadline) -> list[bytes]:
        step, self._step = self._step, self._step + 1
        self._note(VALUE, _HEAD.pack(self.update, step, self.rank), raw, came_from=self.rank)
        begun_s, noticed = time.monotonic(), False
        with self._changed:
            said = self._said[self.update, step]
            while late := sorted({*range(self.size)} - {rank for rank, _ in said}):
                self._raise_for(late)
                try:
                    # first: once it is over nobody waits, and the log has nothing to tell
                    left_s = deadline.left_s()
                except errors.DeadlineExceeded as error:
                    raise errors.DeadlineExceeded(f"ranks {late} did not come along: {error}") from error
                waited_s = time.monotonic() - begun_s
                if not noticed and waited_s >= _SILENT_S:
                    noticed = True
                    log.warning("trainer rank %d has waited %.0f s for ranks %s", self.rank, waited_s, late)
                self._changed.wait(left_s if noticed else min(left_s, _SILENT_S))
            return [raw for _, raw in sorted(said)]

    def tell(self, update: int, word: Any, *, to: int) -> None:
        """Say something (plain, as JSON) to rank 0, or as rank 0 to any; `words` gives it there. Any thread."""
        head, raw = _HEAD.pack(update, _NO_STEP, self.rank), json.dumps(word).encode()
        if to == self.rank:
            self._note(WORD, head, raw, came_from=to)
        else:
            self._outgoing[to].put((WORD, head, raw))

    def words(self, update: int, deadline: Deadline) -> Iterator[tuple[int, Any]]:
        """Who told this rank what in an update, from its first word on, waiting for the next one. Every call gives all of them.
        Raises what a rank has failed with, this one too, and DeadlineExceeded. Any thread."""
        for at in itertools.count():
            with self._changed:
                while len(said := self._said.get((update, _NO_STEP), [])) <= at:
                    if update != self.update:
                        raise errors.WeightsError(f"update {update} is over")
                    self._raise_for(range(self.size))
                    self._changed.wait(deadline.left_s())
            rank, raw = said[at]
            yield rank, json.loads(raw)

    def _raise_for(self, ranks: Iterable[int]) -> None:
        hub = (0,) if 0 in self._gone else ()  # what others say comes through it
        for rank in (self.rank, *ranks, *hub):
            if (self.update, rank) in self._failed:
                raise self._failed[self.update, rank]
            if rank in self._gone:
                raise errors.PeerFailed(f"trainer rank {rank} is gone: {self._gone[rank]}")

    # -- links ---------------------------------------------------------------------------------------------------------

    def _pass_on(self, kind: int, head: bytes, raw: bytes, *, came_from: int) -> None:
        for other in self._outgoing.keys() - {came_from}:
            self._outgoing[other].put((kind, head, raw))

    def _send(self, rank: int, link: Connection) -> None:
        """A link's own thread: a rank that stands still keeps nobody from telling the others."""
        with suppress(errors.TransportError):
            for kind, head, raw in iter(self._outgoing[rank].get, None):
                send_blob(link, kind, raw, head=head, timeout_s=None)
        link.close()

    def _receive(self, rank: int, link: Connection) -> None:
        """A link's own thread: notes what comes, and passes it on at the hub."""
        try:
            while True:
                kind, head = link.recv_record(timeout_s=None)
                self._note(kind, head[: _HEAD.size], receive_blob(link, head[_HEAD.size :]), came_from=rank)
        except errors.TransportError as error:
            self._note(GONE, _HEAD.pack(1 << 62, 0, rank), str(error).encode(), came_from=rank)

    def _note(self, kind: int, head: bytes, raw: bytes, *, came_from: int) -> None:
        update, step, rank = _HEAD.unpack(head)
        with self._changed:
            if update < self.update:
                return  # a late rank's word of an update that has failed
            if kind in (VALUE, WORD):
                self._said.setdefault((update, step), []).append((rank, raw))
            elif kind == FAILED:
                told = json.loads(raw)
                kind_of_error = _KINDS.get(told["kind"], errors.WeightsError)
                why = f"trainer rank {rank}: {told['kind']}: {told['why']}"
                self._failed[update, rank] = kind_of_error(why, engines=told["engines"])
            else:
                self._gone[rank] = raw.decode(errors="replace")
            if kind != WORD and (self.leads or came_from == self.rank):
                self._pass_on(kind, head, raw, came_from=came_from)
            self._changed.notify_all()
