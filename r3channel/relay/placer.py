"""The background placement: sealed steps in, placed shards out, each published as soon as it is complete.

One thread takes the steps in the order in which they were sealed. Knows the store and the plan; nothing of engines, groups or
the wire.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from r3channel.errors import StepError
from r3channel.metrics import StageClock
from r3channel.plan.place import fill_invalid, place_samples
from r3channel.recording import Recorder
from r3channel.relay.step import SealedStep
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids
from r3channel.wire.frame import parse_frame


@dataclass
class Placer:
    """start -> place* -> stop. `changed` is the relay's condition: it guards the steps and is notified of every shard."""

    store: FrameStore
    changed: threading.Condition
    steps: dict[int, SealedStep]
    clock: StageClock
    recorder: Recorder | None = None
    error: BaseException | None = None
    """What ended the thread; the next public call of the relay raises it."""
    _queue: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="r3channel-place", daemon=True)
        self._thread.start()

    def place(self, step: int) -> None:
        """Enqueue a step that is in `steps`; returns at once."""
        self._queue.put(step)

    def stop(self) -> threading.Thread:
        """Ask the thread to end after what is enqueued, and return it to be joined."""
        assert self._thread is not None, "start() comes first"
        self._queue.put(None)
        return self._thread

    def _run(self) -> None:
        try:
            while (step := self._queue.get()) is not None:
                self._place(self.steps[step])
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _place(self, sealed: SealedStep) -> None:
        ticket = sealed.ticket
        for dp in range(ticket.layout.dp):
            with self.clock.span("place", step=ticket.step):
                buffers = place_samples(ticket.plan, dp=dp, ids_of=lambda name: self._decode(sealed, name))
            with self.changed:
                sealed.buffers.update(buffers)
                self.changed.notify_all()
        if self.recorder is not None:
            self.recorder.write(ticket)
        for key in sealed.keys_by_sample.values():
            self.store.release(key)

    def _decode(self, sealed: SealedStep, sample_id: str) -> Ids:
        spec = sealed.ticket.spec
        with self.clock.span("decode"):
            data = self.store.get(sealed.keys_by_sample[sample_id])
            frame = parse_frame(data, spec=spec, sample_id=sample_id, engine="store")
            if frame.payload_hash != sealed.ticket.sample(sample_id).frame_hash:
                raise StepError(
                    f"step {sealed.ticket.step}: the store gave another frame for sample {sample_id}"
                )
            # May be a view of the store, which holds it until the step is placed.
            return fill_invalid(frame.ids(), frame.valid_T, spec)
