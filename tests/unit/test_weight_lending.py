"""Lent shards: whole before their card is handed on, and gone when they cannot be made."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
import torch

import r3channel.weights.lending as lending
from r3channel.weights.colocated import FOLDER, SharedArena
from r3channel.weights.geometry import Box

CPU = torch.device("cpu")


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


def test_on_a_device_the_copy_has_ended_before_the_card_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, seen = SharedArena.create(16), []
    assert arena._buffer_N is not None
    arena._buffer_N = arena._buffer_N.as_subclass(OnDevice)

    class Stream:
        def synchronize(self) -> None:
            seen.append(arena.buffer_N.as_subclass(torch.Tensor).view(torch.float32).tolist())

    monkeypatch.setattr(lending, "create_arena", lambda *_: arena)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    with closing(lending.lend({"w": [(Box.whole((4,)), torch.arange(4.0))]}, device=CPU)):
        assert seen == [[0.0, 1.0, 2.0, 3.0]]


def test_shards_that_do_not_fit_their_boxes_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = SharedArena.create(16)
    monkeypatch.setattr(lending, "create_arena", lambda *_: arena)
    with pytest.raises(RuntimeError):
        lending.lend({"w": [(Box.whole((4,)), torch.zeros(3))]}, device=CPU)
    assert arena.handle["name"] not in os.listdir(FOLDER)
