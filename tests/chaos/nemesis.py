"""One fault at a time, chosen by a seed, and the proof that it happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from r3channel.engine.capture import UnfinishedFrame
from tests import direct
from tests.chaos.deployment import Deployment
from tests.chaos.proxy import KINDS, LASTING, Proxy
from tests.chaos.shim import LEGS

PROCESSES = ("engine", "relay", "trainer")
_ORDERED = {"seal": "relay", "capture": "engine", "replay": "trainer"}
"""Where each process looks for the order to step its clock."""
FAULTS: dict[str, tuple[str, ...]] = {
    "kill": PROCESSES,
    "stop": PROCESSES,
    **dict.fromkeys(KINDS, tuple(LEGS.values())),
    "clock": tuple(_ORDERED),
    "raise": ("prepare", "deliver"),
    "full_disk": ("journal",),
    "full_store": ("store",),
}
NOT_RUN = {"full_shm": "weights travel over TCP here, and nothing of the channel lies in /dev/shm"}
NO_DISK = "no mount namespace of our own: `unshare -m` is not allowed here"
_SEEN_S = 20.0
_ROWS, _FRAMES = 70_000, 45


class Nemesis:
    """`strike` in a thread of its own."""

    def __init__(
        self, deployment: Deployment, proxy: Proxy, *, seed: int, longest_s: float, disk: bool
    ) -> None:
        self._own, self._proxy, self._random, self._longest_s = (
            deployment,
            proxy,
            random.Random(seed),
            longest_s,
        )
        self.phase = "start"
        self.fired = defaultdict[str, Counter[str]](Counter)
        self.detect_s, self.when_s = dict[str, float](), list[float]()
        """By kind of process: the longest time until the relay, or whoever called it, saw that it was gone."""
        self.not_run = NOT_RUN if disk else NOT_RUN | {"full_disk": NO_DISK}
        self._deck = self._deal()

    def _deal(self) -> Iterator[tuple[str, str]]:
        """Each kind once before one comes again, and each victim of a kind once before it comes again."""
        victims = {kind: [*whom] for kind, whom in FAULTS.items() if kind not in self.not_run}
        while True:
            for kind in self._random.sample([*victims], len(victims)):
                victims[kind] = victims[kind] or [*FAULTS[kind]]
                yield kind, victims[kind].pop(self._random.randrange(len(victims[kind])))

    def strike(self, *, within_s: float) -> None:
        kind, victim = next(self._deck)
        time.sleep(self._random.uniform(0.0, within_s))
        self.when_s.append(time.monotonic())
        print(f"chaos: {kind} {victim} in {self.phase}", flush=True)
        if kind in KINDS:
            lasts_s = self._random.uniform(2.0, 6.0) if kind in LASTING else 0.0
            self._proxy.order(kind, victim, skip=self._random.randrange(4), lasts_s=lasts_s)
        elif kind in ("kill", "stop"):
            getattr(self, f"_{kind}")(victim, self._pid(victim))
        elif kind in ("clock", "raise"):
            order = "raise" if kind == "raise" else f"clock {self._random.choice((-3600, 3600))}"
            self._order(victim, order)
        else:
            getattr(self, f"_{kind}")()

    def settle(self) -> None:
        """What the proxy has spoilt by now, and which orders were followed, is counted."""
        for (kind, leg), pieces in self._proxy.fired.items():
            self.fired[kind][leg] = pieces
        for path in self._own.folder.glob("*.fired"):
            what, stage = path.read_text().partition(" ")[0], path.stem
            self.fired[what][f"{_ORDERED.get(stage, stage)}"] += 1
            path.unlink()

    def end(self) -> None:
        """What has not fired by now never does."""
        self._proxy.withdraw()
        for stage in {*_ORDERED, *FAULTS["raise"]}:
            Path(self._own.folder, stage).unlink(missing_ok=True)

    def _fire(self, kind: str, victim: str) -> None:
        self.fired[kind][f"{victim} in {self.phase}"] += 1

    def _pid(self, victim: str) -> int:
        if victim == "engine":
            return self._random.choice(self._own.engines).pid
        return self._own.relay_life if victim == "relay" else self._random.choice(self._own.trainer_lives)

    def _order(self, stage: str, what: str) -> None:
        scratch = self._own.folder / "order"
        scratch.write_text(what)
        scratch.rename(self._own.folder / stage)

    # -- processes ---------------------------------------------------------------------------------------------------------

    def _kill(self, victim: str, pid: int) -> None:
        process, before = psutil.Process(pid), self._links()
        os.kill(pid, signal.SIGKILL)
        begun_s = time.monotonic()
        if _until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 2.0) is None:
            return
        self._fire("kill", victim)

        def noticed() -> bool:
            now = self._links()
            return now is None if victim == "relay" else now is not None and now != before

        if _until(noticed, _SEEN_S) is not None:
            taken_s = time.monotonic() - begun_s
            self.detect_s[victim] = max(self.detect_s.get(victim, 0.0), taken_s)

    def _links(self) -> object:
        """The relay's connections; None where there is no relay."""
        with suppress(Exception):
            return self._own.relay("links", timeout_s=5.0)
        return None

    def _stop(self, victim: str, pid: int) -> None:
        top, lasts_s = psutil.Process(pid), self._random.uniform(1.0, self._longest_s)
        family = [top, *(top.children(recursive=True) if victim == "engine" else ())]
        for process in family:
            process.suspend()
        if _until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in family), 2.0) is not None:
            self._fire("stop", victim)
            time.sleep(lasts_s)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    # -- room --------------------------------------------------------------------------------------------------------------

    def _full_disk(self) -> None:
        """The journal's folder is a small file system of our own mount namespace."""
        filler, written = Path(self._own.args.r3_journal, "filler"), 0
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError as error:
            print(f"chaos: {written} bytes, then {error}", flush=True)
            self._fire("full_disk", "journal")
            time.sleep(4.0)
        finally:
            filler.unlink()

    def _full_store(self) -> None:
        """Frames of an engine whose replies never come, until the relay has no room."""
        args, block = self._own.args, np.arange(3 * 8, dtype=np.uint8).reshape(1, 3, 8)
        hello = replace(direct.hello_of(), spec=self._own.spec.to_dict(), spec_digest=self._own.spec.digest)
        with direct.Engine(
            f"http://127.0.0.1:{args.r3_ingest_port}", Path(args.r3_token_file), hello=hello
        ) as engine:
            for number in range(_FRAMES):
                frame = UnfinishedFrame(self._own.spec, rows=_ROWS, first_row=0, sample_key=number)
                frame.runs = [(0, _ROWS, 0, 2)]
                frame.ids_TLK[:] = block
                engine.sender.offer(frame)

            def full() -> bool:
                status = self._own.relay("r3channel_control", "status", {})
                return status["store"]["bytes"] > 0.9 * args.r3_store_bytes

            if _until(full, 10.0) is not None:
                self._fire("full_store", "store")
                time.sleep(5.0)


def _until(condition: Callable[[], bool], limit_s: float) -> float | None:
    """How long it took; None if it did not become true."""
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + limit_s:
        with suppress(psutil.NoSuchProcess):
            if condition():
                return time.monotonic() - begun_s
        time.sleep(0.02)
    return None


def in_background(strike: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=strike, name="nemesis", daemon=True)
    thread.start()
    return thread
