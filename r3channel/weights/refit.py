"""Weights to engines of the same device: packed once into shared memory, applied there, two buckets deep.

The trainer packs a bucket into one half of an arena per receiver and sends a control message; the receiver applies the
tensors where they lie and acknowledges, which frees the half. What a message says depends on the mode:

    per_tensor    one message per tensor, each with an arena of its own
    packed        one per bucket: names, dtypes, shapes and handles of all receivers, to all receivers
    per_receiver  one per bucket: the receiver's own
    cached        the receiver's manifest and handle once; from then on its id, the bucket's number and the bytes used

The first three exist to be measured against the last. Offsets never travel: both ends compute them from the manifest.
Messages are plain JSON; how they reach a receiver (its HTTP route, an actor's method) is the caller's `Call`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from r3channel.errors import DeadlineExceeded, ManifestMismatch, UsageError
from r3channel.weights.buckets import pack
from r3channel.weights.colocated import Arena, create_arena, open_arena
from r3channel.weights.group import in_background
from r3channel.weights.manifest import ALIGNMENT, Bucket, Manifest
from r3channel.weights.pipeline import Move

Mode = Literal["per_tensor", "packed", "per_receiver", "cached"]
MODES: tuple[Mode, ...] = ("per_tensor", "packed", "per_receiver", "cached")
Call = Callable[[bytes], bytes]
"""Deliver a control message; return the receiver's answer. Any thread; raises what it raises."""

DEPTH = 2
_DONE = b"done"


@dataclass(frozen=True, slots=True)
class Share:
    """What one receiver gets, and how to reach it."""

    manifest: Manifest
    call: Call


@dataclass(slots=True)
class RefitReport:
    """One update."""

    wall_s: float = 0.0
    control_bytes: dict[str, int] = field(default_factory=dict)
    """By receiver."""


@dataclass(slots=True)
class _Line:
    """One receiver: its arena, and the bucket that is under way in each half."""

    share: Share
    arena: Arena
    half_bytes: int
    knows: bool = False
    under_way: list[Future[None] | None] = field(default_factory=lambda: [None] * DEPTH)

    def half(self, index: int) -> torch.Tensor:
        start = index % DEPTH * self.half_bytes
        return self.arena.buffer_N[start : start + self.half_bytes]


class RefitSender:
    """OPEN -> BROKEN (an update failed: a receiver may still read) -> CLOSED. One thread at a time calls.

    sender = RefitSender({"tp0": Share(manifest, post)}, device=torch.device("cpu"))
    sender.update({"tp0": tensors_by_name}, timeout_s=60)
    """

    def __init__(self, shares: Mapping[str, Share], *, device: torch.device, mode: Mode = "cached") -> None:
        """Allocates one arena of two halves per receiver, each as long as its longest bucket."""
        self._mode: Mode = mode
        self._broken = False
        self._lines: dict[str, _Line] = {}
        try:
            for name, share in shares.items():
                longest = max(bucket.payload_bytes for bucket in share.manifest.buckets)
                half_bytes = -(-longest // ALIGNMENT) * ALIGNMENT
                self._lines[name] = _Line(share, create_arena(DEPTH * half_bytes, device), half_bytes)
        except BaseException:
            self.close()
            raise

    def update(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], *, timeout_s: float) -> RefitReport:
        """Bring every receiver to these tensors (by receiver, by name, already in the receiver's shape and dtype).

        Returns when all have acknowledged their last bucket. Raises what a receiver's call raises, ManifestMismatch for
        other tensors than the manifest's, DeadlineExceeded naming receiver and bucket; then no receiver is whole, and this
        sender is done: a receiver that did not acknowledge may still read its memory. Close it and make another.
        """
        if self._broken:
            raise UsageError("RefitSender.update() after a failed update; close it and make another")
        self._broken = True
        report = self._update(tensors, time.monotonic(), timeout_s)
        self._broken = False
        return report

    def _update(
        self, tensors: Mapping[str, Mapping[str, torch.Tensor]], begin: float, timeout_s: float
    ) -> RefitReport:
        report = RefitReport(control_bytes=dict.fromkeys(self._lines, 0))
        buckets = max(len(line.share.manifest.buckets) for line in self._lines.values())
        for index in range(buckets):
            for name, line in self._lines.items():
                if index < len(line.share.manifest.buckets):
                    self._wait(name, line, index - DEPTH, begin + timeout_s)
                    self._send(name, line, index, tensors[name], report)
        for index in range(DEPTH):
            for name, line in self._lines.items():
                self._wait(name, line, index, begin + timeout_s)
        report.wall_s = time.monotonic() - begin
        return report

    def close(self) -> None:
        """Give the memory up; idempotent. Receivers that have it mapped keep their mapping."""
        for line in self._lines.values():
            line.arena.close()

    def _send(
        self, name: str, line: _Line, index: int, tensors: Mapping[str, torch.Tensor], report: RefitReport
    ) -> None:
        bucket = line.share.manifest.buckets[index]
        payload = [tensors[tensor] for tensor in bucket.names]
        if self._mode == "per_tensor":
            for meta, tensor in zip(bucket.tensors, payload, strict=True):
                report.control_bytes[name] += _alone(line.share.call, Bucket.aligned([meta]), tensor)
            return
        _pack_whole(bucket, payload, line.half(index))
        message = self._message(name, index)
        report.control_bytes[name] += len(message)
        before = line.under_way[(index - 1) % DEPTH]
        deliver = partial(_deliver_after, before, line.share.call, message)
        line.under_way[index % DEPTH] = in_background(deliver, name="refit")
        line.knows = True

    def _message(self, name: str, index: int) -> bytes:
        line = self._lines[name]
        manifest = line.share.manifest
        if self._mode != "cached":
            receivers = self._lines if self._mode == "packed" else {name: line}
            told = {who: _arguments(other, index) for who, other in receivers.items()}
            return _json({"receiver": name, "arguments": told})
        used = manifest.buckets[index].payload_bytes
        message: dict[str, Any] = {"id": manifest.id, "bucket": index, "used": used}
        if not line.knows:
            message |= {"manifest": manifest.to_dict(), "handle": line.arena.handle, "half": line.half_bytes}
        return _json(message)

    def _wait(self, name: str, line: _Line, index: int, limit: float) -> None:
        """Until the half that bucket `index` used is free."""
        future = line.under_way[index % DEPTH]
        if index < 0 or future is None:
            return
        if not wait([future], timeout=max(0.0, limit - time.monotonic())).done:
            raise DeadlineExceeded(
                f"receiver {name} did not acknowledge a bucket in half {index % DEPTH} in time"
            )
        line.under_way[index % DEPTH] = None
        future.result()


class RefitReceiver:
    """The engine's end: answers control messages. One thread at a time calls; `apply` runs inside the call.

    It maps the trainer's memory once and keeps it until `close`. Acknowledging means that `apply` has finished with the
    bytes: on a CUDA device it synchronises first.
    """

    def __init__(self, apply: Move) -> None:
        self._apply = apply
        self._manifests: dict[str, Manifest] = {}
        self._arenas: dict[str, tuple[Arena, int]] = {}
        self._opened: dict[str, Arena] = {}

    def take(self, message: bytes) -> bytes:
        """Apply what the message announces; returns the acknowledgement.

        Raises ManifestMismatch for an id that was never explained here, or a size that is not the manifest's.
        """
        told = json.loads(message)
        if "tensor" in told:
            self._take_alone(told)
        elif "arguments" in told:
            self._take_explained(told["arguments"][told["receiver"]])
        else:
            self._take_known(told)
        return _DONE

    def close(self) -> None:
        """Drop every mapping; idempotent. The memory of the trainer may be freed afterwards."""
        for arena, _ in self._arenas.values():
            arena.close()
        for arena in self._opened.values():
            arena.close()
        self._arenas.clear()
        self._opened.clear()

    def _take_known(self, told: Mapping[str, Any]) -> None:
        if "manifest" in told:
            manifest = Manifest.from_dict(told["manifest"])
            self._manifests[manifest.id] = manifest
            self._arenas[manifest.id] = open_arena(told["handle"]), int(told["half"])
        if told["id"] not in self._manifests:
            raise ManifestMismatch(
                f"manifest {told['id']} was never sent to this engine (it knows {sorted(self._manifests) or 'none'}); "
                "was it restarted? Send the manifest again"
            )
        manifest = self._manifests[told["id"]]
        if not 0 <= told["bucket"] < len(manifest.buckets):
            raise ManifestMismatch(f"bucket {told['bucket']} of {len(manifest.buckets)}")
        arena, half_bytes = self._arenas[told["id"]]
        self._apply_at(manifest.buckets[told["bucket"]], told, arena, half_bytes)

    def _take_explained(self, mine: Mapping[str, Any]) -> None:
        bucket = Manifest.from_dict(mine["manifest"]).buckets[0]
        self._apply_at(bucket, mine, self._mapped(mine["handle"]), int(mine["half"]))

    def _take_alone(self, told: Mapping[str, Any]) -> None:
        arena = open_arena(told["handle"])
        try:
            bucket = Manifest.from_dict(told["tensor"]).buckets[0]
            self._apply_whole(0, bucket, arena.buffer_N[: bucket.payload_bytes])
        finally:
            arena.close()

    def _apply_at(self, bucket: Bucket, told: Mapping[str, Any], arena: Arena, half_bytes: int) -> None:
        if told["used"] != bucket.payload_bytes:
            raise ManifestMismatch(
                f"bucket {told['bucket']}: {told['used']} bytes used, its manifest says {bucket.payload_bytes}"
            )
        start = told["bucket"] % DEPTH * half_bytes
        self._apply_whole(told["bucket"], bucket, arena.buffer_N[start : start + bucket.payload_bytes])

    def _apply_whole(self, index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
        self._apply(index, bucket, data_N)
        if data_N.is_cuda:
            torch.cuda.synchronize(data_N.device)

    def _mapped(self, handle: Mapping[str, Any]) -> Arena:
        key = json.dumps(handle, sort_keys=True)
        if key not in self._opened:
            self._opened[key] = open_arena(handle)
        return self._opened[key]


def _arguments(line: _Line, index: int) -> dict[str, Any]:
    """All that a receiver without a memory must be told of one bucket."""
    bucket = line.share.manifest.buckets[index]
    manifest = Manifest.of([bucket]).to_dict()
    where = {"handle": line.arena.handle, "half": line.half_bytes}
    return {"bucket": index, "used": bucket.payload_bytes, "manifest": manifest} | where


def _pack_whole(bucket: Bucket, tensors: Sequence[torch.Tensor], out_N: torch.Tensor) -> None:
    """Pack, and on a CUDA device wait for it: the reader is another process, which our stream does not hold back."""
    pack(bucket, tensors, out_N)
    if out_N.is_cuda:
        torch.cuda.current_stream(out_N.device).synchronize()


def _alone(call: Call, bucket: Bucket, tensor: torch.Tensor) -> int:
    """One tensor in memory of its own; returns the bytes of its control message."""
    arena = create_arena(bucket.payload_bytes, tensor.device)
    try:
        _pack_whole(bucket, [tensor], arena.buffer_N)
        message = _json({"tensor": Manifest.of([bucket]).to_dict(), "handle": arena.handle})
        _deliver(call, message)
        return len(message)
    finally:
        arena.close()


def _deliver_after(before: Future[None] | None, call: Call, message: bytes) -> None:
    """A receiver hears its messages one by one, in order; the failure of one is that of all after it."""
    if before is not None:
        before.result()
    _deliver(call, message)


def _deliver(call: Call, message: bytes) -> None:
    answer = call(message)
    if answer != _DONE:
        raise UsageError(f"a refit receiver answered {answer[:200]!r}, expected {_DONE!r}")


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
