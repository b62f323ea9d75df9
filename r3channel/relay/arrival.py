"""A frame of which all has been checked that does not need its reply. Knows no reply."""

from __future__ import annotations

from dataclasses import dataclass

from r3channel.wire.received import Frame


@dataclass(frozen=True, slots=True)
class Arrived:
    """A verified frame and its bytes."""

    frame: Frame
    data: bytes | memoryview
    key: str = ""
    """Where the bytes lie in the store; empty when they do not."""
