"""The process that runs slime's script: a Ray of its own, then `r3channel slime SCRIPT ...` as a user types it.

python -m tests.upstream.slime_cpu.driver SCRIPT SLIME_ARGUMENTS...         started by run.py, which sets the environment
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from examples.async_grpo.rays import start
from examples.embedded.sglang_main import follow_parent
from r3channel.cli import main
from tests.support import fork_server
from tests.support.waits import until
from tests.upstream.slime_cpu import patches, witness

_IMPORTS = ("transformers.models.auto", "sglang.srt.server_args")
"""What most of Ray's processes import, and no patch is about: 5 of the 8 s of CPU of a trainer's imports. Ray itself is not to be
forked: its process does not come to register."""


def run() -> int:
    # Ray's processes are below this one; a killed run.py must leave none of them behind.
    threading.Thread(target=follow_parent, args=(os.getppid(),), daemon=True).start()
    workers = _forks(f"{os.environ['SLIME_CPU_RAY_DIR']}/forks")
    patches.setup()
    import ray

    start(
        address="local",  # a cluster of its own, ended with this process
        num_cpus=16,  # logical: slime asks for one a bundle, one for the manager, one for the lock
        num_gpus=int(os.environ["SLIME_CPU_GPUS"]),  # logical
        include_dashboard=False,
        _temp_dir=os.environ["SLIME_CPU_RAY_DIR"],
        object_store_memory=256 << 20,
        runtime_env={
            "env_vars": json.loads(os.environ["SLIME_CPU_WORKER_ENV"]),
            "py_executable": workers,
            "worker_process_setup_hook": "tests.upstream.slime_cpu.patches.setup",
        },
    )
    try:
        return main(["slime", *sys.argv[1:]])
    finally:
        if ray.is_initialized():  # the launcher ends it where a run ends in an error
            witness.tell_ray()
        ray.shutdown()


def _forks(path: str) -> str:
    """Start the process that Ray's are forked of, once its imports are made, and return the command that asks it."""
    subprocess.Popen([sys.executable, "-m", fork_server.__name__, path, *_IMPORTS])
    until(lambda: os.path.exists(path), "a process to fork")
    return f"{sys.executable} -SE {fork_server.__file__} {path}"


if __name__ == "__main__":
    sys.exit(run())
