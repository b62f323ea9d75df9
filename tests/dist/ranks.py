"""The one rank program: `run_ranks` starts it as several processes, each runs `run(job)` of a module and keeps what it gives.

Rendezvous by file, a deadline, and the failing rank named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from r3channel.plan.layout import TrainerLayout
from tests.support.waits import ENGINE_S, RUN_S, await_memory, end_of

ROOT = Path(__file__).parents[2]
Job = dict[str, Any]


def run_ranks(
    module: str, folder: Path, *, job: Job, timeout_s: float = RUN_S, world_size: int = 0, overlay: Sequence[Path] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `module.run(job)` on as many processes as the job's layout has, or `world_size`; gives what each returned, by rank.

    Each job has rank, world_size, init_method and out, too. Ends every process on leaving. Packages in the folders of
    `overlay` win over the installed ones.

    Raises:
        AssertionError: a rank failed or the deadline passed; holds the failing rank's last output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world_size = world_size or TrainerLayout.parse(job["layout"]).world_size
    where = {"world_size": world_size, "init_method": f"file://{folder / 'rendezvous'}", "out": str(folder)}
    path = os.pathsep.join(map(str, [*overlay, ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    await_memory(0.7 * world_size, f"{world_size} ranks")
    processes = list[subprocess.Popen[bytes]]()
    for rank in range(world_size):
        command = [
            sys.executable, "-m", "tests.dist.ranks", module, json.dumps({**job, **where, "rank": rank}),
        ]  # fmt: skip
        with (folder / f"log.{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        _wait(processes, folder, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            late = code is None and time.monotonic() > deadline_s
            what = f"still running after {timeout_s} s" if late else f"exit status {code}"
            log = folder / f"log.{rank}"
            assert not code and not late, f"rank {rank}: {what}\n{end_of(log)}"
        if None not in codes:
            return
        time.sleep(0.05)


def write_result(job: Job, result: Mapping[str, Any]) -> None:
    """What a rank gives; one that ends before its `run` returns calls this itself."""
    (Path(job["out"]) / f"result.{job['rank']}.json").write_text(json.dumps(result))


@contextmanager
def megatron_world(job: Job, *, layout: str = "", meeting: str = "") -> Iterator[TrainerLayout]:
    """This rank in Megatron's groups of the job's layout; a second world of the same processes has a `meeting` of its own."""
    from examples.embedded import megatron

    own = TrainerLayout.parse(layout or job["layout"])
    place = {key: job[key] for key in ("rank", "world_size")} | {"init_method": job["init_method"] + meeting}
    megatron.init_distributed(**place, layout=own, timeout_s=ENGINE_S)
    yield own
    megatron.close_distributed()


def facts_of(module: str) -> dict[str, Callable[..., Any]]:
    """The functions that show one fact each."""
    return {name: fact for name, fact in vars(sys.modules[module]).items() if name.startswith("test_")}


def main(module: str, job: str) -> None:
    torch.set_num_threads(1)
    write_result(own := json.loads(job), import_module(module).run(own))


if __name__ == "__main__":
    main(*sys.argv[1:])
