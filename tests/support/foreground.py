"""For children that a test interrupts."""

from __future__ import annotations

import signal


def foreground() -> None:
    """Before a child begins: what a shell starts in the background, as these tests may be, ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
