"""Sends buckets to a fleet one after another: while one is on the wire or being loaded, the caller packs the next.

Knows no tensors and no transaction.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from functools import partial

import torch

from r3channel.errors import UsageError
from r3channel.weights.buckets import Bucket
from r3channel.weights.fleet import REPAIR_S, Fleet
from r3channel.weights.group import in_background
from r3channel.weights.progress import Run


class BucketSender:
    """At most one bucket is under way; `depth` 2 lets the caller prepare another meanwhile, 1 does not. One thread."""

    def __init__(self, fleet: Fleet, run: Run, *, flush: bool, depth: int = 2) -> None:
        """`flush`: the engines drop their KV cache with the last bucket."""
        if depth not in (1, 2):
            raise UsageError(f"depth {depth}: expected 1 or 2 buckets")
        self._fleet, self._run, self._flush, self._depth = fleet, run, flush, depth
        self._sending: Future[None] | None = None
        self._count = 0

    def push(self, bucket: Bucket, payload: torch.Tensor, *, last: bool) -> None:
        """Wait for the bucket before, then send this one; its memory may be reused after the next `push` or `finish`.

        Raises the error of the bucket before, or with depth 1 of this one.
        """
        self.finish()
        send = partial(self._send, self._count, bucket, payload, last)
        self._count += 1
        with self._run.stage("wait_send"):  # a new thread may have to wait for the interpreter
            self._sending = in_background(send, name="weights-send")
        if self._depth == 1:
            self.finish()

    def finish(self) -> None:
        """Wait for the bucket under way, which has its own deadline, and raise its error."""
        if self._sending is not None:
            with self._run.stage("wait_send"):
                sending, self._sending = self._sending, None
                sending.result()

    def settle(self) -> None:
        """After a failure: give a healthy bucket the time to end. A stuck one is cut when its group is left."""
        if self._sending is not None:
            wait([self._sending], timeout=REPAIR_S)

    def _send(self, index: int, bucket: Bucket, payload: torch.Tensor, last: bool) -> None:
        left_s, begun_s = self._run.deadline.left_s(), time.monotonic()
        flush = last and self._flush
        wires = self._fleet.send(bucket, payload, flush_cache=flush, timeout_s=left_s)
        self._fleet.wait_loaded(f"bucket {index} ({bucket})", left_s)
        wire_s = max(wire.result() for wire in wires)
        self._run.add("wire", wire_s)
        self._run.add("apply", max(time.monotonic() - begun_s - wire_s, 0.0))
