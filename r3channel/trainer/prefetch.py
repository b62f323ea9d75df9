"""A shard that is being received ahead of its step, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from r3channel.errors import DeadlineExceeded, UsageError
from r3channel.plan.ticket import Ticket

_Shard = TypeVar("_Shard")


class Prefetch(Generic[_Shard]):
    """A receive that starts when it is built and is joined until it is spent. Its thread is a daemon, so a trainer can end."""

    def __init__(self, ticket: Ticket, receive: Callable[[], _Shard]) -> None:
        self.ticket = ticket
        self._done: Future[_Shard] = Future()
        self._joined = False
        threading.Thread(target=self._run, args=(receive,), name="r3channel-prefetch", daemon=True).start()

    def join(self, ticket: Ticket, *, timeout_s: float) -> _Shard:
        """The whole shard, or the error of its transfer. Raises `UsageError` for another step's ticket."""
        if ticket.identity != self.ticket.identity:
            raise UsageError(
                f"receive of step {ticket.step}, but step {self.ticket.step} was prefetched; expected its ticket"
            )
        try:
            shard = self._done.result(timeout_s)
            self._joined = True
            return shard
        except FutureTimeout as error:
            raise DeadlineExceeded(
                f"the prefetch of step {ticket.step} did not end within {timeout_s:.1f} s", step=ticket.step
            ) from error

    @property
    def spent(self) -> bool:
        """Whether it has given its shard or failed."""
        return self._joined or (self._done.done() and self._done.exception() is not None)

    def _run(self, receive: Callable[[], _Shard]) -> None:
        try:
            self._done.set_result(receive())
        except BaseException as error:
            self._done.set_exception(error)
