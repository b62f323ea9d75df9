"""slime's newer shared-filesystem transport, straw-queue. Its files lie in /dev/shm here, which flatters it: no disk, no sync,
and no network between the two ends.

Per sample one publication, as slime makes one per reply; with DP alone a rank reads its samples whole.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from r3channel.bench.relay.held import HeldRows
from r3channel.bench.relay.paths.base import Delivery, Start
from r3channel.bench.relay.paths.store import StoreTaking, decode_replies, is_narrow
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Workload

_ROOM = "/dev/shm"
_CODECS = ("bytes.v1", "json.v1", "tensor.v1")


class StrawSending:
    """The manager's half; publishes as replies arrive in real life, so the timed section begins before publishing."""

    def __init__(self, work: Workload, path: str) -> None:
        from straw import SharedFilesystemStore

        self._work, self._path = work, path
        arrays = work.narrow if is_narrow(path) else work.wide
        self._tensors = {name: torch.from_numpy(ids) for name, ids in arrays.items()}
        self._root = tempfile.mkdtemp(prefix="r3channel-bench-straw-", dir=_ROOM)
        self._store = SharedFilesystemStore(self._root, "bench", online_gc=True, codecs=_CODECS)
        self._serial = itertools.count()
        self._refs: list[Any] = []
        layout = work.case.trainer
        self._ranks_of = [
            [rank for rank in range(layout.world_size) if layout.coords(rank).dp == dp]
            for dp in range(layout.dp)
        ]
        self.bytes_sent = sum(ids.nbytes for ids in arrays.values())

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        if whole:
            decode_replies(self._work, stages, narrow=is_narrow(self._path), check=False)

    def deliver(self, start: Start) -> Delivery:
        from straw.tensor import publish_tensors

        delivery = Delivery(time.monotonic())
        for dp, ranks in enumerate(self._ranks_of):
            with delivery.stages.span("put"):
                refs = [
                    publish_tensors(
                        self._store,
                        {"routed_experts": self._tensors[name]},
                        submission_id=f"{name}:{next(self._serial)}",
                    )[0]
                    for name in self._work.of_rank(dp)
                ]
            self._refs += refs
            for rank in ranks:
                start(rank, refs)
        return delivery

    def settle(self) -> None:
        from straw.tensor import release_tensor_publications

        release_tensor_publications(self._store, self._refs)
        self._refs.clear()
        self._store.seal()
        self._store.collect_garbage()

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._root, ignore_errors=True)


class StrawTaking:
    """A rank's half."""

    def __init__(self, held: HeldRows, path: str) -> None:
        self._held, self._inner = held, StoreTaking(held, path)

    def take(self, payload: Any, stages: Stages) -> float | None:
        with stages.span("get"):
            samples = [np.asarray(ref[: len(ref)]) for ref in payload]
        return self._inner.hold(samples, stages)

    def blank(self) -> None:
        self._inner.blank()

    def tensors(self) -> Sequence[torch.Tensor]:
        return self._inner.tensors()

    def close(self) -> None:
        self._inner.close()
