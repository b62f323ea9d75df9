"""Compares the rows that a router gets with the digests that came with them. Knows no transport and no Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import torch

from r3channel.errors import DigestMismatch
from r3channel.plan.row_order import Ints
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket
from r3channel.wire.digest import HostRuns, TorchRuns, column_digests, column_digests_torch
from r3channel.wire.routing import Ids


def upload(values: Ids, device: torch.device) -> torch.Tensor:
    """Return an array on the routers' device.

    The copy to a GPU goes through pinned memory: with pageable memory CUDA waits until the copy's turn has come.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class RouterDigestCheck:
    """The digest check of one step on one rank.

    On a CPU a difference is raised before the router goes on. On a GPU it is noted, and read once. There a pass's first router
    checks the rows of all layers, because each kernel costs the trainer its launch.
    """

    def __init__(
        self, ticket: Ticket, shard: Shard, rows: Sequence[torch.Tensor], *, tp: int, digests_SL: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Prepare the check of one step.

        Args:
            ticket: The step's ticket.
            shard: The plan's shard of this rank.
            rows: [layer, row, K] of each micro-batch, of which routers are handed layers.
            tp: This TP rank.
            digests_SL: int64 [sample of the DP rank, layer], on the routers' device; None: nothing is checked.
        """
        self._ticket, self._shard, self._rows, self._expected_SL = ticket, shard, rows, digests_SL
        self._slot = tp if shard.tp_slots > 1 else 0
        self._on_host: dict[int, tuple[HostRuns, list[bytes]]] = {}
        """Micro-batch -> the samples of its rows, and the digests of each layer."""
        self._on_device: dict[int, TorchRuns] = {}
        self._noted = list[tuple[int, int, torch.Tensor]]()
        """Micro-batch, index of the first layer, and where digests differ: [layer, sample] bool."""
        cut = partial(ticket.layout.chunk_layers, ticket.spec, pp=shard.key[1])
        self._chunks = [cut(chunk=chunk) for chunk in range(ticket.layout.vpp)]
        self._ahead: dict[int, dict[int, torch.Tensor]] = {}
        """Micro-batch -> layers that were checked and not handed out since -> their ids, widened."""
        self.checked = self.different = 0
        """Digests so far, each of a sample's rows in one layer and pass; `different` is counted where a difference is raised."""
        self._first = np.cumsum([0, *(len(batch.sample_ids) for batch in shard.microbatches)])
        self._host_SL: Ids | None = None
        if digests_SL is not None and digests_SL.device.type == "cpu":
            self._host_SL = digests_SL.numpy().view(np.uint64)

    def check(
        self, microbatch: int, layer: int, ids_RK: torch.Tensor, dtype: torch.dtype = torch.int64, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Check ids that a router of this layer is about to use.

        Args:
            microbatch: The index of the micro-batch.
            layer: The global decoder layer.
            ids_RK: What `RankShard.layer_ids` gave, or ids that were kept for a recompute.
            dtype: int32 or int64.
            out: On a CPU the memory into which the ids go; new memory without it.

        Returns:
            [rows, K] of `dtype`, not to be written: on a GPU a view of all layers' ids, which one kernel widens for a pass.

        Raises:
            DigestMismatch: Raised on a CPU; on the GPU a difference is noted.
        """
        index = self._shard.layers.index(layer)
        if self._expected_SL is not None:
            self.checked += len(self._shard.microbatches[microbatch].sample_ids)
        if ids_RK.device.type == "cpu" and (self._host_SL is not None or self._expected_SL is None):
            wide_RK = torch.empty_like(ids_RK, dtype=dtype) if out is None else out
            return self._checked_on_host(microbatch, index, ids_RK, wide_RK)
        rows_LRK = self._rows[microbatch]
        if ids_RK.data_ptr() != rows_LRK[index].data_ptr():  # kept for a recompute
            self._note(microbatch, index, ids_RK[None])
            return ids_RK.to(dtype)
        ahead = self._ahead.get(microbatch, {})
        if layer not in ahead:
            # a pass runs the layers of one chunk
            own = next(layers for layers in self._chunks if layer in layers)
            first = self._shard.layers.index(own[0])
            self._note(microbatch, first, rows_LRK[first : first + len(own)])
            ahead = dict(zip(own, rows_LRK[first : first + len(own)].to(dtype), strict=True))
        wide_RK = ahead.pop(layer)
        # Kept for one micro-batch only: a pass that leaves layers out (recompute of some) would keep the whole step widened.
        self._ahead = {microbatch: ahead} if ahead else {}
        return wide_RK

    def _checked_on_host(
        self, microbatch: int, index: int, ids_RK: torch.Tensor, wide_RK: torch.Tensor
    ) -> torch.Tensor:
        if self._host_SL is None:
            return wide_RK.copy_(ids_RK)
        runs, expected_L = self._on_host.get(microbatch) or self._host_runs_of(microbatch)
        found_S = column_digests(ids_RK.numpy(), runs, wide_RK.numpy())
        if found_S.tobytes() != expected_L[index]:
            wrong = np.flatnonzero(found_S != np.frombuffer(expected_L[index], np.uint64)).tolist()
            self.different += len(wrong)
            raise self._mismatch(microbatch, self._shard.layers[index], wrong)
        return wide_RK

    def _note(self, microbatch: int, first: int, rows_LRK: torch.Tensor) -> None:
        if self._expected_SL is None:
            return
        expected_LS = self._expected_SL[self._own(microbatch), first : first + len(rows_LRK)].T
        found_LS = column_digests_torch(rows_LRK, self._torch_runs_of(microbatch, rows_LRK))
        self._noted.append((microbatch, first, found_LS != expected_LS))

    def verify(self) -> None:
        """Read once what the GPU noted.

        Raises:
            DigestMismatch: The first difference that was noted.
        """
        noted, self._noted = self._noted, []
        if not noted or not bool(torch.stack([differs.any() for *_, differs in noted]).any()):
            return
        found = [(batch, first, at.nonzero().tolist()) for batch, first, at in noted if at.any()]
        self.different += sum(len(wrong) for *_, wrong in found)
        microbatch, first, wrong = found[0]
        samples = [sample for at, sample in wrong if at == wrong[0][0]]
        raise self._mismatch(microbatch, self._shard.layers[first + wrong[0][0]], samples)

    def _mismatch(self, microbatch: int, layer: int, wrong: list[int]) -> DigestMismatch:
        names = [self._shard.microbatches[microbatch].sample_ids[index] for index in wrong]
        return DigestMismatch(
            f"step {self._ticket.step}, (dp, pp, cp) {self._shard.key}, TP slot {self._slot}: the router of decoder layer "
            f"{layer} is handed rows of micro-batch {microbatch} that are not those that the engine hashed, of samples "
            f"{names[:5]} ({len(names)} in all). Was memory damaged, or were rows, layers or ranks exchanged on the way?",
            samples=names, ranks=[self._shard.key], step=self._ticket.step,
        )  # fmt: skip

    @cached_property
    def _stream(self) -> Stream:
        return Stream.of(self._ticket, self._shard)

    def _own(self, microbatch: int) -> slice:
        return slice(int(self._first[microbatch]), int(self._first[microbatch + 1]))

    def _host_runs_of(self, microbatch: int) -> tuple[HostRuns, list[bytes]]:
        assert self._host_SL is not None
        own = self._own(microbatch)
        runs = HostRuns.of(self._runs_of(microbatch), samples=own.stop - own.start, spec=self._shard.spec)
        self._on_host[microbatch] = runs, [digests_S.tobytes() for digests_S in self._host_SL[own].T]
        return self._on_host[microbatch]

    def _runs_of(self, microbatch: int) -> Ints:
        """Return [runs, 5] of what engines computed, see `wire.digest.HostRuns`.

        Samples count within the micro-batch.
        """
        stream, batch = self._stream, self._shard.microbatches[microbatch]
        found, runs = stream.stretches, stream.runs
        mine = (runs.microbatch[found.run] == microbatch) & (runs.slot[found.run] == self._slot)
        run, position, rows = found.run[mine], found.position[mine], found.rows[mine]
        column = 0 if batch.packed else runs.sample[run]
        first = (runs.local[run] + position - runs.position[run]) * batch.width + column
        return np.stack((runs.sample[run], position, first, np.full_like(rows, batch.width), rows), axis=1)

    def _torch_runs_of(self, microbatch: int, rows: torch.Tensor) -> TorchRuns:
        if microbatch not in self._on_device:
            runs, to_device = self._runs_of(microbatch), partial(upload, device=rows.device)
            sizes = {"rows": rows.shape[-2], "samples": len(self._shard.microbatches[microbatch].sample_ids)}
            self._on_device[microbatch] = TorchRuns.of(runs, **sizes, spec=self._shard.spec, tensor=to_device)
        return self._on_device[microbatch]
