"""What a relay that shared a step with others says when it is recovered: its own samples, and by name those of the others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.relay.several import Coordinator, LocalPeer
from tests.direct import deliver, draft_of, hello_of, receipt_reply, rows_here
from tests.samples import SPEC, random_ids, reply_for

LAYOUT = TrainerLayout(dp=2)
HELD = {0: ("a", "b", "spare"), 1: ("c", "d")}
ASSIGNMENT = Assignment.given([[["a", "c"]], [["b", "d"]]])
TOKENS = np.random.default_rng(0).integers(0, 150_000, 80).astype(np.int32)
SPLIT = random_ids(59, seed=7)
"""Rows of a sample whose turns came to both relays: [0, 19) to relay 1, [19, 59) to relay 0."""


def config(folder: Path, *, relay: int, relays: int = 2) -> ChannelConfig:
    return ChannelConfig(store_dir=str(folder), relay=relay, relays=relays)


def direct(relay: Relay, name: str, serial: int, ids: np.ndarray, *, first_row: int = 0) -> None:
    """A frame from the engine of that relay."""
    draft = draft_of(name, len(ids), first_row=first_row)
    draft.ids_TLK[:] = ids
    deliver(relay, (serial, draft.encode().tobytes()), boot_id=101)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[dict[int, Path]]:
    """Relay -> a folder with what it had on disk when steps 3 and 4 were sealed; no process locks it, as after a kill."""
    relays = [Relay(SPEC, LAYOUT, config(tmp_path / "live", relay=number)) for number in HELD]
    relays[1].intake.greet(hello_of(boot_id=101))
    front = Coordinator(relays[0], [LocalPeer(relays[1])])
    for name in HELD[0]:
        front.add(name, reply_for(name, 20), TOKENS[:20])
    for serial, name in enumerate(HELD[1], 1):
        direct(relays[1], name, serial, random_ids(19, seed=serial))
        front.add(name, receipt_reply(name, 20, serial=serial, boot_id=101), TOKENS[:20])
    front.seal(3, ASSIGNMENT)
    direct(relays[1], "split", 3, SPLIT[:19])
    front.add("split", receipt_reply("split", 20, serial=3, boot_id=101), TOKENS[:20])
    draft = draft_of("more", 40, first_row=19)
    draft.ids_TLK[:] = SPLIT[19:]
    front.relay.add_frame("split", draft.encode().tobytes(), TOKENS[:60], append=True)
    front.add("filler", reply_for("filler", 20), TOKENS[:20])
    front.seal(4, Assignment.given([[["split"]], [["filler"]]]))
    yield {number: left_by(relay, tmp_path / f"left{number}").parent for number, relay in enumerate(relays)}
    for relay in relays:
        with contextlib.suppress(errors.StepError):
            relay.close()


def together(left: dict[int, Path]) -> Path:
    for folder in left[1].iterdir():
        shutil.move(folder, left[0])
    return left[0]


def test_the_samples_that_other_relays_held_are_named_and_nothing_is_called_lost(
    left: dict[int, Path],
) -> None:
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[1], relay=1))
    assert sorted(recovery.pending) == ["c", "d", "split"]
    assert recovery.shared[3] == {0: ("a", "b")} and recovery.steps == {}
    relay.close()
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[0], relay=0))
    assert sorted(recovery.pending) == ["a", "b", "filler", "spare"]
    assert recovery.shared[3] == {1: ("c", "d")} and recovery.steps == {}
    relay.close()


def test_the_folders_of_all_relays_together_give_the_steps_again(left: dict[int, Path]) -> None:
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(together(left), relay=0, relays=1))
    assert recovery.shared == {} and recovery.damaged == [] and recovery.unclaimed == 0
    assert recovery.steps.keys() == {3, 4} and recovery.steps[3] == ASSIGNMENT
    assert np.array_equal(rows_here(relay, "split"), SPLIT)
    for step, sealed in sorted(recovery.steps.items()):
        ticket = relay.seal(step, sealed)
        assert all(relay_ == 0 for sample in ticket.samples for _, relay_ in sample.segments)
    with pytest.raises(errors.StepError, match="undelivered"):
        relay.close()


def test_a_recovered_sample_of_another_relay_takes_its_next_turn_and_no_other(left: dict[int, Path]) -> None:
    """The hashes of its tokens come from the reply, at whichever relay its rows were."""
    relay, _ = Relay.recover(SPEC, LAYOUT, config(together(left), relay=0, relays=1))
    for name, start in (("c", 19), ("split", 59)):
        assert relay.rows_held(name) == start
        turn = draft_of(name, 10, first_row=start).encode().tobytes()
        changed = TOKENS[: start + 11].copy()
        changed[3] += 1
        with pytest.raises(errors.TokensChanged):
            relay.add_frame(name, turn, changed, append=True)
        relay.add_frame(name, turn, TOKENS[: start + 11], append=True)
        assert relay.rows_held(name) == start + 10
    relay.close()


def test_a_sample_of_its_own_that_a_relay_lost_is_still_called_lost(left: dict[int, Path]) -> None:
    _damage(left[0], sample="b")
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[0], relay=0))
    assert 3 not in recovery.shared and recovery.steps == {} and "b" not in recovery.pending
    assert any("sample b" in said for said in recovery.damaged)
    assert any("step 3" in said and "'b'" in said for said in recovery.damaged)
    relay.close()


def test_a_sample_whose_later_turn_is_damaged_is_in_no_step(left: dict[int, Path]) -> None:
    folder = together(left)
    _damage(folder, sample="split", turn=1)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(folder, relay=0, relays=1))
    assert recovery.steps.keys() == {3} and "split" not in recovery.pending
    assert any("sample split" in said for said in recovery.damaged)
    relay.close()


def test_a_sample_that_has_lost_its_last_turn_is_lost_to_its_step(tmp_path: Path) -> None:
    """Its beginning is here, and would be another sample than the trainers expect."""
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(tmp_path / "live")))
    add_turns(relay, 10, 20)
    relay.seal(0, Assignment.given([[["s"]]]))
    folder = left_by(relay, tmp_path / "left")
    max(folder.glob("*.frame")).unlink()
    new, recovery = Relay.recover(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(tmp_path / "left")))
    assert recovery.pending == ["s"] and new.rows_held("s") == 10
    assert recovery.steps == {} and "step 0: its samples ['s'] are lost" in recovery.damaged[0]
    new.close()
    with pytest.raises(errors.StepError):
        relay.close()


def add_turns(relay: Relay, *ends: int, seed: int = 0) -> None:
    start = 0
    for end in ends:
        draft = draft_of("s", end - start, first_row=start, seed=seed)
        relay.add_frame("s", draft.encode().tobytes(), TOKENS[: end + 1], append=start > 0)
        start = end


def left_by(relay: Relay, root: Path) -> Path:
    """What would be there after a kill."""
    assert relay._durable is not None
    return Path(shutil.copytree(relay._durable.folder, root / relay._durable.folder.name))


def test_two_samples_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    """Left by two relays: all turns are of one of them."""
    relays = []
    for number, ends in enumerate(((10, 20), (15, 30))):
        relays.append(Relay(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(tmp_path / "live"))))
        add_turns(relays[-1], *ends, seed=number)
        left_by(relays[-1], tmp_path / "left")
    new, recovery = Relay.recover(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(tmp_path / "left")))
    assert recovery.pending == ["s"] and len(recovery.damaged) == 1 and "two relays" in recovery.damaged[0]
    assert new.rows_held("s") in (20, 30)
    for relay in (*relays, new):
        relay.close()


def _damage(root: Path, *, sample: str, turn: int = 0) -> None:
    """Within the ids of a sample's frame."""
    said = f'"sample_id": "{sample}", "turn": {turn}'.encode()
    (path,) = (path for path in root.glob("*/*.frame") if said in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def test_what_only_replies_know_is_not_invented(tmp_path: Path) -> None:
    """A frame at another relay whose step was not sealed: nobody on that disk knows whose it is."""
    relays = [Relay(SPEC, LAYOUT, config(tmp_path / "live", relay=number)) for number in (0, 1)]
    relays[1].intake.greet(hello_of(boot_id=101))
    front = Coordinator(relays[0], [LocalPeer(relays[1])])
    direct(relays[1], "s", 1, random_ids(19))
    front.add("s", receipt_reply("s", 20, serial=1, boot_id=101), TOKENS[:20])
    left_by(relays[1], tmp_path / "left")
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path / "left", relay=1))
    assert recovery.pending == [] and recovery.unclaimed == 1
    for one in (relay, *relays):
        one.close()
