"""Copies captured ids from the device to the host's slots, on a stream of its own. Knows streams and memory, and no engine.

    forward's stream     narrow slots and ids into a segment of the ring -> event `ready`
    our copy stream      wait for `ready` -> one copy of the segment to pinned memory -> event `copied`
    scheduler's thread   `copied` has passed -> rows to their slots, first in, first out -> the segment is free again

Narrowing runs in the forward's order. The next pass overwrites the same buffer, and it comes after the narrowing, so nothing has
to wait for that. On the host one thread makes all calls, the scheduler's: another thread that queries an event can void the
capture of a CUDA graph.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from r3channel.engine.capture import KeptRows, LayerSelection, SlotRows
from r3channel.errors import DeadlineExceeded
from r3channel.wire.routing import Ids, RowKind

_LEAST_RING_BYTES = 32 << 20
_SLOT_BYTES = 8
WAIT_S = 30.0
"""Seconds to wait for a finished pass's rows to reach the host; a device that hangs is found by others first."""
_POLL_S = 2e-5


class Event(Protocol):
    def query(self) -> bool:
        """Return whether all work before the event is done."""
        ...


class _Done:
    def query(self) -> bool:
        return True


_DONE = _Done()


class Stream:
    """Work that is done in order. A CPU's stream, without one of a device, does it at once."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def run(self, call: Callable[[], object]) -> None:
        """Issue the work of `call`, which may run at once or later."""
        if self.stream is None:
            call()
        else:
            with torch.cuda.stream(self.stream):
                call()

    def record(self) -> Event:
        return _DONE if self.stream is None else self.stream.record_event()

    def wait(self, event: Event) -> None:
        if self.stream is not None:
            self.stream.wait_event(event)


class CurrentStream(Stream):
    """The thread's current stream, where work goes in any case."""

    def run(self, call: Callable[[], object]) -> None:
        call()


class Streams:
    """The streams of a device's copies. On a CPU one is for all work."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.copies = self._another()
        self.reads = self._another()
        """The stream of reads, which must not queue behind the copy of a pass that still runs."""

    def forward(self) -> Stream:
        """Return the stream that the pass was launched on."""
        if self._device is None:
            return self.copies
        current: Any = torch.cuda.current_stream(self._device)
        # torch hands out 32 streams in turn, so ours may be the forward's stream: copies would then wait in its order.
        while current.cuda_stream == self.copies.stream.cuda_stream:
            self.copies = self._another()
        while current.cuda_stream == self.reads.stream.cuda_stream:
            self.reads = self._another()
        return CurrentStream(current)

    def _another(self) -> Stream:
        return Stream(None if self._device is None else torch.cuda.Stream(self._device))


class Ring:
    """Rows of one fixed block, on the device and in pinned memory. Segments are given back in the order in which they were
    taken.
    """

    def __init__(self, rows: int, row_bytes: int, *, device: torch.device) -> None:
        self.host_RN = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device_RN = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
        self._rows, self._taken = rows, deque[slice]()

    def take(self, rows: int) -> slice | None:
        """Take the next rows of both blocks.

        Args:
            rows: Number of consecutive rows.

        Returns:
            The segment, or None while no such run of rows is free.
        """
        start, most = 0, self._rows
        if self._taken:
            first, start = self._taken[0].start, self._taken[-1].stop
            if start <= first:
                most = first
            elif most - start < rows:
                start, most = 0, first
        if most - start < rows:
            return None
        self._taken.append(taken := slice(start, start + rows))
        return taken

    def give_back(self) -> None:
        """Free the oldest segment."""
        self._taken.popleft()


class Restored(NamedTuple):
    """Rows that a request had before it was retracted. They belong into slots `at`, `at` + 1, ... of a pass."""

    at: int
    rows: KeptRows


@dataclass(slots=True, eq=False)
class Pass:
    """One forward pass's rows on their way to the host. It stands where SGLang has a `TopkCaptureOutput`."""

    copies: PassCopies
    serial: int
    slots_T: Ids
    rows_TN: Ids
    """`slots_T` and `rows_TN` are on the host, and complete once `copied` has passed."""
    copied: Event
    weight_version: int
    kind: RowKind
    restored: Sequence[Restored]

    def map_device_tensors(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Ignore the call: nothing is copied with SGLang's own copy."""

    def finalize(self) -> None:
        """Mark this pass's result as handled by SGLang.

        From now on a reply may need the pass's rows.
        """
        self.copies.came_to(self.serial)


class PassCopies:
    """All passes whose rows are on their way to the host."""

    def __init__(
        self,
        rows: SlotRows,
        selection: LayerSelection,
        *,
        most_rows: int,
        device: str | torch.device,
        streams: Streams | None = None,
        ring_bytes: int = 0,
        timed: Callable[[], AbstractContextManager[None]],
        counted: Callable[[str], None],
    ) -> None:
        """Allocate the ring and its views.

        Args:
            rows: The slots that receive the rows.
            selection: The MoE layers.
            most_rows: Most rows of one pass.
            device: Where ids are captured.
            streams: Streams for copies; by default those of `device`.
            ring_bytes: Size of the ring in bytes; 0 means 32 MiB. It holds at least two passes of `most_rows`.
            timed: Returns a context manager that surrounds writes to slots.
            counted: Called with "room" or "rows" for each wait for free rows of the ring or for a pass's rows.
        """
        device = torch.device(device)
        self._rows, self._selection = rows, selection
        self._timed, self._counted = timed, counted
        self._streams = streams or Streams(device if device.type == "cuda" else None)
        # Each row has its slot behind it, as a word, so one copy brings both. A pass's segment is cut from views made once.
        words = -(-rows.row_bytes // _SLOT_BYTES) + 1
        most = max((ring_bytes or _LEAST_RING_BYTES) // (words * _SLOT_BYTES), 2 * most_rows)
        self._ring = ring = Ring(most, words * _SLOT_BYTES, device=device)
        self._targets = selection.targets(ring.device_RN[:, : rows.row_bytes])
        self._device_slots_R = ring.device_RN.view(torch.int64)[:, -1]
        host_RN = ring.host_RN.numpy()
        self._rows_RN, self._slots_R = host_RN[:, : rows.row_bytes], host_RN.view(np.int64)[:, -1]
        self._passes = deque[Pass]()
        self._serial = self._come_to = 0
        self._read = torch.empty(0, dtype=torch.int32)

    def stage(
        self, slots_T: torch.Tensor, expert_ids_TAK: torch.Tensor, *, weight_version: int, kind: RowKind,
        restored: Sequence[Restored] = (),
    ) -> Pass:  # fmt: skip
        """Take the rows of the pass that was just launched.

        The call waits only while the ring is full.

        Args:
            slots_T: KV slots, on the device.
            expert_ids_TAK: Captured ids of all decoder layers, or pairs, on the device.
            weight_version: The version that the pass ran with.
            kind: The kind of its rows.
            restored: Rows of retracted requests that this pass prefills again.

        Raises:
            DeadlineExceeded: If the ring has no room within `WAIT_S` seconds.
        """
        while (segment := self._ring.take(slots_T.shape[0])) is None:
            self._wait_for(self._passes[0], until="room")
            self._write_oldest()
        forward, copies = self._streams.forward(), self._streams.copies

        def narrow() -> None:
            self._device_slots_R[segment].copy_(slots_T)
            self._selection.fill([target_R[segment] for target_R in self._targets], expert_ids_TAK)

        def copy() -> None:
            self._ring.host_RN[segment].copy_(self._ring.device_RN[segment], non_blocking=True)

        forward.run(narrow)
        copies.wait(forward.record())
        copies.run(copy)
        self._serial += 1
        landed = self._slots_R[segment], self._rows_RN[segment]
        made = Pass(self, self._serial, *landed, copies.record(), weight_version, kind, restored)
        self._passes.append(made)
        return made

    def came_to(self, serial: int) -> None:
        """Mark the results up to this pass's as handled.

        The call writes the rows that have arrived and never waits.

        Args:
            serial: Number of the pass.
        """
        if serial > self._come_to:
            self._come_to = serial
        while self._passes and self._passes[0].copied.query():
            self._write_oldest()

    def flush(self) -> None:
        """Write the rows of every pass whose result SGLang has handled.

        The pass that still runs is left alone.

        Raises:
            DeadlineExceeded: If rows do not reach the host within `WAIT_S` seconds.
        """
        while self._passes and self._passes[0].serial <= self._come_to:
            self._wait_for(self._passes[0], until="rows")
            self._write_oldest()

    def read(self, table: torch.Tensor, row: int, count: int) -> Ids:
        """Read the first numbers of a table's row from the device.

        The call waits for its own copy alone: the numbers were written before a pass that has ended.

        Args:
            table: A table of int32 on the device.
            row: Index of the row.
            count: How many numbers.

        Returns:
            The numbers on the host, int32; valid until the next call.

        Raises:
            DeadlineExceeded: If the numbers do not reach the host within `WAIT_S` seconds.
        """
        if self._streams.reads.stream is None:
            return table.numpy()[row, :count]
        if count > len(self._read):
            self._read = torch.empty(2 * count, dtype=torch.int32, pin_memory=table.is_cuda)
        read_N = self._read[:count]
        self._streams.reads.run(lambda: read_N.copy_(table[row, :count], non_blocking=True))
        _wait(self._streams.reads.record(), what="slot numbers")
        return read_N.numpy()

    def _wait_for(self, made: Pass, *, until: str) -> None:
        if not made.copied.query():
            self._counted(until)
            _wait(made.copied, what=f"rows of pass {made.serial}")

    def _write_oldest(self) -> None:
        made = self._passes.popleft()
        try:
            with self._timed():
                version, kind = made.weight_version, made.kind
                self._rows.write(made.slots_T, made.rows_TN, weight_version=version, kind=kind)
                for at, kept in made.restored:
                    self._rows.put_back(made.slots_T[at : at + len(kept.ids_TN)], kept)
        finally:
            self._ring.give_back()


def _wait(event: Event, *, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not event.query():
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                f"{what} did not come to the host within {WAIT_S:.0f} s; does the device hang?"
            )
        time.sleep(_POLL_S)
