"""Several relays where Ray puts them: three raylets, a relay and an engine on each, trainers in another process."""

from __future__ import annotations

import logging
import os
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
from r3channel.plan.place import place_samples
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recording import Recording
from r3channel.relay.actor import NAME
from tests.samples import SPEC, random_ids

pytestmark = [pytest.mark.dist, pytest.mark.full]
ROOT = Path(__file__).parents[2]
LAYOUT = TrainerLayout(dp=2, pp=2)
LIMIT_S = 60.0
TOKENS = {f"s{i}": 20 + 7 * i for i in range(12)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Ids of three raylets of this machine; the driver is on the first."""
    with patch.dict(os.environ, RAY_AUTH_MODE="disabled"):  # what Ray writes into it is taken back
        yield from _three_raylets()


def _three_raylets() -> Iterator[list[str]]:
    import ray
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common)
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=80 << 20)
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(address=cluster.address, runtime_env=environment, logging_level=logging.ERROR)
    try:
        here = ray.get_runtime_context().get_node_id()
        others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
        assert len(others) == 2
        yield [here, *others]
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass
class Places:
    manager: Any
    engines: list[Any]
    names: list[str]
    placed: Any

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

    from r3channel.relay.placement import place_relays
    from tests.dist.ray_places import Manager, Node, config_of

    token = str(tmp_path_factory.mktemp("ray") / "token")
    placed = place_relays(
        nodes[1:], spec=SPEC, layout=LAYOUT, config=config_of(), token_file=token, timeout_s=LIMIT_S
    )
    manager = pinned(Manager, nodes[0], max_concurrency=32, name=NAME).remote(LAYOUT.to_dict(), placed, token)
    engines = [pinned(Node, node).remote(number) for number, node in enumerate(nodes)]
    urls = {nodes[0]: ray.get(manager.address.remote(), timeout=LIMIT_S), **placed.urls}
    assert len(set(urls.values())) == 3
    started = [engine.start.remote(urls[node], token) for node, engine in zip(nodes, engines, strict=True)]
    made = Places(manager, engines, ray.get(started, timeout=LIMIT_S), placed)
    made.call("expect", made.names)
    yield made
    for actor in (manager, *engines, *placed.actors):
        ray.kill(actor)


def roll_out(places: Places) -> None:
    import ray

    for index, (name, tokens) in enumerate(TOKENS.items()):
        number = index // 2 % 3
        reply: Any = ray.get(places.engines[number].finish.remote(name, tokens, index), timeout=LIMIT_S)
        assert len(reply["meta_info"]["routed_experts"]) <= 64
        places.call("add", name, reply, tokens, places.names[number])


def ranks_of(names: list[str]) -> list[list[list[str]]]:
    return [[names[0::4], names[1::4]], [names[2::4], names[3::4]]]


def receive(places: Places, ticket: Ticket) -> None:
    """Trainers as threads of this process; every rank must hold what one relay would have sent."""
    from r3channel.trainer.receiver import Receiver
    from tests.dist.ray_places import config_of

    coords = [LAYOUT.coords(rank) for rank in range(LAYOUT.world_size)]
    receivers = [
        Receiver(
            places.placed.controls(places.manager), spec=SPEC, layout=LAYOUT, coords=one, config=config_of()
        )
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


def test_a_relay_on_each_node_sends_its_part(places: Places, nodes: list[str]) -> None:
    import ray

    def node_of(self: Any) -> str:
        return ray.get_runtime_context().get_node_id()

    found = ray.get([actor.__ray_call__.remote(node_of) for actor in places.placed.actors], timeout=LIMIT_S)
    assert found == nodes[1:]
    roll_out(places)
    ticket = Ticket.from_bytes(places.call("seal", 0, ranks_of(list(TOKENS))))
    assert {relay for sample in ticket.samples for _, relay in sample.segments} == {0, 1, 2}
    receive(places, ticket)
    places.call("join_previous", LIMIT_S)
    relays = places.call("status")["relays"]
    assert all(report["steps"] == {} and report["pending"] == [] for report in relays.values())


def test_a_recording_begins_and_ends_while_the_channel_runs(places: Places, tmp_path: Path) -> None:
    import ray

    folder, address = tmp_path / "rec", ray.get_runtime_context().gcs_address
    others = places.placed.controls(places.manager)[1:]
    assert "records into" in recorded("record", str(folder), "--record-steps", "5", "--address", address)
    for relay in others:
        relay.record({"root": str(folder), "steps": 5})
    roll_out(places)
    receive(places, Ticket.from_bytes(places.call("seal", 1, ranks_of(list(TOKENS)))))
    assert "records no more" in recorded("record", "--stop", "--address", address)
    for relay in others:
        relay.record({})
    roll_out(places)
    receive(places, Ticket.from_bytes(places.call("seal", 2, ranks_of(list(TOKENS)))))
    places.call("join_previous", LIMIT_S)
    recording = Recording.open(folder)
    assert recording.steps == (1,)
    step = recording.step(1)
    assert step.cut == () and {segment.relay for segment in recording.segments(1)} == {0, 1, 2}
    for index, (name, tokens) in enumerate(TOKENS.items()):
        assert np.array_equal(step.rows(name), random_ids(tokens - 1, seed=index))
        assert step.tokens[name].tolist() == list(range(tokens))
    assert f"0 actors are called 'nobody' in the Ray at {address}" in recorded(
        "record", "x", "--actor", "nobody", "--address", address
    )


def recorded(*arguments: str) -> str:
    """What `r3channel` said."""
    done = subprocess.run(
        [sys.executable, "-m", "r3channel.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_relay_that_ray_cannot_place_is_named(nodes: list[str], tmp_path: Path) -> None:
    from r3channel.relay.placement import place_relays
    from tests.dist.ray_places import config_of

    common: dict[str, Any] = {
        "spec": SPEC,
        "layout": LAYOUT,
        "config": config_of(),
        "token_file": str(tmp_path / "t"),
    }
    with pytest.raises(
        errors.RelayLost, match=f"relay 1 on node {nodes[1]} did not start.*(not schedulable|CPUs or GPUs)"
    ):
        place_relays(nodes[1:2], num_gpus=1, timeout_s=3, **common)
    with pytest.raises(errors.ConfigError, match="each once"):
        place_relays([nodes[1], nodes[1]], **common)
    with pytest.raises(errors.ConfigError, match="expected at least one"):
        place_relays(["no such node"], **common)


def test_a_relay_whose_process_died_is_named_and_the_others_go_on(places: Places) -> None:
    import ray

    roll_out(places)  # the same names again: their step was delivered
    ray.kill(places.placed.actors[1])
    names = list(TOKENS)
    with pytest.raises(errors.RelayLost, match=r"relay 2 of 3 does not answer; it holds 4 samples: .*'s4'"):
        places.call("seal", 3, ranks_of(names))
    rest = [name for index, name in enumerate(names) if index // 2 % 3 != 2]
    ticket = Ticket.from_bytes(places.call("seal", 3, ranks_of(rest)))
    assert {relay for sample in ticket.samples for _, relay in sample.segments} == {0, 1}
    receive(places, ticket)
    places.call("join_previous", LIMIT_S)
    assert "gone" in places.call("status")["relays"][2]["lost"]
