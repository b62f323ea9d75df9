"""A relay in a Ray actor: two raylets, the relay on one and an engine on the other, trainers in this process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recording import Recording
from r3channel.relay.ray_host import NAME, RayRelay
from tests.support.children import ROOT, run
from tests.support.delivery import compare, receive, receivers_of
from tests.support.samples import SPEC, random_ids
from tests.support.waits import ENGINE_S

pytestmark = [pytest.mark.dist, pytest.mark.full]
LAYOUT = TrainerLayout(dp=2, pp=2)
TOKENS = {f"s{i}": 20 + 7 * i for i in range(12)}
NAMES = list(TOKENS)
ASSIGNMENT = Assignment.given([[NAMES[0::4], NAMES[1::4]], [NAMES[2::4], NAMES[3::4]]])


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Ids of two raylets of this machine; the driver is on the first."""
    with patch.dict(os.environ, RAY_AUTH_MODE="disabled"):  # what Ray writes into it is taken back
        yield from _two_raylets()


def _two_raylets() -> Iterator[list[str]]:
    import ray
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common)
    cluster.add_node(num_cpus=4, object_store_memory=80 << 20)
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(address=cluster.address, runtime_env=environment, logging_level=logging.ERROR)
    try:
        here = ray.get_runtime_context().get_node_id()
        others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
        assert len(others) == 1
        yield [here, *others]
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass
class Places:
    manager: Any
    engine: Any
    name: str

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The relay's."""
        import ray

        return ray.get(self.manager.call.remote(method, *arguments, **options), timeout=ENGINE_S)


def pinned(cls: type, node: str, **options: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return remote(num_cpus=1, scheduling_strategy=strategy, **options)(cls)


@pytest.fixture(scope="module")
def places(nodes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    import ray

    from tests.dist.ray_places import Manager, Node

    token = str(tmp_path_factory.mktemp("ray") / "token")
    manager = pinned(Manager, nodes[0], max_concurrency=32, name=NAME).remote(LAYOUT.to_dict(), token)
    engine = pinned(Node, nodes[1]).remote()
    url = ray.get(manager.address.remote(), timeout=ENGINE_S)
    made = Places(manager, engine, ray.get(engine.start.remote(url, token), timeout=ENGINE_S))
    made.call("expect_engines", [made.name], timeout_s=ENGINE_S)
    yield made
    for actor in (manager, engine):
        ray.kill(actor)


def roll_out(places: Places) -> None:
    import ray

    for index, (name, tokens) in enumerate(TOKENS.items()):
        reply: Any = ray.get(places.engine.finish.remote(name, tokens, index), timeout=ENGINE_S)
        assert len(reply["meta_info"]["routed_experts"]) <= 64
        places.call("add", name, reply, range(tokens), engine=places.name)


def received(places: Places, ticket: Ticket) -> None:
    """Trainers as threads of this process; every rank must hold what engines made."""
    from tests.dist.ray_places import config_of

    channel: Any = SimpleNamespace(spec=SPEC, layout=LAYOUT, config=config_of())
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
    import ray

    roll_out(places)
    ticket = places.call("seal", 7, ASSIGNMENT)
    os.kill(ray.get(places.manager.pid.remote(), timeout=ENGINE_S), signal.SIGKILL)
    with pytest.raises(errors.BackgroundFailed, match=r"relay's actor .* is gone during hello"):
        received(places, ticket)


def recorded(*arguments: str) -> str:
    """What `r3channel` said."""
    done = run("-m", "r3channel.cli", *arguments, limit_s=ENGINE_S)
    return done.stdout + done.stderr
