"""The background placement: sealed steps in, placed shards out, each DP rank's published as soon as it is complete.

One thread takes the steps in the order in which they were sealed, and a few place one DP rank's micro-batches side by side. Knows
the store and the plan; nothing of engines, groups or the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from r3channel.metrics import StageClock
from r3channel.plan.place import fill_invalid
from r3channel.recording import Recorder
from r3channel.relay.memory import BufferPool
from r3channel.relay.step import SealedStep
from r3channel.relay.store import IDLE_S, FrameStore
from r3channel.routing import Ids
from r3channel.wire.frame import open_verified


@dataclass
class Placer:
    """start -> place* -> stop. `changed` is the relay's condition: it guards the steps and is notified of every shard."""

    store: FrameStore
    memory: BufferPool
    changed: threading.Condition
    steps: dict[int, SealedStep]
    clock: StageClock
    threads: int = 1
    recorder: Recorder | None = None
    error: BaseException | None = None
    """What ended the thread; the next public call of the relay raises it."""
    _queue: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None
    _pool: ThreadPoolExecutor | None = None
    _stopping: bool = False

    def start(self) -> None:
        if self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="r3channel-place")
        self._thread = threading.Thread(target=self._run, name="r3channel-place", daemon=True)
        self._thread.start()

    def place(self, step: int) -> None:
        """Enqueue a step that is in `steps`; returns at once."""
        self._queue.put(step)

    def stop(self) -> threading.Thread:
        """Ask the thread to end after the DP rank that it places, and return it to be joined. A recording is finished first."""
        assert self._thread is not None, "start() comes first"
        self._stopping = True
        self._queue.put(None)
        return self._thread

    def _run(self) -> None:
        try:
            while (sealed := self._next()) is not None:
                self._place(sealed)
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=False)

    def _next(self) -> SealedStep | None:
        """The next step; memory that is idle meanwhile goes back to the system."""
        while True:
            try:
                step = self._queue.get(timeout=IDLE_S)
                return None if step is None else self.steps.get(step)
            except Empty:
                self.store.trim()
                self.memory.trim(idle_s=IDLE_S)

    def _place(self, sealed: SealedStep) -> None:
        ticket = sealed.ticket
        for dp in range(ticket.layout.dp):
            if self._stopping and self.recorder is None:
                return
            with self.clock.span("place", step=ticket.step):
                buffers = sealed.place(
                    dp, ids_of=lambda name: self._decode(sealed, name), run=self._side_by_side
                )
            with self.changed:
                sealed.buffers.update(buffers)
                self.changed.notify_all()
        if self.recorder is not None:
            self.recorder.write(ticket)

    def _side_by_side(self, work: Callable[[range], None], jobs: Sequence[range]) -> None:
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                work(job)
            return
        for done in [self._pool.submit(work, job) for job in jobs]:
            done.result()

    def _decode(self, sealed: SealedStep, sample_id: str) -> Ids:
        """The ids of a frame that was verified when it came: its hash is compared, not computed again."""
        spec = sealed.ticket.spec
        with self.clock.span("decode"):
            data = self.store.get(sealed.keys_by_sample[sample_id])
            frame_hash = sealed.ticket.sample(sample_id).frame_hash
            frame = open_verified(data, spec=spec, payload_hash=frame_hash, sample_id=sample_id)
            # May be a view of the store, which holds it until the step is delivered.
            return fill_invalid(frame.ids(), frame.valid_T, spec)
