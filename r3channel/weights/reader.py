"""The caller's tensors of one update, read once, in a thread: an iterator that stalls keeps nobody waiting past the deadline.

Whatever becomes of the update, the iterator is read to its end: it may be collective, and other ranks in step with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from r3channel.errors import DeadlineExceeded, ManifestMismatch
from r3channel.transport.process_group import in_background
from r3channel.weights.manifest import Manifest, TensorMeta, fill_buckets
from r3channel.weights.pack import finite, nonfinite
from r3channel.weights.progress import LAST_WORD_S, Run
from r3channel.weights.stages import Push
from r3channel.weights.store import HostCopy

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


class Reader:
    """NEW -> read once, by `first` or `again` -> ENDED, at the latest by `drain`. One thread, beside its own."""

    def __init__(self, named_tensors: Iterable[Named], run: Run) -> None:
        self._iterator, self._run = iter(named_tensors), run
        self._ended = self._asking = False
        """Whether there is no more to read; whether the caller's own code runs."""
        self._reading: Future[Any] | None = None
        self._seconds = 0.0
        """Spent in the caller's own code."""

    def first(self, copy: HostCopy, *, cap_bytes: int, look: bool) -> Manifest:
        """Copy all that comes, cut into buckets. Raises ManifestMismatch, NonFiniteWeights, and what the iterator raises."""

        def read() -> Manifest:
            named, metas = iter(self), list[TensorMeta]()
            while (one := self._run.timed_next("read", named)) is not None:
                meta = TensorMeta.of(*one)
                with self._run.stage("pack"):
                    held = copy.put(len(metas), one[1])
                with self._run.stage("digest"):
                    if look and not finite(held):
                        raise nonfinite(f"after {len(metas)} tensors", meta)
                metas.append(meta)
            with self._run.stage("read"):
                manifest = fill_buckets(metas, cap_bytes=cap_bytes)
            numbers = {meta.name: number for number, meta in enumerate(metas)}
            copy.coming = [copy.coming[numbers[n]] for bucket in manifest.buckets for n in bucket.names]
            return manifest

        return self._in_time(read)

    def again(self, manifest: Manifest, push: Push) -> None:
        """Give `push` each bucket's tensors, in its order, once all have come. ManifestMismatch names what came otherwise."""

        def read() -> None:
            rows = self._by_bucket(manifest)
            while (tensors := self._run.timed_next("read", rows)) is not None:
                push(tensors)

        self._in_time(read)

    def _by_bucket(self, manifest: Manifest) -> Iterator[list[torch.Tensor]]:
        rows: list[dict[int, torch.Tensor]] = [{} for _ in manifest.buckets]
        due, come = 0, 0
        for come, (name, tensor) in enumerate(self, start=1):
            if come > len(manifest.arrivals):
                raise ManifestMismatch(f"the update gives more tensors than the first one did: {name}")
            meta, bucket, slot = manifest.arrivals[come - 1]
            if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
                raise ManifestMismatch(
                    f"tensor {come}: expected {meta}, got {TensorMeta.of(name, tensor)}; did the model, its layout or the cast "
                    "change between updates?"
                )
            rows[bucket][slot] = tensor
            while due < len(rows) and len(rows[due]) == len(manifest.buckets[due].tensors):
                full, rows[due] = rows[due], {}
                due += 1
                yield [full[slot] for slot in range(len(full))]
        if come < len(manifest.arrivals):
            missing = manifest.arrivals[come][0]
            raise ManifestMismatch(
                f"the update ended after {come} of {len(manifest.arrivals)} tensors; the next one expected is {missing}"
            )

    def __iter__(self) -> Iterator[Named]:
        while (named := self._next()) is not None:
            yield named

    def _next(self) -> Named | None:
        begun_s = time.monotonic()
        self._ended = self._asking = True  # unless it gives one: it may raise
        try:
            named = next(self._iterator, None)
        finally:
            self._asking = False
        self._ended = named is None
        self._seconds += time.monotonic() - begun_s
        return named

    def _in_time(self, read: Callable[[], T]) -> T:
        """In a thread, with the caller's setting of gradients, which each thread has its own of."""
        grad, deadline, begun_s, inside_s = torch.is_grad_enabled(), self._run.deadline, time.monotonic(), 0.0

        def reading() -> T:
            nonlocal inside_s
            read_s = time.monotonic()
            with torch.set_grad_enabled(grad):
                found = read()
            inside_s = time.monotonic() - read_s
            return found

        self._reading = future = in_background(reading, name="weights-read")
        wait([future], timeout=deadline.left_s())
        if (
            not self._asking
        ):  # a call of ours is under way: it has the same deadline, and can name who is late
            wait([future], timeout=LAST_WORD_S)
        if not future.done():
            late = "the tensors did not come" if self._asking else "the tensors were not packed and sent"
            why = ": is their iterator stuck?" if self._asking else ""
            raise DeadlineExceeded(f"{late} within {deadline.elapsed_s:.1f} s{why}")
        found = future.result()
        self._run.add("wait_send", time.monotonic() - begun_s - inside_s)  # threads wait for the interpreter
        return found

    def drain(self) -> None:
        """Read to the end in a thread, keeping nothing; an error of the iterator is dropped, since one is already under way."""
        before = self._reading
        if self._ended:
            return

        def rest() -> None:
            if before is not None:
                wait([before])
            with contextlib.suppress(Exception):
                while not self._ended:
                    self._next()

        self._reading = in_background(rest, name="weights-drain")

    def account(self) -> None:
        """Tell the run's stages what was the caller's own time, and what ours."""
        self._run.add("convert", self._seconds)
        self._run.add("plan", self._run.seconds.pop("read", 0.0) - self._seconds)

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is read any more, after waiting up to `timeout_s` for that."""
        return self._reading is None or bool(wait([self._reading], timeout=timeout_s).done)
