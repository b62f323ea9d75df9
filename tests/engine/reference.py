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
from typing import Any, NamedTuple

import numpy as np

from r3channel.embedded.sglang import environment

TIMEOUT_S = 120.0


NEAR_TIE = 1e-5
"""Router logits closer than this may come out in either order: float32 sums differ with the batch (logits are about 1)."""


class Expected(NamedTuple):
    """What the routers of transformers choose for one sequence."""

    ids_TLK: np.ndarray[Any, Any]
    """Best first."""
    gaps_TL: np.ndarray[Any, Any]
    """The smallest distance between neighbours among the k + 1 best logits."""

    def differing_rows(self, ids_TLK: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
        """(row, moe index) whose ids, order included, are others for no near tie; nothing after a tie that changed the set."""
        found = []
        for row, layer in np.argwhere((ids_TLK != self.ids_TLK).any(axis=-1)):
            if self.gaps_TL[row, layer] > NEAR_TIE:
                found.append((int(row), int(layer)))
            elif set(ids_TLK[row, layer]) != set(self.ids_TLK[row, layer]):
                break  # other experts from here on are a consequence
        return found


def reference_ids(model: Path, token_lists: list[list[int]], *, folder: Path) -> list[Expected]:
    """For each list of n tokens the n - 1 rows that transformers computes in float32.

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
    return [Expected(arrays[f"ids{index}"], arrays[f"gaps{index}"]) for index in range(len(token_lists))]


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
            top_k = model.config.num_experts_per_tok
            top = [layer.topk(top_k + 1, -1) for layer in logits]
            results[f"ids{index}"] = torch.stack([layer.indices[:, :top_k] for layer in top], 1).numpy()
            gaps = [-layer.values.diff(dim=-1).max(dim=-1).values for layer in top]
            results[f"gaps{index}"] = torch.stack(gaps, 1).numpy()
        np.savez(jobs["out"], **results)
        print("DONE", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
