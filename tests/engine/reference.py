"""Expert ids of the same checkpoint by transformers, float32. Run as a program, in a process of its own.

python reference.py MODEL JOBS.json OUT.npz        JOBS: lists of tokens; OUT: one array [tokens, L, K] per list
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.embedded.sglang import environment


def reference_ids(model: Path, token_lists: list[list[int]], *, folder: Path) -> list[np.ndarray[Any, Any]]:
    """[tokens - 1, L, K] for each list, as the routers of transformers choose them, best first."""
    jobs, out = folder / "jobs.json", folder / "out.npz"
    jobs.write_text(json.dumps([tokens[:-1] for tokens in token_lists]))
    subprocess.run(
        [sys.executable, __file__, str(model), str(jobs), str(out)],
        env=environment(r3channel=False),
        check=True,
        timeout=120,
    )
    arrays = np.load(out)
    return [arrays[str(index)] for index in range(len(token_lists))]


def main(model_dir: str, jobs: str, out: str) -> None:
    import torch
    from transformers import Qwen3MoeForCausalLM

    model: Any = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    logits: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda gate, inputs, _: logits.append(
                    inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T
                )
            )
    results = {}
    for index, tokens in enumerate(json.loads(Path(jobs).read_text())):
        logits.clear()
        with torch.no_grad():
            model(torch.tensor([tokens]))
        top = [layer.topk(model.config.num_experts_per_tok, -1).indices for layer in logits]
        results[str(index)] = torch.stack(top, 1).numpy()
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
