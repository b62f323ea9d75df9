"""Expert ids of the same checkpoint by transformers, float32, in a process of its own (no shim of ours in it).

python reference.py MODEL        reads one JSON line per call, {"token_lists": [...], "out": FILE.npz}, and answers "DONE"
"""

from __future__ import annotations

import atexit
import functools
import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.embedded.sglang import environment

TIMEOUT_S = 120.0


def reference_ids(model: Path, token_lists: list[list[int]], *, folder: Path) -> list[np.ndarray[Any, Any]]:
    """[tokens - 1, L, K] for each list, as the routers of transformers choose them, best first.

    The process is started once per model and test run: importing transformers takes most of the time.
    """
    out = folder / "reference.npz"
    child = _process(str(model))
    assert child.stdin is not None
    jobs = {"token_lists": [tokens[:-1] for tokens in token_lists], "out": str(out)}
    child.stdin.write(json.dumps(jobs) + "\n")
    child.stdin.flush()
    _wait_for_answer(child)
    arrays = np.load(out)
    return [arrays[str(index)] for index in range(len(token_lists))]


@functools.cache
def _process(model: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, __file__, model],
        env=environment(r3channel=False),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    atexit.register(child.kill)
    return child


def _wait_for_answer(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        assert selector.select(TIMEOUT_S), f"transformers gave no answer within {TIMEOUT_S:g} s"
    answer = child.stdout.readline()
    assert answer == "DONE\n", f"the reference process ended, or said {answer!r}"


def main(model_dir: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
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
    for line in sys.stdin:
        jobs, results = json.loads(line), {}
        for index, tokens in enumerate(jobs["token_lists"]):
            logits.clear()
            with torch.no_grad():
                model(torch.tensor([tokens]))
            top = [layer.topk(model.config.num_experts_per_tok, -1).indices for layer in logits]
            results[str(index)] = torch.stack(top, 1).numpy()
        np.savez(jobs["out"], **results)
        print("DONE", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
