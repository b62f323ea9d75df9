"""The trainer ranks of a session, and how they agree: over links of our own, with rank 0 as the hub.

Each message carries the number of its update and of its step in that update. A rank that comes late finds that its update has
failed: its messages about that update are dropped, and the next update has another number. A rank that fails alone says so at
once, whatever other ranks wait for. Nothing here travels on the caller's process group, whose collectives have no number.
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
"""Update, step, and the sending rank; the length of the message follows."""
_NO_STEP = (1 << 32) - 1
"""The step number of a word, which belongs to no step."""
_SILENT_S = 2.0
"""Seconds of waiting after which the log names the ranks that are waited for."""
_RETRY_S = 0.1
_KINDS = {kind.__name__: kind for kind in (errors.NonFiniteWeights, errors.CannotStage, errors.GiverChanged)}
"""Errors of other ranks that keep their own class when they are raised here."""

log = logging.getLogger(__name__)


class TrainerRanks:
    """The ranks of a torch process group; without a group this rank alone. NEW -> `connect` -> `close`.

    One thread calls, except where a call says otherwise.
    """

    def __init__(self, group: Any = None) -> None:
        self._key, self.rank, self.size = "", 0, 1
        if group is not None:  # the group is not kept: gloo's threads would outlive it
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._key = f"r3channel/weights/{dist.get_process_group_ranks(group)}"
        self.leads = self.rank == 0
        """Whether this rank speaks to engines."""
        self.listener: Listener | None = None
        """Takes the links of trainer ranks and of engines."""
        self.update = 0
        """The number of the update under way; it is the same on every rank, because each rank counts the calls."""
        self._step = 0
        self._outgoing: dict[int, queue.SimpleQueue[tuple[int, bytes, bytes] | None]] = {}
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._said: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """By update and step: the rank that said something, and its bytes."""
        self._failed: dict[tuple[int, int], BaseException] = {}
        """By update and rank: the error with which the rank has given the update up; this rank is included."""
        self._gone: dict[int, str] = {}

    def connect(self, host: str, run_token: str, deadline: Deadline) -> tuple[str, str, int]:
        """Connect all ranks to one another.

        Args:
            host: The address on which this rank listens.
            run_token: The run's secret; may be empty.
            deadline: The deadline of the whole call.

        Returns:
            The session's name, its secret, and the port at which this rank listens, also for engines.

        Raises:
            DeadlineExceeded: Not all ranks have met in time.
        """
        self.close()  # what a call that failed has left
        hub = {"session": f"r3channel-weights-{secrets.token_hex(4)}", "nonce": secrets.token_hex(16)}
        links: dict[int, Connection] = {}
        if not self.leads:
            hub, links[0] = self._to_hub(run_token, deadline)
        self.listener = listener = Listener(host, token=session_token(run_token, hub["nonce"]))
        if self.leads and self.size > 1:
            _get_default_store().set(self._key, json.dumps(hub | {"host": host, "port": listener.port}))
            while len(links) < self.size - 1:
                link = listener.accept(deadline.left_s())
                link.send_record(WELCOME, timeout_s=deadline.left_s())
                links[json.loads(link.hello)["trainer"]] = link
            # a rank that is the first in another session would come here
            _get_default_store().set(self._key, "{}")
        # filled before any link is read: rank 0 passes messages on to these
        self._outgoing = {rank: queue.SimpleQueue() for rank in links}
        for rank, link in links.items():
            for call in (self._send, self._receive):
                name = f"weights-rank-{rank}"
                threading.Thread(target=call, args=(rank, link), name=name, daemon=True).start()
        return hub["session"], hub["nonce"], listener.port

    def _to_hub(self, run_token: str, deadline: Deadline) -> tuple[dict[str, Any], Connection]:
        store = _get_default_store()  # the caller's ranks met there: no collective is needed
        while True:
            try:
                store.wait([self._key], timedelta(seconds=deadline.left_s()))
                hub = json.loads(store.get(self._key))
                token, hello = session_token(run_token, hub["nonce"]), json.dumps({"trainer": self.rank})
                left_s = deadline.left_s()
                link = connect(hub["host"], hub["port"], token, timeout_s=left_s, hello=hello.encode())
                link.recv_record(timeout_s=left_s)
                return hub, link
            # a closed `WeightSync` may have left its address there, one whose ranks have met leaves none
            except (errors.TransportError, KeyError) as error:
                log.debug("trainer rank %d does not reach rank 0 yet: %s", self.rank, error)
                time.sleep(min(_RETRY_S, deadline.left_s()))
            except RuntimeError as error:
                raise errors.DeadlineExceeded(f"rank 0 did not say where it listens: {error}") from error

    def close(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        if self.listener is not None:
            self.listener.close()

    # -- what ranks tell one another -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the next update on this rank.

        What was said of earlier updates is dropped.
        """
        with self._changed:
            self.update, self._step = self.update + 1, 0
            self._said = {key: said for key, said in self._said.items() if key[0] >= self.update}
            self._failed = {key: why for key, why in self._failed.items() if key[0] >= self.update}

    def fail(self, error: BaseException, *, update: int = 0) -> None:
        """Send the other ranks this rank's failure, once for each update.

        The others raise it where they wait for this rank, or in `check`. Any thread may call.

        Args:
            error: Why this rank has given the update up.
            update: Does nothing if another update than this one is under way; 0 means the one under way.
        """
        with self._changed:
            if (self.update, self.rank) in self._failed or update not in (0, self.update):
                return
            self._failed[self.update, self.rank] = error
            head = _HEAD.pack(self.update, self._step, self.rank)
            self._changed.notify_all()
        failure = {"kind": type(error).__name__, "why": str(error), "engines": getattr(error, "engines", ())}
        self._pass_on(FAILED, head, json.dumps(failure).encode(), came_from=self.rank)

    def check(self) -> None:
        """Raise the error of a rank that has failed.

        Raises:
            WeightsError: A rank has failed; other classes as in `exchange`. This rank's own error is raised as it is.
            PeerFailed: A rank has died.
        """
        with self._changed:
            self._raise_for(range(self.size))

    def exchange(self, value: Any, deadline: Deadline) -> list[Any]:
        """Gather every rank's value, by rank.

        Args:
            value: This rank's value, plain as JSON.
            deadline: The deadline of the call.

        Raises:
            DeadlineExceeded: Names the ranks that did not come along.
            PeerFailed: A rank has died.
            WeightsError: A rank has failed (or NonFiniteWeights, CannotStage, GiverChanged).
        """
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
                    # before the warning: after the deadline nobody waits, and the log has nothing to tell
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
        """Send a word to rank 0, or from there to any.

        The other rank reads it with `words`. Any thread may call.

        Args:
            update: The number of the update that the word belongs to.
            word: The word, plain as JSON.
            to: The rank that gets it; may be this one.
        """
        head, raw = _HEAD.pack(update, _NO_STEP, self.rank), json.dumps(word).encode()
        if to == self.rank:
            self._note(WORD, head, raw, came_from=to)
        else:
            self._outgoing[to].put((WORD, head, raw))

    def words(self, update: int, deadline: Deadline) -> Iterator[tuple[int, Any]]:
        """Yield the words that this rank was told in an update.

        Each call starts at the update's first word and waits for the next one. Any thread may call.

        Yields:
            The rank that said the word, and the word.

        Raises:
            WeightsError: A rank has failed, or the update is over. This rank's own error is raised as it is.
            PeerFailed: A rank has died.
            DeadlineExceeded: No word has come before the deadline.
        """
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
        hub = (0,) if 0 in self._gone else ()  # messages of other ranks come through rank 0
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
        # Each rank has a thread: one that hangs keeps no rank from telling the others.
        with suppress(errors.TransportError):
            for kind, head, raw in iter(self._outgoing[rank].get, None):
                send_blob(link, kind, raw, head=head, timeout_s=None)
        link.close()

    def _receive(self, rank: int, link: Connection) -> None:
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
                return  # a late rank's message about an update that has failed
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
