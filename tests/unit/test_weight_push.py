"""One-sided delivery: senders write by the byte-balanced plan and hear nothing back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from r3channel.errors import DeadlineExceeded, NonFiniteWeights, PlanInvalid, UsageError, WeightsCorrupt
from r3channel.weights.push import Landing, Pusher, SharedWindow
from r3channel.weights.reshard import plan_reshard
from tests.reshard_cases import TIMEOUT_S, Held, equals_oracle, held, side

MESSAGE_BYTES = 4096
TENSORS = [
    *((f"w{i}", torch.bfloat16, (60, 30)) for i in range(9)),
    ("s", torch.float32, ()),
    ("fp8", torch.float8_e4m3fn, (33, 7)),
]
TRAINERS, ENGINES = (0, 1, 2), (3, 4)
SOURCE, TARGET = side(TENSORS, TRAINERS, axis=0), side(TENSORS, ENGINES, axis=1)
PLANS = {rank: plan_reshard(SOURCE, TARGET, rank=rank) for rank in (*TRAINERS, *ENGINES)}


class Job:
    """Windows of all engines, their cards handed to the trainers."""

    def __init__(self, stack: ExitStack) -> None:
        self.mine: dict[int, dict[int, SharedWindow]] = {}
        self.theirs: dict[int, dict[int, SharedWindow]] = {rank: {} for rank in TRAINERS}
        for engine in ENGINES:
            wanted = Landing.expected(PLANS[engine], max_message_bytes=MESSAGE_BYTES)
            self.mine[engine] = {
                src: stack.enter_context(closing(SharedWindow.create(m))) for src, m in wanted.items()
            }
            for src, window in self.mine[engine].items():
                self.theirs[src][engine] = stack.enter_context(closing(SharedWindow.open(window.card)))

    def pusher(self, rank: int) -> Pusher:
        return Pusher(PLANS[rank], self.theirs[rank], max_message_bytes=MESSAGE_BYTES)

    def landing(self, rank: int) -> Landing:
        return Landing(PLANS[rank], self.mine[rank], max_message_bytes=MESSAGE_BYTES)


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def room(rank: int) -> Held:
    return held(TARGET, rank, seed=None)


def test_uccl_senders_write_without_any_reply_and_before_anybody_listens(job: Job) -> None:
    """All senders end before the first receiver looks: there is nothing that they could have waited for."""
    filled = {rank: room(rank) for rank in ENGINES}
    for update in (1, 2):
        sent = [
            job.pusher(rank).push(held(SOURCE, rank, seed=update), update=update)
            for rank in reversed(TRAINERS)
        ]
        assert all(sent)
        for rank in ENGINES:
            assert job.landing(rank).take(filled[rank], update=update, timeout_s=TIMEOUT_S) >= 3
            assert equals_oracle(TARGET, filled[rank], seed=update)


def test_a_receiver_places_while_senders_are_still_writing(job: Job) -> None:
    filled = room(3)
    senders = [
        threading.Timer(0.05 * i, job.pusher(rank).push, [held(SOURCE, rank, seed=1)], {"update": 1})
        for i, rank in enumerate(TRAINERS)
    ]
    for sender in senders:
        sender.start()
    job.landing(3).take(filled, update=1, timeout_s=TIMEOUT_S)
    assert equals_oracle(TARGET, filled, seed=1)
    for sender in senders:
        sender.join(TIMEOUT_S)


def test_a_sender_that_does_not_deliver_is_named_at_the_deadline(job: Job) -> None:
    for rank in TRAINERS[:2]:
        job.pusher(rank).push(held(SOURCE, rank, seed=1), update=1)
    with pytest.raises(
        DeadlineExceeded, match=r"bucket 0 from rank 2 to rank 3 did not arrive within 0\.2 s"
    ):
        job.landing(3).take(room(3), update=1, timeout_s=0.2)


def test_what_the_last_update_left_is_not_taken_for_this_one(job: Job) -> None:
    for rank in TRAINERS:
        job.pusher(rank).push(held(SOURCE, rank, seed=1), update=1)
    job.landing(3).take(room(3), update=1, timeout_s=TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        job.landing(3).take(room(3), update=2, timeout_s=0.1)


def test_a_damaged_byte_is_named_with_tensor_and_bucket(job: Job) -> None:
    for rank in TRAINERS:
        job.pusher(rank).push(held(SOURCE, rank, seed=1), update=1)
    job.mine[4][1].landing_N[5] ^= 1
    with pytest.raises(WeightsCorrupt, match="bucket 0 from rank 1 to rank 4: tensor w0"):
        job.landing(4).take(room(4), update=1, timeout_s=TIMEOUT_S)


def test_a_nan_is_never_marked_as_delivered(job: Job) -> None:
    mine = held(SOURCE, 0, seed=1)
    mine["w0"][0][1][0, 0] = float("nan")
    with pytest.raises(NonFiniteWeights, match="tensor w0"):
        job.pusher(0).push(mine, update=1)
    assert job.mine[3][0].marked(0) == 0


def test_the_number_of_a_push_that_failed_is_spent(job: Job) -> None:
    """Its first messages are marked: under the same number a receiver would take them beside the new ones."""
    bad, pusher, filled = held(SOURCE, 0, seed=1), job.pusher(0), room(3)
    bad["w8"][0][1][-1, -1] = float("nan")
    with pytest.raises(NonFiniteWeights, match="tensor w8"):
        pusher.push(bad, update=1)
    assert job.mine[3][0].marked(0) == 1
    with pytest.raises(UsageError, match="update 1 after 1"):
        pusher.push(held(SOURCE, 0, seed=2), update=1)
    for one in (pusher, job.pusher(1), job.pusher(2)):
        one.push(held(SOURCE, one._plan.rank, seed=2), update=2)
    job.landing(3).take(filled, update=2, timeout_s=TIMEOUT_S)
    assert equals_oracle(TARGET, filled, seed=2)


def test_a_receiver_without_a_window_is_refused_by_rank() -> None:
    with pytest.raises(PlanInvalid, match="rank 0 has no window for rank 3"):
        Pusher(PLANS[0], {})
