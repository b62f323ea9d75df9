"""An exact reshard on real processes: two Megatron ranks (TP 2) fill one SGLang engine of two ranks, and count their bytes.

Each rank is this module run by name, with one JSON argument; it prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS = 2
_TIMEOUT_S = 240.0


def measure(model: Path, url: str, *, folder: Path, rounds: int) -> dict[str, Any]:
    """`bytes_of_model`: what all ranks sent for one update, of the model's bytes. `largest_share_held`: of any trainer rank."""
    from safetensors.torch import load_file

    model_bytes = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    job = {"model": str(model), "url": url, "rounds": rounds, "meet": f"file://{folder / 'reshard-meet'}"}
    ranks = [_start({**job, "rank": rank}) for rank in range(RANKS)]
    try:
        told = [json.loads(rank.communicate(timeout=_TIMEOUT_S)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return {
        "bytes_of_model": sum(one["sent"] for one in told) / model_bytes,
        "largest_share_held": max(one["held"] for one in told) / model_bytes,
        "update_s": told[0]["update_s"],
        "parameters_compared": told[0]["verified"],
    }


def _start(job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "r3channel.bench.reshard_ranks", json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(job: dict[str, Any]) -> dict[str, Any]:
    """One trainer rank."""
    import torch

    from r3channel.embedded import megatron
    from r3channel.plan.layout import TrainerLayout
    from r3channel.weights.convert import hf_shards
    from r3channel.weights.session import WeightSync

    torch.set_num_threads(1)
    layout = TrainerLayout.parse("tp=2")
    megatron.init_distributed(rank=job["rank"], world_size=RANKS, init_method=job["meet"], layout=layout)
    trained = megatron.build(job["model"], layout, dtype="float32")
    with WeightSync([job["url"]], plan="exact", group=torch.distributed.group.WORLD) as sync:
        sync.connect(timeout_s=_TIMEOUT_S)
        shards = hf_shards(trained.bridge, trained.chunks)
        reports = [sync.update(shards, version=n, timeout_s=_TIMEOUT_S) for n in range(1, job["rounds"] + 2)]
    megatron.close_distributed()
    return {
        "sent": reports[-1].sent_bytes,
        "held": sum(shard.tensor.nbytes for shard in shards),
        "verified": reports[-1].verified,
        "update_s": statistics.median(report.wall_s for report in reports[1:]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
