"""A rank's staged copy: whether its host has room for it, when its memory goes, and how a GPU gets it."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3channel.errors import CannotStage
from r3channel.weights import staged_copy
from r3channel.weights.checksums import cross_sums
from r3channel.weights.session import WeightSync
from r3channel.weights.staged_copy import Room, StagedCopy, free_bytes, new_memory
from tests.gpu.checks.weights import check
from tests.gpu.facts import Facts
from tests.support.waits import until
from tests.support.weights import give, holds, refused, serving, session, weights

MACHINE = {"proc/meminfo": "MemFree: 9 kB\nMemAvailable: 2 kB"}
POD = {"pod/memory.max": "900", "pod/memory.current": "700", "pod/memory.stat": "anon 9\ninactive_file 50"}
POD |= {"pod/ranks/memory.max": "max", "pod/ranks/memory.current": "5"}
OLD = {"memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "90"}
CASES = [
    ("0::/pod/ranks", POD, 250), ("0::/", POD, 2048), ("0::/pod", POD | {"pod/memory.current": "999"}, 0),
    ("4:cpu,memory:/of/the/host\n0::/", OLD, 710), ("4:cpu:/x\n0::/", OLD, 2048),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "free"), CASES)
def test_free_memory_is_the_least_of_the_machine_and_its_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    limits = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (MACHINE | limits | {"proc/self/cgroup": groups}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert free_bytes(tmp_path) == free


def test_a_rank_may_take_its_share_of_its_host_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copy, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(staged_copy.shutil, "disk_usage", lambda _: SimpleNamespace(free=600))
    room = Room.share_of_host(lambda word: [word, "another host", word])
    assert room == (400, 300) and not room.lacks(400, insist=False, shared=False)
    engine = serving()
    with session(engine, wire="shared_memory") as sync:
        refused(sync, 1, "8,192 bytes.* in /dev/shm is 600: enlarge it", cause=CannotStage)
    with session(engine, wire="cuda_ipc") as sync:
        refused(sync, 1, "this engine is on cpu: take", cause=CannotStage)
    with session(engine, staged="auto") as sync:
        assert "8,192 bytes" in (way := give(sync, 1).way) and "control groups is 800: give" in way
    with session(engine, make=WeightSync.sharded, group=None, staged="auto") as sync:
        refused(sync, 2, r"or WeightSync\.whole\(staged=False\)", cause=CannotStage)


@pytest.mark.parametrize("wire", ["tcp", "shared_memory"])
def test_an_engine_has_one_staged_copy_at_most_and_none_when_the_session_is_closed(
    monkeypatch: pytest.MonkeyPatch, wire: Any
) -> None:
    def left() -> list[Any]:
        copies = [one for one in gc.get_objects() if type(one) is StagedCopy]
        names = [thread.name for thread in threading.enumerate() if "r3channel-stage" in thread.name]
        lines = Path("/proc/self/maps").read_text().splitlines()
        maps = [line for line in lines if "/dev/shm/r3channel-weights" in line]
        return [one for one in copies + names + maps if one not in others]

    def made(*params: Any, **options: Any) -> StagedCopy:
        assert not [one for one in left() if isinstance(one, StagedCopy)]
        return StagedCopy(*params, **options)

    others: list[Any] = []
    others += left()  # of other tests
    monkeypatch.setattr(staged_copy, "StagedCopy", made)
    engine, spoiled = serving(), weights(1)
    next(iter(spoiled.values())).view(-1)[-1] = torch.nan
    for version in (1, 3):
        with session(engine, wire=wire) as sync:
            give(sync, version)
            assert engine.receiver is not None  # an order that links it anew, to nobody
            engine.receiver.order(engine.model(), sync._planner.order(engine.url) | {"trainers": []})
            give(sync, version + 1)
            assert left() and not [*Path("/dev/shm").glob("r3channel-weights-*")]
            refused(
                sync, version + 2, "holds NaN", spoiled.items()
            )  # an error that is kept, with what its frames hold
            with monkeypatch.context() as other:
                other.setattr(engine.receiver, "_agree", lambda word: [word, "it does not"])
                refused(sync, version + 2, "nothing was touched: rank 1: it does not")
        until(lambda: not left())


class OnGpu(torch.Tensor):
    """Host memory that is read as a GPU's is: by way of a copy."""

    is_cpu = False  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_bytes_that_come_over_a_link_reach_a_copy_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copy, "new_memory", lambda *size: new_memory(*size).as_subclass(OnGpu))
    with session(engine := serving()) as sync:
        give(sync, 1)
        assert holds(engine, 1)


def test_a_trainer_lets_go_of_a_ranks_memory_before_the_link_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = serving(), list[Any]()
    with session(engine, wire="shared_memory") as sync:
        give(sync, 1)
        (rank,) = sync._engines.find(engine.url).ranks
        assert rank.shared and rank.buckets
        close = rank.link.close
        monkeypatch.setattr(rank.link, "close", lambda: (seen.append((rank.shared, rank.buckets)), close()))
    assert seen == [([], [])]


def test_a_gpu_gets_a_locked_copy_or_two_locked_buffers_in_turn_and_finds_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, real, waiting = dict[int, int](), torch.Tensor.copy_, defaultdict[int, list[Any]](list)

    def copy_late(new: Any, kept: Any, non_blocking: bool = False) -> Any:
        """As a GPU: what is copied without blocking is read when its stream is waited for."""
        return waiting[threading.get_ident()].append((new, kept)) if non_blocking else real(new, kept)

    def arrive(tensor: Any = None) -> Any:
        for pair in waiting.pop(threading.get_ident(), ()):
            real(*pair)
        return tensor

    runtime = SimpleNamespace(
        cudaHostRegister=lambda at, size, _: held.update({at: size}) or 0, cudaHostUnregister=held.pop
    )
    fakes: dict[str, Any] = {"cudart": lambda: runtime, "stream": nullcontext, "synchronize": arrive}
    fakes |= {"Stream": lambda _: SimpleNamespace(synchronize=arrive), "device": nullcontext}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *sizes, device: randint(*sizes))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
    monkeypatch.setattr(staged_copy, "cross_sums", lambda tensor: cross_sums(arrive(tensor)))
    monkeypatch.setattr(staged_copy, "_SLOT_BYTES", 60_000)
    check("cuda", facts := Facts(small=True))
    assert not facts.wrong and [*facts.figures.values()].count("p1 holds other bytes than were staged") == 2
    assert not held
