"""A relay in a Ray actor: two raylets, the relay on one and an engine on the other, trainers in this process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from r3channel import errors
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recording import Recording
from r3channel.relay.ray_host import NAME
from tests.samples import SPEC, random_ids

pytestmark = [pytest.mark.dist, pytest.mark.full]
ROOT = Path(__file__).parents[2]
LAYOUT = TrainerLayout(dp=2, pp=2)
LIMIT_S = 60.0
TOKENS = {f"s{i}": 20 + 7 * i for i in range(12)}


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

    def call(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self.manager, method).remote(*arguments), timeout=LIMIT_S)


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
    url = ray.get(manager.address.remote(), timeout=LIMIT_S)
    made = Places(manager, engine, ray.get(engine.start.remote(url, token), timeout=LIMIT_S))
    made.call("expect", [made.name])
    yield made
    for actor in (manager, engine):
        ray.kill(actor)


def roll_out(places: Places) -> None:
    import ray

    for index, (name, tokens) in enumerate(TOKENS.items()):
        reply: Any = ray.get(places.engine.finish.remote(name, tokens, index), timeout=LIMIT_S)
        assert len(reply["meta_info"]["routed_experts"]) <= 64
        places.call("add", name, reply, tokens, places.name)


def ranks_of(names: list[str]) -> list[list[list[str]]]:
    return [[names[0::4], names[1::4]], [names[2::4], names[3::4]]]


def receive(places: Places, ticket: Ticket) -> None:
    """Trainers as threads of this process; every rank must hold what its plan says."""
    from r3channel.relay.ray_host import RayRelay
    from r3channel.trainer.receiver import Receiver
    from tests.dist.ray_places import config_of

    coords = [LAYOUT.coords(rank) for rank in range(LAYOUT.world_size)]
    receivers = [
        Receiver(RayRelay(places.manager), spec=SPEC, layout=LAYOUT, coords=one, config=config_of())
        for one in coords
    ]
    with ThreadPoolExecutor(len(receivers)) as pool:
        shards = [future.result(LIMIT_S) for future in [pool.submit(r.receive, ticket) for r in receivers]]
    ids = {name: random_ids(n - 1, seed=index) for index, (name, n) in enumerate(TOKENS.items())}
    whole: dict[Any, np.ndarray] = {}
    for dp in range(LAYOUT.dp):
        whole |= place_samples(ticket.plan, dp=dp, ids_of=ids.__getitem__)
    for shard in shards:
        assert shard.data_N.numpy().tobytes() == whole[shard.shard.key].tobytes()


def test_a_recording_begins_and_ends_while_the_channel_runs(places: Places, tmp_path: Path) -> None:
    import ray

    from r3channel.relay.ray_host import RayRelay

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
        receive(places, Ticket.from_bytes(places.call("seal", step, ranks_of(list(TOKENS)))))
        places.call("join_previous", LIMIT_S)
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
    ticket = Ticket.from_bytes(places.call("seal", 7, ranks_of(list(TOKENS))))
    os.kill(places.call("pid"), signal.SIGKILL)
    with pytest.raises(errors.BackgroundFailed, match=r"relay's actor .* is gone during hello"):
        receive(places, ticket)


def recorded(*arguments: str) -> str:
    """What `r3channel` said."""
    done = subprocess.run(
        [sys.executable, "-m", "r3channel.cli", *arguments], capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr
