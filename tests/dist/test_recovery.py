"""A relay is killed with SIGKILL; the one after it gives the trainers the same bytes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.place import place_samples
from r3channel.plan.ticket import Ticket
from r3channel.relay.recovery import Recovery, read_remains, take_over
from r3channel.relay.relay import Relay
from r3channel.relay.segment import FILE_SUFFIX
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import parse_frame
from tests.dist.killed_relay import LAYOUT, POINTS, STEP, TOKENS, assignment, fill
from tests.samples import SPEC, random_ids

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0


def kill_at(point: str, folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.dist.killed_relay", str(folder), point],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert child.returncode == -9, child.stderr


def config(folder: Path) -> ChannelConfig:
    return ChannelConfig(backend="loopback", store_dir=str(folder), step_timeout_s=LIMIT_S)


def check_delivery(relay: Relay, ticket: Ticket) -> None:
    ids = {name: random_ids(n - 1, seed=i) for i, (name, n) in enumerate(TOKENS.items())}
    receivers = [
        Receiver(relay, spec=SPEC, layout=LAYOUT, coords=LAYOUT.coords(rank), config=relay.config) for rank in range(2)
    ]
    got: dict[int, np.ndarray] = {}

    def receive(dp: int) -> None:
        got[dp] = receivers[dp].receive(ticket).data_N.numpy().copy()

    threads = [threading.Thread(target=receive, args=(dp,)) for dp in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for dp in range(2):
        assert np.array_equal(got[dp], place_samples(ticket.plan, dp=dp, ids_of=ids.__getitem__)[dp, 0, 0])


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_relay_loses_nothing(point: str, tmp_path: Path) -> None:
    kill_at(point, tmp_path)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    whole = list(TOKENS)[:-1] if point == "writing" else list(TOKENS)
    assert sorted(recovery.pending) == whole
    assert sorted(relay.status()["pending"]) == whole
    if point == "writing":
        assert len(recovery.damaged) == 1 and "s4" in recovery.damaged[0]
    else:
        assert recovery.damaged == []
    sealed = point not in ("writing", "added")
    assert recovery.steps == ({STEP: assignment()} if sealed else {})
    check_delivery(relay, relay.seal(STEP, assignment()))
    relay.join_previous(timeout_s=LIMIT_S)
    assert [path.name for path in tmp_path.iterdir()] == [relay._store.folder.name]
    relay.close()


def test_damaged_frames_and_tickets_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    kill_at("sealed", tmp_path)
    (folder,) = tmp_path.iterdir()
    sample = read_remains(folder).samples["s1"]
    (segment,) = folder.glob(f"*{FILE_SUFFIX}")
    data = bytearray(segment.read_bytes())
    at = data.index(bytes(sample.frame)[200:600])
    data[at] ^= 1
    segment.write_bytes(data)
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s0", "s2", "s3", "s4"] and recovery.steps == {}
    assert len(recovery.damaged) == 2
    assert "s1" in recovery.damaged[0] and "step 4" in recovery.damaged[1] and "s1" in recovery.damaged[1]
    relay.close()


def test_a_torn_tail_and_a_damaged_ticket_stop_nothing(tmp_path: Path) -> None:
    kill_at("sealed", tmp_path)
    (folder,) = tmp_path.iterdir()
    (segment,) = folder.glob(f"*{FILE_SUFFIX}")
    with open(segment, "r+b") as file:
        file.truncate(len(segment.read_bytes().rstrip(b"\0")) - 40)  # within the last sample's frame
    (ticket,) = folder.glob("*.ticket")
    ticket.write_bytes(ticket.read_bytes()[:-3])
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(recovery.pending) == ["s0", "s1", "s2", "s3"]
    assert len(recovery.damaged) == 2 and ticket.name in recovery.damaged[1]
    assert re.fullmatch(r"sample s4: its file ends after \d+ bytes of its frame", recovery.damaged[0])
    relay.close()


def test_frames_that_came_directly_and_that_no_reply_claimed_are_counted(tmp_path: Path) -> None:
    kill_at("delivered", tmp_path / "store")
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path / "store"))
    assert recovery.unclaimed == 2 and recovery.pending == ["s0"] and recovery.damaged == []
    held = relay._inbox.held("s0")
    assert held is not None
    assert np.array_equal(parse_frame(relay._store.get(held.key), spec=SPEC).decode(), random_ids(8, seed=0))
    relay.close()


def test_a_frame_that_was_being_received_leaves_nothing_behind(tmp_path: Path) -> None:
    kill_at("receiving", tmp_path / "store")
    relay, recovery = Relay.recover(SPEC, LAYOUT, config(tmp_path / "store"))
    assert recovery == Recovery()
    relay.close()


def test_the_folder_of_a_relay_that_lives_is_refused(tmp_path: Path) -> None:
    relay = Relay(SPEC, LAYOUT, config(tmp_path))
    fill(relay)
    with pytest.raises(errors.StoreBusy, match=relay._store.folder.name):
        Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert sorted(relay.status()["pending"]) == list(TOKENS)
    relay.close()
    assert take_over(relay, tmp_path, but=tmp_path) == Recovery()


def test_later_turns_can_be_appended_to_a_recovered_sample(tmp_path: Path) -> None:
    kill_at("added", tmp_path)
    relay, _ = Relay.recover(SPEC, LAYOUT, config(tmp_path))
    assert relay.rows_held("s2") == 16
    held = relay._inbox.held("s2")
    assert held is not None and held.tokens.tolist() == list(range(100, 117))
    relay.close()
