"""Which rooms of r3channel this process has entered: shows that off means off."""

from __future__ import annotations

import sys

ROOMS = ("engine", "relay", "trainer")


def channel_modules() -> list[str]:
    """Loaded modules of the engine, relay and trainer rooms."""
    return sorted(
        name for name in sys.modules if name.split(".")[:2] in (["r3channel", room] for room in ROOMS)
    )
