"""The frame store: files on disk, released by sample, bounded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from r3channel.errors import SampleTwice, SampleUnknown, StoreFull
from r3channel.relay import store as store_module
from r3channel.relay.store import FrameStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrameStore:
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 4096)
    return FrameStore.open(str(tmp_path / "s"), ceiling_bytes=5 * 4096)


def test_frames_come_back_as_they_were_put(store: FrameStore) -> None:
    frames = {f"s{i}": bytes([i]) * (100 + i) for i in range(60)}
    for name, frame in frames.items():
        store.put(name, frame)
    assert all(bytes(store.get(name)) == frame for name, frame in frames.items())


def segments(store: FrameStore) -> int:
    return len(list(store.folder.glob("*.r3s")))


def test_released_segments_are_filled_again_and_their_files_stay(store: FrameStore) -> None:
    inodes = set()
    for number in range(5):
        for i in range(15):
            store.put(f"s{i}", bytes([number]) * 1000)
        assert segments(store) == 5
        inodes |= {path.stat().st_ino for path in store.folder.glob("*.r3s")}
        assert all(bytes(store.get(f"s{i}")) == bytes([number]) * 1000 for i in range(15))
        for i in range(15):
            store.release(f"s{i}")
    assert len(inodes) == 5 and len(store) == 0
    store.trim(idle_s=0)
    assert segments(store) == 1
    store.close()
    assert not store.folder.exists()


def test_frames_lie_where_words_can_be_read(store: FrameStore) -> None:
    for i in range(20):
        store.put("n" * i, bytes(i), sample_id="n" * i, tokens=range(i))
        assert np.frombuffer(store.get("n" * i) or b"", np.uint8).ctypes.data % 16 == 0 or i == 0


def test_the_ceiling_holds_and_release_makes_room(store: FrameStore) -> None:
    with pytest.raises(StoreFull, match="s10"):
        for i in range(30):
            store.put(f"s{i}", bytes(1300))
    assert store.nbytes <= 5 * 4096
    for i in range(15):
        store.release(f"s{i}")
    store.put("again", bytes(1300))


def test_a_frame_larger_than_a_segment_gets_its_own_file(store: FrameStore) -> None:
    store.put("big", bytes(range(250)) * 40)
    assert bytes(store.get("big")) == bytes(range(250)) * 40


def test_two_stores_in_one_folder_do_not_touch_each_other(tmp_path: Path) -> None:
    one, two = (FrameStore.open(str(tmp_path), ceiling_bytes=1 << 28) for _ in range(2))
    one.put("x", b"one")
    two.put("x", b"two")
    assert bytes(one.get("x")) == b"one"
    two.close()
    assert bytes(one.get("x")) == b"one" and list(tmp_path.iterdir()) == [one.folder]


def test_a_full_disk_is_a_typed_error_not_a_signal(
    store: FrameStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFull, match="No space left"):
        store.put("a", b"x")
    assert segments(store) == 0


def test_twice_and_unknown_are_named(store: FrameStore) -> None:
    store.put("a", b"x")
    with pytest.raises(SampleTwice, match="a"):
        store.put("a", b"y")
    store.release("a")
    store.release("a")
    with pytest.raises(SampleUnknown, match="a"):
        store.get("a")
