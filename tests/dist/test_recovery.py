"""A relay is killed with SIGKILL; what the one after it finds of its folder. Each kind of damage: tests/unit/test_journal.py."""

from __future__ import annotations

import contextlib
import shutil
import signal
from itertools import pairwise
from pathlib import Path

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.journal import Recovery, read_remains
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.wire.header import announced_bytes
from tests.dist.killed_relay import LAYOUT, TOKENS, Child, config, fill, leave
from tests.support.direct import draft_of
from tests.support.samples import SPEC, reply_for


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


def test_frames_whose_samples_were_not_noted_are_counted_and_may_be_added_again(tmp_path: Path) -> None:
    kill_at("after a frame is written", tmp_path)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert recovery == Recovery(pending=["s0", "s1"], unclaimed=1)
    fill(relay, but=tuple(recovery.pending))
    assert relay.status()["store"]["frames"] == len(TOKENS)
    relay.close()


def test_a_frame_that_another_sample_was_put_under_is_not_taken_for_it(tmp_path: Path) -> None:
    """A note speaks of one frame: exchanged notes do not fit the rows that they stand under."""
    left = kill_at("before the seal", tmp_path)
    paths, turns = [frame_of(left, name) for name in ("s0", "s2")], read_remains(left).samples
    (one, two), (a, b) = (
        map(Path.read_bytes, paths),
        (announced_bytes(turns[n][0].head) for n in ("s0", "s2")),
    )
    paths[0].write_bytes(one[:a] + two[b:])
    paths[1].write_bytes(two[:b] + one[a:])
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s1", "s3", "s4", "s5"]
    assert len(recovery.damaged) == 2 and {text.split()[1] for text in recovery.damaged} == {"s0", "s2"}
    relay.close()


def test_two_samples_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    """Left by two relays: all turns are of one of them."""
    relays = []
    for number, ends in enumerate(((10, 20), (15, 30))):
        relays.append(relay_at(tmp_path / "live"))
        add_turns(relays[-1], *ends, seed=number)
        left_by(relays[-1], tmp_path / "left")
    new, recovery = Relay.recover(SPEC, TrainerLayout(), config(tmp_path / "left"))
    assert recovery.pending == ["s"] and len(recovery.damaged) == 1 and "two relays" in recovery.damaged[0]
    assert new.rows_held("s") in (20, 30)
    for relay in (*relays, new):
        relay.close()


def test_a_recovered_step_goes_on_by_its_ticket_also_with_samples_that_nobody_has(tmp_path: Path) -> None:
    old = relay_at(tmp_path / "live")
    old.add("a", reply_for("a", 20), range(20))
    old.add_live("b", range(3))
    ticket = old.seal(3, Assignment.given([[["a"], ["b"]]]))
    left_by(old, tmp_path / "left")
    new, found = Relay.recover(SPEC, TrainerLayout(), config(tmp_path / "left"))
    new.resume(found)
    live = ChannelConfig(on_missing="live", max_live=1.0)
    receiver = Receiver(new, spec=SPEC, layout=(one := TrainerLayout()), coords=one.coords(0), config=live)
    assert receiver.receive(ticket).live_counts()["invalid"] >= 2
    new.join_previous()
    for relay in (new, old):
        with contextlib.suppress(errors.StepError):
            relay.close()


def relay_at(folder: Path) -> Relay:
    return Relay(SPEC, TrainerLayout(), config(folder))


def add_turns(relay: Relay, *ends: int, seed: int = 0) -> None:
    for start, end in pairwise((0, *ends)):
        draft = draft_of("s", end - start, first_row=start, seed=seed)
        relay.add_frame("s", draft.encode().tobytes(), range(end + 1), append=start > 0)


def left_by(relay: Relay, root: Path) -> Path:
    """What would be there after a kill."""
    (folder,) = (
        path for path in Path(relay.config.journal).glob("relay-*") if not (root / path.name).exists()
    )
    return Path(shutil.copytree(folder, root / folder.name))
