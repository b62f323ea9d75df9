"""Capture for the engine that has none of its own: staged copies, deferred scatter. The copy stream itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.config import EngineConfig
from r3channel.engine.frame_sender import Outlet
from r3channel.engine.staging import StagedCapturer
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import Hello
from r3channel.wire.routing import RowKind
from tests.engine.host_copies import HostCopies
from tests.samples import SPEC, random_ids

HELLO = Hello(
    engine="e", boot_id=1, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="0.5.9", r3channel="0", hooks=(),
    delivery="inband", codec="auto",
)  # fmt: skip


def capturer_on(device: str) -> StagedCapturer:
    return StagedCapturer(
        SPEC,
        max_rows=16,
        fused_columns=0,
        slots=32,
        device=device,
        weight_version="0",
        local_range=lambda batch, graph, size: (0, batch.out_cache_loc.shape[0]),
        outlet=Outlet(EngineConfig(), HELLO),
    )


def forward(capturer: StagedCapturer, ids_TLK: np.ndarray, slots: list[int], *, mixed: bool = False) -> None:
    for moe_index, layer in enumerate(SPEC.moe_layers):
        capturer.capture(layer, torch.from_numpy(ids_TLK[:, moe_index].astype(np.int32)))
    mode = SimpleNamespace(is_decode=lambda: len(slots) == 1, is_mixed=lambda: mixed)
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots), forward_mode=mode)
    capturer.on_forward_end(batch, False, None)


def frame_of(capturer: StagedCapturer, slots: list[int]) -> Any:
    pool = SimpleNamespace(req_to_token=torch.tensor([[*slots, 0]], dtype=torch.int32))
    req = SimpleNamespace(
        rid="r", req_pool_idx=0, seqlen=len(slots) + 1, return_routed_experts=True, origin_input_ids=[1]
    )
    data = capturer.collect(req, pool)
    assert data is not None
    return parse_frame(data.numpy().tobytes(), spec=SPEC)


class Event:
    """A CUDA event that has happened or not."""

    def __init__(self, happened: bool) -> None:
        self.happened, self.waited = happened, 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        assert self.happened, "somebody would wait for a pass that is still running"
        self.waited += 1


def mark(capturer: StagedCapturer, index: int, *, computed: bool, copied: bool) -> None:
    stage = capturer._staged[index]
    object.__setattr__(stage, "computed", Event(computed))
    object.__setattr__(stage, "copied", Event(copied))


def test_rows_are_scattered_only_when_a_request_finishes() -> None:
    capturer, ids = capturer_on("cpu"), random_ids(6)
    forward(capturer, ids, [3, 4, 5, 6, 7, 8])
    assert not capturer.rows.ids.any()
    assert np.array_equal(frame_of(capturer, [3, 4, 5, 6, 7, 8]).decode(), ids)


def test_a_later_pass_over_the_device_buffer_changes_no_staged_row() -> None:
    capturer, ids = capturer_on("cpu"), random_ids(4)
    forward(capturer, ids[:3], [1, 2, 3])
    forward(capturer, ids[3:], [9])
    assert np.array_equal(frame_of(capturer, [1, 2, 3, 9]).decode(), ids)


def test_a_slot_that_was_written_twice_holds_the_later_row() -> None:
    capturer, ids = capturer_on("cpu"), random_ids(2)
    forward(capturer, ids[:1], [5])
    forward(capturer, ids[1:], [5])
    assert np.array_equal(frame_of(capturer, [5]).decode(), ids[1:])


def test_the_pass_that_is_still_running_is_left_alone() -> None:
    capturer, ids = capturer_on("cpu"), random_ids(2)
    forward(capturer, ids[:1], [5])
    forward(capturer, ids[1:], [6])
    mark(capturer, 0, computed=True, copied=True)
    mark(capturer, 1, computed=False, copied=False)
    assert np.array_equal(frame_of(capturer, [5]).decode(), ids[:1])
    assert len(capturer._staged) == 1


def test_rows_of_a_pass_that_decodes_and_prefills_are_of_unknown_kind() -> None:
    capturer, ids = capturer_on("cpu"), random_ids(4)
    forward(capturer, ids[:2], [4, 5])
    forward(capturer, ids[2:3], [6], mixed=True)
    forward(capturer, ids[3:], [7])
    frame = frame_of(capturer, [4, 5, 6, 7])
    assert [span.kind for span in frame.provenance] == [RowKind.PREFILLED, RowKind.UNKNOWN, RowKind.DECODED]
    assert frame.valid_T.all()


def test_the_forward_thread_makes_no_blocking_copy() -> None:
    capturer = capturer_on("meta")
    batch = SimpleNamespace(
        out_cache_loc=torch.zeros(3, dtype=torch.int64, device="meta"),
        forward_mode=SimpleNamespace(is_decode=lambda: True, is_mixed=lambda: False),
    )
    with HostCopies() as watch:
        capturer.capture(1, torch.zeros((3, SPEC.top_k), dtype=torch.int32, device="meta"))
        capturer.on_forward_end(batch, True, 4)
    assert watch.blocking == []
    assert "_to_copy" in watch.seen


def test_what_fails_for_one_request_is_its_reply() -> None:
    capturer = capturer_on("cpu")
    capturer.note_weight_version("nightly")
    forward(capturer, random_ids(1), [5])
    req = SimpleNamespace(rid="r", req_pool_idx=0, seqlen=2, return_routed_experts=True, origin_input_ids=[1])
    pool = SimpleNamespace(req_to_token=torch.tensor([[5, 0]], dtype=torch.int32))
    data = capturer.collect(req, pool)
    assert data is not None
    assert b"weight version was not a number" in data.numpy().tobytes()
