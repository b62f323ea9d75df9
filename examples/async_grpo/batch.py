"""The ordinary rollout data: what a sample is, how a DP rank's samples travel through Ray, how micro-batches are padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r3channel.plan.assignment import Assignment
from r3channel.plan.shards import Microbatch


@dataclass(frozen=True)
class Sample:
    """One generated sequence."""

    sample_id: str
    tokens: list[int]
    """Prompt and response."""
    prompt_tokens: int
    logprobs: list[float]
    """Of the response tokens, by the engine."""
    reward: float

    @property
    def response(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


def pack(
    samples: dict[str, Sample], advantages: dict[str, float], assignment: Assignment, *, dp: int
) -> dict[str, Any]:
    """One DP rank's data as a few flat arrays: about 9 bytes per token through Ray."""
    names = [name for microbatch in assignment.ranks[dp] for name in microbatch]
    chosen = [samples[name] for name in names]
    return {
        "names": names,
        "tokens": np.concatenate([np.asarray(s.tokens, np.int32) for s in chosen]),
        "lengths": np.asarray([len(s.tokens) for s in chosen], np.int32),
        "prompts": np.asarray([s.prompt_tokens for s in chosen], np.int32),
        "logprobs": np.concatenate([np.asarray(s.logprobs, np.float32) for s in chosen]),
        "advantages": np.asarray([advantages[name] for name in names], np.float32),
    }


@dataclass
class MicrobatchData:
    """A padded micro-batch, [b, s]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """tokens shifted left; logprob[t] is that of labels[t]."""
    positions: torch.Tensor
    mask: torch.Tensor
    """1.0 where labels[t] is a response token."""
    rollout_logprobs: torch.Tensor
    """The engine's, where the mask is 1."""
    advantages: torch.Tensor
    """[b]."""


def unpack(data: dict[str, Any], microbatches: tuple[Microbatch, ...]) -> list[MicrobatchData]:
    """Pad a DP rank's samples as the plan says: same order, same lengths, so that rows meet their ids."""
    ends = np.cumsum(data["lengths"])
    answers = data["lengths"] - data["prompts"]
    answer_ends = np.cumsum(answers)
    index_of = {name: index for index, name in enumerate(data["names"])}
    return [_pad(data, batch, index_of, ends, answer_ends) for batch in microbatches]


def _pad(
    data: dict[str, Any],
    batch: Microbatch,
    index_of: dict[str, int],
    ends: np.ndarray,
    answer_ends: np.ndarray,
) -> MicrobatchData:
    size, length = len(batch.sample_ids), batch.seq_len
    tokens, labels = (torch.zeros(size, length, dtype=torch.int64) for _ in range(2))
    mask, logprobs = (torch.zeros(size, length) for _ in range(2))
    chosen = [index_of[name] for name in batch.sample_ids]
    for row, index in enumerate(chosen):
        total, prompt = int(data["lengths"][index]), int(data["prompts"][index])
        text = torch.from_numpy(data["tokens"][ends[index] - total : ends[index]].astype(np.int64))
        tokens[row, :total] = text
        labels[row, : total - 1] = text[1:]
        mask[row, prompt - 1 : total - 1] = 1.0
        answer = data["logprobs"][answer_ends[index] - (total - prompt) : answer_ends[index]]
        logprobs[row, prompt - 1 : total - 1] = torch.from_numpy(answer.copy())
    positions = torch.arange(length).expand(size, length)
    advantages = torch.from_numpy(data["advantages"][chosen])
    return MicrobatchData(tokens, labels, positions, mask, logprobs, advantages)
