"""Faults from a seeded schedule on the demo's real processes, and a ledger of every row.

python -m tests.chaos --seed 7 --minutes 2 --json         (or: make chaos)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from examples.demo import family
from examples.embedded.scratch import scratch
from tests.chaos import matrix
from tests.chaos.loop import LIMIT_S, deployed
from tests.chaos.nemesis import Nemesis
from tests.chaos.proxy import Proxy
from tests.chaos.shim import TABLE
from tests.support.children import mounted

BAD = ("lost", "duplicated", "wrong_rows", "hung", "not_recovered")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--cells", type=int, default=0, help="so many of the matrix's 63 cells, no schedule")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    if "R3CHAOS_FOLDER" in os.environ:
        report = _run(Path(os.environ["R3CHAOS_FOLDER"]), args.seed, args.minutes, args.cells)
        print(matrix.table(report["matrix"]) if args.cells else "")
        print(json.dumps(report, indent=None if args.json else 1), flush=True)
        return 1 if any(report[key] for key in BAD) or not report["rows_compared"] else 0
    with scratch() as folder:  # all processes end as one family
        ours = {"TMPDIR": str(folder), "R3CHAOS_FOLDER": str(folder), "R3TEST_TAP": f"{folder}/tap"}
        ours |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.chaos.models"}
        return family([sys.executable, "-m", "tests.chaos", *sys.argv[1:]], environment=os.environ | ours)


def _run(folder: Path, seed: int, minutes: float, cells: int) -> dict[str, Any]:
    """Either of the two; then two steps without a new fault."""
    for name in ("store", "tap"):
        (folder / name).mkdir()
    not_run, load, took_s = dict(TABLE["not_run"]), os.getloadavg()[0], [0.0]
    if not mounted(folder / "store", "128m"):
        not_run["full_disk"] = "no mount namespace of our own is allowed here"
    proxy = Proxy(seed)
    os.environ["R3CHAOS_PROXY"] = str(proxy.port)
    with deployed(folder, seed, **(matrix.OPTIONS if cells else {})) as loop:
        nemesis = Nemesis(loop, proxy, folder, seed=seed, longest_s=min(30.0, 5 * minutes), not_run=not_run)
        loop.step()
        start, rows, until_s = resources(), list[matrix.Row](), time.monotonic() + 60 * minutes
        for cell in matrix.cells(seed, cells):
            rows.append(matrix.kill_at(loop, nemesis, *cell))
            nemesis.count()
        while not cells and time.monotonic() < until_s and not loop.hung:
            strike, begun_s = Thread(target=nemesis.strike, daemon=True), time.monotonic()
            strike.start()
            loop.step()
            took_s.append(time.monotonic() - begun_s)
            strike.join(LIMIT_S)
            nemesis.count()
        for _ in range(0 if loop.hung else 2):
            loop.step()
        loop.end()
        nemesis.count()
        end = resources()
    ledger, detect_s = loop.ledger, nemesis.detect_s.items()
    return {
        "faults_fired": {kind: dict(where) for kind, where in sorted(nemesis.fired.items())},
        "not_run": not_run, "steps": loop.number + 1, "samples": ledger.samples, "rows_compared": ledger.rows,
        **ledger.faults, "hung": loop.hung, "told": ledger.told, "named": ledger.named, "failed": Counter(loop.failed),
        "max_detect_s": {name: round(max(each), 2) for name, each in detect_s}, "max_recover_s": round(max(took_s), 1),
        "restarts": loop.restarts, "start": start, "end": end, "seed": seed, "minutes": minutes, "load": load,
        "matrix": rows, "not_recovered": sum(row["killed"] and not row["whole"] for row in rows),
    }  # fmt: skip


def resources() -> dict[str, int]:
    """What all processes of the deployment take together, Ray's own too, but its log monitor: that keeps two files open for each
    worker that ever was."""
    family = psutil.Process().children(recursive=True)
    family = [each for each in family if each.status() != psutil.STATUS_ZOMBIE]
    family = [each for each in family if "log_monitor" not in " ".join(each.cmdline())]
    counts = [(each.memory_info().rss, each.num_fds(), each.num_threads()) for each in family]
    shm_bytes = sum(path.stat().st_size for path in Path("/dev/shm").iterdir())
    names = ("rss_bytes", "descriptors", "threads", "shm_bytes")
    return dict(zip(names, (*map(sum, zip(*counts, strict=True)), shm_bytes), strict=True))


if __name__ == "__main__":
    sys.exit(main())
