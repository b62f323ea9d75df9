"""Capture for the engine that has none of its own: staged copies, deferred scatter. The copy stream itself needs a GPU."""

from __future__ import annotations

import numpy as np
import torch

from r3channel.engine.staging import StagedCapturer
from r3channel.wire.routing import RowKind
from tests.engine.host_copies import HostCopies
from tests.gpu.checks.staged import batch_at, capture, capturer, collected, frame_of, rows_of
from tests.samples import SPEC, random_ids


def forward(target: StagedCapturer, ids_TLK: np.ndarray, slots: list[int], *, mixed: bool = False) -> None:
    capture(target, torch.from_numpy(ids_TLK))
    target.on_forward_end(batch_at(torch.tensor(slots), decode=len(slots) == 1, mixed=mixed), False, None)


class Event:
    """A CUDA event that has happened or not."""

    def __init__(self, happened: bool) -> None:
        self.happened, self.waited = happened, 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        assert self.happened, "somebody would wait for a pass that is still running"
        self.waited += 1


def mark(target: StagedCapturer, index: int, *, computed: bool, copied: bool) -> None:
    stage = target._staged[index]
    object.__setattr__(stage, "computed", Event(computed))
    object.__setattr__(stage, "copied", Event(copied))


def test_rows_are_scattered_only_when_a_request_finishes() -> None:
    target, ids = capturer("cpu"), random_ids(6)
    forward(target, ids, [3, 4, 5, 6, 7, 8])
    assert not target.rows.ids.any()
    assert np.array_equal(rows_of(target, torch.tensor([3, 4, 5, 6, 7, 8])), ids)


def test_a_later_pass_over_the_device_buffer_changes_no_staged_row() -> None:
    target, ids = capturer("cpu"), random_ids(4)
    forward(target, ids[:3], [1, 2, 3])
    forward(target, ids[3:], [9])
    assert np.array_equal(rows_of(target, torch.tensor([1, 2, 3, 9])), ids)


def test_a_slot_that_was_written_twice_holds_the_later_row() -> None:
    target, ids = capturer("cpu"), random_ids(2)
    forward(target, ids[:1], [5])
    forward(target, ids[1:], [5])
    assert np.array_equal(rows_of(target, torch.tensor([5])), ids[1:])


def test_the_pass_that_is_still_running_is_left_alone() -> None:
    target, ids = capturer("cpu"), random_ids(2)
    forward(target, ids[:1], [5])
    forward(target, ids[1:], [6])
    mark(target, 0, computed=True, copied=True)
    mark(target, 1, computed=False, copied=False)
    assert np.array_equal(rows_of(target, torch.tensor([5])), ids[:1])
    assert len(target._staged) == 1


def test_rows_of_a_pass_that_decodes_and_prefills_are_of_unknown_kind() -> None:
    target, ids = capturer("cpu"), random_ids(4)
    forward(target, ids[:2], [4, 5])
    forward(target, ids[2:3], [6], mixed=True)
    forward(target, ids[3:], [7])
    frame = frame_of(target, torch.tensor([4, 5, 6, 7]))
    assert [span.kind for span in frame.provenance] == [RowKind.PREFILLED, RowKind.UNKNOWN, RowKind.DECODED]
    assert frame.valid_T.all()


def test_the_forward_thread_makes_no_blocking_copy() -> None:
    target, slots_T = capturer("meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    with HostCopies() as watch:
        target.capture(1, torch.zeros((3, SPEC.top_k), dtype=torch.int32, device="meta"))
        target.on_forward_end(batch_at(slots_T), True, 4)
    assert watch.blocking == []
    assert "_to_copy" in watch.seen


def test_what_fails_for_one_request_is_its_reply() -> None:
    target = capturer("cpu")
    target.note_weight_version("nightly")
    forward(target, random_ids(1), [5])
    assert b"weight version was not a number" in collected(target, torch.tensor([5]))
