"""A step's routing and a weight update exclude each other: in the slot itself, and in the two that use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from r3channel import errors
from r3channel.transport.collective_lock import PROCESS_SLOT, Slot
from r3channel.weights.session import WeightSync
from tests.support.delivery import MakeRelay, check_rows, receivers_of, sealed
from tests.support.waits import SOON_S, until


def test_uses_of_one_kind_may_overlap() -> None:
    slot, met = Slot(), threading.Barrier(2, timeout=SOON_S)

    def user() -> None:
        with slot.use("routing", "routing", timeout_s=SOON_S):
            met.wait()  # breaks where the other is not let in

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(user) for _ in range(2)]:
            done.result(2 * SOON_S)


def test_a_thread_that_would_wait_for_itself_is_refused_at_once() -> None:
    slot = Slot()
    with (
        slot.use("routing", "step 3", timeout_s=SOON_S),
        pytest.raises(errors.UsageError, match="the update inside step 3"),
        slot.use("weights", "the update", timeout_s=SOON_S),
    ):
        pass


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_a_receive_waits_for_the_end_of_a_weight_update_and_rows_over_tcp_do_not(
    make_relay: MakeRelay, transport: str
) -> None:
    relay = make_relay("dp=1", transport=transport, step_timeout_s=10 * SOON_S)
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    with ThreadPoolExecutor(1) as pool, PROCESS_SLOT.use("weights", "an update", timeout_s=SOON_S):
        receiving = pool.submit(receiver.receive, ticket)
        until(lambda: PROCESS_SLOT._changed._waiters)  # type: ignore[attr-defined]
        wait_s = SOON_S if transport == "tcp" else 1.0
        assert (relay.find_undelivered(wait_s=wait_s) == {}) is (transport == "tcp")
        assert not receiving.done()
    check_rows(receiving.result(SOON_S))


def test_a_weight_update_waits_for_the_end_of_a_receive() -> None:
    sync = WeightSync.whole(["http://127.0.0.1:9"], bucket_bytes=1 << 10)
    read: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        read.append("begun")
        yield "w", torch.zeros(4)

    with ThreadPoolExecutor(1) as pool, PROCESS_SLOT.use("routing", "step 3", timeout_s=SOON_S):
        updating = pool.submit(sync.update, tensors(), version=1, timeout_s=0.3)
        with pytest.raises(
            errors.DeadlineExceeded, match=r"update to weight version 1 waited 0\.3 s for step 3"
        ):
            updating.result(SOON_S)
    until(lambda: read == ["begun"])  # drained on a thread, because other ranks may be in step with it
