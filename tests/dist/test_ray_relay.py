"""A relay in a Ray actor; its engine and its trainers are in this process. On two raylets: `tests/unit/test_bench.py`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from examples.async_grpo.rays import fetch, start
from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recording import Recording
from r3channel.relay.ray_host import NAME, RayRelay, RelayHost
from r3channel.relay.relay import Relay
from tests.support.children import ROOT, run
from tests.support.delivery import compare, receive, receivers_of
from tests.support.direct import Engine
from tests.support.samples import SPEC, random_ids
from tests.support.waits import ENGINE_S

pytestmark = [pytest.mark.dist, pytest.mark.full]
LAYOUT, CONFIG = TrainerLayout(dp=2, pp=2), ChannelConfig(bucket_bytes=4096, frame_timeout_s=20.0)
TOKENS = {f"s{i}": 20 + 7 * i for i in range(12)}
NAMES = list(TOKENS)
ASSIGNMENT = Assignment.given([[NAMES[0::4], NAMES[1::4]], [NAMES[2::4], NAMES[3::4]]])


class Manager(RelayHost):
    """What a rollout manager does with its relay."""

    def __init__(self) -> None:
        self.relay = Relay(SPEC, LAYOUT, CONFIG)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The relay's."""
        return getattr(self.relay, method)(*arguments, **options)


class Places:
    """The manager's handle, and an engine that delivers directly."""

    def __init__(self, manager: Any, token: Path) -> None:
        self.manager = manager
        self.engine = Engine(self.call("serve", token_file=str(token)), token)
        self.name = self.engine.hello.engine
        self.call("expect_engines", [self.name], timeout_s=ENGINE_S)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The relay's."""
        return fetch(self.manager.call.remote(method, *arguments, **options), timeout_s=ENGINE_S)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    import ray

    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    limits = {"num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}
    with patch.dict(os.environ, RAY_AUTH_MODE="disabled"):  # what Ray writes into it is taken back
        start(address="local", runtime_env=environment, logging_level=logging.ERROR, **limits)
        try:
            manager: Any = ray.remote(Manager)
            made = Places(
                manager.options(max_concurrency=32, name=NAME).remote(),
                tmp_path_factory.mktemp("ray") / "token",
            )
            with made.engine:
                yield made
        finally:
            ray.shutdown()


def roll_out(places: Places) -> None:
    for index, (name, tokens) in enumerate(TOKENS.items()):
        reply = places.engine.finish(name, tokens, seed=index)
        assert len(reply["meta_info"]["routed_experts"]) <= 64
        places.call("add", name, reply, range(tokens), engine=places.name)


def received(places: Places, ticket: Ticket) -> None:
    """Trainers as threads of this process; every rank must hold what engines made."""
    channel: Any = SimpleNamespace(spec=SPEC, layout=LAYOUT, config=CONFIG)
    ids = {name: random_ids(n - 1, seed=index) for index, (name, n) in enumerate(TOKENS.items())}
    for shard in receive(receivers_of(channel, control=RayRelay(places.manager)), ticket):
        wrong, rows = compare(shard, ids)
        assert not wrong and rows


def test_a_recording_begins_and_ends_while_the_channel_runs(places: Places, tmp_path: Path) -> None:
    import ray

    folder, address = tmp_path / "rec", ray.get_runtime_context().gcs_address
    for step, (arguments, said) in enumerate(
        (
            ((), ""),
            ((str(folder), "--record-steps", "5", "--address", address), "records into"),
            (("--stop", "--address", address), "records no more"),
        )
    ):
        assert not arguments or said in recorded("record", *arguments)
        roll_out(places)
        received(places, places.call("seal", step, ASSIGNMENT))
        places.call("join_previous", timeout_s=ENGINE_S)
    status = RayRelay(places.manager).status()
    assert status["steps"] == {} and status["pending"] == []
    recording = Recording.open(folder)
    assert recording.steps == (1,)
    step = recording.step(1)
    assert step.cut == ()
    for index, (name, tokens) in enumerate(TOKENS.items()):
        assert np.array_equal(step.rows(name), random_ids(tokens - 1, seed=index))
        assert step.tokens[name].tolist() == list(range(tokens))
    assert f"0 actors are called 'nobody' in the Ray at {address}" in recorded(
        "record", "x", "--actor", "nobody", "--address", address
    )


def test_a_relay_whose_process_was_killed_is_named_at_once_to_trainers_that_wait(places: Places) -> None:
    roll_out(places)
    ticket = places.call("seal", 7, ASSIGNMENT)
    os.kill(fetch(places.manager.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with pytest.raises(errors.BackgroundFailed, match=r"relay's actor .* is gone during hello"):
        received(places, ticket)


def recorded(*arguments: str) -> str:
    """What `r3channel` said."""
    done = run("-m", "r3channel.cli", *arguments, limit_s=ENGINE_S)
    return done.stdout + done.stderr
