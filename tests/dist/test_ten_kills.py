"""A relay or a receiver is killed at each point of a step's way; every row arrives, exactly once where it is needed, and nobody
else notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
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
