"""The algorithm, as small as GRPO can be: prompts, a programmatic reward, group-normalised advantages, the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

GROUP = 4
"""Samples per prompt; an advantage is relative to its group."""
CLIP = 0.2


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    sample_id: str
    prompt: list[int]
    new_tokens: int
    rid: str | None = None
    """The request's name at SGLang; None: it makes one."""


def make_requests(
    step: int, *, samples: int, seed: int, vocab: int, evaluation: bool = False
) -> list[Request]:
    """`samples` requests in groups that share a prompt; lengths differ, so that padding and balance matter."""
    rng = np.random.default_rng((seed, step, evaluation))
    kind = "eval" if evaluation else "sample"
    requests = []
    for group in range(samples // GROUP):
        prompt = rng.integers(4, vocab, int(rng.integers(12, 28))).tolist()
        for index in range(GROUP):
            name = f"step{step}/{kind}/group{group}/{index}"
            requests.append(Request(name, prompt, int(rng.integers(24, 48))))
    return requests


def reward(response: list[int]) -> float:
    """Share of even tokens: simple, programmatic, and something that a policy can learn."""
    return float(np.mean([token % 2 == 0 for token in response]))


def group_advantages(rewards: list[float]) -> list[float]:
    """GRPO: (reward - mean of its group) / (std of its group + 1e-6); groups are consecutive."""
    groups = np.asarray(rewards).reshape(-1, GROUP)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1).tolist()


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, responses: int
) -> torch.Tensor:
    """This rank's part of the clipped policy-gradient loss, a mean over `responses` tokens of all CP ranks. All [b, s]."""
    ratio = (logprobs - old).exp()
    gain = (ratio * advantages).minimum(ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / max(responses, 1)
