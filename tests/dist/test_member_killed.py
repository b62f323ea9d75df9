"""A receiving process that is killed in the middle of a bucket comes back and gets the same bytes; nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples
from r3channel.relay.relay import Relay
from tests.dist.control import ControlServer
from tests.samples import SPEC, random_ids, reply_for

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
CONFIG: dict[str, Any] = {"bucket_bytes": 16 << 10, "send_timeout_s": 20.0, "join_timeout_s": 30.0}
TOKENS = {f"s{i}": 2000 + 100 * i for i in range(4)}


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    relay = Relay(SPEC, TrainerLayout(dp=2), ChannelConfig(store_dir=str(tmp_path / "store"), **CONFIG))
    for index, (name, tokens) in enumerate(TOKENS.items()):
        relay.add(name, reply_for(name, tokens, seed=index), range(tokens))
    yield relay
    relay.close()


def member(folder: Path, port: int, rank: int, *, die_at: int | None = None) -> subprocess.Popen[bytes]:
    job = {"port": port, "rank": rank, "die_at": die_at, "config": CONFIG}
    job |= {"ticket": str(folder / "ticket"), "out": str(folder / f"shard.{rank}")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("wire_member.py"))
    return subprocess.Popen([sys.executable, script, json.dumps(job)], env=environment)


def wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()


def test_a_killed_member_gets_the_same_bytes_and_other_ranks_are_undisturbed(
    relay: Relay, tmp_path: Path
) -> None:
    ticket = relay.seal(0, Assignment.round_robin(list(TOKENS), dp=2, microbatch_size=1))
    (tmp_path / "ticket").write_bytes(ticket.to_bytes())
    with ControlServer(relay) as server:
        assert wait(member(tmp_path, server.port, 0, die_at=3)) == -signal.SIGKILL
        deadline = time.monotonic() + LIMIT_S
        while relay.status()["groups"][0]["epoch"] == 1 and time.monotonic() < deadline:
            time.sleep(0.02)  # the sender has noticed: sockets of the dead are closed
        sent = relay.metrics.value("r3channel_buckets_total")
        assert 3 <= sent < ticket.plan.shards[0].nbytes / CONFIG["bucket_bytes"]
        other, again = member(tmp_path, server.port, 1), member(tmp_path, server.port, 0)
        assert [wait(other), wait(again)] == [0, 0]
    relay.join_previous(timeout_s=LIMIT_S)
    for rank in range(2):
        placed = place_samples(
            ticket.plan,
            dp=rank,
            ids_of=lambda name: random_ids(TOKENS[name] - 1, seed=list(TOKENS).index(name)),
        )
        assert (tmp_path / f"shard.{rank}").read_bytes() == placed[(rank, 0, 0)].tobytes()
    assert [group["epoch"] for group in relay.status()["groups"].values()] == [2, 1]
