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
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from examples.demo import family
from examples.embedded.scratch import scratch
from tests.chaos.loop import Loop, deployed
from tests.chaos.nemesis import FAULTS, Nemesis
from tests.chaos.proxy import Proxy
from tests.chaos.shim import TABLE

NO_DISK = {"full_disk": "no mount namespace of our own: `unshare -m` is not allowed here"}
BAD = ("lost", "duplicated", "wrong_rows", "hung")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    if "R3CHAOS_DISK" in os.environ:
        return _inside(args)
    # As a family of processes that ends as one, with mounts that nobody else sees where the system allows it.
    own = (
        ["unshare", "-m"] if not subprocess.call(["unshare", "-m", "true"], stderr=subprocess.DEVNULL) else []
    )
    with scratch() as folder:
        environment = {**os.environ, "TMPDIR": str(folder), "R3CHAOS_DISK": "".join(own[:1])}
        return family([*own, sys.executable, "-m", "tests.chaos", *sys.argv[1:]], environment=environment)


def _inside(args: argparse.Namespace) -> int:
    folder, proxy, disk = Path(tempfile.mkdtemp(prefix="c-")), Proxy(args.seed), os.environ["R3CHAOS_DISK"]
    for name in ("store", "tap"):
        (folder / name).mkdir()
    if disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", folder / "store"], check=True)
    ours = {"R3CHAOS_FOLDER": folder, "R3CHAOS_PROXY": proxy.port, "R3TEST_TAP": folder / "tap"}
    os.environ |= {name: str(value) for name, value in ours.items()}
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "tests.chaos.models"
    report: dict[str, Any] = {"seed": args.seed, "minutes": args.minutes, "load": os.getloadavg()[0]}
    with deployed(folder, args.seed) as loop:
        options = {"seed": args.seed, "longest_s": min(30.0, 5 * args.minutes)}
        not_run = TABLE["not_run"] | ({} if disk else NO_DISK)
        nemesis = Nemesis(loop, proxy, folder, **options, not_run=not_run)
        report |= _run(loop, nemesis, args.minutes)
    print(json.dumps(report, indent=None if args.json else 1), flush=True)
    return 1 if any(report[key] for key in BAD) or not report["rows_compared"] else 0


def _run(loop: Loop, nemesis: Nemesis, minutes: float) -> dict[str, Any]:
    """Steps, each under one fault, until the time is over; then two without. All is well again when the step after has ended."""
    loop.step()
    start, until_s, recover_s = resources(loop), time.monotonic() + 60 * minutes, 0.0
    quiet, hurt_s = 0, list[float]()
    while quiet < 2:
        strike = Thread(target=nemesis.strike, daemon=True)
        if time.monotonic() < until_s and not loop.hung:
            strike.start()
        else:
            nemesis.withdraw()
            quiet += 1
        loop.step(last=quiet == 2)
        recover_s = max([recover_s, *(time.monotonic() - each for each in hurt_s)])
        if not quiet:
            strike.join(60.0)
        hurt_s, nemesis.struck_s = nemesis.struck_s, []
        nemesis.count()
    ledger, detect_s = loop.ledger, nemesis.detect_s.items()
    return {
        "faults_fired": {kind: dict(where) for kind, where in sorted(nemesis.fired.items())},
        "not_run": nemesis.not_run, "steps": loop.number + 1, "samples": ledger.samples, "rows_compared": ledger.rows,
        **ledger.faults, "hung": loop.hung, "told": ledger.told, "named": ledger.named, "failed": loop.failed,
        "max_detect_s": {name: round(max(each), 2) for name, each in detect_s}, "max_recover_s": round(recover_s, 1),
        "restarts": loop.restarts, "start": start, "end": resources(loop),
    }  # fmt: skip


def resources(loop: Loop) -> dict[str, Any]:
    found: dict[str, Any] = {"shm_bytes": sum(path.stat().st_size for path in Path("/dev/shm").iterdir())}
    for victim in FAULTS["kill"]:
        tops = [*map(psutil.Process, loop.pids(victim))]
        each = [process for top in tops for process in (top, *top.children(recursive=True))]
        counts = [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in each]
        sums = map(sum, zip(*counts, strict=True))
        found[victim] = dict(zip(("rss", "descriptors", "threads"), sums, strict=True))
    return found


if __name__ == "__main__":
    sys.exit(main())
