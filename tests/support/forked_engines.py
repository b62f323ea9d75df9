"""Engines as forks of a process that has made SGLang's imports: a start takes 4 s of CPU time instead of 18 (AMD EPYC)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

from examples.embedded import sglang_main
from tests.support import fork_server
from tests.support.waits import ENGINE_S, await_memory, until

IMPORTS = ("sglang.srt.entrypoints.http_server", "sglang.srt.model_executor.model_runner")
_LATER = ("R3CHANNEL_", "R3DEMO_", "R3TEST_", "PYTEST_", "SGLANG_CPU_OMP_THREADS_BIND")
"""What an engine reads of its environment once its imports are made. Engines that differ in more have servers of their own."""


class Forked(psutil.Process):
    """A process that another one has forked, as `sglang` asks it."""

    returncode = -signal.SIGKILL

    def poll(self) -> int | None:
        return None if self.is_running() else self.returncode


class EngineForks(ExitStack):
    """In the place of `sglang._popen`, for one process's tests. What it starts ends with that process, or with this object."""

    def __init__(self) -> None:
        super().__init__()
        self._servers: dict[frozenset[tuple[str, str]], tuple[int, str]] = {}

    def __call__(self, command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes]) -> Any:
        await_memory(2, "an engine")
        key = frozenset(one for one in env.items() if not one[0].startswith(_LATER))
        if key not in self._servers:
            path = Path(self.enter_context(TemporaryDirectory(prefix="r3-")), "forks")  # short: a socket's
            imports = [sys.executable, "-m", fork_server.__name__, str(path), *IMPORTS]
            server = self.enter_context(subprocess.Popen(imports, env=env, stdout=log, stderr=log))
            self.callback(server.kill)
            until(path.exists, "SGLang's imports", limit_s=ENGINE_S, log=Path(log.name))
            self._servers[key] = server.pid, str(path)
        pid, where = self._servers[key]
        ours = [sglang_main.__file__, *command[3:]], {**env, "R3DEMO_PARENT_PID": str(pid)}
        return Forked(fork_server.ask(where, *ours, [log.fileno()] * 3))
