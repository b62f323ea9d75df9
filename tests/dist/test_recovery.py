"""A relay is killed with SIGKILL; what the one after it finds of its folder, whole, torn or damaged."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from r3channel import errors
from r3channel.relay.relay import Relay
from r3channel.relay.storage.durable import read_remains
from r3channel.relay.storage.recovery import Recovery
from r3channel.wire.routing import ProvenanceSpan, RowKind
from tests.dist.killed_relay import LAYOUT, STEP, STEPS, TOKENS, Child, config, fill, leave
from tests.samples import SPEC, random_ids, reply_for


def kill_at(point: str, folder: Path) -> Path:
    """The folder of a relay that died there."""
    child = Child(leave, folder, point)
    assert child.hear() is None and child.process.exitcode == -signal.SIGKILL
    child.end()
    (left,) = folder.glob("relay-*")
    return left


def frame_of(left: Path, name: str) -> Path:
    (found,) = [path for path in left.glob("*.frame") if f'"{name}"'.encode() in path.read_bytes()]
    return found


@pytest.mark.parametrize("point", ["before the seal", "after the seal"])
def test_a_killed_relay_loses_nothing(point: str, tmp_path: Path) -> None:
    kill_at(point, tmp_path)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == sorted(relay.status()["pending"]) == list(TOKENS)
    assert recovery == Recovery(
        pending=recovery.pending, steps={STEP: STEPS[STEP]} if point == "after the seal" else {}
    )
    assert len(list(tmp_path.iterdir())) == 1  # what was read is deleted
    relay.close()
    assert list(tmp_path.iterdir()) == []


def test_frames_whose_samples_were_not_noted_are_counted_and_may_be_added_again(tmp_path: Path) -> None:
    kill_at("after a frame is written", tmp_path)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert recovery == Recovery(pending=["s0", "s1"], unclaimed=1)
    fill(relay, but=tuple(recovery.pending))
    assert relay.status()["store"]["frames"] == len(TOKENS)
    relay.close()


def test_a_damaged_frame_is_named_and_so_is_the_step_that_needs_it(tmp_path: Path) -> None:
    left = kill_at("after the seal", tmp_path)
    path = frame_of(left, "s1")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s0", "s2", "s3", "s4", "s5"] and recovery.steps == {}
    sample, step = recovery.damaged
    assert "s1" in sample and step == f"step {STEP}: its samples ['s1'] are lost, 1 in all"
    relay.close()


@pytest.mark.parametrize("cut", [40, 1000])
def test_a_torn_file_and_a_damaged_ticket_stop_nothing(cut: int, tmp_path: Path) -> None:
    left = kill_at("after the seal", tmp_path)
    torn, (ticket,) = frame_of(left, "s4"), left.glob("*.ticket")
    torn.write_bytes(torn.read_bytes()[:-cut])
    ticket.write_bytes(ticket.read_bytes()[:-3])
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s0", "s1", "s2", "s3", "s5"] and recovery.steps == {}
    frame, step = recovery.damaged
    assert torn.name in frame and step.startswith(f"step {STEP}: ") and "damaged" in step
    relay.close()


def test_a_frame_that_another_sample_was_put_under_is_not_taken_for_it(tmp_path: Path) -> None:
    """A note speaks of one frame: exchanged notes do not fit the rows that they stand under."""
    left = kill_at("before the seal", tmp_path)
    (one, two), ends = (frame_of(left, "s0"), frame_of(left, "s2")), []
    for path in (one, two):
        (turn,) = [
            s.turns[0] for s in read_remains(left).samples.values() if path == frame_of(left, s.sample_id)
        ]
        ends.append((turn.frame, path.read_bytes()[len(turn.frame) :]))
    one.write_bytes(ends[0][0] + ends[1][1])
    two.write_bytes(ends[1][0] + ends[0][1])
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s1", "s3", "s4", "s5"]
    assert len(recovery.damaged) == 2 and {text.split()[1] for text in recovery.damaged} == {"s0", "s2"}
    relay.close()


def test_the_folder_of_a_relay_that_lives_is_refused(tmp_path: Path) -> None:
    relay = Relay(SPEC, LAYOUT, config(tmp_path))
    fill(relay)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(errors.UsageError, match=folder.name):
        Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(relay.status()["pending"]) == list(TOKENS)
    relay.close()
    empty, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert recovery == Recovery()
    empty.close()


def test_later_turns_can_be_appended_to_a_recovered_sample_with_its_own_tokens_only(tmp_path: Path) -> None:
    kill_at("before the seal", tmp_path)
    relay, _ = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    held = relay.rows_held("s2")
    assert held == TOKENS["s2"] - 1
    ids_TLK = random_ids(39, seed=7)[held:]
    made = [ProvenanceSpan(start=held, end=39, weight_version=0, kind=RowKind.DECODED)]
    turn = reply_for("s2", 40, expert_ids_TLK=ids_TLK, first_row=held, provenance=made)
    with pytest.raises(errors.TurnMismatch, match="s2"):
        relay.add("s2", turn, range(40), append=True)
    relay.add("s2", turn, range(100, 140), append=True)
    assert relay.rows_held("s2") == 39
    relay.close()
