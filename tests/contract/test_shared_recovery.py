"""What a relay that shared a step with others says when it is recovered: its own samples, and by name those of the others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from tests.samples import SPEC, reply_for

LAYOUT = TrainerLayout(dp=2)
HELD = {0: ("a", "b", "spare"), 1: ("c", "d")}
ASSIGNMENT = Assignment.given([[["a", "c"]], [["b", "d"]]])
LIMIT_S = 20.0


@pytest.fixture
def left(tmp_path: Path) -> Iterator[dict[int, Path]]:
    """Relay -> a folder with what it had on disk when step 3 was sealed; no process locks it, as after a kill."""
    config = ChannelConfig(backend="loopback", relays=2)
    relays = [
        Relay(SPEC, LAYOUT, replace(config, relay=number, store_dir=str(tmp_path / "live")))
        for number in HELD
    ]
    looked = {}
    for relay, names in zip(relays, HELD.values(), strict=True):
        for name in names:
            relay.add(name, reply_for(name, 20), range(20))
        for sample in relay.look(names, step=3, timeout_s=LIMIT_S):
            looked[sample.sample_id] = replace(sample, relay=relay.config.relay)
    samples = tuple(looked[name] for name in ASSIGNMENT.sample_ids)
    ticket = Ticket(relays[0].run, 3, SPEC, LAYOUT, ASSIGNMENT, samples, 1024, peers=(relays[1].run,))
    folders = {}
    for number, relay in enumerate(relays):
        relay.reserve(ticket)
        folders[number] = tmp_path / f"left{number}"
        shutil.copytree(relay._store.folder, folders[number] / relay._store.folder.name)
    yield folders
    for relay in relays:
        with contextlib.suppress(errors.StepError):
            relay.close()


def config(folder: Path, *, relay: int, relays: int = 2) -> ChannelConfig:
    return ChannelConfig(backend="loopback", store_dir=str(folder), relay=relay, relays=relays)


@pytest.mark.parametrize("number", [0, 1])
def test_the_samples_that_other_relays_held_are_named_and_nothing_is_called_lost(
    left: dict[int, Path], number: int
) -> None:
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[number], relay=number))
    assert sorted(recovery.pending) == sorted(HELD[number])
    assert recovery.damaged == [] and recovery.steps == {}
    assert recovery.shared == {3: {1: ("c", "d")} if number == 0 else {0: ("a", "b")}}
    relay.close()


def test_the_folders_of_all_relays_together_give_the_step_again(left: dict[int, Path]) -> None:
    for folder in left[1].iterdir():
        shutil.move(folder, left[0])
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[0], relay=0, relays=1))
    assert recovery.steps == {3: ASSIGNMENT} and recovery.shared == {} and recovery.damaged == []
    relay.seal(3, recovery.steps[3])
    with pytest.raises(errors.StepError, match="undelivered"):
        relay.close()


def test_a_sample_of_its_own_that_a_relay_lost_is_still_called_lost(left: dict[int, Path]) -> None:
    (folder,) = left[0].iterdir()
    for path in folder.glob("segment-*"):
        data = bytearray(path.read_bytes())
        at = data.index(b"R3F", data.index(b"R3F") + 1)  # the second frame, of sample b
        data[at + 200 : at + 210] = bytes(10)
        path.write_bytes(data)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(left[0], relay=0))
    assert recovery.shared == {} and recovery.steps == {}
    assert (
        "sample b" in recovery.damaged[0] and "step 3" in recovery.damaged[1] and "'b'" in recovery.damaged[1]
    )
    relay.close()
