"""A relay or a receiver is killed at each point of a step's way; every row arrives, exactly once where it is needed, and nobody
else notices. And what the relay after a killed one finds of its folder; each kind of damage: tests/unit/test_journal.py."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.relay.journal import Recovery, read_remains
from r3channel.relay.relay import Relay
from r3channel.wire.header import announced_bytes
from tests.dist import killed_relay as kills
from tests.dist.control import ControlServer
from tests.support.samples import SPEC
from tests.support.waits import until

pytestmark = pytest.mark.dist
RANKS = range(kills.LAYOUT.world_size)


class Loop:
    """What a user's loop does: it starts what has died, seals again, and hands the ticket to who has not received."""

    def __init__(self, folder: Path, point: str, *later: str) -> None:
        """`later`: where the relays after the first one die."""
        self.folder, self.later = folder, list(later)
        self.deaths = 0
        self.relay = kills.Child(kills.be_relay, folder, point)
        self.receivers = [kills.Child(kills.be_receiver, rank, point if rank else "") for rank in RANKS]

    def ticket(self) -> tuple[int, bytes]:
        """The port and the ticket of the step that the relay has sealed; a relay that has died is started again."""
        while (told := self.relay.hear()) is None:
            self.again()
        port, data, damaged = told
        assert damaged == []
        return port, data

    def again(self) -> None:
        self.deaths += 1
        self.relay.end()
        self.relay = kills.Child(kills.be_relay, self.folder, self.later.pop(0) if self.later else "")

    def deliver(self, ranks: list[int], port: int, data: bytes) -> dict[int, bytes]:
        """Receiver -> its shard, of those that got one. One that has died is started again."""
        for rank in ranks:
            self.receivers[rank].tell(port, data)
        found: dict[int, bytes] = {}
        for rank in ranks:
            answer = self.receivers[rank].hear()
            if answer is None:
                self.deaths += 1
                self.receivers[rank].end()
                self.receivers[rank] = kills.Child(kills.be_receiver, rank, "")
                self.receivers[rank].tell(port, data)
                answer = self.receivers[rank].hear()
            if isinstance(answer, bytes):
                found[rank] = answer
        return found

    def close(self) -> None:
        for child in (self.relay, *self.receivers):
            child.end()


def run(loop: Loop, *, deaths: int = 1) -> dict[int, list[int]]:
    """Deliver both steps. Receiver -> the rows of each shard that it got."""
    got: dict[int, list[int]] = {rank: [] for rank in RANKS}
    with closing(loop):
        for step in kills.STEPS:
            missing, status = list(RANKS), None
            while status is None:
                port, data = loop.ticket()
                ticket = Ticket.from_bytes(data)
                assert ticket.step == step and ticket.assignment == kills.STEPS[step]
                found = loop.deliver(missing, port, data)
                for rank, shard in found.items():
                    got[rank].append(kills.rows_in(ticket, rank, shard))
                missing = [rank for rank in missing if rank not in found]
                status = loop.relay.hear()
                if status is None:
                    loop.again()
            assert missing == []
            check(status, step)
            loop.relay.tell()
        assert loop.relay.hear() == "closed"
    assert loop.deaths == deaths
    return got


def check(status: dict[str, Any], step: int) -> None:
    """Nobody is waited for, and what no step has taken is still here."""
    assert all(not own["missing"] for own in status["steps"].values())
    assert status["pending"] == (list(kills.TOKENS)[4:] if step == kills.STEP else [])


def needed(rank: int) -> list[int]:
    """The rows of each step, over all layers."""
    samples = [chain(*assignment.ranks[rank]) for assignment in kills.STEPS.values()]
    return [SPEC.num_moe_layers * sum(kills.TOKENS[name] - 1 for name in names) for names in samples]


@pytest.mark.full
@pytest.mark.parametrize("point", [*kills.AT_RELAY, *kills.AT_RECEIVER])
def test_every_row_is_delivered_once_to_who_needs_it(point: str, tmp_path: Path) -> None:
    assert run(Loop(tmp_path, point)) == {rank: needed(rank) for rank in RANKS}


@pytest.mark.full
@pytest.mark.parametrize("second", ["before the seal", "after the seal", "before the rows are prepared"])
def test_a_second_kill_forgets_nobody_who_has_the_step(second: str, tmp_path: Path) -> None:
    """Tickets are written once more while they are taken over: that is the second relay's "after the seal"."""
    loop = Loop(tmp_path, "before the last acknowledgement is written", second)
    assert run(loop, deaths=2) == {rank: needed(rank) for rank in RANKS}


@pytest.fixture(params=["tcp", "gloo"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    config = ChannelConfig(transport=request.param, journal=str(tmp_path), **kills.CONFIG)
    with Relay(SPEC, kills.LAYOUT, config) as relay:
        kills.fill(relay)
        yield relay


@pytest.mark.long
def test_a_killed_member_gets_the_same_bytes_and_other_ranks_are_undisturbed(relay: Relay) -> None:
    ticket = relay.seal(kills.STEP, kills.STEPS[kills.STEP])
    with ExitStack() as stack:
        server = stack.enter_context(ControlServer(relay))

        def start(rank: int, point: str = "") -> kills.Child:
            child = kills.Child(kills.be_receiver, rank, point, relay.config.transport)
            stack.callback(child.end)
            child.tell(server.port, ticket.to_bytes())
            return child

        assert start(1, "in its third bucket").hear() is None
        until(lambda: not relay.status()["receivers"]["connected"])
        assert relay.status()["steps"][kills.STEP]["missing"] == [(0, 0, 0), (1, 0, 0)]
        for rank, child in enumerate([start(0), start(1)]):
            assert kills.rows_in(ticket, rank, child.hear()) == needed(rank)[0]
        relay.join_previous(timeout_s=kills.LIMIT_S)
        assert relay.status()["receivers"]["lives"] == {(0, 0, 0): 1, (1, 0, 0): 2}
        assert relay.status()["steps"] == {}


# -- what is left --------------------------------------------------------------------------------------------------------


def kill_at(point: str, folder: Path) -> Path:
    """The folder of a relay that died there."""
    child = kills.Child(kills.leave, folder, point)
    assert child.hear() is None and child.process.exitcode == -signal.SIGKILL
    child.end()
    (left,) = folder.glob("relay-*")
    return left


def frame_of(left: Path, name: str) -> Path:
    (found,) = [path for path in left.glob("*.frame") if f'"{name}"'.encode() in path.read_bytes()]
    return found


def test_frames_whose_samples_were_not_noted_are_counted_and_may_be_added_again(tmp_path: Path) -> None:
    kill_at("after a frame is written", tmp_path)
    relay, recovery = Relay.recover(SPEC, kills.LAYOUT, kills.config(tmp_path))
    assert recovery == Recovery(pending=["s0", "s1"], unclaimed=1)
    kills.fill(relay, but=tuple(recovery.pending))
    assert relay.status()["store"]["frames"] == len(kills.TOKENS)
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
    relay, recovery = Relay.recover(SPEC, kills.LAYOUT, kills.config(tmp_path))
    assert sorted(recovery.pending) == ["s1", "s3", "s4", "s5"]
    assert len(recovery.damaged) == 2 and {text.split()[1] for text in recovery.damaged} == {"s0", "s2"}
    relay.close()
