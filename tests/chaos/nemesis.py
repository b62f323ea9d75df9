"""One fault at a time, chosen by a seed, and the proof that it happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from r3channel.wire.parcel import Status
from tests.chaos.actors import DEPARTURES
from tests.chaos.loop import LIMIT_S, Loop
from tests.chaos.proxy import Proxy
from tests.chaos.shim import LEGS, TABLE
from tests.support import direct
from tests.support.samples import frame_of
from tests.support.waits import until

FAULTS: dict[str, list[str]] = TABLE["faults"]


class Nemesis:
    """`strike` in a thread of its own."""

    def __init__(
        self, loop: Loop, proxy: Proxy, folder: Path, *, seed: int, longest_s: float, not_run: dict[str, str]
    ) -> None:
        self._loop, self._proxy, self.folder = loop, proxy, folder
        self._random, self._longest_s, self.not_run = random.Random(seed), longest_s, not_run
        self.fired = defaultdict[str, Counter[str]](Counter)
        self.detect_s = defaultdict[str, list[float]](list)
        """How long it took until the relay lost a process's connection, or a call of the relay failed."""
        (folder / DEPARTURES).touch()
        self._deck = self._deal()

    def _deal(self) -> Iterator[tuple[str, str]]:
        """Each kind once before one comes again, and each victim of a kind once before it comes again."""
        left = {kind: list[str]() for kind in FAULTS if kind not in self.not_run}
        while True:
            for kind in self._random.sample([*left], len(left)):
                left[kind] = left[kind] or self._random.sample(FAULTS[kind], len(FAULTS[kind]))
                yield kind, left[kind].pop()

    def strike(self) -> None:
        (kind, victim), number = next(self._deck), self._random.randrange(4)
        time.sleep(self._random.uniform(0.0, 5.0))
        where = f"{victim} in {self._loop.phase}"
        print(f"chaos: {kind} {where}", flush=True)
        if kind in ("clock", "raise"):
            self.order(victim, kind if kind == "raise" else f"clock {7200 * number - 9999}")
        elif victim in LEGS.values():
            self._proxy.orders[victim] = kind, range(number, number + (20 if kind == "slow" else 1))
        elif getattr(self, f"_{kind}")(victim):
            self.fired[kind][where] += 1

    def order(self, stage: str, what: str) -> Path:
        """What the process does that comes to the stage next. The file is there until then."""
        scratch = self.folder / "order"
        scratch.write_text(what)
        return scratch.rename(self.folder / stage)

    def count(self) -> None:
        """What the proxy has spoilt, and the orders that were followed."""
        for (kind, leg), pieces in self._proxy.fired.items():
            self.fired[kind][leg] = pieces
        for path in self.folder.glob("*.fired"):
            self.fired[path.read_text().split()[0]][path.stem] += 1
            path.unlink()

    # -- each strikes, and returns whether it was seen to -----------------------------------------------------------------

    def _kill(self, victim: str) -> bool:
        process = psutil.Process(self._random.choice(self._loop.pids[victim]))
        call = self._loop.cluster.manager.stay.remote(LIMIT_S) if victim == "relay" else None
        begun_s = time.monotonic()
        process.send_signal(signal.SIGKILL)
        gone = _until(lambda: _status(process) in ("", psutil.STATUS_ZOMBIE))
        if _until(lambda: self._seen_s(call, begun_s) > 0):
            self.detect_s[victim].append(self._seen_s(call, begun_s))
        return gone

    def _seen_s(self, call: Any, begun_s: float) -> float:
        """How long it took until the call ended, or else the first connection to the relay; 0 before that."""
        if call is not None:
            import ray

            return (time.monotonic() - begun_s) * bool(ray.wait([call], timeout=0)[0])
        waits_s = [float(at) - begun_s for at in (self.folder / DEPARTURES).read_text().split()]
        return next((wait_s for wait_s in waits_s if wait_s > 0), 0.0)

    def _stop(self, victim: str) -> bool:
        family = [psutil.Process(self._random.choice(self._loop.pids[victim]))]
        family += family[0].children(recursive=True) if victim == "engine" else []
        for process in family:
            process.suspend()
        stopped = _until(lambda: all(_status(each) == psutil.STATUS_STOPPED for each in family))
        time.sleep(self._random.uniform(1.0, self._longest_s))
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return stopped

    def _full_disk(self, _victim: str) -> bool:
        """The journal's folder is a small file system of our own mount namespace."""
        filler = Path(self._loop.args.r3_journal, "filler")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        free = os.statvfs(filler).f_bavail
        time.sleep(4.0)
        filler.unlink()
        return not free

    def _full_store(self, _victim: str) -> bool:
        """Frames whose replies never come, until the relay has no room; it drops them when nobody claims them."""
        args, frame, serial = self._loop.args, frame_of(20_000), time.time_ns()
        url, file = f"http://127.0.0.1:{args.r3_ingest_port}", Path(args.r3_token_file)
        while (status := direct.post(url, file, direct.parcel_of((serial, frame)))) == Status.TAKEN:
            serial += 1
        return status == Status.COME_AGAIN


def _until(condition: Callable[[], bool]) -> bool:
    with suppress(AssertionError):
        until(condition)
        return True
    return False


def _status(process: psutil.Process) -> str:
    """Return what it does; nothing once it is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.status()
    return ""
