"""Frames that came before their replies, and the names of those that were claimed. Knows no sample and no store."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from r3channel.errors import RoutingError
from r3channel.relay.arrival import Arrived
from r3channel.wire.receipt import FrameName

_REMEMBERED = 1 << 16
"""Names of frames that were claimed, so that one that is sent again is known."""


@dataclass(frozen=True, slots=True)
class _Kept:
    frame: Arrived | RoutingError
    nbytes: int
    since_s: float


class Unclaimed:
    """Name -> frame, or the error of a frame that came damaged. Not thread safe."""

    def __init__(self) -> None:
        self._kept: dict[FrameName, _Kept] = {}
        self._claimed: OrderedDict[FrameName, None] = OrderedDict()
        self.nbytes = 0
        """Of the frames as they came."""

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, name: FrameName) -> bool:
        """Did this frame come before, whether it is still here or was claimed?"""
        return name in self._kept or name in self._claimed

    def put(self, name: FrameName, frame: Arrived | RoutingError, *, nbytes: int) -> None:
        self._kept[name] = _Kept(frame, nbytes, time.monotonic())
        self.nbytes += nbytes

    def claim(self, name: FrameName) -> Arrived | RoutingError | None:
        """The frame, which is the caller's now; None when it has not come."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return None
        self.nbytes -= kept.nbytes
        self.remember(name)
        return kept.frame

    def remember(self, name: FrameName) -> None:
        """This frame was claimed."""
        self._claimed[name] = None
        if len(self._claimed) > _REMEMBERED:
            self._claimed.popitem(last=False)

    def expire(self, seconds: float) -> list[Arrived | RoutingError]:
        """Take out those that nobody claimed for so long."""
        limit_s, old = time.monotonic() - seconds, []
        for name, kept in list(self._kept.items()):
            if kept.since_s >= limit_s:
                break  # in the order of arrival
            old.append(self._kept.pop(name).frame)
            self.nbytes -= kept.nbytes
        return old
