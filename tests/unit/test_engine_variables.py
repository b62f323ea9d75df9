"""What engines that a framework starts are told: enough to deliver, and nothing that the framework may not log."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError
from r3channel.integrations.slime.engine_variables import engine_variables
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.transport.auth import create_token, read_token
from tests.support.direct import Engine
from tests.support.samples import SPEC
from tests.support.waits import until


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig())
    yield relay
    relay.close()


def told(relay: Relay, token_file: str = "", *, nodes: int = 1) -> Namespace:
    """A framework's arguments behind `tell_engines`."""
    args = Namespace(
        r3_delivery="direct", r3_channel={"token_file": token_file, "interface": "127.0.0.1", "trace": ""}
    )
    args.r3_engine = engine_variables(relay, args, nodes=nodes)
    return args


@pytest.mark.parametrize("given", [True, False])
def test_an_engine_delivers_by_what_it_is_told(relay: Relay, tmp_path: Path, given: bool) -> None:
    path = str(tmp_path / "token") if given else ""
    if given:
        create_token(path)
    args = told(relay, path)
    token = read_token(args.r3_engine["R3CHANNEL_TOKEN_FILE"])
    texts = repr(args), str(vars(args)), json.dumps(vars(args)), pickle.dumps(args, protocol=0).decode()
    assert not [text for text in texts if token in text]
    with Engine(args.r3_engine["R3CHANNEL_RELAY_URL"], Path(args.r3_engine["R3CHANNEL_TOKEN_FILE"])):
        until(lambda: relay.samples.engines.counts()[0], "the engine said hello")


def test_in_band_nothing_is_opened(relay: Relay) -> None:
    args = Namespace(r3_delivery="inband", r3_channel={"interface": "10.0.0.1", "trace": "/run"})
    told = engine_variables(relay, args, nodes=2)
    assert (told["R3CHANNEL_METRICS_PORT"], told["R3CHANNEL_TRACE"]) == ("-1", "/run")
    assert not {"R3CHANNEL_DELIVERY", "R3CHANNEL_RELAY_URL"} & set(told)


def test_several_nodes_need_a_file_that_all_of_them_can_read(relay: Relay) -> None:
    with pytest.raises(ConfigError, match="on 2 nodes without --r3-token-file"):
        told(relay, nodes=2)


_HOLDER = """
from r3channel.transport.auth import token_in_memory
print(token_in_memory(), flush=True)
input()
"""


def test_a_token_in_memory_is_read_by_other_processes_and_is_gone_when_its_own_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        try:
            assert len(read_token(path)) == 64  # which refuses a mode other than 0600
        finally:
            holder.kill()
    assert not path.exists()
