"""The one rank program: `run_ranks` starts it, it forks a process a rank, and each keeps what `run(job)` of a module gives.

Rendezvous by file, a deadline, and the failing rank named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from examples.embedded import megatron_shim
from examples.embedded.sglang import kill_family
from r3channel.plan.layout import TrainerLayout
from tests.support.waits import ENGINE_S, RUN_S, await_memory, end_of

ROOT = Path(__file__).parents[2]
_MEGATRON = (
    "mbridge.models.qwen3moe", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer",
    "megatron.core.distributed", "megatron.core.pipeline_parallel", "transformers.models.auto",
)  # fmt: skip
"""What a rank of Megatron imports when it runs."""
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
    command = [sys.executable, "-m", "tests.dist.ranks", module, json.dumps({**job, **where})]
    results = [folder / f"result.{rank}.json" for rank in range(world_size)]
    with (said := folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        late = [rank for rank, result in enumerate(results) if not result.exists()]
        code = f"ranks {late} still running after {timeout_s} s{end_of(folder / f'log.{late[0]}') if late else ''}"
    finally:
        kill_family(process)
    assert code == 0, f"{code}{end_of(said)}"
    return [json.loads(result.read_text()) for result in results]


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
    """Fork all ranks of this process, which makes their imports once. The first that fails ends it."""
    torch.set_num_threads(1)
    import_module(module)
    if "examples.embedded.megatron" in sys.modules:
        megatron_shim.install()
        for name in _MEGATRON:
            import_module(name)
    own, context = json.loads(job), get_context("fork")
    jobs = [{**own, "rank": rank} for rank in range(own["world_size"])]
    ranks = [context.Process(target=_run, args=(module, each)) for each in jobs]
    for process in ranks:
        process.start()
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        wait(running)
        for rank, process in enumerate(ranks):
            if process.exitcode:
                print(f"rank {rank}: exit status {process.exitcode}{end_of(_log(own, rank))}", flush=True)
                for other in ranks:
                    other.kill()
                sys.exit(1)


def _run(module: str, job: Job) -> None:
    with _log(job, job["rank"]).open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    write_result(job, import_module(module).run(job))


def _log(job: Job, rank: int) -> Path:
    return Path(job["out"]) / f"log.{rank}"


if __name__ == "__main__":
    main(*sys.argv[1:])
