"""The peers' paths of `bench relay`, and the limit: raw gloo. `relay_paths` says what both halves of a path do.

Peers are written from reading slime: JSON, base64 and copy, count check, all-zero-layer check (torch only), split
by DP rank, one put per DP rank; every rank gets its DP rank's whole object, then pads, cuts and copies per layer. They are at
their best: a rank is started as soon as its own object is put, gets read out of shared memory without a copy (numpy), and rows
are copied once into memory that is reused.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pybase64
import ray
import torch

from r3channel.bench.relay_paths import OWN, Router, Seconds, Start, Workload, measure, reply
from r3channel.plan.placement import place_samples
from r3channel.plan.shards import Plan
from r3channel.transport.base import Rendezvous
from r3channel.transport.select import join, open_store
from r3channel.wire.routing import Ids

LIMIT = "raw_gloo"
SLIME, NUMPY, DIRECT = "slime_torch_int32", "ray_numpy_uint8", "ray_direct_gloo_uint8"
PEERS = (SLIME, NUMPY, DIRECT)
"""Ray's object store, from one raylet to another, as slime uses it and in the id dtype; and Ray Direct Transport."""
ALL = (OWN, *PEERS, LIMIT)

_DECODED_EACH = 4
_WAIT_S = 60.0
_BLOCK_ROWS = 256
"""Rows that are transposed at once: the fastest of 16 to 1,024 rows at 48 x top-8 (CPU time, AMD EPYC)."""


class HeldRows:
    """A rank's rows in memory that is reused: `data_N`, and per micro-batch a view [L, rows, K] of it. Real rows begin as zeros,
    which no router chooses. Pads are written once and stay.

    `place` is the fastest placement in numpy that was found.
    """

    def __init__(self, plan: Plan, dp: int, dtype: Any) -> None:
        self.shard = plan.shard(dp=dp, pp=0)
        spec, batches = self.shard.spec, self.shard.microbatches
        tokens = {n: t for b in batches for n, t in zip(b.sample_ids, b.tokens, strict=True)}
        zeros = np.zeros((max(tokens.values()), spec.num_moe_layers, spec.top_k), spec.id_dtype)
        placed = place_samples(plan, dp=dp, ids_of=lambda name: zeros[: tokens[name] - 1])
        wholes = [whole[0] for whole in self.shard.views(placed[self.shard.key])]
        self.data_N = np.concatenate([whole.reshape(-1) for whole in wholes]).astype(dtype)
        parts = np.split(self.data_N, np.cumsum([whole.size for whole in wholes])[:-1])
        self.views = [part.reshape(whole.shape) for part, whole in zip(parts, wholes, strict=True)]

    def place(self, samples: Iterable[Ids]) -> None:
        """Write the samples of this DP rank.

        Args:
            samples: The samples' ids in the plan's order, each uint8 [tokens - 1, all MoE layers, 8].
        """
        arrays = iter(samples)
        for number, batch in enumerate(self.shard.microbatches):
            for index in range(len(batch.sample_ids)):
                source_TL, target_LT = _as_items(next(arrays)), _as_items(self.views[number])
                stretches = self.shard.table.of_sample(cp=0, microbatch=number, sample=index)
                for start, _, local, _, real in stretches:
                    _transpose(source_TL[start : start + real], target_LT[:, local : local + real])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield [rows, K] of each layer of each micro-batch, contiguous."""
        for view in self.views:
            yield from torch.from_numpy(view)


def _as_items(ids: Ids) -> Any:
    # Each row of 8 ids of a byte is one item: numpy then copies rows, not single ids.
    return ids.view("u8")[..., 0]


def _transpose(source_TL: Any, target_LT: Any) -> None:
    for at in range(0, len(source_TL), _BLOCK_ROWS):
        target_LT[:, at : at + _BLOCK_ROWS] = source_TL[at : at + _BLOCK_ROWS].T


class StoreSending:
    """Peers through Ray's object store."""

    def __init__(self, work: Workload, path: str) -> None:
        self._work, self._path = work, path
        self._arrays: dict[str, Any] = work.narrow
        if path == SLIME:
            self._arrays = {name: torch.from_numpy(ids) for name, ids in work.wide.items()}
        self.bytes_sent = sum(ids.nbytes for ids in self._arrays.values())
        self._refs: list[Any] = []

    def prepare(self, *, whole: bool) -> Seconds:
        """Decode every fourth sample and scale its times by tokens.

        The work is per sample, and the text of all samples has half a gigabyte.
        """
        work = self._work
        names = list(work.lengths)[::_DECODED_EACH] if whole else []
        stock = [
            (reply(name, work.wide[name], tokens=work.lengths[name]), len(work.wide[name])) for name in names
        ]
        seconds = [measure(partial(self._decode, *one)) for one in stock]
        scale = sum(work.lengths.values()) / max(1, sum(work.lengths[name] for name in names))
        return sum(wall_s for wall_s, _ in seconds) * scale, sum(cpu_s for _, cpu_s in seconds) * scale

    def _decode(self, body: bytes, rows: int) -> None:
        text, spec = json.loads(body)["meta_info"]["routed_experts"], self._work.spec
        flat = np.frombuffer(bytearray(pybase64.b64decode(text.encode("ascii"))), np.int32)
        ids_TLK = flat.reshape(rows, spec.num_layers, spec.top_k)
        if self._path != SLIME:
            ids_TLK.astype(spec.id_dtype)
        elif not all(torch.from_numpy(ids_TLK)[:, layer].count_nonzero() for layer in spec.moe_layers):
            raise ValueError("a layer of zeros only")

    def deliver(self, start: Start) -> float:
        begin_s = time.monotonic()
        for dp in range(self._work.case.dp):
            self._refs.append(ray.put([self._arrays[name] for name in self._work.of_rank(dp)]))
            start(dp, [self._refs[-1]])
        return begin_s

    def settle(self) -> None:
        self._refs.clear()


class ArraysTaking(HeldRows):
    """Peers that hand over per-sample arrays. Through Ray's store the payload is a reference; with Ray Direct Transport the
    arrays are there when the call begins.
    """

    def __init__(self, plan: Plan, dp: int, path: str) -> None:
        super().__init__(plan, dp, np.int32 if path == SLIME else plan.shard(dp=dp, pp=0).spec.id_dtype)
        self._path, self._router = path, Router()
        views = map(torch.from_numpy, self.views if path == SLIME else [])
        self._packs = [view.transpose(0, 1).contiguous() for view in views]  # with the pads

    def take(self, payload: Any) -> float:
        return self.hold(payload if self._path == DIRECT else ray.get(payload[0], timeout=_WAIT_S))

    def hold(self, samples: Sequence[Any]) -> float:
        """Place the arrays and widen them for routers.

        Routers take int32 as it is.
        """
        if self._path == SLIME:
            self._pad_cat_copy(samples)
            return time.monotonic()
        self.place([np.asarray(ids) for ids in samples])
        held_s = time.monotonic()
        for ids_RK in self.tensors():
            self._router.memory(ids_RK).copy_(ids_RK)
        return held_s

    def _pad_cat_copy(self, samples: Sequence[torch.Tensor]) -> None:
        """Concatenate samples and pads of each micro-batch, as slime does.

        Then copy each layer out of the result.
        """
        arrays, batches = iter(samples), self.shard.microbatches
        for pack_RLK, view, batch in zip(self._packs, self.views, batches, strict=True):
            starts = itertools.accumulate(batch.tokens, initial=0)
            for start, tokens in zip(starts, batch.tokens, strict=False):
                pack_RLK[start : start + tokens - 1].copy_(next(arrays))
            for layer, target_RK in enumerate(torch.from_numpy(view)):
                target_RK.copy_(pack_RLK[:, layer])


class RawSending:
    """The limit: the bytes of our shards, already cut, sent by plain gloo. Each rank has a group, a thread and a message."""

    def __init__(self, work: Workload) -> None:
        self._parts = []
        for dp in range(work.case.dp):
            shard, placed = work.plan.shard(dp=dp, pp=0), place_samples(work.plan, dp=dp, ids_of=work.ids)
            views = [view[0].reshape(-1).view(np.uint8) for view in shard.views(placed[shard.key])]
            self._parts.append(torch.from_numpy(np.concatenate(views)))
        self.bytes_sent = sum(len(part) for part in self._parts)
        self._store, self._pool = open_store("127.0.0.1"), ThreadPoolExecutor(len(self._parts))

    def rendezvous(self, rank: int, member: int) -> Rendezvous:
        where = {"host": self._store.host, "port": self._store.port}
        return Rendezvous(backend="gloo", name=f"raw{rank}", connection=1, rank=member, world_size=2, **where)

    def join(self) -> None:
        meets = [self.rendezvous(rank, 0) for rank in range(len(self._parts))]
        self._groups = [join(meet, timeout_s=_WAIT_S) for meet in meets]

    def prepare(self, *, whole: bool) -> Seconds:
        return 0.0, 0.0

    def deliver(self, start: Start) -> float:
        """Send the bytes of all ranks.

        The clock starts when every rank has said that it is about to receive.
        """
        word = torch.zeros(1, dtype=torch.uint8)
        for rank, group in enumerate(self._groups):
            start(rank, None)
            group.recv(1, word, timeout_s=_WAIT_S)
        begin_s = time.monotonic()
        sends = [partial(group.send, 1, timeout_s=_WAIT_S) for group in self._groups]
        list(self._pool.map(lambda send, part: send(part), sends, self._parts))
        return begin_s

    def settle(self) -> None:
        """Free nothing: nothing is held."""


class RawTaking(HeldRows):
    """A rank's half of the limit: one receive, without widening and without checks."""

    def __init__(self, plan: Plan, dp: int, rendezvous: Rendezvous) -> None:
        super().__init__(plan, dp, np.uint8)
        self._word = torch.zeros(1, dtype=torch.uint8)
        self._group = join(rendezvous, timeout_s=_WAIT_S)

    def take(self, payload: Any) -> float:
        self._group.send(0, self._word, timeout_s=_WAIT_S)
        self._group.recv(0, torch.from_numpy(self.data_N), timeout_s=_WAIT_S)
        return time.monotonic()
