"""What a weight group asks of NCCL, on a stand-in for it: the real one needs a GPU per rank and was not run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from r3channel.errors import DeadlineExceeded
from r3channel.weights.group import WeightGroup

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work:
    """An operation that never ends: its peer died. As with NCCL, `wait` orders streams and returns at once."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


class FakeNCCL:
    class Options:
        pass

    def __init__(self, *_: Any) -> None:
        self.handling, self.aborted = os.environ.get(HANDLING), threading.Event()
        made.append(self)

    def broadcast(self, *_: Any) -> Work:
        return Work()

    def abort(self) -> None:
        self.aborted.set()


made: list[FakeNCCL] = []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> WeightGroup:
    made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr("r3channel.transport.process_group.device_of", lambda _: torch.device("cpu"))
    monkeypatch.setenv(HANDLING, "3")
    group = WeightGroup("test-nccl", world_size=2, backend="nccl")
    group.join(timeout_s=20)
    return group


def test_a_member_that_dies_neither_ends_the_trainer_nor_stays_on_its_device(group: WeightGroup) -> None:
    assert made[0].handling == "0" and os.environ[HANDLING] == "3"
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"could not broadcast 4 bytes of rank 0 within 0\.2 s"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=0.2)
    assert time.monotonic() - begun_s < 5
    group.close()
    assert made[0].aborted.wait(5)
