"""A receiving process that is killed in the middle of its rows comes back and gets the same bytes; nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from r3channel.config import ChannelConfig
from r3channel.relay.relay import Relay
from tests.dist.control import ControlServer
from tests.dist.killed_relay import (
    CONFIG,
    LAYOUT,
    LIMIT_S,
    STEP,
    STEPS,
    TOKENS,
    Child,
    be_receiver,
    fill,
    rows_in,
    until,
)
from tests.samples import SPEC

pytestmark = pytest.mark.dist


@pytest.fixture(params=["tcp", "gloo"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    relay = Relay(SPEC, LAYOUT, ChannelConfig(transport=request.param, store_dir=str(tmp_path), **CONFIG))
    fill(relay)
    yield relay
    relay.close()


def test_a_killed_member_gets_the_same_bytes_and_other_ranks_are_undisturbed(relay: Relay) -> None:
    ticket = relay.seal(STEP, STEPS[STEP])
    with ExitStack() as stack:
        server = stack.enter_context(ControlServer(relay))

        def start(rank: int, point: str = "") -> Child:
            child = Child(be_receiver, rank, point, relay.config.transport)
            stack.callback(child.end)
            child.tell(server.port, ticket.to_bytes())
            return child

        assert start(1, "in its third bucket").hear() is None
        until(lambda: not relay.status()["receivers"]["connected"])
        assert relay.status()["steps"][STEP]["missing"] == [(0, 0, 0), (1, 0, 0)]
        for rank, child in enumerate([start(0), start(1)]):
            names = [name for batch in STEPS[STEP].ranks[rank] for name in batch]
            assert rows_in(ticket, rank, child.hear()) == {name: TOKENS[name] - 1 for name in names}
        relay.join_previous(timeout_s=LIMIT_S)
        assert relay.status()["receivers"]["lives"] == {(0, 0, 0): 1, (1, 0, 0): 2}
        assert relay.status()["steps"] == {}
