"""The demo: the complete loop of examples/async_grpo with the channel on, in a family of processes that ends as one.

    make demo ARGS="--steps 2"                                      (it runs python -m examples.demo --steps 2)

The run is a child of this process. Its engine, Ray and trainers start dozens more, some of which outlive their parents or catch
signals: a signal to the command ends them all at once, from outside. Knows only where the script lies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.embedded.scratch import remove_leftovers, scratch
from examples.embedded.sglang import segments_of

if TYPE_CHECKING:
    import psutil

SCRIPT = Path(__file__).with_name("async_grpo") / "train_async.py"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_END_S = 10.0
"""A process that does not end by then waits for a device or a file system, and no signal helps."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Stopped(BaseException):
    """A signal came."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(argv: Sequence[str]) -> int:
    """Run the loop with `--use-r3-channel` and the given options, in a temporary folder of its own."""
    for left in remove_leftovers():
        _say(f"removed {left}, which a run that was killed had left")
    with scratch() as folder:
        command = [sys.executable, str(SCRIPT), "--use-r3-channel", *argv]
        return family(command, environment={**os.environ, "TMPDIR": str(folder)})


def family(command: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run a command and return its exit status; all that it started is gone by then. A signal ends it: 128 + its number."""
    from psutil import Process  # of the demo's own environment

    _libc.prctl(_CHILD_SUBREAPER, 1)  # whose parent ends becomes our child, and is not lost
    try:
        _listen(_stop)
        # A session of its own: Ctrl-C reaches this process alone, and no part of the run prints how it was interrupted.
        child = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=_follow
        )
        code = child.wait()
        return code if code >= 0 else 128 - code
    except _Stopped as stopped:
        _listen(signal.SIG_IGN)
        name = signal.Signals(stopped.number).name
        ended = end_descendants(Process())
        _say(f"stopped by {name}: the run, its engines, Ray and trainers, {ended} processes")
        return 128 + stopped.number
    finally:
        end_descendants(Process())


def _listen(handler: Any) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or handler == signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, handler)


def _stop(number: int, _frame: object) -> None:
    raise _Stopped(number)


def _follow() -> None:
    """In the child: it ends with this process, also when that is killed."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)


def end_descendants(own: psutil.Process) -> int:
    """Kill and reap every process below this one; how many there were."""
    ended, segments = set[int](), set[Path]()
    deadline_s = time.monotonic() + _END_S
    while (family := own.children(recursive=True)) and time.monotonic() < deadline_s:
        segments |= segments_of(process.pid for process in family)
        for process in family:  # the run first: Ray in it would print the log of whatever ends before it
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        ended |= {process.pid for process in family}
        _reap()
        time.sleep(0.01)
    for segment in segments:
        segment.unlink(missing_ok=True)
    return len(ended)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # before it listens
        sys.exit(128 + signal.SIGINT)
