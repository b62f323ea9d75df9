"""The way back: the trainer's weights to the engines after every step, and a copy of them for a look from outside."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from r3channel.observe.metrics import Metrics
from r3channel.transport.network import urlopen
from r3channel.weights.convert import Shard
from r3channel.weights.engine import EngineHandle
from r3channel.weights.session import UpdateReport, WeightSync

WEIGHT_TIMEOUT_S, ASK_TIMEOUT_S = 120.0, 15.0
GREEDY_PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [301, 17, 44, 260, 8, 99], [400, 401, 402])
GREEDY_TOKENS = 12

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Pushed:
    """One update, and which engines hold it."""

    report: UpdateReport
    routable: tuple[str, ...]
    """Only these may get requests until the next update."""


class Publisher:
    """Pushes from the first trainer rank, or from all, each with its part. A push is verified before it is committed."""

    def __init__(
        self, urls: list[str], *, model: str, bucket_bytes: int, manifest: str | None, weights: str, wire: Any,
        host: str, token_file: str | None, metrics: Metrics | None, device: str,
    ) -> None:  # fmt: skip
        """`model`: the checkpoint that the engines were started from. `manifest`: file that tells what was committed. `host`: our
        address, which engines reach.

        `weights`: `broadcast` (which tells no manifest), `exact` (over `wire`) or `colocated`. From a GPU a broadcast is NCCL's.
        """
        self._manifest = manifest
        engines = [EngineHandle(url) for url in urls]
        for engine in engines:
            engine.learn_versions(timeout_s=ASK_TIMEOUT_S)  # they are compared with ours when it joins
        exact = partial(WeightSync.sharded, group=dist.group.WORLD)
        make = exact if weights == "exact" else WeightSync.whole
        self._sync = make(
            engines, staged=weights != "broadcast", wire="shared_memory" if weights == "colocated" else wire,
            bucket_bytes=bucket_bytes, host=host, verify=weights != "broadcast" or manifest is not None,
            token_file=token_file or "", metrics=metrics,
            backend="nccl" if device == "cuda" and weights == "broadcast" else "gloo",
        )  # fmt: skip
        self._sync.connect(timeout_s=WEIGHT_TIMEOUT_S)

    def push(self, weights: Weights | list[Shard], version: int) -> Pushed:
        report = self._sync.update(weights, version=version, timeout_s=WEIGHT_TIMEOUT_S)
        if self._manifest is not None and self._sync.held is not None:
            self._sync.held.write(self._manifest)
        return Pushed(report, self._sync.routable())

    def close(self) -> None:
        self._sync.close()


def export(weights: Weights, folder: Path, *, model: Path) -> None:
    """The trainer's weights as a Hugging Face folder, with the configuration and tokenizer of `model`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in model.glob("*.json"):
        shutil.copy(path, folder)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def ask_engines(urls: list[str]) -> dict[str, Any]:
    """By engine: its version, its parameters' checksums, and what it answers greedily to a few prompts."""
    return {url: _ask_engine(EngineHandle(url)) for url in urls}


def _ask_engine(client: EngineHandle) -> dict[str, Any]:
    answers = [_greedy(client.url, prompt) for prompt in GREEDY_PROMPTS]
    return {
        "version": client.weight_version(timeout_s=WEIGHT_TIMEOUT_S),
        "checksums": client.weight_checksums(timeout_s=WEIGHT_TIMEOUT_S),
        "greedy": [[prompt, output] for prompt, output in zip(GREEDY_PROMPTS, answers, strict=True)],
    }


def _greedy(url: str, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": GREEDY_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        url + "/generate", data=body, headers={"Content-Type": "application/json"}
    )
    with urlopen(request, timeout_s=WEIGHT_TIMEOUT_S) as reply:
        return json.loads(reply.read())["output_ids"]
