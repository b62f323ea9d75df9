"""The store: every freed byte is usable again, the ceiling counts live bytes exactly, and a full disk is an error."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from r3channel.errors import ConfigError, StoreFull, UsageError
from r3channel.relay import store as store_module
from r3channel.relay.store import LOCK_FILE, Block, Store

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EXTENT_BYTES", 256 * KIB)


@pytest.fixture(params=["memory", "spilled", "kept"])
def store(request: pytest.FixtureRequest, tmp_path: Path, small_extents: None) -> Iterator[Store]:
    """Of 4 MiB: in memory, half in temporary files, or in named ones."""
    folder = str(tmp_path / "s") if request.param == "kept" else ""
    memory = 2 * MIB if request.param == "spilled" else 4 * MIB
    store = Store.open(folder, ceiling_bytes=4 * MIB, memory_bytes=memory)
    yield store
    store.close()


def fill(block: Block, mark: int) -> None:
    np.frombuffer(block.view, np.uint8)[:] = mark % 251


def check(block: Block, mark: int) -> None:
    assert block.view.nbytes == block.nbytes
    assert (np.frombuffer(block.view, np.uint8) == mark % 251).all()


def resident_bytes(store: Store) -> int:
    """What the system has behind the extents: pages in memory, and for named files room on the disk."""
    if store.folder:
        return sum(path.stat().st_blocks * 512 for path in Path(store.folder).glob("*.r3s"))
    found = 0
    with open("/proc/self/pagemap", "rb") as file:
        for extent in store._extents.values():
            address = np.frombuffer(extent.memory, np.uint8).ctypes.data
            file.seek(address // PAGE * 8)
            entries = np.frombuffer(file.read(len(extent.memory) // PAGE * 8), np.uint64)
            found += int(np.count_nonzero(entries >> np.uint64(63))) * PAGE
    return found


# -- against a model -------------------------------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """Blocks hold a pattern of their own: two that overlap would show it."""

    CEILING = 1 * MIB

    @initialize(memory=st.sampled_from([0, 300 * KIB, CEILING]))
    def start(self, memory: int) -> None:
        self.extent_bytes, store_module.EXTENT_BYTES = store_module.EXTENT_BYTES, 128 * KIB
        self.store = Store.open("", ceiling_bytes=self.CEILING, memory_bytes=memory)
        self.blocks: dict[int, Block] = {}
        self.marks = 0

    @rule(nbytes=st.one_of(st.integers(0, 3000), st.integers(0, 400 * KIB)), adopted=st.booleans())
    def take(self, nbytes: int, adopted: bool) -> None:
        live = sum(block.nbytes for block in self.blocks.values())
        mark = self.marks = self.marks + 1
        try:
            if adopted:
                block = self.store.adopt(bytes([mark % 251]) * nbytes)
            else:
                block = self.store.allocate(nbytes)
                assert nbytes == 0 or np.frombuffer(block.view, np.uint8).ctypes.data % 64 == 0
                fill(block, mark)
        except StoreFull:
            assert live + nbytes > self.CEILING
        else:
            assert live + nbytes <= self.CEILING and block.nbytes == nbytes
            self.blocks[mark] = block

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        mark = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks.pop(mark)
        check(block, mark)
        block.free()
        block.free()
        assert len(block.view) == 0

    @rule()
    def trim(self) -> None:
        self.store.trim(idle_s=0)
        assert self.store.dead_bytes == 0

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.live_bytes == sum(block.nbytes for block in self.blocks.values())
        assert len(self.store) == len(self.blocks)
        assert self.store.held_bytes >= self.store.live_bytes
        assert self.store._anonymous_bytes <= self.store.memory_bytes
        assert self.store.dead_bytes <= 2 * 128 * KIB
        for extent in self.store._extents.values():
            assert extent.stops == {start: stop for stop, start in extent.starts.items()}
            assert not set(extent.stops) & set(extent.starts), "holes that touch are one"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for mark, block in self.blocks.items():
                check(block, mark)
                block.free()
            assert self.store.live_bytes == len(self.store) == 0
            self.store.trim(idle_s=0)
            assert self.store.held_bytes == self.store.dead_bytes == 0
            assert not self.store._extents
            store_module.EXTENT_BYTES = self.extent_bytes


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestModel = Model.TestCase


# -- the ceiling -------------------------------------------------------------------------------------------------------


def test_stragglers_of_every_round_leave_the_rest_usable(store: Store) -> None:
    """A partial rollout of each round stays; it took a whole segment with it once."""
    stragglers, size = [], 50 * KIB
    while True:
        blocks = []
        while store.live_bytes + size <= store.ceiling_bytes:
            blocks.append(store.allocate(size))
        if len(blocks) < 2:
            break
        stragglers.append(blocks.pop(len(stragglers) % len(blocks)))
        for block in blocks:
            block.free()
    assert store.live_bytes >= store.ceiling_bytes - size
    assert len(stragglers) * size >= 0.9 * store.ceiling_bytes - size


def test_holes_too_small_for_what_comes_hide_nothing_and_cost_nothing(store: Store) -> None:
    small, large = 64 * KIB, 128 * KIB
    blocks = [store.allocate(small) for _ in range(store.ceiling_bytes // small)]
    for mark, block in enumerate(blocks):
        fill(block, mark)
    for block in blocks[::2]:
        block.free()
    others = [store.allocate(large) for _ in range(store.ceiling_bytes // 2 // large)]
    for mark, block in enumerate(others):
        fill(block, mark)
    for mark, block in list(enumerate(blocks))[1::2]:
        check(block, mark)
    for mark, block in enumerate(others):
        check(block, mark)
    assert store.live_bytes == store.ceiling_bytes
    assert store.held_bytes > store.live_bytes, "the holes are still address space"
    assert store.dead_bytes <= max(2 * 256 * KIB, 0.1 * store.ceiling_bytes)
    assert store.dead_bytes + store.live_bytes >= resident_bytes(store) > 0
    with pytest.raises(StoreFull, match=f"step 7: no room for 1 bytes .* {4 * MIB} bytes are live"):
        store.allocate(1, what="step 7")


def test_a_block_larger_than_an_extent_is_one_stretch(store: Store) -> None:
    block = store.allocate(3 * MIB + 5)
    fill(block, 7)
    check(block, 7)
    block.free()
    check(store.adopt(b"\5" * (3 * MIB)), 5)


def test_what_can_never_fit_is_refused_without_waiting(store: Store) -> None:
    with pytest.raises(StoreFull, match=r"after 0\.0 s"):
        store.allocate(store.ceiling_bytes + 1, timeout_s=3600)
    with pytest.raises(StoreFull):
        store.allocate(-1, timeout_s=3600)
    assert store.live_bytes == 0


def test_memory_that_was_just_freed_is_filled_again(store: Store) -> None:
    blocks = [store.allocate(100 * KIB) for _ in range(3)]
    for mark, block in enumerate(blocks):
        fill(block, mark)
    before = store.held_bytes, resident_bytes(store)
    for _ in range(5):
        for block in blocks:
            block.free()
        blocks = [store.allocate(100 * KIB) for _ in range(3)]
        for mark, block in enumerate(blocks):
            fill(block, mark)
    assert (store.held_bytes, resident_bytes(store)) == before


def test_trim_gives_everything_back_that_is_dead(store: Store) -> None:
    blocks = [store.allocate(100 * KIB) for _ in range(20)]
    for mark, block in enumerate(blocks):
        fill(block, mark)
    for block in blocks[1:]:
        block.free()
    store.trim(idle_s=3600)
    assert store.dead_bytes > 0
    store.trim(idle_s=0)
    assert store.dead_bytes == 0 and resident_bytes(store) <= 100 * KIB + 2 * PAGE
    check(blocks[0], 0)
    again = store.allocate(140 * KIB)
    fill(again, 3)
    check(blocks[0], 0)
    check(again, 3)


def test_anonymous_memory_stays_under_its_ceiling(small_extents: None) -> None:
    store = Store.open("", ceiling_bytes=4 * MIB, memory_bytes=600 * KIB)
    blocks = [store.allocate(90 * KIB) for _ in range(20)] + [
        store.adopt(b"\1" * 90 * KIB) for _ in range(10)
    ]
    assert store._anonymous_bytes <= 600 * KIB
    assert sum(block._extent is not None and not block._extent.on_file for block in blocks) == 4
    for block in blocks:
        block.free()
    big = store.allocate(560 * KIB)
    assert big._extent is not None and not big._extent.on_file, "extents without blocks make way"
    store.close()


def test_adopted_bytes_are_not_copied_unless_they_must_survive(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 64
    block = store.adopt(data)
    assert bytes(block.view) == data and store.live_bytes == len(data)
    same = np.shares_memory(np.frombuffer(block.view, np.uint8), np.frombuffer(data, np.uint8))
    assert same is not bool(store.folder)
    assert bool(block.where[0]) is bool(store.folder)
    empty = store.adopt(b"")
    assert empty.nbytes == len(empty.view) == 0
    block.free()
    empty.free()
    assert store.live_bytes == len(store) == 0


# -- waiting -----------------------------------------------------------------------------------------------------------


def started(
    store: Store, work: list[int], *, timeout_s: float
) -> tuple[list[threading.Thread], list[object]]:
    """One thread for each size, which waits in this order; what each got or raised."""
    found: list[object] = [None] * len(work)

    def take(number: int) -> None:
        try:
            found[number] = store.allocate(work[number], timeout_s=timeout_s)
        except Exception as error:
            found[number] = error

    threads = []
    for number in range(len(work)):
        ahead = len(store._waiting)
        thread = threading.Thread(target=take, args=(number,))
        thread.start()
        threads.append(thread)
        while thread.is_alive() and len(store._waiting) == ahead:
            pass
    return threads, found


def test_a_herd_that_waits_gets_all_the_room_there_is_and_nobody_is_refused_early(store: Store) -> None:
    size = store.ceiling_bytes // 8
    old = [store.allocate(size) for _ in range(8)]
    threads, found = started(store, [size] * 12, timeout_s=60)
    for block in old:
        block.free()
    for thread in threads[:8]:
        thread.join()
    assert all(isinstance(block, Block) for block in found[:8]), found
    assert found[8:] == [None] * 4, "the others still wait"
    for block in found[:4]:
        assert isinstance(block, Block)
        block.free()
    for thread in threads:
        thread.join()
    assert all(isinstance(block, Block) for block in found)
    assert store.live_bytes == store.ceiling_bytes


def test_small_ones_that_came_later_do_not_starve_a_large_one(store: Store) -> None:
    old = [store.allocate(store.ceiling_bytes // 4) for _ in range(4)]
    threads, found = started(store, [store.ceiling_bytes // 2, 10], timeout_s=60)
    old[0].free()  # room for the small one, which is not its turn
    with pytest.raises(StoreFull, match="2 others wait"):
        store.allocate(10)
    assert found == [None, None]
    old[1].free()
    threads[0].join()
    assert isinstance(found[0], Block)
    old[2].free()
    threads[1].join()
    assert isinstance(found[1], Block)


def test_those_behind_one_that_gives_up_are_served_at_once(store: Store) -> None:
    store.allocate(store.ceiling_bytes - 100)
    (large,), refused = started(store, [200], timeout_s=0.2)
    (small,), given = started(store, [50], timeout_s=60)
    large.join()
    small.join()
    assert isinstance(refused[0], StoreFull) and isinstance(given[0], Block)


def test_many_threads_end_with_the_books_in_order(store: Store) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        draw, mine = random.Random(seed), []
        try:
            for turn in range(150):
                if mine and draw.random() < 0.5:
                    block, mark = mine.pop(draw.randrange(len(mine)))
                    check(block, mark)
                    block.free()
                else:
                    block = store.allocate(draw.randrange(1, 200 * KIB), timeout_s=60)
                    fill(block, seed * 31 + turn)
                    mine.append((block, seed * 31 + turn))
                if len(mine) > 2:
                    block, mark = mine.pop(0)
                    check(block, mark)
                    block.free()
                if turn % 50 == 0:
                    store.trim(idle_s=0)
            for block, mark in mine:
                check(block, mark)
                block.free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.live_bytes == len(store) == 0
    store.trim(idle_s=0)
    assert store.held_bytes == store.dead_bytes == 0


# -- the disk ----------------------------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, small_extents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path), ceiling_bytes=4 * MIB, memory_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreFull, match=r"sample a: no memory or disk for 10 bytes: .*No space left"):
            store.allocate(10, what="sample a")
        with pytest.raises(StoreFull, match="No space left"):
            store.adopt(b"0123456789")
    assert store.live_bytes == store.held_bytes == len(store) == 0
    assert [path.name for path in Path(store.folder).iterdir()] == [LOCK_FILE]
    fill(store.allocate(10), 1)
    store.close()


@pytest.mark.parametrize("kept", [True, False])
def test_a_hole_that_the_disk_took_back_is_not_written_into_when_the_disk_is_full(
    tmp_path: Path, small_extents: None, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if not store_module._populates():
        pytest.skip("this kernel cannot fill holes safely, so none are made")
    store = Store.open(str(tmp_path) if kept else "", ceiling_bytes=4 * MIB, memory_bytes=0)
    first, second = store.allocate(100 * KIB), store.allocate(100 * KIB)
    fill(second, 2)
    first.free()
    store.trim(idle_s=0)
    advise = store_module._advise

    def refused(memory: memoryview, pages: slice, advice: int) -> None:
        if advice == store_module._POPULATE_WRITE:
            full()
        advise(memory, pages, advice)

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_advise", refused)
        with pytest.raises(StoreFull, match="No space left"):
            store.allocate(90 * KIB)
    assert (store.live_bytes, len(store), store.dead_bytes) == (100 * KIB, 1, 0)
    again = store.allocate(90 * KIB)
    fill(again, 3)
    check(second, 2)
    store.close()


def test_no_descriptor_stays_open_for_an_extent(tmp_path: Path, small_extents: None) -> None:
    def opened() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [
            path for path in (os.readlink(link) for link in links if os.path.lexists(link)) if "r3" in path
        ]

    for folder in ("", str(tmp_path)):
        store, before = Store.open(folder, ceiling_bytes=4 * MIB, memory_bytes=0), opened()
        blocks = [store.allocate(200 * KIB) for _ in range(10)]
        assert len(store._extents) == 10 and opened() == before
        assert not store.folder or len(list(Path(store.folder).glob("*.r3s"))) == len(blocks)
        store.close()


def test_files_beyond_memory_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = Store.open("", ceiling_bytes=MIB, memory_bytes=0)
    block = store.allocate(1000)
    fill(block, 1)
    assert block._extent is not None and block._extent.on_file
    assert list(tmp_path.iterdir()) == [] and block.where[0] == ""
    store.close()


def test_a_ram_disk_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - tmpfs none rw\n")
    monkeypatch.setattr(store_module, "_MOUNTS", mounts)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        Store.open("", ceiling_bytes=2, memory_bytes=2).close()
        assert not caplog.messages, "nothing spills"
        for _ in range(2):
            Store.open("", ceiling_bytes=2, memory_bytes=1).close()
    assert caplog.messages == [f"{tmp_path} is on tmpfs: files there take memory"]


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_a_store_that_cannot_open_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"ceiling_bytes": 0, "memory_bytes": 1}, {"ceiling_bytes": 1, "memory_bytes": -1}):
        with pytest.raises(ConfigError):
            Store.open(str(tmp_path), **wrong)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", full)
        with pytest.raises(ConfigError, match=r"cannot hold a store: .*No space left"):
            Store.open(str(tmp_path), ceiling_bytes=1, memory_bytes=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot hold a store"):
        Store.open(str(tmp_path / "file"), ceiling_bytes=1, memory_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_stores_of_one_folder_do_not_touch_each_other(tmp_path: Path) -> None:
    one, two = (Store.open(str(tmp_path), ceiling_bytes=MIB, memory_bytes=0) for _ in range(2))
    blocks = [store.adopt(bytes([mark]) * 1000) for mark, store in enumerate((one, two), 1)]
    two.close()
    two.close()
    check(blocks[0], 1)
    assert list(tmp_path.iterdir()) == [Path(one.folder)]
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_late_writes_into_its_own_memory_and_nowhere_else(
    store: Store, tmp_path: Path
) -> None:
    """Once it wrote through a descriptor that by then was somebody else's file."""
    block, adopted = store.allocate(100 * KIB), store.adopt(b"abc")
    store.close()
    victims = [os.open(tmp_path / f"victim-{number}", os.O_CREAT | os.O_RDWR) for number in range(6)]
    fill(block, 9)
    check(block, 9)
    assert bytes(adopted.view) == b"abc"
    for victim in victims:
        assert os.fstat(victim).st_size == 0
        os.close(victim)
    assert not store.folder or not Path(store.folder).exists()
    block.free()
    adopted.free()
    assert (store.live_bytes, store.held_bytes, len(store)) == (0, 0, 0)
    with pytest.raises(UsageError, match="closed"):
        store.allocate(1)


def test_close_ends_every_wait(store: Store) -> None:
    store.allocate(store.ceiling_bytes)
    threads, found = started(store, [10, 10], timeout_s=3600)
    store.close()
    for thread in threads:
        thread.join()
    assert [type(error) for error in found] == [UsageError, UsageError]
