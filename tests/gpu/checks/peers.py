"""NCCL groups of two and three processes beside the default group, which goes on: what connects, what it takes, and how a
silent and a dying peer end; gloo on a CPU.

All are on the first GPU, as hosts of their own to NCCL (see `pair`): this check's environment, and no user's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from r3channel.errors import DeadlineExceeded, R3Error, TransportError, UsageError
from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from r3channel.transport.select import join
from r3channel.transport.tp_fanout import TensorParallelFanout
from tests.gpu.facts import Facts, words_of

CONNECT_S, SEND_S = 60.0, 30.0
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MONITORED_S = {"cpu": 1, "cuda": 20}
"""The default group's monitors look every 5 s, in NCCL alone: what we aborted must not end the process."""
HOSTS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}
BUSY_CYCLES = 4_000_000_000
"""About 2 s of a GPU's clock."""
DEADLINE_S = 0.5


def pattern(nbytes: int, device: str) -> torch.Tensor:
    return (torch.arange(nbytes, device=device) % 251).to(torch.uint8)


class Peer(NamedTuple):
    """Another process, which does what it is asked, one thing at a time."""

    pool: ProcessPoolExecutor
    name: str
    pid: int

    @classmethod
    def start(cls) -> Peer:
        """Start it now, with the environment that is here now."""
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        return cls(pool, *pool.submit(_who).result())


_group: Any = None
"""The peer's."""


def _who() -> tuple[str, int]:
    return multiprocessing.current_process().name, os.getpid()


def _join(where: dict[str, Any]) -> None:
    global _group
    _group = join(Rendezvous(**where), timeout_s=CONNECT_S)


def _send(nbytes: int, device: str) -> None:
    _group.send(0, pattern(nbytes, device), timeout_s=SEND_S)


def _begin(rank: int, folder: str, device: str) -> None:
    dist.init_process_group(BACKENDS[device], init_method=f"file://{folder}/ranks", rank=rank, world_size=2)


def _reduce(_rank: int, device: str) -> float:
    dist.all_reduce(value := torch.ones(1, device=device))
    return float(value)


def _hand_on(rank: int, nbytes: int, device: str) -> list[bool]:
    """As a TP group of two: hand a shard on, and learn that a rank cannot; what was right."""
    group = TensorParallelFanout(dist.group.WORLD, device=torch.device(device))
    whole_N = pattern(nbytes, device)
    got_N, part_N = whole_N * (rank == 0), torch.zeros_like(whole_N[: nbytes // 2])
    group.vote(None, what="rows")
    group.rebroadcast(got_N)
    group.scatter([*whole_N.chunk(2)] if rank == 0 else None, part_N)
    told = words_of(lambda: group.vote(UsageError("no room") if rank else None, what="rows"), R3Error)
    return [torch.equal(got_N, whole_N), torch.equal(part_N, whole_N.chunk(2)[rank]), "no room" in told]


def _end(_rank: int) -> None:
    dist.destroy_process_group()


def _take(nbytes: int, device: str) -> bool:
    data_N = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    _group.broadcast(0, data_N, timeout_s=SEND_S)
    return torch.equal(data_N, pattern(nbytes, device))


@contextmanager
def two_peers() -> Iterator[list[Peer]]:
    found = list[Peer]()
    try:
        for number in range(2):
            os.environ.update(HOSTS, NCCL_HOSTID=f"peer{number}")
            found.append(Peer.start())
        os.environ.update(NCCL_HOSTID="check")
        yield found
    finally:
        for peer in found:
            with suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGKILL)
            peer.pool.shutdown()


class Groups:
    """Groups of this process, rank 0, with peers."""

    def __init__(self, device: str, facts: Facts) -> None:
        self.device, self.facts, self.made = device, facts, 0
        self.store = RendezvousStore("127.0.0.1")

    def join(self, what: str, peers: list[Peer]) -> ProcessGroupTransport:
        """Its seconds, and on a GPU the memory that all its ends take there, are noted."""
        self.made, before = self.made + 1, self.free_bytes()
        where: dict[str, Any] = {
            "backend": BACKENDS[self.device], "name": f"{what}-{self.made}", "connection": 1,
            "world_size": 1 + len(peers), "host": self.store.host, "port": self.store.port,
        }  # fmt: skip
        begin = time.monotonic()
        theirs = [one.pool.submit(_join, {**where, "rank": rank}) for rank, one in enumerate(peers, start=1)]
        group: Any = join(Rendezvous(**where, rank=0), timeout_s=CONNECT_S)
        for one in theirs:
            one.result()
        self.facts.note(f"{what}: s to connect", time.monotonic() - begin)
        if self.device == "cuda":
            self.facts.note(f"{what}: MiB of the GPU", (before - self.free_bytes()) >> 20)
        return group

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.device == "cuda" else 0


def check(device: str, facts: Facts) -> None:
    nbytes = (4 if facts.small else 64) << 20
    if device == "cuda":
        torch.cuda.set_device(0)
    with two_peers() as (first, second), tempfile.TemporaryDirectory() as folder:
        # first, as a trainer's: it is the one that monitors all groups
        at_both_ends(second, _begin, folder, device)
        groups = Groups(device, facts)
        three = groups.join("a group of three", [first, second])
        taking = [peer.pool.submit(_take, nbytes, device) for peer in (first, second)]
        three.broadcast(0, pattern(nbytes, device), timeout_s=SEND_S)
        held = [one.result() for one in taking]
        facts.expect("a broadcast to two, bytes equal", held, held == [True, True], "both")
        held = at_both_ends(second, _hand_on, nbytes, device)
        facts.expect("TP 2: rebroadcast, scatter, vote", held, held == [[True] * 3] * 2, "right at both ends")
        pair = groups.join("a pair", [first])
        arrived(pair, first, nbytes, device, facts)
        silent(pair, device, facts)
        reduces(second, device, facts, "after a deadline")
        dying(groups.join("a second pair", [first]), first, device, facts)
        other = groups.join("a pair with another, after that", [second])
        arrived(other, second, nbytes, device, facts)
        for group in (three, other):
            group.close()
        time.sleep(MONITORED_S[device])
        reduces(second, device, facts, f"{MONITORED_S[device]} s after the last one")
        at_both_ends(second, _end)
    if device == "cpu":
        facts.left_out.append("monitors of the default group: NCCL's alone")


def at_both_ends(peer: Peer, call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a call of each rank of the default group returns: rank 0 is this process."""
    there = peer.pool.submit(call, 1, *arguments)
    return [call(0, *arguments), there.result()]


def reduces(peer: Peer, device: str, facts: Facts, when: str) -> None:
    found = at_both_ends(peer, _reduce, device)
    facts.expect(f"the default group reduces {when}", found, found == [2.0, 2.0], "2.0 at both ends")


def arrived(group: Transport, peer: Peer, nbytes: int, device: str, facts: Facts) -> None:
    sending = peer.pool.submit(_send, nbytes, device)
    data_N = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    group.recv(1, data_N, timeout_s=SEND_S)
    sending.result()
    different = int((data_N != pattern(nbytes, device)).sum())
    facts.expect(f"bytes of {peer.name} that differ", different, different == 0, "0")


def silent(group: ProcessGroupTransport, device: str, facts: Facts) -> None:
    """A peer that sends nothing, while this process's default stream is busy with work that is not ours."""
    busy_s = kernel_s() if device == "cuda" else 0.0
    pending = group.start_recv(1, torch.zeros(1024, dtype=torch.uint8, device=device))
    value = torch.ones(1, device=device)
    if device == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
    value += 1
    begin = time.monotonic()
    told = words_of(lambda: pending.wait(timeout_s=DEADLINE_S), DeadlineExceeded)
    late_s = time.monotonic() - begin - DEADLINE_S
    facts.expect("of a silent peer", told, "within 0.5 s" in told, "a deadline by name")
    facts.note("the stream is busy for, s", busy_s)
    # Missed on an H100: NCCL's abort ends after what the stream still runs; only then is the memory the caller's again.
    name = "error, abort included, s after its deadline"
    facts.limit(name, late_s, late_s <= 0.5 * busy_s, "at most half of what keeps the stream busy")
    facts.expect("the busy stream's result", float(value), float(value) == 2.0, "2.0")
    begin = time.monotonic()
    group.abort()
    group.close()
    facts.limit(
        "abort and close again, s", closed_s := time.monotonic() - begin, closed_s <= busy_s, "at most that"
    )


def kernel_s() -> float:
    """What the busy kernel takes here."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    torch.cuda._sleep(BUSY_CYCLES)
    torch.cuda.synchronize()
    return time.monotonic() - begin


def dying(group: ProcessGroupTransport, peer: Peer, device: str, facts: Facts) -> None:
    """It is killed in the middle of what it sends."""
    nbytes = (256 << 20) if facts.small else 1 << 30
    data_N = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    peer.pool.submit(_send, nbytes, device)
    pending = group.start_recv(1, data_N)
    time.sleep(0.01)
    os.kill(peer.pid, signal.SIGKILL)
    begin = time.monotonic()
    told = words_of(lambda: pending.wait(timeout_s=SEND_S), TransportError)
    facts.expect("of a peer killed in its send", told, "could not receive" in told, "an error by name")
    facts.note("told after, s", time.monotonic() - begin)
