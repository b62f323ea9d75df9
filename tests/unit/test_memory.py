"""The store: every freed byte is usable again, the ceiling counts live bytes exactly, nobody who waits is forgotten."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from r3channel.errors import StoreFull, UsageError
from r3channel.relay.memory import Block, Store
from tests.support.memory import growth_of
from tests.support.waits import SOON_S, until

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 3600.0
"""No test waits so long; a thread that does is a daemon."""
SIZES = st.one_of(
    st.integers(0, 2 * KIB),
    st.integers(100 * KIB, 300 * KIB),  # around what is kept for the next
    st.sampled_from([131_071, 131_072, MIB, MIB + 1]),
)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(4 * MIB)
    yield store
    store.close()


def fill(block: Block, mark: int) -> None:
    np.frombuffer(block.view, np.uint8)[:] = mark % 251


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive(), "it was forgotten"


def free(*blocks: object) -> None:
    for block in blocks:
        assert isinstance(block, Block), block
        block.free()


def check(block: Block, mark: int) -> None:
    assert (np.frombuffer(block.view, np.uint8) == mark % 251).all()


def begun(store: Store, size: int, *, timeout_s: float = WAIT_S) -> tuple[threading.Thread, list[object]]:
    """A thread that asks for so much and waits, or has ended; what it got or raised."""
    answer, ahead = list[object](), len(store._waiting)

    def take() -> None:
        try:
            answer.append(store.allocate(size, timeout_s=timeout_s))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    until(lambda: answer or len(store._waiting) > ahead)
    return thread, answer


class Machine(RuleBasedStateMachine):
    """Against a model: what is live, who waits in which order, and what each block holds.

    Waiters are threads that hold an answer ready; a granted one takes its memory before the next rule runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(MIB)
        self.live: list[tuple[Block, int, int]] = []
        self.waiting: list[tuple[int, threading.Thread, list[object]]] = []
        self.mark = 0

    def teardown(self) -> None:
        self.store.close()
        self.store.close()
        for size, thread, answer in self.waiting:
            ended(thread)
            assert isinstance(answer[0], UsageError), (size, answer)

    def keep(self, block: Block, size: int) -> None:
        self.mark += 1
        assert len(block.view) == size
        assert not size or address(block) % 16 == 0
        fill(block, self.mark)
        self.live.append((block, size, self.mark))

    def used(self) -> int:
        return sum(size for _, size, _ in self.live)

    def fits(self, size: int) -> bool:
        """Also a small block waits while others do: it would starve a large one."""
        return not self.waiting and self.used() + size <= MIB

    @rule(size=SIZES)
    def allocate(self, size: int) -> None:
        could = self.fits(size)
        try:
            self.keep(self.store.allocate(size, what="mine"), size)
        except StoreFull as error:
            held = f"{len(self.live)} blocks hold {self.used()} of"
            assert not could and str(error).startswith(f"mine: waited 0.0 s for {size} bytes; {held}"), error
        else:
            assert could

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 1 << 16), again=st.booleans())
    def free(self, which: int, again: bool) -> None:
        block, _, mark = self.live.pop(which % len(self.live))
        check(block, mark)
        block.free()
        if again:
            block.free()
        self.serve()

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(size=SIZES.filter(lambda size: size <= MIB))
    def wait(self, size: int) -> None:
        self.waiting.append((size, *begun(self.store, size)))
        self.serve()

    @rule()
    def trim(self) -> None:
        self.store.trim(idle_s=0)
        assert self.store.held_bytes == self.store.live_bytes

    def serve(self) -> None:
        """Who is first in the line and fits is served, and nobody else."""
        while self.waiting and self.used() + self.waiting[0][0] <= MIB:
            size, thread, answer = self.waiting.pop(0)
            ended(thread)
            assert isinstance(answer[0], Block), "a wake-up was lost"
            self.keep(answer[0], size)

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.store.live_bytes == self.used() <= MIB
        assert len(self.store) == len(self.live)
        assert len(self.store._waiting) == len(self.waiting)
        assert not any(answer for *_, answer in self.waiting)
        assert self.store.held_bytes <= MIB, "kept memory is within the ceiling, too"
        for block, _, mark in self.live:  # none was written over
            check(block, mark)


TestStore = Machine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30)


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_without_waiting_and_holds_up_nobody(store: Store) -> None:
    with pytest.raises(StoreFull, match=r"waited 0\.0 s"):
        store.allocate(store.ceiling_bytes + 1, timeout_s=WAIT_S)
    with pytest.raises(StoreFull):
        store.allocate(store.ceiling_bytes, beside=1, timeout_s=WAIT_S)
    assert store.live_bytes == len(store) == 0
    store.allocate(store.ceiling_bytes).free()


def test_memory_that_was_just_freed_is_filled_again(store: Store) -> None:
    block = store.allocate(200 * KIB)
    place = address(block)
    block.free()
    assert store.held_bytes >= 200 * KIB > store.live_bytes
    nearly = store.allocate(199 * KIB)
    assert address(nearly) == place and len(nearly.view) == 199 * KIB
    assert address(store.allocate(200 * KIB)) != place


def address(block: Block) -> int:
    return np.frombuffer(block.view, np.uint8).ctypes.data


def test_what_was_idle_longest_makes_way_for_what_is_needed() -> None:
    store = Store(MIB)
    for size in (200 * KIB, 300 * KIB, 400 * KIB):
        store.allocate(size).free()
    assert store.held_bytes >= 900 * KIB
    other = store.allocate(500 * KIB)
    assert store.held_bytes - store.live_bytes == 400 * KIB + 16 * KIB
    few = [store.allocate(100 * KIB) for _ in range(4)]
    assert store.held_bytes == store.live_bytes <= MIB
    free(other, *few)
    store.trim(idle_s=WAIT_S)
    assert store.held_bytes > store.live_bytes == 0
    store.trim(idle_s=0)
    assert store.held_bytes == 0
    store.close()


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_those_behind_one_that_gives_up_are_served_at_once(store: Store) -> None:
    store.allocate(store.ceiling_bytes - 100)
    large, refused = begun(store, 200, timeout_s=0.2)
    small, given = begun(store, 50)
    ended(large, small)
    assert isinstance(refused[0], StoreFull) and isinstance(given[0], Block)


def test_who_is_interrupted_while_it_waits_leaves_the_line(store: Store) -> None:
    full = store.allocate(store.ceiling_bytes)
    store._changed.wait = Mock(side_effect=KeyboardInterrupt)  # as of a signal that comes there
    with pytest.raises(KeyboardInterrupt):
        store.allocate(1, timeout_s=WAIT_S)
    full.free()
    assert store.live_bytes == len(store) == 0


def test_many_threads_end_with_the_books_in_order(store: Store) -> None:
    def work(seed: int) -> None:
        draw, mine = random.Random(seed), list[tuple[Block, int]]()
        for mark in range(seed * 31, seed * 31 + 150):
            mine.append((store.allocate(draw.randrange(1, 200 * KIB), timeout_s=WAIT_S), mark))
            fill(*mine[-1])
            while mine and (len(mine) > 2 or draw.random() < 0.5):
                held = mine.pop(draw.randrange(len(mine)))
                check(*held)
                held[0].free()
            if mark % 50 == 0:
                store.trim(idle_s=0)
        free(*(block for block, _ in mine))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, seed) for seed in range(6)]:
            future.result(SOON_S)
    assert store.live_bytes == len(store) == 0
    store.trim(idle_s=0)
    assert store.held_bytes == 0


# -- no memory ----------------------------------------------------------------------------------------------------


def test_memory_that_is_not_to_be_had_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(np, "empty", none)
        store.allocate(10)
    assert store.live_bytes == len(store) == 0


# -- its host memory, in a process of its own, so that what the kernel counts (RssAnon) is the store's ------------------------

CEILING = 64 * MIB
MARGIN = 8 * MIB
"""What numpy and the allocator may add."""


FILLS = (100_000, 1_050_000, 3 * MIB, 1_050_000)
"""Adopted as they are, rounded up, large, and one that was there before."""


def coming_and_going() -> Iterator[None]:
    store = Store(CEILING)
    free(store.allocate(MIB))
    store.trim(idle_s=0)
    yield
    for size in FILLS:
        blocks = [store.allocate(size) for _ in range(CEILING // size)]
        for mark, block in enumerate(blocks):
            fill(block, mark)
        free(*blocks)
        blocks.clear()
    store.trim(idle_s=0)
    yield
    store.close()


def test_anonymous_memory_stays_under_the_ceiling_whatever_sizes_come_and_go() -> None:
    growth = growth_of(coming_and_going)
    assert 0.8 * CEILING <= growth.peak <= CEILING + MARGIN and growth.kept <= MARGIN, growth
