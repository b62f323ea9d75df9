"""An update from a trainer's memory to the parameters of an engine on the same GPU, in two processes, by each wire."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from r3channel.errors import WeightUpdateFailed
from r3channel.weights import staged_copy
from r3channel.weights.checksums import cross_sums, tensor_digest
from r3channel.weights.session import WeightSync
from tests.gpu.checks.peers import HOSTS
from tests.gpu.facts import Facts, words_of
from tests.support.fake_engine import FakeEngine

NAMES = [f"model.layers.{at}.weight" for at in range(24)]


def made(device: str, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """84 MB each with 4,096 rows."""
    options: Any = {"device": device, "dtype": torch.bfloat16}
    options["generator"] = torch.Generator(device).manual_seed(seed)
    return {name: torch.randn(rows, 10240, **options) for name in NAMES}


def sums_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_digest(cross_sums(tensor)) for name, tensor in tensors.items()}


HEADER_BYTES = 64
"""They lie before what torch shares (`map_alloc_alignment` of aten/src/ATen/MapAllocator.cpp)."""


def counts_of(handles: list[list[Any]]) -> list[int]:
    """How many maps of each memory torch still counts: 1 when it is shared, 0 once its taker has given it up.

    The counter lies in a file of shared memory, which is gone with its last one (torch/csrc/CudaIPCTypes.cpp).
    """
    found = list[int]()
    for handle in handles:
        name, offset = bytes.fromhex(handle[4]).decode().strip("/"), int(handle[5])
        try:
            found.append(int(np.memmap(f"/dev/shm/{name}", np.int64, "r", offset=HEADER_BYTES)[offset]))
        except FileNotFoundError:
            found.append(0)
    return found


def engine(device: str, rows: int, pipe: Any) -> None:
    """A process of its own: tells where it listens, then what it holds, and what it takes of the GPU before and after torch looks
    for memory that nobody else maps; as often as it is asked."""
    handles, share = list[list[Any]](), staged_copy.ipc_handle

    def noted(flat: torch.Tensor) -> list[Any]:
        handles.append(share(flat))
        return handles[-1]

    setattr(staged_copy, "ipc_handle", noted)  # noqa: B010
    served = FakeEngine(receives=made(device, rows, 0))
    pipe.send(served.url)
    while pipe.recv():
        time.sleep(1)  # links' threads end, and with them the copy
        found = [sums_of(served.tensors), torch.cuda.memory_allocated()]
        _ = torch.cuda.is_initialized() and torch.cuda.ipc_collect()
        pipe.send([counts_of(handles), *found, torch.cuda.memory_allocated()])


def check(device: str, facts: Facts) -> None:
    rows = 16 if facts.small else 4096
    ours, its = multiprocessing.Pipe()
    args: Any = {"args": (device, rows, its), "daemon": True}
    os.environ.update(HOSTS | {"NCCL_HOSTID": "engine"})
    multiprocessing.get_context("spawn").Process(target=engine, **args).start()
    os.environ["NCCL_HOSTID"] = "trainer"
    url = ours.recv()
    wires = ["tcp", "shared_memory", "nccl", "cuda_ipc", "cuda_ipc"]  # whether what stays taken grows
    if not made(device, 1, 0)[NAMES[0]].is_cuda:
        facts.left_out.append("cuda_ipc: no memory of a GPU")
        wires[2:] = ["gloo"]
    for number, wire in enumerate(wires):
        updated(device, rows, wire, 1 + 3 * number, url, facts, ours)


def updated(device: str, rows: int, wire: Any, first: int, url: str, facts: Facts, pipe: Any) -> None:
    make = partial(WeightSync.sharded, group=None) if wire in ("nccl", "gloo") else WeightSync.whole
    with make([url], staged=True, wire=wire) as sync:
        sync.connect(timeout_s=60)
        for version in (first, first + 1):  # the second one finds links and plan
            given = made(device, rows, version)
            report = sync.update(given.items(), version=version, timeout_s=100)
        committed = sums_of(given)
        facts.note(f"{wire}: GB", report.payload_bytes / 1e9)
        facts.note(f"{wire}: s, paused", (report.wall_s, report.paused_s))
        by_stage = {stage: round(took_s, 4) for stage, took_s in report.seconds.items()}
        facts.note(f"{wire}: s by stage", by_stage)
        given[NAMES[7]][-1, -1] = torch.nan
        told = words_of(
            lambda: sync.update(given.items(), version=first + 2, timeout_s=100), WeightUpdateFailed
        )
        facts.expect(f"{wire}: NaN", told[:200], NAMES[7] in told, "its tensor by name")
    pipe.send(True)
    mapped, found, *counts = pipe.recv()
    facts.note(f"{wire} from version {first}: maps that torch counts", mapped)
    wrong = sum(found[name] != seen for name, seen in committed.items())
    facts.expect(f"{wire}: parameters with other bytes", wrong, wrong == 0, "0")
    kept = [count - sum(one.nbytes for one in given.values() if one.is_cuda) for count in counts]
    # The second is once torch has looked for memory that nobody else maps.
    facts.expect(f"{wire} from version {first}: bytes that stay taken", kept, kept[0] < 1 << 20, "none")
