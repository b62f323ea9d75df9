"""Expert ids of the same checkpoint by transformers, float32, in a process of its own (no shim of ours in it).

python reference.py    reads one JSON line per call, {"model": FOLDER, "token_lists": [...], "out": FILE.npz}, and answers "DONE"
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

from examples.embedded.sglang import environment
from tests.support.waits import PROGRAM_S

NEAR_TIE = 1e-5
"""Router logits closer than this may come out in either order: float32 sums differ with the batch (logits are about 1). Measured
with exact comparison: 19 of 976,674 (row, layer) of 2,320 interleaved requests differed, 13 of them where the gap was at
most 2.4e-6, the others in later layers and rows of two samples in which such a tie had changed the set."""

CONSEQUENCES = 0.05
"""Share of a sample that may differ after a tie that changed the set (measured: at most 0.02). Rows of another sample, or of
another position, differ nearly everywhere."""


class Expected(NamedTuple):
    """What the routers of transformers choose for one sequence."""

    ids_TLK: np.ndarray[Any, Any]
    """Best first."""
    gaps_TL: np.ndarray[Any, Any]
    """The smallest distance between neighbours among the k + 1 best logits."""
    logits_TV: np.ndarray[Any, Any]
    """The logits of the token after each row's."""
    scores_TLE: np.ndarray[Any, Any]
    """What each router takes the best of."""

    def differing_rows(self, ids_TLK: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
        """(row, moe index) whose ids, order included, are others for no near tie, nor because of one that changed the set."""
        differing = [(int(row), int(layer)) for row, layer in np.argwhere((ids_TLK != self.ids_TLK).any(-1))]
        ties = [self.gaps_TL[at] <= NEAR_TIE for at in differing]
        changed = [
            tie and set(ids_TLK[at]) != set(self.ids_TLK[at]) for at, tie in zip(differing, ties, strict=True)
        ]
        first = changed.index(True) if any(changed) else len(differing)
        if len(differing) - first > CONSEQUENCES * self.gaps_TL.size:
            first = len(differing)
        return [at for at, tie in zip(differing[:first], ties, strict=False) if not tie]


def reference_ids(model: Path, token_lists: list[list[int]], *, folder: Path) -> list[Expected]:
    """For each list of n tokens the n - 1 rows that transformers computes in float32.

    The process is started once per test run: importing transformers takes most of the time.
    """
    out = folder / "reference.npz"
    child = _process()
    assert child.stdin is not None
    jobs = {"model": str(model), "token_lists": [tokens[:-1] for tokens in token_lists], "out": str(out)}
    child.stdin.write(json.dumps(jobs) + "\n")
    child.stdin.flush()
    _wait_for_answer(child)
    arrays = np.load(out)
    return [
        Expected(*(arrays[f"{name}{index}"] for name in ("ids", "gaps", "logits", "scores")))
        for index in range(len(token_lists))
    ]


@functools.cache
def _process() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, __file__], env=environment(r3channel=False), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    atexit.register(child.kill)
    return child


def _wait_for_answer(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        assert selector.select(PROGRAM_S), f"transformers gave no answer within {PROGRAM_S:g} s"
    answer = child.stdout.readline()
    assert answer == "DONE\n", f"the reference process ended, or said {answer!r}"


@functools.cache
def _loaded(folder: str) -> tuple[Any, list[Any]]:
    """A model, and the list into which its routers write what they take the best of, one tensor for each MoE layer of a pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores: list[torch.Tensor] = []
    for block in model.modules():
        if hasattr(block, "experts"):
            router = block.gate if hasattr(block, "gate") else block.router
            router.register_forward_hook(
                lambda router, inputs, _: scores.append(_scores(router, inputs[0], model.config))
            )
    return model, scores


def _scores(router: Any, hidden: Any, config: Any) -> Any:
    """[T, E]: logits, or what a router with groups or a bias makes of them. Groups that are out lie far below all others."""
    scores_TE = hidden.reshape(-1, router.weight.shape[1]) @ router.weight.T
    if getattr(router, "bias", None) is not None:
        scores_TE = scores_TE + router.bias
    if hasattr(router, "e_score_correction_bias"):
        scores_TE = scores_TE.sigmoid() + router.e_score_correction_bias
    groups = getattr(config, "n_group", None) or 1
    best = 2 if hasattr(router, "e_score_correction_bias") else 1
    if groups == 1:
        return scores_TE
    scores_TGE = scores_TE.unflatten(1, (groups, -1))
    chosen_TG = scores_TGE.topk(best, -1).values.sum(-1).topk(config.topk_group, -1).indices
    out_TG = scores_TE.new_ones(len(scores_TE), groups).scatter(1, chosen_TG, 0)
    return (scores_TGE - 1e6 * out_TG.unsqueeze(-1)).flatten(1)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    import torch

    for line in sys.stdin:
        jobs, results = json.loads(line), {}
        model, scores = _loaded(jobs["model"])
        top_k = model.config.num_experts_per_tok
        for index, tokens in enumerate(jobs["token_lists"]):
            scores.clear()
            with torch.no_grad():
                results[f"logits{index}"] = model(torch.tensor([tokens])).logits[0].numpy()
            top = [layer.topk(top_k + 1, -1) for layer in scores]
            results[f"ids{index}"] = torch.stack([layer.indices[:, :top_k] for layer in top], 1).numpy()
            gaps = [-layer.values.diff(dim=-1).max(dim=-1).values for layer in top]
            results[f"scores{index}"] = torch.stack(scores, 1).numpy()
            results[f"gaps{index}"] = torch.stack(gaps, 1).numpy()
        np.savez(jobs["out"], **results)
        print("DONE", file=answers, flush=True)


if __name__ == "__main__":
    main()
