"""The ordinary rollout data: what a sample is, how a DP rank's samples travel through Ray, how micro-batches are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r3channel.plan.assignment import Assignment
from r3channel.plan.shards import Microbatch, Shard


@dataclass(frozen=True)
class Sample:
    """One generated sequence."""

    sample_id: str
    tokens: list[int]
    """Prompt and response."""
    prompt_tokens: int
    logprobs: list[float]
    """The engine's log-probs of the response tokens."""
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
    """What one CP rank of a DP rank feeds its model: [b, s / cp], or [1, t / cp] for a pack."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """tokens shifted left; logprob[t] is that of labels[t]."""
    positions: torch.Tensor
    mask: torch.Tensor
    """1.0 where labels[t] is a response token."""
    rollout_logprobs: torch.Tensor
    """The engine's, where the mask is 1."""
    advantages: torch.Tensor
    """The advantage of each token's sample."""
    responses: int
    """Response tokens of the micro-batch over all CP ranks: what the loss divides by."""
    plan: Microbatch


def unpack(data: dict[str, Any], shard: Shard, *, device: str) -> list[MicrobatchData]:
    """Lay out a DP rank's samples as the plan says: same order, same padding, so that rows meet their ids."""
    samples = dict(zip(data["names"], _samples(data), strict=True))
    return [
        _lay_out(shard, index, [samples[name] for name in batch.sample_ids], device)
        for index, batch in enumerate(shard.microbatches)
    ]


def tokens_of(data: dict[str, Any], ranks: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Return the token ids of each sample of each micro-batch, to be held against a ticket."""
    tokens = dict(zip(data["names"], np.split(data["tokens"], np.cumsum(data["lengths"])[:-1]), strict=True))
    return [[tokens[name].tolist() for name in names] for names in ranks]


_Arrays = dict[str, np.ndarray]


def _samples(data: dict[str, Any]) -> list[_Arrays]:
    """Per sample, arrays by position from its first token on."""
    answers = data["lengths"] - data["prompts"]
    tokens = np.split(data["tokens"].astype(np.int64), np.cumsum(data["lengths"])[:-1])
    logprobs = np.split(data["logprobs"], np.cumsum(answers)[:-1])
    found = []
    for own, prompt, answer, gain in zip(tokens, data["prompts"], logprobs, data["advantages"], strict=True):
        before = np.zeros(prompt - 1, np.float32)
        found.append(
            {
                "tokens": own,
                "labels": own[1:],
                "mask": np.concatenate([before, np.ones(len(answer), np.float32)]),
                "rollout_logprobs": np.concatenate([before, answer]),
                "advantages": np.full(len(own), gain, np.float32),
            }
        )
    return found


def _lay_out(shard: Shard, index: int, samples: list[_Arrays], device: str) -> MicrobatchData:
    laid = {
        name: torch.from_numpy(shard.lay_out(index, [sample[name] for sample in samples])).to(device)
        for name in samples[0]
    }
    positions = torch.from_numpy(np.ascontiguousarray(shard.token_map(index)[1])).to(device)
    responses = int(sum(sample["mask"].sum() for sample in samples))
    return MicrobatchData(**laid, positions=positions, responses=responses, plan=shard.microbatches[index])
