"""A relay or a receiver is killed at each point of a step's way; every row arrives, exactly once where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3channel.plan.ticket import Ticket
from tests.dist.killed_relay import (
    AT_RECEIVER,
    AT_RELAY,
    LAYOUT,
    STEP,
    STEPS,
    TOKENS,
    Child,
    be_receiver,
    be_relay,
    rows_in,
)

pytestmark = pytest.mark.full
RANKS = range(LAYOUT.world_size)


class Loop:
    """What a user's loop does: it starts what has died, seals again, and hands the ticket to who has not received."""

    def __init__(self, folder: Path, point: str, *later: str) -> None:
        """`later`: where the relays after the first one die."""
        self.folder, self.later = folder, list(later)
        self.deaths = 0
        self.relay = Child(be_relay, folder, point)
        self.receivers = [Child(be_receiver, rank, point if rank else "") for rank in RANKS]

    def ticket(self) -> tuple[int, bytes]:
        """Of the step that the relay has sealed; a relay that has died is started again."""
        while (told := self.relay.hear()) is None:
            self.again()
        port, data, damaged = told
        assert damaged == []
        return port, data

    def again(self) -> None:
        self.deaths += 1
        self.relay.end()
        self.relay = Child(be_relay, self.folder, self.later.pop(0) if self.later else "")

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
                self.receivers[rank] = Child(be_receiver, rank, "")
                self.receivers[rank].tell(port, data)
                answer = self.receivers[rank].hear()
            if isinstance(answer, bytes):
                found[rank] = answer
        return found

    def end(self) -> None:
        for child in (self.relay, *self.receivers):
            child.end()


def run(loop: Loop, *, all_come_again: bool) -> dict[int, list[dict[str, int]]]:
    """Deliver both steps. Receiver -> the rows of each shard that it got."""
    got: dict[int, list[dict[str, int]]] = {rank: [] for rank in RANKS}
    for step in STEPS:
        missing, status = list(RANKS), None
        while status is None:
            port, data = loop.ticket()
            ticket = Ticket.from_bytes(data)
            assert ticket.step == step and ticket.assignment == STEPS[step]
            found = loop.deliver(list(RANKS) if all_come_again else missing, port, data)
            for rank, shard in found.items():
                got[rank].append(rows_in(ticket, rank, shard))
            missing = [rank for rank in missing if rank not in found]
            status = loop.relay.hear()
            if status is None:
                loop.again()
        assert missing == []
        check(status, step)
        loop.relay.tell()
    assert loop.relay.hear() == "closed"
    return got


def check(status: dict[str, Any], step: int) -> None:
    """Nobody is waited for, and what no step has taken is still here."""
    assert all(not own["missing"] for own in status["steps"].values())
    assert status["pending"] == (list(TOKENS)[4:] if step == STEP else [])


def needed(rank: int) -> list[dict[str, int]]:
    return [
        {name: TOKENS[name] - 1 for batch in assignment.ranks[rank] for name in batch}
        for assignment in STEPS.values()
    ]


@pytest.mark.parametrize("point", [*AT_RELAY, *AT_RECEIVER])
def test_every_row_is_delivered_once_to_who_needs_it(point: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, point)
    try:
        got = run(loop, all_come_again=False)
    finally:
        loop.end()
    assert loop.deaths == 1
    assert got == {rank: needed(rank) for rank in RANKS}


@pytest.mark.parametrize("point", [point for point in AT_RELAY if "acknowledgement" in point])
def test_receivers_that_had_the_step_may_receive_it_again(point: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, point)
    try:
        got = run(loop, all_come_again=True)
    finally:
        loop.end()
    assert loop.deaths == 1
    for rank in RANKS:
        first, second = needed(rank)
        assert got[rank] in ([first, second], [first, first, second])
    assert any(len(shards) == 3 for shards in got.values()) == ("last" in point)


@pytest.mark.parametrize("second", ["before the seal", "after the seal", "before the rows are prepared"])
def test_a_second_kill_forgets_nobody_who_has_the_step(second: str, tmp_path: Path) -> None:
    """Tickets are written once more while they are taken over: that is the second relay's "after the seal"."""
    loop = Loop(tmp_path, "before the last acknowledgement is written", second)
    try:
        got = run(loop, all_come_again=False)
    finally:
        loop.end()
    assert loop.deaths == 2
    assert got == {rank: needed(rank) for rank in RANKS}
