"""Worker of test_weights_exact.py: runs the lines of the room's README as one of several real Megatron ranks."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from examples.embedded import megatron
from r3channel.plan.layout import TrainerLayout
from r3channel.weights.sglang import EngineClient
from tests.dist.ranks import write_result
from tests.dist.weights_exact_rank import scale

README = Path(__file__).parents[2] / "r3channel" / "weights" / "README.md"


def own(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What the README leaves to its reader. Before the second update one engine is killed; before the third it has the second's
    weights again."""

    def train(version: int) -> None:
        scale(model.chunks, 2.0)
        if version == 2:
            Path("kill").touch()
            while not Path("killed").exists():
                time.sleep(0.1)
        if version == 3 and job["rank"] == 0:
            one, other = (EngineClient(url).weight_checksums(timeout_s=60) for url in job["engines"])
            print("the engines are", "equal" if one == other else "not equal")

    return {"bridge": model.bridge, "chunks": model.chunks, "engines": job["engines"], "train": train}


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.chdir(job["out"])
    layout = TrainerLayout.parse(job["layout"])
    megatron.init_distributed(
        rank=job["rank"], world_size=job["world_size"], init_method=job["init_method"], layout=layout
    )
    names = own(megatron.build(job["model"], layout, dtype="float32"), job)
    script = Path(f"readme_{job['rank']}.py")
    script.write_text(README.read_text().split("```python\n")[1].split("```")[0])
    sync = runpy.run_path(str(script), names)["sync"]
    megatron.close_distributed()
    write_result(job, {"version": sync.version, "evicted": sync.evicted, "states": len(sync.engine_states)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
