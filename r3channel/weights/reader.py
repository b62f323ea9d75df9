"""Reads the caller's tensors of one update once, in a thread, so that no call waits past its deadline for a stalled iterator.

The iterator is read to its end even if the update fails: it may be collective, with other ranks in step with it.
"""

from __future__ import annotations

import contextlib
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
        """The first: whether there is no more to read. The second: whether the caller's own code runs."""
        self._reading: Future[Any] | None = None

    def first(self, copy: HostCopy, *, cap_bytes: int, look: bool) -> Manifest:
        """Copy all that comes, cut into buckets. Raises ManifestMismatch, NonFiniteWeights, and what the iterator raises."""

        def read() -> Manifest:
            metas = list[TensorMeta]()
            for name, tensor in self:
                meta = TensorMeta.of(name, tensor)
                with self._run.stage("pack"):
                    held = copy.put(len(metas), tensor)
                with self._run.stage("digest"):
                    if look and not finite(held):
                        raise nonfinite(f"after {len(metas)} tensors", meta)
                metas.append(meta)
            manifest = fill_buckets(metas, cap_bytes=cap_bytes)
            numbers = {meta.name: number for number, meta in enumerate(metas)}
            copy.coming = [copy.coming[numbers[n]] for bucket in manifest.buckets for n in bucket.names]
            return manifest

        return self._in_time(read)

    def again(self, manifest: Manifest, push: Push) -> None:
        """Give `push` each bucket's tensors, in its order, once all have come. ManifestMismatch names what came otherwise."""
        self._in_time(lambda: self._by_bucket(manifest, push))

    def _by_bucket(self, manifest: Manifest, push: Push) -> None:
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
                push([full[slot] for slot in range(len(full))])
        if come < len(manifest.arrivals):
            missing = manifest.arrivals[come][0]
            raise ManifestMismatch(
                f"the update ended after {come} of {len(manifest.arrivals)} tensors; the next one expected is {missing}"
            )

    def __iter__(self) -> Iterator[Named]:
        while (named := self._next()) is not None:
            yield named

    def _next(self) -> Named | None:
        self._ended = self._asking = True  # unless it gives one: it may raise
        try:
            with self._run.stage("convert"):
                named = next(self._iterator, None)
        finally:
            self._asking = False
        self._ended = named is None
        return named

    def _in_time(self, read: Callable[[], T]) -> T:
        """Run in a thread, with the caller's setting of gradients, which belongs to a thread."""
        grad, run, deadline = torch.is_grad_enabled(), self._run, self._run.deadline

        def reading() -> T:
            with torch.set_grad_enabled(grad), run.stage("plan"):
                return read()

        with run.stage("wait_send"):  # threads wait for the interpreter
            self._reading = future = in_background(reading, name="weights-read")
            wait([future], timeout=deadline.left_s())
            if (
                not self._asking
            ):  # a call of ours is under way, with the same deadline: it can name who is late
                wait([future], timeout=LAST_WORD_S)
        if not future.done():
            late = "the tensors did not come" if self._asking else "the tensors were not packed and sent"
            why = ": is their iterator stuck?" if self._asking else ""
            raise DeadlineExceeded(f"{late} within {deadline.elapsed_s:.1f} s{why}")
        return future.result()

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

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is read any more, after waiting up to `timeout_s` for that."""
        return self._reading is None or bool(wait([self._reading], timeout=timeout_s).done)
