"""Peers through Ray's object store: torch int32 as slime does it, numpy int32 as miles does it, numpy in the id dtype.

Steps as read in slime and miles, written here independently: JSON, base64 and copy, count check, all-zero-layer check (torch
only), split by DP rank, one put per DP rank, every rank gets its DP rank's whole object, then pads, cuts and copies per layer.
At their best: a rank is started as soon as its own object is put, gets read out of shared memory without a copy (numpy),
and rows are copied once into memory that is reused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pybase64
import ray
import torch

from r3channel.bench.relay.held import HeldRows, Router
from r3channel.bench.relay.paths.base import Delivery, Start
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case, Workload
from r3channel.plan.layout import RankCoords

_GET_S = 60.0
_DECODED_EACH = 4


def is_narrow(path: str) -> bool:
    return "uint8" in path


def decode_replies(work: Workload, stages: Stages, *, narrow: bool, check: bool) -> None:
    """Replies in memory -> per-sample arrays, the manager's work before it puts.

    Every fourth sample is decoded and the times are scaled by tokens: the work is per sample, and half a gigabyte of text less.
    """
    names = list(work.lengths)[::_DECODED_EACH]
    sampled = Stages()
    for name in names:
        _decode(work, name, work.stock_reply(name), sampled, narrow=narrow, check=check)
    stages.add(sampled, times=sum(work.lengths.values()) / sum(work.lengths[name] for name in names))


def _decode(work: Workload, name: str, reply: bytes, stages: Stages, *, narrow: bool, check: bool) -> None:
    with stages.span("json"):
        text = json.loads(reply)["meta_info"]["routed_experts"]
    with stages.span("base64"):
        flat = np.frombuffer(bytearray(pybase64.b64decode(text.encode("ascii"))), np.int32)
        ids_TAK = flat.reshape(work.lengths[name] - 1, work.spec.num_layers, work.spec.top_k)
    if check:
        with stages.span("check"):
            _check_layers(torch.from_numpy(ids_TAK), work.spec.moe_layers)
    if narrow:
        with stages.span("narrow"):
            ids_TAK.astype(work.spec.id_dtype)


def _check_layers(ids_TAK: torch.Tensor, layers: Sequence[int]) -> None:
    if any(not torch.count_nonzero(ids_TAK[:, layer]) for layer in layers):
        raise ValueError("a layer of zeros only")


class StoreSending:
    """The manager's half."""

    def __init__(self, work: Workload, path: str) -> None:
        self._work, self._path = work, path
        arrays = work.narrow if is_narrow(path) else work.wide
        self._arrays: dict[str, Any] = dict(arrays)
        if "torch" in path:
            self._arrays = {name: torch.from_numpy(ids) for name, ids in arrays.items()}
        layout = work.case.trainer
        self._ranks_of = [
            [rank for rank in range(layout.world_size) if layout.coords(rank).dp == dp]
            for dp in range(layout.dp)
        ]
        self.bytes_sent = sum(ids.nbytes for ids in arrays.values())  # once per node; its ranks share memory
        self._refs: list[Any] = []

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        if whole:
            decode_replies(self._work, stages, narrow=is_narrow(self._path), check="torch" in self._path)

    def deliver(self, start: Start) -> Delivery:
        delivery = Delivery(time.monotonic())
        for dp, ranks in enumerate(self._ranks_of):
            with delivery.stages.span("put"):
                self._refs.append(ray.put([self._arrays[name] for name in self._work.of_rank(dp)]))
            for rank in ranks:
                start(rank, [self._refs[-1]])
        return delivery

    def settle(self) -> None:
        self._refs.clear()

    def close(self) -> None:
        self._refs.clear()


class StoreTaking:
    """A rank's half; `held` is shared by the paths of its dtype."""

    def __init__(self, held: HeldRows, path: str) -> None:
        self._held, self._path = held, path
        self._router = Router()
        self._packs: dict[int, torch.Tensor] = {}

    def take(self, payload: Any, stages: Stages) -> float | None:
        with stages.span("get"):
            samples = ray.get(payload[0], timeout=_GET_S)
        return self.hold(samples, stages)

    def hold(self, samples: Sequence[Any], stages: Stages) -> float:
        """From arrays to routers."""
        with stages.span("rows"):
            if "torch" in self._path:
                self._pad_cat_copy(samples)
            else:
                self._held.place([np.asarray(ids) for ids in samples])
        held_s = time.monotonic()
        with stages.span("widen"):
            self._router.take_all(self._held.tensors())
        return held_s

    def blank(self) -> None:
        self._held.blank()

    def tensors(self) -> Sequence[torch.Tensor]:
        return list(self._held.tensors())

    def close(self) -> None:
        self._packs.clear()

    def _pad_cat_copy(self, samples: Sequence[torch.Tensor]) -> None:
        """slime: samples and pads of a micro-batch are concatenated, then each layer is copied out of the result."""
        arrays = iter(samples)
        for number, batch in enumerate(self._held.shard.microbatches):
            cat_RLK = self._pack(number)
            at = 0
            for tokens in batch.tokens:
                cat_RLK[at : at + tokens - 1].copy_(next(arrays))
                at += tokens
            self._copy_layers(number, cat_RLK)

    def _copy_layers(self, number: int, cat_RLK: torch.Tensor) -> None:
        rows = self._held.views[number].shape[1]
        slot = slice(self._held.slot * rows, (self._held.slot + 1) * rows)
        for index, target_RK in enumerate(torch.from_numpy(self._held.views[number])):
            target_RK.copy_(cat_RLK[slot, self._held.layers.start + index])

    def _pack(self, number: int) -> torch.Tensor:
        """[rows of the pack, L, K] with its pads; made once."""
        if number not in self._packs:
            held, spec = self._held, self._held.shard.spec
            rows = held.shard.microbatches[number].rows
            pads = torch.from_numpy(held.views[number][0]).to(torch.int32)  # of one layer: all are alike
            whole = torch.zeros((rows, spec.num_moe_layers, spec.top_k), dtype=torch.int32)
            whole[held.slot * len(pads) : (held.slot + 1) * len(pads)] = pads[:, None]
            self._packs[number] = whole
        return self._packs[number]


def held_of(case: Case, coords: RankCoords, *, narrow: bool) -> HeldRows:
    dtype: Any = case.spec.id_dtype if narrow else np.int32
    _, plan = case.plan()
    return HeldRows(plan, coords, dtype)
