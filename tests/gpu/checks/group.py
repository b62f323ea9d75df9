"""Our raw group beside the default one: a deadline ends in an error, abort and close in time; the default group goes on."""

from __future__ import annotations

import os
import tempfile
import threading
import time

import torch
import torch.distributed as dist

from r3channel.errors import DeadlineExceeded
from r3channel.transport.base import Rendezvous
from r3channel.transport.joining import join
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from tests.gpu.facts import Facts, main

BUSY_CYCLES = 10_000_000_000
"""About 5 s of a GPU's clock."""
DEADLINE_S = 0.5
HEARTBEAT_S = 10


def joined(device: str, store: RendezvousStore) -> tuple[ProcessGroupTransport, threading.Thread | None]:
    """On a CPU the peer that keeps us waiting is a silent rank; on a GPU it is a kernel, of a group of one."""

    def rank(number: int) -> ProcessGroupTransport:
        where = Rendezvous(
            backend="nccl" if device == "cuda" else "gloo", name="beside", epoch=1, rank=number,
            world_size=1 if device == "cuda" else 2, host=store.host, port=store.port,
        )  # fmt: skip
        transport = join(where, timeout_s=30.0)
        assert isinstance(transport, ProcessGroupTransport)
        return transport

    if device == "cuda":
        return rank(0), None
    silent = threading.Thread(target=lambda: kept.append(rank(1)), daemon=True)
    silent.start()
    return rank(0), silent


kept: list[ProcessGroupTransport] = []


def reduces(device: str) -> bool:
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    return float(value) == dist.get_world_size()


def check(device: str, facts: Facts) -> None:
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT_S)
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/r", rank=0, world_size=1
        )
        facts.expect("the default group reduces before", reduces(device), reduces(device), "true")
        transport, _ = joined(device, RendezvousStore("127.0.0.1"))
        data_N = torch.zeros(1024, dtype=torch.uint8, device=device)
        if device == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        begin, told = time.monotonic(), ""
        try:
            if device == "cuda":
                transport.broadcast(0, data_N, timeout_s=DEADLINE_S)
            else:
                transport.recv(1, data_N, timeout_s=DEADLINE_S)
        except DeadlineExceeded as error:
            told = str(error)
        spent_s = time.monotonic() - begin
        facts.expect("told", told, "within 0.5 s" in told, "a deadline by name")
        facts.expect("error, abort included, s", spent_s, spent_s <= DEADLINE_S + 2.0, "at most 2.5")
        begin = time.monotonic()
        transport.abort()
        transport.close()
        closed_s = time.monotonic() - begin
        facts.expect("abort and close again, s", closed_s, closed_s <= 2.0, "at most 2")
        facts.expect("the default group reduces after", reduces(device), reduces(device), "true")
        lives_s = 30 if device == "cuda" else 1
        time.sleep(lives_s)
        facts.expect(f"the default group reduces {lives_s} s later", reduces(device), reduces(device), "true")
        if device == "cpu":
            facts.left_out.append("monitors of the default group: NCCL's alone")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(check)
