"""Our raw group beside the default one: a deadline ends in an error, abort and close in time; the default group goes on."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from r3channel.errors import DeadlineExceeded
from r3channel.transport.base import Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from r3channel.transport.select import join
from tests.gpu.facts import Facts, words_of

BUSY_CYCLES = 4_000_000_000
"""About 2 s of a GPU's clock."""
DEADLINE_S = 0.5
HEARTBEAT_S = 5


def joined(device: str, store: RendezvousStore) -> ProcessGroupTransport:
    """On a CPU the peer that keeps us waiting is a silent rank; on a GPU it is a kernel, before the group of one."""

    def rank(number: int) -> ProcessGroupTransport:
        where = Rendezvous(
            backend="nccl" if device == "cuda" else "gloo", name="beside", connection=1, rank=number,
            world_size=1 if device == "cuda" else 2, host=store.host, port=store.port,
        )  # fmt: skip
        transport = join(where, timeout_s=30.0)
        assert isinstance(transport, ProcessGroupTransport)
        kept.append(transport)
        return transport

    if device == "cpu":
        threading.Thread(target=rank, args=(1,), daemon=True).start()
    return rank(0)


kept: list[ProcessGroupTransport] = []


def deadline(wait: Callable[[], object], busy_s: float, facts: Facts, of: str, busy: str) -> None:
    """Let a wait end by its deadline, and judge its error, and how late it comes beside what keeps the stream busy."""
    begin = time.monotonic()
    told = words_of(wait, DeadlineExceeded)
    late_s = time.monotonic() - begin - DEADLINE_S
    facts.expect(of, told, "within 0.5 s" in told, "a deadline by name")
    facts.note(busy, busy_s)
    # Missed on an H100: NCCL's abort ends after what the stream still runs; only then is the memory the caller's again.
    name = "error, abort included, s after its deadline"
    facts.limit(name, late_s, late_s <= 0.5 * busy_s, "at most half of what keeps it waiting")


def wait_for_it(transport: ProcessGroupTransport, device: str) -> None:
    data_N = torch.zeros(1024, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
        transport.broadcast(0, data_N, timeout_s=DEADLINE_S)
    else:
        transport.recv(1, data_N, timeout_s=DEADLINE_S)


def kernel_s() -> float:
    """What the busy kernel takes here."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    torch.cuda._sleep(BUSY_CYCLES)
    torch.cuda.synchronize()
    return time.monotonic() - begin


def reduces(device: str, facts: Facts, when: str) -> None:
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    facts.expect(f"the default group reduces {when}", float(value), float(value) == 1.0, "1.0")


def check(device: str, facts: Facts) -> None:
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT_S)
    backend, lives_s = ("nccl", 15) if device == "cuda" else ("gloo", 1)
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/r", rank=0, world_size=1)
        reduces(device, facts, "before")
        busy_s = kernel_s() if device == "cuda" else 0.0
        transport = joined(device, RendezvousStore("127.0.0.1"))
        waits = "told", "what keeps the group waiting, s"
        deadline(lambda: wait_for_it(transport, device), busy_s, facts, *waits)
        told_s = time.monotonic()
        transport.abort()
        transport.close()
        closed_s = time.monotonic() - told_s
        facts.limit("abort and close again, s", closed_s, closed_s <= busy_s, "at most that")
        reduces(device, facts, "after")
        time.sleep(lives_s)
        reduces(device, facts, f"{lives_s} s later")
        dist.destroy_process_group()
    if device == "cpu":
        facts.left_out.append("monitors of the default group: NCCL's alone")
