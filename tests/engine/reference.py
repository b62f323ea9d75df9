"""Expert ids of the same checkpoint by transformers, float32, in a process of its own."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

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


def reference_ids(model: Path, token_lists: list[list[int]]) -> list[Expected]:
    """For each list of n tokens the n - 1 rows that transformers computes in float32."""
    return in_transformers(_expected, str(model), [tokens[:-1] for tokens in token_lists])


def in_transformers(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the function of a module gives in the process that imports transformers."""
    return _process().submit(call, *arguments).result(PROGRAM_S)


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Once per test run: the imports take most of the time. It has the environment of an engine, and ends with us."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_die_with_parent)
    with patch.dict(os.environ, environment(r3channel=False), clear=True):
        pool.submit(os.getpid).result(PROGRAM_S)
    return pool


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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


def _expected(folder: str, token_lists: list[list[int]]) -> list[Expected]:
    import torch

    model, scores = _loaded(folder)
    found, top_k = list[Expected](), model.config.num_experts_per_tok
    for tokens in token_lists:
        scores.clear()
        with torch.no_grad():
            logits_TV = model(torch.tensor([tokens])).logits[0]
        top = [layer.topk(top_k + 1, -1) for layer in scores]
        ids_TLK = torch.stack([layer.indices[:, :top_k] for layer in top], 1)
        gaps_TL = torch.stack([-layer.values.diff(dim=-1).max(dim=-1).values for layer in top], 1)
        found.append(
            Expected(*(each.numpy() for each in (ids_TLK, gaps_TL, logits_TV, torch.stack(scores, 1))))
        )
    return found
