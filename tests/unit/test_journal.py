"""What survives a kill: found again whole, named where it is damaged, and gone where it had been let go.

A folder that is copied while its relay lives is what a kill at that moment would leave.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.errors import StoreFull, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay import journal as durable_module
from r3channel.relay.journal import Journal, Recovery, Remains, dead_relays, read_remains
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame, sample_key
from tests.support import direct
from tests.support.delivery import (
    TOKENS,
    MakeRelay,
    assignment,
    check_rows,
    fill,
    receive,
    receivers_of,
    relays,
)
from tests.support.memory import growth_of
from tests.support.samples import SPEC, flipped, frame_of, random_ids, reply_for, span
from tests.support.waits import SOON_S, until

BIG = (1 << 64) - 1


class Kept:
    """A folder, and how a relay puts a turn into it."""

    def __init__(self, root: Path) -> None:
        self.durable = Journal(str(root))
        self.folder = self.durable.folder
        self.refs = itertools.count(1)

    def frame(self, mark: int) -> int:
        ref = next(self.refs)
        self.durable.frame(ref, [frame_of(5 + mark % 50, seed=mark)])
        return ref

    def sample(self, name: str, ref: int, *, turn: int = 0) -> None:
        hashes = {"tokens_hash": BIG, "prefix_hash": BIG - 1}
        self.durable.note(ref, sample_id=name, turn=turn, key=None if turn else BIG, **hashes)

    def read(self) -> Remains:
        return read_remains(self.folder)

    def file(self, ref: int) -> Path:
        return self.durable._frame(ref)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with closing((kept := Kept(tmp_path)).durable):
        yield kept


def test_of_a_sample_let_go_the_beginning_goes_last(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill in between leaves turns that still join."""
    refs, seen = [kept.frame(mark) for mark in range(4)], list[list[str]]()
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        seen.append(sorted(left.name for left in kept.folder.glob("*.frame")))

    monkeypatch.setattr(Path, "unlink", watched)
    kept.durable.delete_frames([refs[1], refs[3], refs[0], refs[2]])
    names = [kept.file(ref).name for ref in refs]
    assert seen == [names[:3], names[:2], names[:1], []]


def test_a_file_that_was_cut_anywhere_is_no_sample_and_hides_no_other(kept: Kept) -> None:
    cut, whole = kept.frame(0), kept.frame(1)
    frame_bytes = kept.file(cut).stat().st_size
    kept.sample("cut", cut)
    kept.sample("whole", whole)
    data = kept.file(cut).read_bytes()
    for length in range(len(data)):
        kept.file(cut).write_bytes(data[:length])
        remains = kept.read()
        assert list(remains.samples) == ["whole"]
        told = [line for line in remains.damaged if kept.file(cut).name in line]
        assert len(remains.damaged) == len(told) and len(told) + remains.unclaimed == 1
        assert length <= frame_bytes or "note was being written" in told[0]


def test_a_note_of_which_any_byte_is_damaged_is_named(kept: Kept) -> None:
    ref = kept.frame(0)
    begin = kept.file(ref).stat().st_size
    kept.sample("s", ref)
    data = kept.file(ref).read_bytes()
    for at in range(begin, len(data)):
        kept.file(ref).write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        remains = kept.read()
        assert not remains.samples and kept.file(ref).name in remains.damaged[0]


@pytest.mark.parametrize("tail", [b"[0, 1", b"5\n", b"[0, 1]\n", b"\xff\xfe\n", b"{}\n", b'["x", 0, 0]\n'])
def test_an_acknowledgement_that_cannot_be_read_was_not_made(kept: Kept, tail: bytes) -> None:
    kept.durable.write_ticket(4, b"ticket")
    kept.durable.write_acknowledgement(4, (0, 0, 0))
    with open(next(kept.folder.glob("*.acks")), "ab") as file:
        file.write(tail)
    assert kept.read().steps[4].acked == {(0, 0, 0)}


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_and_leaves_nothing_of_what_was_written(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept.sample("a", kept.frame(1))
    kept.durable.write_ticket(1, b"ticket")
    noted = kept.frame(2)
    before = sorted(path.name for path in kept.folder.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(durable_module, "open", full, raising=False)
        patched.setattr(Path, "write_bytes", full)
        sealed = partial(kept.durable.write_ticket, 2, b"ticket")
        for call in (partial(kept.frame, 3), partial(kept.sample, "b", noted), sealed):
            with pytest.raises(StoreFull, match=r"no room for .*No space left"):
                call()
        assert not caplog.messages
        kept.durable.write_acknowledgement(1, (0, 0, 0))
        assert len(caplog.messages) == 1 and "no room" in caplog.messages[0], "said, and nothing stops for it"
    assert sorted(path.name for path in kept.folder.iterdir() if path.suffix != ".acks") == before
    kept.sample("c", kept.frame(4))
    remains = kept.read()
    assert sorted(remains.samples) == ["a", "c"] and remains.steps[1].ticket == b"ticket"
    assert remains.steps[1].acked == set()


def test_threads_do_not_disturb_each_other(kept: Kept) -> None:
    def work(number: int) -> None:
        for step in range(number * 100, number * 100 + 100):
            ref = kept.frame(step)
            kept.sample(f"s{step}", ref)
            kept.durable.write_ticket(step, b"\nticket\0\n" * step)
            kept.durable.write_acknowledgement(step, (number, 0, 0))
            if step % 10:
                for _ in range(2):
                    kept.durable.delete_step(step)
                    kept.durable.delete_frames([ref])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    remains = kept.read()
    assert sorted(remains.steps) == list(range(0, 400, 10)) and not remains.damaged
    for step, saved in remains.steps.items():
        assert saved.acked == {(step // 100, 0, 0)} and saved.ticket == b"\nticket\0\n" * step
    assert sorted(remains.samples) == sorted(f"s{step}" for step in range(0, 400, 10))


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_busy_while_its_relay_lives_and_while_another_recovers(tmp_path: Path) -> None:
    own, dead = Kept(tmp_path), Kept(tmp_path)
    with pytest.raises(UsageError, match=dead.folder.name), dead_relays(tmp_path, but=own.folder):
        pass
    dead.sample("left", dead.frame(1))
    os.close(dead.durable._lock)
    living = Kept(tmp_path)
    with dead_relays(tmp_path, but=own.folder) as found:
        assert [list(remains.samples) for remains in found] == [["left"]]
        with pytest.raises(UsageError), dead_relays(tmp_path, but=own.folder):
            pass
    for closed in (own, own, living):
        closed.durable.close()
    assert list(tmp_path.iterdir()) == [dead.folder]


@pytest.mark.parametrize("where", [(Path, "glob"), (os, "open"), (fcntl, "flock")])
def test_a_folder_that_goes_is_no_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    going, glob, call = Kept(tmp_path), Path.glob, getattr(*where)

    def goes_first(*arguments: Any, **options: Any) -> Any:
        found = list(glob(*arguments)) if call is glob else None
        going.durable.close()
        return call(*arguments, **options) if found is None else found

    monkeypatch.setattr(*where, goes_first)
    with dead_relays(tmp_path, but=tmp_path / "own") as found:
        assert found == []


# -- a relay, and the next ---------------------------------------------------------------------------------------------


def folder_of(relay: Relay) -> Path:
    (folder,) = Path(relay.config.journal).iterdir()
    return folder


@pytest.fixture
def make_relay(tmp_path: Path) -> Iterator[MakeRelay]:
    with relays(journal=str(tmp_path / "alive")) as make:
        yield make


@pytest.fixture
def recover(tmp_path: Path) -> Iterator[Callable[..., tuple[Relay, Recovery]]]:
    """Kills a relay, as far as its folder goes, and starts the next; the folder may be changed in between."""
    with ExitStack() as stack:

        def take_over(
            relay: Relay, change: Callable[[Path], object] = lambda _: None
        ) -> tuple[Relay, Recovery]:
            dead = Path(mkdtemp(dir=tmp_path))
            folder = shutil.copytree(folder_of(relay), dead / folder_of(relay).name)
            change(folder)
            config = relay.config.__class__(bucket_bytes=1024, journal=str(dead), step_timeout_s=SOON_S)
            new, recovery = Relay.recover(SPEC, relay.layout, config)
            stack.enter_context(suppress(errors.StepError))  # a test may leave steps undelivered
            stack.enter_context(closing(new))
            assert not folder.exists(), "what was read is deleted"
            return new, recovery

        yield take_over


Recover = Callable[..., tuple[Relay, Recovery]]


def test_a_delivered_or_abandoned_step_is_not_sealed_again(make_relay: MakeRelay, recover: Recover) -> None:
    old = make_relay("dp=1")
    fill(old)
    receivers_of(old)[0].receive(old.seal(0, assignment(dp=1)))
    old.join_previous(timeout_s=SOON_S)
    fill(old, prefix="n-")
    old.seal(1, assignment(prefix="n-", dp=1))
    old.abandon(1)
    until(lambda: old.status()["store"]["frames"] == 4)  # freed once nobody waits for it
    old.discard(["n-s1"])
    new, recovery = recover(old)
    assert recovery.steps == {} and sorted(recovery.pending) == ["n-s0", "n-s2", "n-s3"]
    assert new.status()["pending"] == sorted(recovery.pending)


def test_who_had_acknowledged_is_not_waited_for_after_a_second_kill(
    make_relay: MakeRelay, recover: Recover
) -> None:
    relay = make_relay("dp=2")
    fill(relay)
    receivers_of(relay)[0].receive(relay.seal(0, assignment(dp=2)))
    until(lambda: len(relay.find_undelivered(wait_s=0)[0]) == 1)
    left = relay.find_undelivered(wait_s=0)
    again, found = recover(recover(relay)[0])
    again.resume(found)
    assert again.find_undelivered(wait_s=0) == left


NAME = "s\ud800\n✓"
"""Ids of samples may hold lone surrogates."""


def turns(relay: Relay, *ends: int) -> None:
    """A sample of several turns, of which each has the rows up to its end."""
    for end in ends:
        begin = relay.rows_held(NAME)
        relay.add_frame(NAME, later(begin, end), range(end + 1), append=begin > 0)


def test_a_sample_of_turns_comes_back_and_takes_its_next(make_relay: MakeRelay, recover: Recover) -> None:
    old = make_relay("dp=1")
    turns(old, 10, 25, 26)
    new, recovery = recover(old)
    assert recovery.pending == [NAME] and new.rows_held(NAME) == 26
    assert not recovery.damaged and not recovery.unclaimed
    with pytest.raises(errors.TurnMismatch):
        new.add_frame(NAME, later(26, 40), [7, *range(1, 41)], append=True)
    turns(new, 40)
    again, recovery = recover(new)
    assert again.rows_held(NAME) == 40
    (shard,) = receive(receivers_of(again), again.seal(0, Assignment.given([[[NAME]]])))
    sample_R, position_R = shard.shard.row_map(0, tp=0)
    rows = shard.layer_ids(0, 1).numpy()[sample_R == 0]
    assert np.array_equal(rows, random_ids(100, seed=1)[position_R[sample_R == 0], 0]) and len(rows) == 40


def test_two_samples_of_one_name_are_not_mixed(make_relay: MakeRelay, tmp_path: Path) -> None:
    """Left by two relays: all turns are of one of them."""
    for folder, ends in (("one", (10, 20)), ("other", (15, 30))):
        turns(relay := make_relay(journal=str(tmp_path / folder)), *ends)
        shutil.copytree(folder_of(relay), tmp_path / "dead" / folder_of(relay).name)
    new, recovery = Relay.recover(SPEC, TrainerLayout(), ChannelConfig(journal=str(tmp_path / "dead")))
    assert recovery.pending == [NAME] and len(recovery.damaged) == 1 and "two relays" in recovery.damaged[0]
    assert new.rows_held(NAME) in (20, 30)
    new.close()


def test_a_recovered_step_goes_on_by_its_ticket_also_with_samples_that_nobody_has(
    make_relay: MakeRelay, recover: Recover
) -> None:
    old = make_relay()
    old.add("a", reply_for("a", 20), range(20))
    old.add_live("b", range(3))
    ticket = old.seal(3, Assignment.given([[["a"], ["b"]]]))
    new, found = recover(old)
    new.resume(found)
    (receiver,) = receivers_of(new, ChannelConfig(on_missing="live", max_live=1.0))
    assert receiver.receive(ticket).live_counts()["invalid"] >= 2
    new.join_previous(timeout_s=SOON_S)


def test_a_turn_whose_frame_came_late_comes_back_with_its_own_tokens(
    make_relay: MakeRelay, recover: Recover
) -> None:
    """Its sample's next reply had come before it, whose frame never did."""
    old = make_relay("dp=1")
    for serial, tokens in ((1, 11), (2, 21)):
        reply = direct.reference_reply("r", tokens, serial=serial, first_row=old.rows_held(NAME))
        old.add(NAME, reply, range(tokens), append=serial > 1)
    direct.deliver(old, (1, frame_of(11, sample_key=sample_key("r"))))
    new, recovery = recover(old)
    assert recovery.pending == [NAME] and new.rows_held(NAME, range(11)) == 10


def later(begin: int, end: int) -> bytes:
    rows = random_ids(100, seed=1)[begin:end]
    return encode_frame(SPEC, expert_ids_TLK=rows, provenance=[span(begin, end)], first_row=begin)


def nth_frame(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.frame"))[number]


def flip(path: Path, at: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), 8 * at))


@pytest.mark.parametrize("at", [-400, 20], ids=["ids", "header"])
def test_a_damaged_frame_is_named_with_its_step(make_relay: MakeRelay, recover: Recover, at: int) -> None:
    old = make_relay("dp=1")
    fill(old)
    old.seal(0, Assignment.given([[["s0", "s1"]]]))
    old.seal(1, Assignment.given([[["s2", "s3"]]]))
    new, recovery = recover(old, lambda folder: flip(nth_frame(folder, 1), at))
    assert sorted(recovery.pending) == ["s0", "s2", "s3"]
    assert list(recovery.steps) == [1]
    assert any("step 0" in line and "['s1']" in line for line in recovery.damaged)
    assert len(recovery.damaged) == 2 and recovery.unclaimed == 0
    assert new.status()["store"]["frames"] == 3
    (shard,) = receive(receivers_of(new), new.seal(1, recovery.steps[1].assignment))
    assert shard.sample_ids == ("s2", "s3")
    check_rows(shard)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_sample_that_lost_a_turn_is_partly_back(make_relay: MakeRelay, recover: Recover, lost: int) -> None:
    old = make_relay("dp=1")
    turns(old, 10, 20, 30)
    old.seal(0, Assignment.given([[[NAME]]]))
    new, recovery = recover(old, lambda folder: nth_frame(folder, lost).unlink())
    assert recovery.pending == [NAME][: lost > 0]
    assert new.rows_held(NAME) == 10 * lost and new.status()["store"]["frames"] == lost
    assert recovery.steps == {} and any("step 0" in line for line in recovery.damaged)
    assert any(f"turn {lost} is not" in line for line in recovery.damaged) or lost == 2


def test_a_turn_that_does_not_follow_leaves_nothing_behind(make_relay: MakeRelay, recover: Recover) -> None:
    old = make_relay("dp=1")
    turns(old, 10, 20)
    fill(old)

    def change(folder: Path) -> None:
        """The second turn's frame is one of other rows, and whole."""
        path = nth_frame(folder, 1)
        path.write_bytes(later(12, 20) + path.read_bytes()[len(later(10, 20)) :])

    new, recovery = recover(old, change)
    assert sorted(recovery.pending) == sorted(TOKENS) and len(recovery.damaged) == 1
    assert f"sample {NAME}" in recovery.damaged[0] and "10" in recovery.damaged[0]
    assert new.status()["store"]["frames"] == len(TOKENS)
    assert len(list(folder_of(new).glob("*.frame"))) == len(TOKENS)


def test_a_recovery_without_room_changes_nothing_and_may_be_repeated(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_relay("dp=1")
    fill(old)
    old.seal(0, assignment(dp=1))
    dead = tmp_path / "dead"
    folder = shutil.copytree(folder_of(old), dead / folder_of(old).name)
    config = old.config.__class__(journal=str(dead))
    written, frame = [0], Journal.frame

    def full_at_the_third(durable: Journal, ref: int, data: Any, **_: Any) -> None:
        written[0] += 1
        if written[0] == 3:
            raise StoreFull("no room")
        frame(durable, ref, data)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "frame", full_at_the_third)
        with pytest.raises(StoreFull, match="no room"):
            Relay.recover(SPEC, old.layout, config)
    assert [*dead.iterdir()] == [folder]
    monkeypatch.setattr(os, "rmdir", full)  # as on NFS, where a folder stays while the lock in it is open
    new, recovery = Relay.recover(SPEC, old.layout, config)
    assert sorted(recovery.pending) == sorted(TOKENS) and list(recovery.steps) == [0]
    new.close()


def test_there_is_nothing_to_recover_without_a_folder(make_relay: MakeRelay, tmp_path: Path) -> None:
    relay = make_relay("dp=1")
    with pytest.raises(errors.UsageError, match="journal is not set"):
        Relay.recover(SPEC, relay.layout, relay.config.__class__())
    new, recovery = Relay.recover(SPEC, relay.layout, relay.config.__class__(journal=str(tmp_path / "new")))
    assert recovery == Recovery()
    new.close()
    assert list((tmp_path / "new").iterdir()) == []


SAVED, SAVED_ROWS = 30, 40_000
SAVED_BYTES = SAVED * SAVED_ROWS * SPEC.bytes_per_token


def recovering(root: str) -> Iterator[None]:
    dead, frame = Kept(Path(root)), frame_of(SAVED_ROWS + 1, sample_key=BIG)
    for number in range(SAVED):
        dead.durable.frame(number, [frame])
        dead.sample(f"s{number}", number)
    os.close(dead.durable._lock)
    Relay(SPEC, TrainerLayout()).close()  # compiles
    yield
    relay, recovery = Relay.recover(SPEC, TrainerLayout(), ChannelConfig(journal=root))
    assert len(recovery.pending) == SAVED
    yield
    relay.close()


def test_a_recovery_holds_one_copy_of_what_it_reads(tmp_path: Path) -> None:
    growth = growth_of(recovering, str(tmp_path))
    assert growth.kept > SAVED_BYTES and growth.peak < 1.15 * SAVED_BYTES
