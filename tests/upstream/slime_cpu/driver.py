"""The process that runs slime's script: a Ray of its own, then `r3channel slime SCRIPT ...` as a user types it.

python -m tests.upstream.slime_cpu.driver SCRIPT SLIME_ARGUMENTS...         started by run.py, which sets the environment
"""

from __future__ import annotations

import json
import os
import sys
import threading

from examples.async_grpo.rays import start
from examples.embedded.sglang_main import follow_parent
from r3channel.cli import main
from tests.upstream.slime_cpu import patches, witness


def run() -> int:
    # Ray's processes are below this one; a killed run.py must leave none of them behind.
    threading.Thread(target=follow_parent, args=(os.getppid(),), daemon=True).start()
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
            "worker_process_setup_hook": "tests.upstream.slime_cpu.patches.setup",
        },
    )
    try:
        return main(["slime", *sys.argv[1:]])
    finally:
        if ray.is_initialized():  # the launcher ends it where a run ends in an error
            witness.tell_ray()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(run())
