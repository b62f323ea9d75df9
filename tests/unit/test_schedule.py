"""Megatron's schedule with a step in it: contexts by the iterator's own count, and a check before the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from r3channel.errors import DigestMismatch
from r3channel.trainer.adapters.megatron_schedule import replayed


class Step:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.wrong = False

    @contextmanager
    def microbatch(self, index: int, *, mode: str, chunk: Any) -> Iterator[None]:
        self.seen.append((index, mode, chunk))
        yield

    def verified(self) -> None:
        self.seen.append("verified")
        if self.wrong:
            raise DigestMismatch("other rows")


class Batches:
    offset = 4


def forward_step(batches: Batches, chunk: str) -> str:
    batches.offset += 1
    return chunk


def run(*, forward_step_func: Any, forward_only: bool, data_iterator: list[Batches]) -> list[str]:
    """Interleaves two chunks, each with an iterator of its own."""
    return [forward_step_func(data_iterator[chunk], f"chunk {chunk}") for chunk in (0, 1, 1, 0)]


@pytest.mark.parametrize("forward_only, mode", [(True, "logprob"), (False, "train")])
def test_each_chunk_counts_by_its_own_iterator(forward_only: bool, mode: str) -> None:
    step: Any = Step()
    schedule = replayed(run, lambda: step)
    found = schedule(
        forward_step_func=forward_step, forward_only=forward_only, data_iterator=[Batches(), Batches()]
    )
    assert found == ["chunk 0", "chunk 1", "chunk 1", "chunk 0"]
    order = [(4, mode, "chunk 0"), (4, mode, "chunk 1"), (5, mode, "chunk 1"), (5, mode, "chunk 0")]
    assert step.seen == [*order, "verified"]


def test_wrong_rows_are_raised_before_the_schedule_returns() -> None:
    step: Any = Step()
    step.wrong = True
    with pytest.raises(DigestMismatch):
        replayed(run, lambda: step)(forward_step_func=forward_step, data_iterator=[Batches(), Batches()])


def test_outside_of_a_step_the_schedule_is_megatrons() -> None:
    schedule = replayed(run, lambda: None)
    assert schedule(forward_step_func=forward_step, data_iterator=[Batches(), Batches()])[0] == "chunk 0"
