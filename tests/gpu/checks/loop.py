"""The demo on the device, two steps: engine to relay to Megatron's routers, and weights to the engine by a broadcast.

On one GPU each process is a host of its own to NCCL (`stand_ins/sitecustomize`), so that trainer and engine can make a group.
Rows go over TCP there, since a relay refuses NCCL to its own GPU; `pair` has them over NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.gpu.facts import Facts

SMALL = "--json --steps 2 --samples 8 --layout dp=1 --weights broadcast"


def check(device: str, facts: Facts) -> None:
    command = [sys.executable, "-m", "examples.demo", "--device", device, *SMALL.split()]
    environment = {**os.environ, "R3TEST_HOSTS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout.rstrip().endswith("}"):
        raise RuntimeError(f"the demo ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    differ, compared = result["ids_different"], result["ids_compared"]
    facts.expect("ids compared", compared, compared > 0, "some")
    facts.expect("ids that differ", differ, differ == 0, "0")
    on, off = (result["logprob_abs_diff"][name] for name in ("replay_on", "replay_off"))
    facts.expect("|log-prob engine - trainer|, replay on, off", [on, off], on < off, "nearer with replay")
    versions = result["weight_versions"]
    facts.expect("weight versions that the engine took", versions, versions == [0, 1, 2], "0 to 2")
    facts.note("rows by the version that made them, by step", result["rows_by_version"])
