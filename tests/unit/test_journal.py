"""The journal: what a killed relay held is found again, and what it had let go is not."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3channel.errors import StoreBusy, StoreFull
from r3channel.relay import journal as journal_module
from r3channel.relay.journal import Journal, Remains, dead_relays, read
from r3channel.relay.store import LOCK_FILE, Store

ROOT = Path(__file__).parents[2]
BIG = (1 << 64) - 1
FILE = "journal.r3j"


class Held:
    """A store and its journal, and how a relay puts a turn into both."""

    def __init__(self, root: Path) -> None:
        self.store = Store.open(str(root), ceiling_bytes=1 << 20, memory_bytes=0)
        self.folder, self.journal = Path(self.store.folder), Journal(self.store.folder)
        self.refs = 0

    def frame(self, mark: int, *, name: tuple[int, int] | None = None) -> int:
        block = self.store.adopt(bytes([mark]) * (100 + mark))
        self.refs += 1
        self.journal.frame(self.refs, block.where, block.nbytes, head=b"head\n%d" % mark, name=name)
        return self.refs

    def sample(self, name: str, ref: int, *, tokens: int = 7) -> None:
        self.journal.sample(name, ref, tokens=tokens, tokens_hash=BIG, prefix_hash=BIG - 1, key=None)

    def read(self) -> Remains:
        return read(self.folder)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.journal.close()
    held.store.close()


def test_samples_come_back_turn_by_turn_with_their_ids(held: Held) -> None:
    name = "s\ud800\n✓"  # ids of samples may hold lone surrogates
    for turn in range(3):
        held.sample(name, held.frame(turn + 1, name=(BIG, turn)), tokens=10 * turn)
    held.sample("one", held.frame(9))
    remains = held.read()
    assert list(remains.samples) == [name, "one"] and not remains.damaged and not remains.unclaimed
    assert remains.samples[name].sample_id == name
    for turn, saved in enumerate(remains.samples[name].turns):
        assert bytes(saved.ids) == bytes([turn + 1]) * (101 + turn) and saved.head == b"head\n%d" % (turn + 1)
        assert (saved.tokens, saved.tokens_hash, saved.prefix_hash, saved.key) == (
            10 * turn,
            BIG,
            BIG - 1,
            None,
        )


def test_what_was_let_go_is_not_found(held: Held) -> None:
    refs = [held.frame(mark) for mark in range(3)]
    for mark, ref in enumerate(refs):
        held.sample(f"s{mark}", ref)
    held.journal.forget(["s0", "s1", "never seen"])
    held.journal.gone(refs[:2])
    held.sample("s1", held.frame(7))
    remains = held.read()
    assert sorted(remains.samples) == ["s1", "s2"] and not remains.damaged
    assert [bytes(turn.ids)[0] for turn in remains.samples["s1"].turns] == [7]


def test_steps_are_kept_with_their_acknowledgements_until_they_are_done(held: Held) -> None:
    for step in (1, 2, 3):
        held.journal.sealed(step, b"\0\nticket %d" % step)
    held.journal.acked(2, (0, 1, 0))
    held.journal.acked(2, (1, 1, 0))
    held.journal.acked(3, (0, 0, 0))
    held.journal.acked(99, (0, 0, 0))
    held.journal.done(1)
    held.journal.sealed(3, b"again")
    steps = held.read().steps
    assert {step: (saved.ticket, saved.acked) for step, saved in steps.items()} == {
        2: (b"\0\nticket 2", {(0, 1, 0), (1, 1, 0)}),
        3: (b"again", set()),
    }


def test_direct_frames_without_a_sample_are_counted(held: Held) -> None:
    held.sample("s", held.frame(1, name=(5, 1)))
    held.frame(2, name=(5, 2))
    held.frame(3)
    gone = held.frame(4, name=(5, 3))
    held.journal.gone([gone])
    assert held.read().unclaimed == 1


def test_a_torn_tail_ends_at_the_last_whole_record(held: Held) -> None:
    path = held.folder / FILE
    held.sample("kept", held.frame(1))
    whole = path.stat().st_size
    held.sample("torn", held.frame(2))
    data = path.read_bytes()
    for length in range(whole, len(data) - 7):  # at its end may be padding, which says nothing
        path.write_bytes(data[:length])
        remains = held.read()
        assert "kept" in remains.samples and "torn" not in remains.samples
        assert remains.damaged == []
    for length in range(whole):
        path.write_bytes(data[:length])
        held.read()


def test_every_damaged_byte_is_named_and_the_records_behind_it_are_read(held: Held) -> None:
    path = held.folder / FILE
    first = path.stat().st_size
    held.sample("a", held.frame(1))
    second = path.stat().st_size
    held.sample("b", held.frame(2))
    data = path.read_bytes()
    for at in range(first, second):
        bad = bytearray(data)
        bad[at] ^= 0x41
        path.write_bytes(bad)
        remains = held.read()
        assert bytes(remains.samples["b"].turns[0].ids) == b"\2" * 102
        if bad[at] != data[at] and remains.damaged:
            assert FILE in remains.damaged[0] and "bytes" in remains.damaged[0]
        else:
            assert "a" in remains.samples, "only padding says nothing"
    path.write_bytes(b"R3J\x02" + data[4:])
    assert "another version" in held.read().damaged[0]
    path.unlink()
    assert "missing" in held.read().damaged[0]


def test_a_sample_that_lost_a_turn_in_the_middle_is_named_and_not_given(held: Held) -> None:
    path = held.folder / FILE
    refs = [held.frame(turn) for turn in range(3)]
    ends = []
    for ref in refs:
        held.sample("s", ref)
        ends.append(path.stat().st_size)
    bad = bytearray(path.read_bytes())
    bad[ends[0] + 20] ^= 1
    path.write_bytes(bad)
    remains = held.read()
    assert not remains.samples and len(remains.damaged) == 2
    assert remains.damaged[1] == "sample s: turn 1 is not in the journal, turn 2 is"


def test_samples_of_extents_that_are_short_or_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r3channel.relay.store.EXTENT_BYTES", 4096)
    held = Held(tmp_path)
    for number in range(3):
        block = held.store.adopt(bytes([number]) * 4096)
        held.journal.frame(number, block.where, block.nbytes, head=b"", name=None)
        held.sample(f"s{number}", number)
    first, second, _ = sorted(held.folder.glob("*.r3s"))
    first.unlink()
    os.truncate(second, 100)
    remains = held.read()
    assert list(remains.samples) == ["s2"]
    assert remains.damaged == [
        f"sample s0: {first.name} has 0 bytes, and its ids end at 4096",
        f"sample s1: {second.name} has 100 bytes, and its ids end at 4096",
    ]
    held.journal.gone([2])
    assert "frame 2 of turn 0 is not in the journal" in held.read().damaged[2]
    held.journal.close()
    held.store.close()


def test_the_file_is_written_anew_with_what_still_counts(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.journal, "_compact_bytes", 20_000)
    held.journal.sealed(5, b"t" * 100)
    held.journal.acked(5, (1, 2, 3))
    held.sample("old", held.frame(1, name=(1, 1)))
    peak, refs = 0, list[int]()
    for number in range(2000):
        refs.append(held.frame(number % 50))
        held.sample(f"s{number}", refs[-1])
        if number == 1000:
            held.sample("old", held.frame(2))
        if number >= 20:
            held.journal.forget([f"s{number - 20}"])
            held.journal.gone([refs.pop(0)])
        peak = max(peak, (held.folder / FILE).stat().st_size)
    assert 15_000 < peak < 21_000
    remains = held.read()
    assert sorted(remains.samples) == sorted(["old", *(f"s{number}" for number in range(1980, 2000))])
    assert [bytes(turn.ids)[0] for turn in remains.samples["old"].turns] == [1, 2]
    assert remains.steps[5].acked == {(1, 2, 3)} and not remains.damaged
    assert {path.name for path in held.folder.iterdir()} >= {FILE} and not list(held.folder.glob("*.new"))


def half_written(file: int, data: bytes) -> int:
    return write(file, data[: len(data) // 2])


write = os.write


def refused(file: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full", [half_written, refused])
def test_a_full_disk_is_an_error_before_anything_happened_and_hides_no_later_record(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: object
) -> None:
    held.sample("a", held.frame(1))
    held.journal.sealed(1, b"ticket")
    before = (held.folder / FILE).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for call in (
            lambda: held.frame(2),
            lambda: held.sample("a", 1),
            lambda: held.journal.sealed(1, b"other"),
            lambda: held.journal.sealed(2, b"ticket"),
        ):
            with pytest.raises(StoreFull, match="no room for"):
                call()
        assert not caplog.messages
        held.journal.acked(1, (0, 0, 0))
        held.journal.done(1)
        held.journal.forget(["a"])
        held.journal.gone([1])
        assert len(caplog.messages) == 4
    assert (held.folder / FILE).read_bytes() == before
    held.sample("b", held.frame(3))
    remains = held.read()
    assert (
        sorted(remains.samples) == ["a", "b"] and remains.steps[1].ticket == b"ticket" and not remains.damaged
    )


def test_a_disk_too_full_to_write_anew_is_logged_and_the_old_file_goes_on(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held.journal, "_compact_bytes", 1000)

    def no_new_file(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(journal_module, "_new_file", no_new_file)
    for step in range(200):
        held.journal.sealed(step, b"ticket")
        held.journal.done(step)
    held.journal.sealed(7, b"kept")
    assert 1 <= len(caplog.messages) < 8, "not at every record"
    assert held.read().steps[7].ticket == b"kept"


def test_no_journal_can_be_begun_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", half_written)
    with pytest.raises(StoreFull, match="no room for a journal"):
        Journal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_threads_write_whole_records(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.journal, "_compact_bytes", 5_000)

    def work(number: int) -> None:
        for step in range(number * 100, number * 100 + 100):
            held.journal.sealed(step, b"x" * (step % 50))
            held.journal.acked(step, (number, 0, 0))
            if step % 10:
                held.journal.done(step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    remains = held.read()
    assert sorted(remains.steps) == list(range(0, 400, 10)) and not remains.damaged
    assert all(saved.acked == {(step // 100, 0, 0)} for step, saved in remains.steps.items())


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_journal import Held
held = Held(Path(sys.argv[1]))
for number in range(50):
    held.sample(f"s{number}", held.frame(number))
held.journal.sealed(3, b"ticket")
held.journal.acked(3, (0, 0, 0))
print(held.folder, flush=True)
number = 0
while True:
    number += 1
    held.sample("growing", held.frame(number % 100))
"""


def test_nothing_is_lost_when_a_relay_is_killed_and_its_folder_is_busy_until_then(tmp_path: Path) -> None:
    own = Held(tmp_path)
    with dead_relays(tmp_path, but=own.folder) as found:
        assert found == []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(ROOT)], stdout=subprocess.PIPE, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().decode().strip())
        with pytest.raises(StoreBusy, match=folder.name), dead_relays(tmp_path, but=own.folder):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
    with dead_relays(tmp_path, but=own.folder) as found:
        (remains,) = found
        with pytest.raises(StoreBusy), dead_relays(tmp_path, but=str(own.folder)):
            pass
    assert remains.folder == folder and not remains.damaged and remains.steps[3].acked == {(0, 0, 0)}
    for number in range(50):
        (turn,) = remains.samples[f"s{number}"].turns
        assert bytes(turn.ids) == bytes([number]) * (100 + number)
    for turn, saved in enumerate(remains.samples["growing"].turns, 1) if "growing" in remains.samples else ():
        assert bytes(saved.ids) == bytes([turn % 100]) * (100 + turn % 100)
    own.journal.close()
    own.store.close()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_folder_that_goes_while_it_is_looked_at_is_no_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path)
    held.journal.close()
    lock = fcntl.flock

    def closes_first(file: int, how: int) -> None:
        held.store.close()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", closes_first)
    with dead_relays(tmp_path, but="") as found:
        assert found == []


def test_a_closed_journal_writes_nothing(held: Held) -> None:
    held.journal.close()
    held.journal.close()
    before = (held.folder / FILE).read_bytes()
    held.journal.gone([1])
    held.journal.acked(1, (0, 0, 0))
    held.sample("late", 3)
    assert (held.folder / FILE).read_bytes() == before
    assert {path.name for path in held.folder.iterdir()} == {FILE, LOCK_FILE}
