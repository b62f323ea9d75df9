"""What a process under chaos has beside its own code: its connections go through our proxy, and at a named stage of its work
it does what a file says: kill a process, raise, or step its clock. A file is used once; that it is renamed proves that it was."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import struct
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

TABLE = tomllib.loads(Path(__file__).with_name("chaos.toml").read_text())
PREAMBLE = struct.Struct("<BH")
"""Which leg a connection is of, and the port that it is meant for."""
LEGS: dict[str, str] = TABLE["legs"]
_connect, _time = socket.create_connection, time.time


def apply(role: str) -> None:
    """In this process, once. The environment: R3CHAOS_FOLDER, where the files lie, and R3CHAOS_PROXY, our proxy's port."""
    setattr(socket, "create_connection", _through_proxy)  # noqa: B010
    for stage, (module, owner, name) in TABLE["stages"][role].items():
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
                _act(*done.read_text().split())
        return inner(*args, **kwargs)

    setattr(owner, name, method)


def _act(what: str, number: str = "0") -> None:
    if what == "kill":
        os.kill(int(Path(os.environ["R3CHAOS_FOLDER"], number).read_text()), signal.SIGKILL)
    elif what == "clock":
        time.time = lambda: _time() + float(number)
    else:
        raise RuntimeError("an exception that chaos has raised")
