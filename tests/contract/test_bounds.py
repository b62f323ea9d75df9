"""Ceilings, full disks and ranks that never answer: bounded waits and typed errors that name the cause; nothing is lost."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay import store as store_module
from r3channel.relay.memory import BufferPool
from r3channel.relay.relay import Relay
from tests.samples import SPEC, reply_for

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0
TOKENS = 1000  # 24 kB of ids


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Room for 4 samples: two segments of two."""
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 64 << 10)
    config = ChannelConfig(backend="loopback", store_dir=str(tmp_path), room_timeout_s=0.2)
    relay = Relay(SPEC, TrainerLayout(dp=2), config)
    relay._store.ceiling_bytes = 128 << 10
    yield relay
    with contextlib.suppress(errors.StepError):  # the tests leave steps undelivered
        relay.close()


def add(relay: Relay, *names: str) -> None:
    for name in names:
        relay.add(name, reply_for(name, TOKENS), range(TOKENS))


def seal(relay: Relay, step: int, *names: str) -> Ticket:
    return relay.seal(
        step, Assignment.given([[[name] for name in names[::2]], [[name] for name in names[1::2]]])
    )


def acknowledge(relay: Relay, ticket: Ticket, *ranks: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while relay.status()["steps"][ticket.step]["state"] != "PLACED" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for dp in ranks:
        relay.ack(run=ticket.run, step=ticket.step, dp=dp, pp=0)


def test_at_the_ceiling_add_names_what_is_in_the_way_and_keeps_what_it_holds(relay: Relay) -> None:
    add(relay, "a", "b")
    ticket = seal(relay, 7, "a", "b")
    acknowledge(relay, ticket, 1)
    add(relay, "c", "d")
    with pytest.raises(errors.StoreFull, match=r"\{7: \[\(0, 0, 0\)\]\}.*no step has taken: 2"):
        add(relay, "e")
    assert relay.status()["pending"] == ["c", "d"]
    acknowledge(relay, ticket, 0)
    add(relay, "e", "f")
    assert relay.status()["pending"] == ["c", "d", "e", "f"]


def test_add_goes_on_when_the_background_frees_memory(relay: Relay) -> None:
    relay.config = replace(relay.config, room_timeout_s=LIMIT_S)
    add(relay, "a", "b", "c", "d")
    ticket = seal(relay, 0, "a", "b")
    waiting = threading.Thread(target=add, args=(relay, "e"))
    waiting.start()
    acknowledge(relay, ticket, 0, 1)
    waiting.join(LIMIT_S)
    assert relay.status()["pending"] == ["c", "d", "e"]


def test_discarded_samples_make_room_and_are_counted(relay: Relay) -> None:
    add(relay, "a", "b", "c", "d")
    relay.discard(["a", "b", "unknown"])
    add(relay, "e", "f")
    assert relay.metrics.value("r3channel_samples_total", outcome="discarded") == 2


def test_a_rank_that_never_acknowledges_is_named_within_the_deadline(relay: Relay) -> None:
    add(relay, "a", "b")
    acknowledge(relay, seal(relay, 3, "a", "b"), 0)
    begin_s = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=r"3: \[\(1, 0, 0\)\]"):
        relay.join_previous(timeout_s=0.3)
    assert time.monotonic() - begin_s < LIMIT_S


def test_status_says_where_every_sample_is(relay: Relay) -> None:
    add(relay, "a", "b", "c")
    ticket = seal(relay, 3, "a", "b")
    acknowledge(relay, ticket, 0)
    status = relay.status()
    assert status["pending"] == ["c"]
    ranks = status["steps"][3]["ranks"]
    assert ranks[0] == {"samples": ["a"], "placed": [], "acknowledged": [(0, 0, 0)]}
    assert ranks[1] == {"samples": ["b"], "placed": [(1, 0, 0)], "acknowledged": []}
    assert status["store"]["frames"] == 3  # kept until all ranks have acknowledged
    acknowledge(relay, ticket, 1)
    assert relay.status()["store"]["frames"] == 1 and relay.status()["steps"] == {}


def test_a_sample_sealed_twice_or_never_received_is_named(relay: Relay) -> None:
    add(relay, "a", "b")
    seal(relay, 0, "a", "b")
    with pytest.raises(errors.SampleUnknown, match="'a', 'b'"):
        seal(relay, 1, "a", "b")
    with pytest.raises(errors.SampleUnknown, match="never"):
        seal(relay, 1, "never", "was")
    assert relay.status()["steps"].keys() == {0}


def test_shards_lie_in_memory_up_to_a_ceiling_and_in_files_beyond(tmp_path: Path) -> None:
    pool = BufferPool(1 << 20, folder=tmp_path)
    buffers = [pool.take(600 << 10) for _ in range(3)]
    for number in range(3):
        buffers[number][:] = number
    assert pool.nbytes["memory"] <= 1 << 20 and pool.nbytes["file"] >= 1200 << 10
    assert [int(buffer.max()) for buffer in buffers] == [0, 1, 2]
    part = buffers.pop()[5:10]
    assert pool.nbytes["idle"] == 0, "a part of it is in use"
    address = buffers[0].ctypes.data
    del part
    buffers.clear()
    assert pool.nbytes["use"] == 0
    assert pool.take(590 << 10).ctypes.data == address
    pool.trim(idle_s=0)
    assert pool.nbytes["idle"] == 0


def test_a_shard_buffer_in_use_is_never_given_twice(tmp_path: Path) -> None:
    pool = BufferPool(1 << 20, folder=tmp_path)
    views = [pool.take(100 << 10).view(np.uint64)[7:9] for _ in range(20)]
    assert len({view.ctypes.data for view in views}) == 20


FULL_DISK = """
import resource, sys
from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay import store
from r3channel.relay.relay import Relay
from tests.samples import SPEC, reply_for

store.SEGMENT_BYTES = 64 << 10
relay = Relay(SPEC, TrainerLayout(), ChannelConfig(backend="loopback", store_dir=sys.argv[1], shard_memory_bytes=4096))
relay.add("a", reply_for("a", 1000), range(1000))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as on a full disk: an error, not a signal
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for call in (lambda: relay.add("big", reply_for("big", 6000), range(6000)), lambda: relay.seal(0, Assignment.given([[["a"]]]))):
    try:
        call()
    except errors.StoreFull as error:
        print("StoreFull", error)
print(relay.status()["pending"], relay.status()["steps"])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
"""


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = child.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["StoreFull", "StoreFull", "['a']"], (
        child.stdout + child.stderr
    )
    assert (
        "no room for a segment" in lines[0] and "no room for a shard" in lines[1] and lines[2] == "['a'] {}"
    )
