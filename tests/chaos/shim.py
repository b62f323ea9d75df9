"""What a process under chaos has beside its own code: its connections go through our proxy, and at a named stage of its work it does
what a file says: kill a process, raise, or step its clock. A file is used once; that it is renamed proves that it was found."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PREAMBLE = struct.Struct("<BH")
"""Which leg a connection is of, and the port that it is meant for."""
LEGS = {
    "r3channel.engine.frame_sender": "frames",
    "r3channel.trainer.relay_connection": "rows",
    "r3channel.weights.hold": "weights",
}
"""By the module that connects: engine to relay, trainer to relay, engine to trainers."""
STAGES = {
    "engine": {
        "capture": ("r3channel.engine.frame_sender", "Outlet", "reply"),
        "deliver": ("r3channel.engine.frame_sender", "Sender", "_deliver"),
        "link": ("r3channel.weights.hold", "Hold", "_fill"),
        "stage weights": ("r3channel.weights.hold", "Hold", "_begin"),
        "change over": ("r3channel.weights.hold", "Hold", "change_over"),
    },
    "relay": {
        "seal": ("r3channel.relay.relay", "Relay", "_seal"),
        "prepare": ("r3channel.relay.sealed_steps", "SealedStep", "prepare"),
        "send": ("r3channel.relay.row_stream", "RowStream", "batches"),
    },
    "trainer": {
        "place": ("r3channel.trainer.shard_buffer", "RelaySink", "rows"),
        "replay": ("r3channel.trainer.replay", "ReplayDriver", "call_of"),
    },
}
_connect, _time = socket.create_connection, time.time


def apply(role: str) -> None:
    """In this process, once. The environment: R3CHAOS_FOLDER, where the files lie, and R3CHAOS_PROXY, our proxy's port."""
    socket.create_connection = _through_proxy  # pyright: ignore[reportAttributeAccessIssue]
    for stage, (module, owner, name) in STAGES[role].items():
        _watch(stage, getattr(importlib.import_module(module), owner), name)


def _through_proxy(address: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
    leg = LEGS.get(sys._getframe(2).f_globals["__name__"])  # beyond `listener.connect`, or http.client's
    if leg is None:
        return _connect(address, *args, **kwargs)
    link = _connect(("127.0.0.1", int(os.environ["R3CHAOS_PROXY"])), *args, **kwargs)
    link.sendall(PREAMBLE.pack([*LEGS.values()].index(leg), address[1]))
    return link


def _watch(stage: str, owner: type, name: str) -> None:
    inner, file = getattr(owner, name), Path(os.environ["R3CHAOS_FOLDER"], stage)

    def method(*args: Any, **kwargs: Any) -> Any:
        with suppress(FileNotFoundError):  # of several processes that see it one renames it
            if file.exists():
                file.rename(done := file.with_suffix(".fired"))
                _act(done.read_text())
        return inner(*args, **kwargs)

    setattr(owner, name, method)


def _act(order: str) -> None:
    what, _, number = order.partition(" ")
    if what == "kill":
        os.kill(int(number), signal.SIGKILL)
    elif what == "clock":
        time.time = lambda: _time() + float(number)
    else:
        raise RuntimeError("an exception that chaos has raised")
