"""Faults from a seeded schedule on the demo's real processes, and a ledger of every row.

python -m tests.chaos --seed 7 --minutes 2 --json         (or: make chaos)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from examples.async_grpo.rays import fetch
from examples.demo import family
from examples.embedded.scratch import scratch
from tests.chaos.deployment import Deployment
from tests.chaos.ledger import Ledger
from tests.chaos.nemesis import Nemesis, in_background
from tests.chaos.proxy import Proxy

LIMIT_S = 200.0
"""A part of a step that takes longer hangs: the sum of the deadlines that may follow one another, and a restart."""
TRIES = 4


class Run:
    """Steps of the demo's loop, each under one fault, until the time is over; then one without a fault."""

    def __init__(self, own: Deployment, ledger: Ledger, nemesis: Nemesis) -> None:
        self.own, self.ledger, self.nemesis = own, ledger, nemesis
        self.hung, self.steps, self.failed = list[str](), 0, Counter[str]()
        self.recover_s, self._hurt_s = 0.0, list[float]()
        self.coming: Any = None

    def go(self, minutes: float) -> dict[str, Any]:
        self.coming = self.own.cluster.manager.generate.remote(0)
        self.step(0)
        start, until_s, number = self.resources(), time.monotonic() + 60 * minutes, 1
        while time.monotonic() < until_s and not self.hung:
            strike = in_background(partial(self.nemesis.strike, within_s=5.0))
            self.step(number)
            strike.join(60.0)
            self.nemesis.settle()
            number += 1
        self.nemesis.end()
        for last in (number, number + 1):
            self.step(last)
        return self.report(start, self.resources())

    def step(self, number: int) -> None:
        own, begun_s = self.own, time.monotonic()
        try:
            own.await_relay()
            self.nemesis.phase = "generate"
            box = fetch(self.coming, timeout_s=LIMIT_S)
            self.coming = own.cluster.manager.generate.remote(number + 1)
            self.nemesis.phase = "train"
            own.cluster.all("train", number, box, timeout_s=LIMIT_S)
            parts = own.cluster.all("consumed", number)
        except Exception as error:
            self.give_up(number, error)
        else:
            self.ledger.settle(number, [part["arrays"] for part in parts])
            self.nemesis.phase = "weights"
            self.again("weights", self.own.update)
        self.steps += 1
        self._recovered(begun_s)

    def give_up(self, number: int, error: Exception) -> None:
        phase, why = self.nemesis.phase, self.name(self.nemesis.phase, error)
        self.nemesis.phase = "recovery"
        self.own.await_relay()
        if phase == "train":
            self.again("recovery", self.own.renew_trainers)
        self.own.relay("forget", number, self.ledger.give_up(number, why))
        if phase == "generate":
            self.again("weights", self.own.update)
            self.coming = self.own.cluster.manager.generate.remote(number + 1)

    def again(self, phase: str, call: Any) -> None:
        """Until it succeeds, with new engines, relay and trainers in the place of dead ones."""
        for tries_left in reversed(range(TRIES)):
            try:
                return call()
            except Exception as error:
                self.name(phase, error)
                if not tries_left:
                    raise
                self.own.await_relay()
                self.own.await_engines()
                call = self.own.renew_trainers
        return None

    def name(self, phase: str, error: Exception) -> str:
        cause = getattr(error, "cause", None) or error
        why = f"{phase}: {type(cause).__name__}"
        print(f"chaos: {why}: {str(cause)[:300]}", flush=True)
        self.failed[why] += 1
        if isinstance(error, TimeoutError):
            self.hung.append(why)
        return why

    def _recovered(self, begun_s: float) -> None:
        """A step that began after a fault, and ended: all is well again."""
        hurt_s, self.nemesis.when_s = self.nemesis.when_s, []
        self.recover_s = max([self.recover_s, *(time.monotonic() - each for each in self._hurt_s)])
        self._hurt_s = hurt_s
        print(f"chaos: step took {time.monotonic() - begun_s:.1f} s", flush=True)

    def resources(self) -> dict[str, Any]:
        pids = {"relay": [self.own.relay_life], "trainers": self.own.trainer_lives, "nemesis": [os.getpid()]}
        engines = [psutil.Process(engine.pid) for engine in self.own.engines]
        pids["engines"] = [each.pid for top in engines for each in (top, *top.children(recursive=True))]
        shm = sum(path.stat().st_size for path in Path("/dev/shm").iterdir())
        return {"shm_bytes": shm} | {kind: _sum([*map(psutil.Process, own)]) for kind, own in pids.items()}

    def report(self, start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        detect_s = {name: round(taken_s, 2) for name, taken_s in self.nemesis.detect_s.items()}
        return {
            "faults_fired": {kind: dict(where) for kind, where in sorted(self.nemesis.fired.items())},
            "not_run": self.nemesis.not_run, "steps": self.steps, "samples": dict(self.ledger.counts),
            "rows_compared": self.ledger.rows, **self.ledger.faults, "hung": len(self.hung),
            "named": dict(self.ledger.named), "failed": dict(self.failed), "told": self.ledger.told,
            "max_detect_s": detect_s, "max_recover_s": round(self.recover_s, 1), "restarts": self.own.restarts,
            "start": start, "end": end,
        }  # fmt: skip


def _sum(processes: list[psutil.Process]) -> dict[str, int]:
    counts = Counter[str]()
    for process in processes:
        counts.update(
            rss=process.memory_info().rss, descriptors=process.num_fds(), threads=process.num_threads()
        )
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--layout", default="dp=2,tp=1,pp=2,cp=1")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--inside", choices=("disk", "no-disk"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        return _in_own_namespace()
    folder, proxy = Path(tempfile.mkdtemp(prefix="c-")), Proxy(args.seed)
    (folder / "store").mkdir()
    if args.inside == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder / "store"], check=True)
    os.environ |= {"R3CHAOS_FOLDER": str(folder), "R3CHAOS_PROXY": str(proxy.port)}
    load, begun_s = os.getloadavg()[0], time.monotonic()
    with Deployment(folder, layout=args.layout, seed=args.seed) as own:
        own.start()
        ledger = Ledger(folder, folder / "tap", own.spec.moe_layers)
        longest_s = min(30.0, 5 * args.minutes)
        nemesis = Nemesis(own, proxy, seed=args.seed, longest_s=longest_s, disk=args.inside == "disk")
        report = Run(own, ledger, nemesis).go(args.minutes)
    report |= {
        "seed": args.seed,
        "minutes": args.minutes,
        "wall_s": round(time.monotonic() - begun_s),
        "load": load,
    }
    bad = [key for key in ("lost", "duplicated", "wrong_rows", "hung") if report[key]]
    print(json.dumps(report, indent=None if args.json else 1), flush=True)
    return 1 if bad or not report["rows_compared"] else 0


def _in_own_namespace() -> int:
    """The run as a family of processes that ends as one, with mounts that nobody else sees where the system allows it."""
    allowed = not subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        *sys.argv[1:],
        "--inside",
        "disk" if allowed else "no-disk",
    ]
    with scratch() as folder:
        environment = {**os.environ, "TMPDIR": str(folder)}
        return family([*(["unshare", "-m"] if allowed else []), *command], environment=environment)


if __name__ == "__main__":
    sys.exit(main())
