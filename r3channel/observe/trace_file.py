"""The file into which one process appends its spans, events of a Chrome trace: `trace.py` reads the files of a run.

A line is one event, written whole in one call, so a file can be read while its process runs and after it was killed; each file
opens in Perfetto, too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

_US = 1e6
log = logging.getLogger(__name__)


class TraceFile:
    """The file of one process; any thread may write. It stays open until the process ends, which may be at any time."""

    def __init__(self, folder: str | Path, process: str) -> None:
        """Create the process's file in `folder`.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        self._pid, self._wall_s = os.getpid(), time.time() - time.monotonic()
        name = f"{re.sub(r'[^a-z0-9]+', '-', process)}-{socket.gethostname()}-{self._pid}.trace"
        self._threads: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"trace {str(folder)!r}: {error}; expected a folder to write into") from error
        os.write(self._file, b"[\n")
        self._write({"ph": "M", "name": "process_name", "args": {"name": process}}, 0, time.monotonic())

    def span(self, stage: str, step: int | None, thread: str, start_s: float, end_s: float) -> None:
        """Append a span; the arguments are the values of a `Span`.

        Times are this process's time.monotonic.
        """
        at, seconds = self._wall_us(start_s), (end_s - start_s) * _US
        # written as text: json.dumps takes longer than all the rest, and this runs several times a sample
        self._append(
            f'{{"ph":"X","name":"{stage}","pid":{self._pid},"tid":{self._number(thread)},"ts":{at:.1f},"dur":{seconds:.1f},'
            f'"args":{{"step":{"null" if step is None else step}}}}}'
        )

    def sample(self, name: str, *, thread: str = "", at_s: float = 0.0) -> None:
        """Append the point at which a sample was here.

        Args:
            name: the sample.
            thread: the thread; empty for the calling one.
            at_s: time.monotonic() seconds; 0.0 for now.
        """
        event = {"ph": "i", "s": "t", "name": name, "cat": "sample"}
        number = self._number(thread or threading.current_thread().name)
        self._write(event, number, at_s or time.monotonic())

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Append what a step has shown, in values for JSON."""
        event = {"ph": "i", "s": "p", "name": name, "cat": "note", "args": dict(values)}
        self._write(event, 0, time.monotonic())

    def _number(self, thread: str) -> int:
        with self._lock:
            if thread not in self._threads:
                self._threads[thread] = number = len(self._threads) + 1
                event = {"ph": "M", "name": "thread_name", "args": {"name": thread}}
                self._write(event, number, time.monotonic())
            return self._threads[thread]

    def _write(self, event: dict[str, Any], thread: int, at_s: float) -> None:
        placed = {"pid": self._pid, "tid": thread, "ts": round(self._wall_us(at_s), 1)}
        self._append(json.dumps(event | placed, separators=(",", ":")))

    def _append(self, line: str) -> None:
        try:
            os.write(self._file, f"{line},\n".encode())
        except OSError as error:  # a full disk costs the trace, and nothing else
            log.warning("r3channel: a line of this process's trace is lost: %s", error)

    def _wall_us(self, at_s: float) -> float:
        return (at_s + self._wall_s) * _US
