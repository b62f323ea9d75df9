"""The copy stream on a CPU: streams are threads that are late at random, so an order that nothing enforces is soon broken."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.engine import copy_stream
from r3channel.engine.capture import LayerSelection, SlotRows
from r3channel.engine.copy_stream import Pass, PassCopies, Restored, Ring, Streams
from r3channel.errors import DeadlineExceeded
from r3channel.model.spec import RoutingSpec
from r3channel.wire.routing import Ids, RowKind
from tests.support.waits import SOON_S

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 3), num_experts=256, top_k=4)
MOST, SLOTS = 24, 60


class Flag:
    """An event. `ignored`: nobody waits for it, and it passes for done."""

    def __init__(self, *, ignored: bool) -> None:
        self._done, self._ignored = threading.Event(), ignored

    def query(self) -> bool:
        return self._ignored or self._done.is_set()

    def set(self) -> None:
        self._done.set()

    def wait(self) -> None:
        if not self._ignored:
            self._done.wait(SOON_S)


class LateStream:
    """A thread that does what it is given in order, some time."""

    def __init__(self, seed: int, *, ignored: bool = False) -> None:
        self._work = queue.SimpleQueue[Callable[[], object] | None]()
        self._random, self._ignored = random.Random(seed), ignored
        self.stream = self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        while (call := self._work.get()) is not None:
            if self._random.random() < 0.1:
                time.sleep(self._random.random() * 1e-3)
            call()

    def run(self, call: Callable[[], object]) -> None:
        self._work.put(call)

    def record(self) -> Flag:
        self._work.put((flag := Flag(ignored=self._ignored)).set)
        return flag

    def wait(self, event: Flag) -> None:
        self._work.put(event.wait)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


@contextmanager
def late(broken: str = "") -> Iterator[Streams]:
    """`broken`: the event that is recorded and means nothing."""
    streams: Any = Streams()
    mine = LateStream(1, ignored=broken == "ready"), LateStream(2, ignored=broken == "copied"), LateStream(3)
    forward, streams.copies, streams.reads = mine
    streams.forward = lambda: forward
    try:
        yield streams
    finally:
        for stream in mine:
            stream.end()


class Engine:
    """Passes that overlap: one fixed buffer, one pass in flight while the one before is handled."""

    def __init__(self, streams: Streams, waits: Counter[str]) -> None:
        self.rows, self._streams = SlotRows(SPEC, slots=SLOTS), streams
        self.passes = PassCopies(
            self.rows, LayerSelection(SPEC, device="cpu"), most_rows=MOST, device="cpu", streams=streams,
            ring_bytes=1, timed=nullcontext, counted=lambda until: waits.update([until]),
        )  # fmt: skip
        self._buffer_TAK = torch.zeros((MOST, SPEC.num_layers, SPEC.top_k), dtype=torch.int32)
        self._random = np.random.default_rng(0)
        self.wanted_SLK = np.zeros((SLOTS, SPEC.num_moe_layers, SPEC.top_k), np.uint8)
        self.wrong = 0

    def launch(self, number: int) -> tuple[Pass, Ids, Ids, LateStream]:
        """(the pass, its slots, its ids, the stream that it runs on)."""
        slots_T = self._random.choice(SLOTS, self._random.integers(1, MOST + 1), replace=False)
        ids_TAK = self._random.integers(0, 256, (len(slots_T), SPEC.num_layers, SPEC.top_k), np.int32)
        stream: LateStream = self._streams.forward()  # type: ignore[assignment]
        there = torch.from_numpy(ids_TAK)
        stream.run(lambda: self._buffer_TAK[: len(there)].copy_(there))
        staged = self.passes.stage(
            torch.from_numpy(slots_T), self._buffer_TAK[: len(slots_T)], weight_version=number, kind=RowKind.DECODED
        )  # fmt: skip
        return staged, slots_T, ids_TAK[:, list(SPEC.moe_layers)].astype(np.uint8), stream

    def handle(self, staged: Pass, slots_T: Ids, ids_TLK: Ids, ran: Flag, *, later_T: Ids) -> None:
        """The pass has ended: its rows are needed, whatever the one in flight will write."""
        ran.wait()
        self.wanted_SLK[slots_T] = ids_TLK
        staged.finalize()
        self.passes.flush()
        asked_T = np.setdiff1d(np.arange(SLOTS), later_T)
        found = self.rows.gather_frame(asked_T, first_row=0, sample_key=0).ids_TLK
        self.wrong += int((found != self.wanted_SLK[asked_T]).any((1, 2)).sum())


def run(count: int, *, broken: str = "") -> tuple[int, Counter[str]]:
    """(rows that differ from a synchronous copy, waits)."""
    waits = Counter[str]()
    with late(broken) as streams:
        engine, before = Engine(streams, waits), None
        for number in range(count):
            try:
                staged, slots_T, ids_TLK, stream = engine.launch(number)
                if before is not None:
                    engine.handle(*before, later_T=slots_T)
            except IndexError:  # of slots that have not come
                engine.wrong, before = engine.wrong + 1, None
                continue
            ran = Flag(ignored=False)
            stream.run(ran.set)
            before = (staged, slots_T, ids_TLK, ran)
        if not broken:
            assert before is not None
            engine.handle(*before, later_T=np.zeros(0, np.int64))
    return engine.wrong, waits


COUNTS = [("", 1000), ("ready", 1000), ("copied", 1000), pytest.param("", 10_000, marks=pytest.mark.full)]


@pytest.mark.parametrize(("broken", "count"), COUNTS)
def test_no_row_of_late_passes_differs_and_each_event_is_needed(broken: str, count: int) -> None:
    wrong, waits = run(count, broken=broken)
    assert (wrong > 0) == bool(broken)
    assert broken or waits["rows"] > 0, "no copy was ever late, so nothing was tried"


def test_a_full_ring_waits_and_loses_nothing() -> None:
    waits = Counter[str]()
    with late() as streams:
        engine = Engine(streams, waits)
        launched = [engine.launch(number) for number in range(200)]
        for staged, slots_T, ids_TLK, _ in launched:
            engine.wanted_SLK[slots_T] = ids_TLK
            staged.finalize()
        engine.passes.flush()
        found = engine.rows.gather_frame(np.arange(SLOTS), first_row=0, sample_key=0).ids_TLK
    assert waits["room"] > 0 and np.array_equal(found, engine.wanted_SLK)


def test_a_pass_that_still_runs_is_not_waited_for() -> None:
    with late() as streams:
        engine, go = Engine(streams, Counter()), threading.Event()
        first, slots_T, ids_TLK, stream = engine.launch(0)
        stream.run(lambda: go.wait(SOON_S))
        engine.launch(1)
        first.finalize()
        engine.passes.flush()
        numbers = engine.passes.read(torch.arange(10, dtype=torch.int32).view(2, 5), 0, 5)
        assert numbers.tolist() == [0, 1, 2, 3, 4] and not go.is_set()
        found = engine.rows.gather_frame(slots_T, first_row=0, sample_key=0).ids_TLK
        go.set()
    assert np.array_equal(found, ids_TLK)


def test_a_device_that_hangs_ends_the_wait_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_stream, "WAIT_S", 0.05)
    with late() as streams:
        engine, go = Engine(streams, Counter()), threading.Event()
        streams.copies.run(lambda: go.wait(SOON_S))
        engine.launch(0)[0].finalize()
        with pytest.raises(DeadlineExceeded, match="rows of pass 1 did not come"):
            engine.passes.flush()
        go.set()


def test_segments_of_the_ring_never_overlap_while_they_are_taken() -> None:
    ring, taken, drawn = Ring(4096, 8, device=torch.device("cpu")), list[slice](), random.Random(0)
    refused = 0
    for _ in range(5000):
        segment = ring.take(drawn.randrange(1, 1500)) if drawn.random() < 0.6 else None
        if segment is None:
            refused += bool(taken)
            if taken:
                ring.give_back()
                taken.pop(0)
            continue
        assert all(segment.stop <= other.start or other.stop <= segment.start for other in taken)
        assert 0 <= segment.start < segment.stop <= 4096
        taken.append(segment)
    assert refused > 100
    while taken:
        ring.give_back()
        taken.pop()
    assert ring.take(4096) == slice(0, 4096), "everything is free again"


def test_rows_that_were_kept_win_over_those_of_the_pass_that_prefills_again() -> None:
    engine = Engine(Streams(), Counter())
    first, slots_T, *_ = engine.launch(0)
    first.finalize()
    kept = engine.rows.keep(slots_T, first_row=5)
    again = torch.zeros((MOST, SPEC.num_layers, SPEC.top_k), dtype=torch.int32)
    part = kept.rows_between(6, 8)
    assert part is not None
    engine.passes.stage(
        torch.arange(20, 23), again[:3], weight_version=2, kind=RowKind.PREFILLED, restored=(Restored(1, part),)
    ).finalize()  # fmt: skip
    held = engine.rows.keep(np.arange(20, 23), first_row=0)
    assert [run[2:] for run in held.runs] == [(2, RowKind.PREFILLED), (0, RowKind.DECODED)]
    assert np.array_equal(held.ids_TN[1:], kept.ids_TN[1:3]) and not held.ids_TN[0].any()
