"""The group that carries weight buckets, against a process that joins the way SGLang does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.weights.group import WeightGroup

pytestmark = pytest.mark.dist

PEER = Path(__file__).with_name("weight_peer.py")


class Peer:
    """One such process; every answer has a deadline."""

    def __init__(self, group: WeightGroup) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(group.port), group.name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        self._killer = threading.Timer(60, self.process.kill)
        self._killer.start()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self._killer.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pair() -> Iterator[tuple[WeightGroup, Peer]]:
    group = WeightGroup("test-weights-1", world_size=2)
    peer = Peer(group)
    try:
        group.join(timeout_s=60)
        assert peer.answer() == "joined"
        yield group, peer
    finally:
        group.close()
        peer.close()


def test_bytes_arrive_and_a_close_frees_a_waiting_peer(pair: tuple[WeightGroup, Peer]) -> None:
    group, peer = pair
    payload = torch.arange(1000).to(torch.uint8)
    peer.tell("receive 1000")
    group.broadcast(payload, timeout_s=20)
    assert peer.answer() == f"sum {int(payload.long().sum())}"

    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert group.port in {c.laddr.port for c in listening}
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}

    peer.tell("receive 10")
    time.sleep(0.3)  # the peer is in its broadcast now
    begun_s = time.monotonic()
    group.close()
    group.close()
    assert peer.answer() == "closed" and time.monotonic() - begun_s < 2


def test_a_peer_that_is_deaf_ends_at_the_deadline_and_can_be_left(pair: tuple[WeightGroup, Peer]) -> None:
    group, peer = pair
    payload = torch.zeros(10, dtype=torch.uint8)
    try:
        group.broadcast(payload, timeout_s=0.5)
    except DeadlineExceeded as error:
        assert "could not broadcast 10 bytes" in str(error)
        group.close()  # while the error, and with it every frame of the broadcast, is still held
    else:
        pytest.fail("the broadcast ended without a receiver")
    peer.tell("receive 10")
    assert peer.answer() == "closed"


def test_a_peer_that_dies_ends_the_broadcast_at_once(pair: tuple[WeightGroup, Peer]) -> None:
    group, peer = pair
    threading.Timer(0.3, peer.process.kill).start()
    begun_s = time.monotonic()
    with pytest.raises(TransportError, match="could not broadcast 10 bytes"):
        group.broadcast(torch.zeros(10, dtype=torch.uint8), timeout_s=30)
    assert time.monotonic() - begun_s < 5


def test_a_join_without_the_other_member_ends_at_the_deadline() -> None:
    group = WeightGroup("test-weights-2", world_size=2)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of 2 could not join within 0\.5 s"):
        group.join(timeout_s=0.5)
    group.close()


def test_a_wildcard_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="every interface"):
        WeightGroup("test-weights-3", world_size=1, host="0.0.0.0")


def test_use_after_close_is_refused() -> None:
    group = WeightGroup("test-weights-4", world_size=1)
    group.join(timeout_s=5)
    group.close()
    with pytest.raises(UsageError, match="closed"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), timeout_s=1)
