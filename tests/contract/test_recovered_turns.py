"""What a recovered relay says of samples of several turns: whole ones go on, others are named and are in no step."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.relay.storage.recovery import Recovery
from tests.direct import draft_of
from tests.samples import SPEC, reply_for

TOKENS = np.random.default_rng(0).integers(0, 150_000, 80).astype(np.int32)


def open_at(folder: Path) -> Relay:
    return Relay(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(folder)))


def recover(folder: Path) -> tuple[Relay, Recovery]:
    return Relay.recover(SPEC, TrainerLayout(), ChannelConfig(store_dir=str(folder)))


def close(*relays: Relay) -> None:
    for relay in relays:
        with contextlib.suppress(errors.StepError):
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


def test_a_recovered_sample_takes_its_next_turn_and_no_other(tmp_path: Path) -> None:
    """The hashes of its tokens come from the reply."""
    old = open_at(tmp_path / "live")
    add_turns(old, 10, 20)
    left_by(old, tmp_path / "left")
    relay, _ = recover(tmp_path / "left")
    assert relay.rows_held("s") == 20
    turn = draft_of("s", 10, first_row=20).encode().tobytes()
    changed = TOKENS[:31].copy()
    changed[3] += 1
    with pytest.raises(errors.TurnMismatch):
        relay.add_frame("s", turn, changed, append=True)
    relay.add_frame("s", turn, TOKENS[:31], append=True)
    assert relay.rows_held("s") == 30
    close(relay, old)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_sample_with_a_damaged_turn_is_lost_to_its_step_and_the_other_step_is_whole(
    tmp_path: Path, turn: int
) -> None:
    old = open_at(tmp_path / "live")
    add_turns(old, 10, 20)
    old.seal(3, Assignment.given([[["s"]]]))
    old.add("a", reply_for("a", 20), TOKENS[:20])
    old.seal(4, Assignment.given([[["a"]]]))
    left_by(old, tmp_path / "left")
    _damage(tmp_path / "left", sample="s", turn=turn)
    relay, recovery = recover(tmp_path / "left")
    assert recovery.steps.keys() == {4} and recovery.pending == ["a"]
    assert any("sample s" in said for said in recovery.damaged)
    assert any("step 3" in said and "'s'" in said for said in recovery.damaged)
    close(relay, old)


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
