"""Buckets to every rank of a group, one owner after the other, two deep. Knows neither where values come from nor where
they go: `fill` and `apply` are given.

Depth 2, per bucket g: owners have copied their next bucket from the host beforehand, all in parallel; the owner of g copies
it into half g % 2, all broadcast, and meanwhile g - 1 is being applied; then all vote. Depth 1 does one thing at a time.

All buffers are allocated before the first bucket: two halves and, on owners, one for the copy ahead. A half is written
again only when what it held was applied (bucket g - 2), which the vote of g - 1 has established on every rank.

An error on one rank never leaves the others waiting: it takes part in the broadcast and says so in the vote, so that all
ranks stop at the same bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Literal

import torch
import xxhash

from r3channel.errors import ConfigError, DeadlineExceeded, PeerFailed, PlanMismatch
from r3channel.transport.base import Collective
from r3channel.weights.buckets import plan_buckets, unit_of
from r3channel.weights.group import in_background
from r3channel.weights.manifest import ALIGNMENT, Bucket, Manifest, TensorMeta
from r3channel.weights.senders import Item, sender_table

Move = Callable[[int, Bucket, torch.Tensor], None]
"""(bucket number, bucket, its bytes: uint8, `payload_bytes` long). Fills the bytes, or applies them."""

_REASON_BYTES = 1024
_VOTE_GRACE_S = 5.0
"""How much longer than the deadline the group's own operations may take: a rank whose background work is late must still
be heard in the vote."""


@dataclass(frozen=True, slots=True)
class SharedManifest:
    """Buckets in sending order, and who feeds each."""

    manifest: Manifest
    owners: tuple[int, ...]

    @classmethod
    def of(cls, held: Iterable[tuple[TensorMeta, Sequence[int]]], *, cap_bytes: int) -> SharedManifest:
        """From (tensor, ranks that hold it whole): each unit to one holder, balanced by bytes; owners take turns.

        A unit larger than `cap_bytes` is a bucket of its own. The members of a unit must share a holder.
        """
        metas: dict[str, list[TensorMeta]] = {}
        holders: dict[str, set[int]] = {}
        for meta, ranks in held:
            unit, _ = unit_of(meta.name)
            metas.setdefault(unit, []).append(meta)
            holders[unit] = holders.get(unit, set(ranks)) & set(ranks)
        items = [Item(u, sum(m.nbytes for m in metas[u]), tuple(sorted(holders[u]))) for u in metas]
        sender_of = sender_table(items).sender_of
        shares: dict[int, list[TensorMeta]] = {}
        for unit, members in metas.items():
            shares.setdefault(sender_of[unit], []).extend(members)
        queues = [
            [
                (rank, Bucket.aligned(bucket.tensors))
                for bucket in plan_buckets(share, cap_bytes=cap_bytes, alignment=ALIGNMENT)
            ]
            for rank, share in sorted(shares.items())
        ]
        turns = [pair for pair in chain.from_iterable(zip_longest(*queues)) if pair is not None]
        return cls(Manifest.of([bucket for _, bucket in turns]), tuple(rank for rank, _ in turns))

    @property
    def digest(self) -> int:
        """63 bits over the manifest and the owners: what all ranks compare."""
        return xxhash.xxh3_64_intdigest(f"{self.manifest.id} {self.owners}".encode()) >> 1


@dataclass(slots=True)
class PipelineReport:
    """Seconds of one run on this rank. `fill` and `apply` run beside `broadcast` at depth 2."""

    wall_s: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("fill", "copy", "broadcast", "apply", "vote"), 0.0)
    )


class BroadcastPipeline:
    """One rank of it. `run` may be called any number of times; all ranks call alike, from one thread.

    After a TransportError the group is dead. After any other error all ranks have raised, and may run again.
    """

    def __init__(
        self,
        group: Collective,
        shared: SharedManifest,
        *,
        depth: Literal[1, 2] = 2,
        device: torch.device | None = None,
    ) -> None:
        """Allocates every buffer. `device`: where the group sends from; the CPU for gloo."""
        if depth not in (1, 2):
            raise ConfigError(f"pipeline depth {depth}: expected 1 or 2")
        self._group, self._shared, self._depth = group, shared, depth
        size = max((bucket.payload_bytes for bucket in shared.manifest.buckets), default=0)
        count = depth + (depth == 2 and group.rank in shared.owners)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]

    def run(self, fill: Move, apply: Move, *, timeout_s: float) -> PipelineReport:
        """Every bucket is filled by its owner and applied on every rank, in order.

        `fill` and `apply` run in background threads, one call of each at a time. Raises PlanMismatch, before a byte moves,
        when ranks have other buckets than this one; what `fill` and `apply` raised on this rank; PeerFailed (naming bucket
        and rank) when another rank failed; TransportError; and DeadlineExceeded: a `fill` or `apply` that hangs is left
        behind with its buffer, so the pipeline must then be dropped.
        """
        begin = time.monotonic()
        run = _Run(self._group, self._shared, self._buffers, self._depth, fill, apply, begin + timeout_s)
        run.walk()
        run.report.wall_s = time.monotonic() - begin
        return run.report


@dataclass(slots=True)
class _Run:
    group: Collective
    shared: SharedManifest
    buffers: list[torch.Tensor]
    depth: int
    fill: Move
    apply: Move
    limit: float
    failure: BaseException | None = None
    ahead: Future[None] | None = None
    """The copy of this rank's next bucket into the third buffer."""
    report: PipelineReport = field(default_factory=PipelineReport)

    def walk(self) -> None:
        self._timed("vote", self._agree)
        try:
            self._walk()
        finally:
            self._leave_ahead()

    def _walk(self) -> None:
        buckets = self.shared.manifest.buckets
        mine = self._mine()
        self.ahead = self._fill_ahead(mine)
        applying: Future[None] | None = None
        for index, bucket in enumerate(buckets):
            half_N = self.buffers[index % self.depth][: bucket.payload_bytes]
            if self.shared.owners[index] == self.group.rank:
                self.ahead = self._feed(index, half_N, self.ahead, mine)
            self._timed("broadcast", partial(self._broadcast, index, half_N))
            self._collect(applying, index - 1)
            self._vote(index)
            applying = in_background(partial(self._apply, index, bucket, half_N), name="weights-apply")
            if self.depth == 1:
                self._collect(applying, index)
                applying = None
        self._collect(applying, len(buckets) - 1)
        self._vote(len(buckets) - 1)

    def _agree(self) -> None:
        """gloo fills a larger buffer in silence and ends the process of a smaller one; equal sizes tell nothing of names."""
        mine, timeout_s = self.shared.digest, self._left_s() + _VOTE_GRACE_S
        highest = self.group.largest(mine, timeout_s=timeout_s)
        lowest = -self.group.largest(-mine, timeout_s=timeout_s)
        if lowest != highest:
            raise PlanMismatch(
                f"weights were not sent: rank {self.group.rank} planned buckets {mine:016x}, the ranks' plans lie between "
                f"{lowest:016x} and {highest:016x}; do all give the same tensors, holders and bucket size?"
            )

    def _mine(self) -> Iterator[int]:
        return (i for i, owner in enumerate(self.shared.owners) if owner == self.group.rank)

    def _fill_ahead(self, mine: Iterator[int]) -> Future[None] | None:
        """Start copying this rank's next bucket into the third buffer."""
        if self.depth == 1 or (index := next(mine, None)) is None:
            return None
        return self._fill_in_background(index, self.buffers[2])

    def _leave_ahead(self) -> None:
        """A copy ahead that an error of another rank has made useless must not write into what the next run fills."""
        if self.ahead is not None and not wait([self.ahead], timeout=self._left_s()).done:
            self.buffers[2] = torch.empty_like(self.buffers[2])

    def _fill_in_background(self, index: int, buffer_N: torch.Tensor) -> Future[None]:
        bucket = self.shared.manifest.buckets[index]
        out_N = buffer_N[: bucket.payload_bytes]
        return in_background(partial(self._fill, index, bucket, out_N), name="weights-fill")

    def _feed(
        self, index: int, half_N: torch.Tensor, ahead: Future[None] | None, mine: Iterator[int]
    ) -> Future[None] | None:
        """Bring our bucket into its half; returns the copy ahead of the next one."""
        what = f"fill of bucket {index}"
        if ahead is None:
            self._keep(self._fill_in_background(index, half_N), what)
            return None
        self._keep(ahead, what)
        self._timed("copy", lambda: _ended(half_N.copy_(self.buffers[2][: len(half_N)])))
        return self._fill_ahead(mine)

    def _fill(self, index: int, bucket: Bucket, out_N: torch.Tensor) -> None:
        self._timed("fill", lambda: (self.fill(index, bucket, out_N), _ended(out_N)))

    def _apply(self, index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
        self._timed("apply", lambda: (self.apply(index, bucket, data_N), _ended(data_N)))

    def _broadcast(self, index: int, half_N: torch.Tensor) -> None:
        self.group.broadcast(self.shared.owners[index], half_N, timeout_s=self._left_s() + _VOTE_GRACE_S)

    def _collect(self, applying: Future[None] | None, index: int) -> None:
        if applying is not None:
            self._keep(applying, f"apply of bucket {index}")

    def _keep(self, future: Future[None], what: str) -> None:
        """Wait for background work; its failure is told in the next vote."""
        left_s = self._left_s()
        if not wait([future], timeout=left_s).done:
            self.failure = self.failure or DeadlineExceeded(
                f"{what} did not end within the {left_s:.1f} s left"
            )
            return
        self.failure = self.failure or future.exception()

    def _vote(self, index: int) -> None:
        """All ranks go on, or all raise here."""
        self._timed("vote", lambda: self._count(index))

    def _count(self, index: int) -> None:
        rank = self.group.rank if self.failure is not None else -1
        worst = self.group.largest(rank, timeout_s=self._left_s() + _VOTE_GRACE_S)
        if worst < 0:
            return
        reason_N = _record(str(self.failure)).to(self.buffers[0].device)
        self.group.broadcast(worst, reason_N, timeout_s=self._left_s() + _VOTE_GRACE_S)
        if self.failure is not None:
            raise self.failure
        text = bytes(reason_N.tolist()).decode(errors="replace").strip()
        raise PeerFailed(f"weight update stopped at bucket {index} on all ranks: rank {worst}: {text}")

    def _timed(self, stage: str, step: Callable[[], object]) -> None:
        begin = time.monotonic()
        try:
            step()
        finally:
            self.report.seconds[stage] += time.monotonic() - begin

    def _left_s(self) -> float:
        return max(0.001, self.limit - time.monotonic())


def _ended(data_N: torch.Tensor) -> None:
    """On a CUDA device wait for what this thread has begun: the thread that goes on has another current stream."""
    if data_N.is_cuda:
        torch.cuda.current_stream(data_N.device).synchronize()


def _record(text: str) -> torch.Tensor:
    raw = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
