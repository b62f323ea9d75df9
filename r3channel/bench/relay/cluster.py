"""Two Ray nodes on this machine, one for the manager and one for the ranks, and actors on them. All of it ends with `with`.

Each raylet has its own object store, so an object crosses from one to the other as it would between machines, over loopback.
Ray's own settings stay: chunks of 64 MiB instead of 5 took 1.6 to 2 times as long (262,144 tokens, int32 and uint8).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

import r3channel

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}
CALL_S = 180.0
"""Deadline of one call; nothing here takes a tenth of it on a quiet machine."""
MANAGER_NODE, RANK_NODE = "bench_manager", "bench_rank"


@contextmanager
def two_nodes(*, store_bytes: int) -> Iterator[None]:
    """`store_bytes`: each raylet's object store; it is reserved, not touched."""
    root = str(Path(r3channel.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}  # inherited by Ray's processes
    cluster = Cluster()
    try:
        for name in (MANAGER_NODE, RANK_NODE):
            cluster.add_node(num_cpus=8, resources={name: 64}, object_store_memory=store_bytes)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_actor(cls: type, *arguments: Any, node: str, threads: int = 1) -> Any:
    remote: Any = ray.remote
    options = {"num_cpus": 0, "resources": {node: 1}, "max_concurrency": threads}
    options |= {"max_restarts": 0, "enable_tensor_transport": True}  # the latter for Ray Direct Transport
    return remote(**options)(cls).remote(*arguments)


def call(references: Any, *, timeout_s: float = CALL_S) -> Any:
    """`ray.get` with a deadline."""
    return ray.get(references, timeout=timeout_s)


def stop_actors(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def process_ids() -> list[int]:
    """This process and all its descendants: actors, raylets, Ray's own servers."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
