"""The pure part of the engine room, on real tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from examples.embedded.bench.operations import Operations
from r3channel.engine import capture
from r3channel.engine.refusals import parse_weight_version
from r3channel.engine.retraction import Kept, KeptStore
from r3channel.engine.token_tensors import KeptWeights, tensor_frame
from r3channel.errors import ConfigError, ExpertIdInvalid, RoutingError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, spans_of
from r3channel.wire.tensor_frame import parse_tensors
from r3channel.wire.token_tensors import tensors_of
from tests.support.loops import numba
from tests.support.samples import SPEC, WIDE, random_ids, sparse

EVERY_OTHER = RoutingSpec(num_layers=5, moe_layers=(1, 3), num_experts=128, top_k=8)
LINES = sparse(16, experts=128, top_k=8)
"""Its rows are two whole lines of the cache."""
ODD = sparse(3, experts=60, top_k=5)


def device_buffer(spec: RoutingSpec, rows: int, *, seed: int = 0) -> torch.Tensor:
    """int32 [rows, all layers, K] as SGLang's TopK leaves it: dense layers stay zero."""
    buffer = np.zeros((rows, spec.num_layers, spec.top_k), np.int32)
    buffer[:, list(spec.moe_layers)] = random_ids(rows, spec=spec, seed=seed)
    return torch.from_numpy(buffer)


def narrowed(spec: RoutingSpec, buffer: torch.Tensor) -> Ids:
    shape = (len(buffer), spec.num_moe_layers, spec.top_k)
    out = torch.full(shape, 77, dtype=capture.torch_id_dtype(spec))
    capture.LayerSelection(spec, device="cpu").narrow(buffer, out=out)
    return out.numpy()


def draft_of(
    spec: RoutingSpec, buffer: torch.Tensor, *, version: int = 0, **changes: Any
) -> capture.UnfinishedFrame:
    """Decoded rows, filled as a gather would."""
    changes, rows = {"first_row": 0, "sample_key": 0} | changes, len(buffer)
    runs = [(changes["first_row"], changes["first_row"] + rows, version, int(RowKind.DECODED))][:rows]
    unfinished = capture.UnfinishedFrame(spec, rows=rows, **changes)
    unfinished.runs, unfinished.ids_TLK[:] = runs, narrowed(spec, buffer)
    return unfinished


def judged(spec: RoutingSpec, data: bytes) -> list[int]:
    """The rows that a relay takes for missing."""
    frame = parse_frame(data, spec=spec)
    try:
        frame.verify()
    except ExpertIdInvalid:
        assert frame.leave_out_unsound(frame.ids())
    kinds = [(span.start, span.end, span.kind) for span in frame.provenance]
    missing = [row for start, end, kind in kinds if kind is RowKind.MISSING for row in range(start, end)]
    assert np.flatnonzero(~frame.valid_T).tolist() == missing
    assert np.array_equal(frame.digests_L, layer_digests(frame.ids(), first_row=0, valid_T=frame.valid_T))
    return missing


@pytest.mark.parametrize("spec", [SPEC, EVERY_OTHER, WIDE], ids=["range", "every other layer", "int16"])
def test_only_moe_layers_leave_the_device_and_in_the_id_dtype(spec: RoutingSpec) -> None:
    buffer = device_buffer(spec, 20)
    ids_TLK = narrowed(spec, buffer)
    assert ids_TLK.dtype == spec.id_dtype
    assert np.array_equal(ids_TLK, buffer[:, list(spec.moe_layers)])


@pytest.mark.parametrize("rows", [1, 65, 3000])
@pytest.mark.parametrize("top_k", [2, 5, 6, 8])
@pytest.mark.parametrize("experts", [128, 256, 384])
def test_a_row_of_zeros_is_missing_however_long_the_request(experts: int, top_k: int, rows: int) -> None:
    """A layer was never written; or it is padding."""
    buffer = device_buffer(spec := sparse(2, experts=experts, top_k=top_k), rows)
    buffer[rows // 2, 1], buffer[-1] = 0, -1
    assert judged(spec, draft_of(spec, buffer).encode().tobytes()) == sorted({rows // 2, rows - 1})


@pytest.mark.parametrize("column", [0, 1, 4, 7])
@pytest.mark.parametrize("foreign", [-1, 256, 511])
@pytest.mark.parametrize("rows", [17, 300])
def test_one_foreign_id_makes_a_row_of_256_experts_missing(rows: int, foreign: int, column: int) -> None:
    buffer = device_buffer(spec := sparse(3, experts=256, top_k=8), rows)
    buffer[5, 2, column] = foreign
    assert judged(spec, draft_of(spec, buffer).encode().tobytes()) == [5]


def test_expert_255_of_256_is_an_expert() -> None:
    spec = sparse(1, experts=256, top_k=8)
    buffer = torch.arange(248, 256, dtype=torch.int32).flip(0).expand(300, 1, 8)
    frame = parse_frame(draft_of(spec, buffer).encode().tobytes(), spec=spec)
    assert np.array_equal(frame.routing(sample_id="s").expert_ids_TLK, buffer.numpy())


@pytest.mark.parametrize("codec", ["auto", "stored", "lz4"])
@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["uint8", "int16"])
def test_a_frame_holds_exactly_the_rows_it_was_built_from(spec: RoutingSpec, codec: str) -> None:
    buffer = device_buffer(spec, 30)
    data = draft_of(spec, buffer, first_row=7, sample_key=99).encode(codec=codec)
    frame = parse_frame(data.tobytes(), spec=spec)
    routing = frame.routing(sample_id="s")
    assert np.array_equal(routing.expert_ids_TLK, buffer[:, 1:].numpy())
    assert (frame.first_row, frame.sample_key, bool(frame.valid_T.all())) == (7, 99, True)
    assert np.array_equal(frame.digests_L, layer_digests(routing.expert_ids_TLK, first_row=7))


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "plain"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("spec", [SPEC, LINES, WIDE, ODD], ids=["uint8", "whole lines", "int16", "odd"])
def test_a_frame_built_in_place_is_encode_frames_own(spec: RoutingSpec, compiled: bool, hashed: bool) -> None:
    """Written to slots and gathered from them; with few spans, and with more than there is room for."""
    ids = narrowed(spec, device_buffer(spec, 9000))
    slots_T = np.random.default_rng(1).permutation(20_000)[:9000]
    for rows, width in ((0, 1), (1, 1), (300, 40), (300, 1), (9000, 5000)):
        versions_T = np.arange(rows) // width
        with numba(compiled):
            held = capture.SlotRows(spec, slots=20_000)
            for version in range(versions_T.max(initial=-1) + 1):
                of = slice(version * width, min(rows, (version + 1) * width))
                held.write(slots_T[of], ids[of], weight_version=version, kind=RowKind.DECODED)
            made = held.gather_frame(slots_T[:rows], first_row=5, sample_key=8, hashed=hashed)
        expected = encode_frame(
            spec, expert_ids_TLK=ids[:rows], first_row=5, sample_key=8, codec="stored",
            provenance=spans_of(versions_T, np.zeros(rows, np.uint8), first_row=5),
        )  # fmt: skip
        assert made.hashed == (compiled and hashed)
        assert made.encode(codec="stored").tobytes() == expected and np.array_equal(made.ids_TLK, ids[:rows])


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
def test_a_slot_that_there_is_not_is_refused(compiled: bool) -> None:
    ids = narrowed(SPEC, device_buffer(SPEC, 1))
    with numba(compiled):
        rows = capture.SlotRows(SPEC, slots=10)
    with pytest.raises(IndexError):
        rows.write(np.array([10]), ids, weight_version=0, kind=RowKind.DECODED)
    with pytest.raises(IndexError):
        rows.gather_frame(np.array([10]), first_row=0, sample_key=0)


def test_provenance_follows_the_slot_and_not_the_request_and_a_frame_is_its_rows_when_they_are_gathered() -> (
    None
):
    rows, buffer = capture.SlotRows(SPEC, slots=16), device_buffer(SPEC, 5)
    ids = narrowed(SPEC, buffer)
    rows.write(np.array([3, 4, 5]), ids[:3], weight_version=1, kind=RowKind.PREFILLED)
    # 5 was freed and reused
    rows.write(np.array([9, 5]), ids[3:], weight_version=2, kind=RowKind.DECODED)
    unfinished = rows.gather_frame(slots_T := np.array([4, 3, 5, 9]), first_row=0, sample_key=0)
    rows.write(slots_T, ids[:4], weight_version=3, kind=RowKind.PREFILLED)  # before the frame is encoded
    frame = parse_frame(unfinished.encode().tobytes(), spec=SPEC)
    assert frame.provenance == (
        ProvenanceSpan(start=0, end=2, weight_version=1, kind=RowKind.PREFILLED),
        ProvenanceSpan(start=2, end=4, weight_version=2, kind=RowKind.DECODED),
    )
    assert np.array_equal(frame.ids(), ids[[1, 0, 4, 3]])


def test_rows_of_slots_that_another_engine_filled_are_missing_until_they_are_written_again() -> None:
    rows, buffer = capture.SlotRows(SPEC, slots=8), device_buffer(SPEC, 4)
    ids = narrowed(SPEC, buffer)
    rows.write(np.arange(4), ids, weight_version=5, kind=RowKind.DECODED)
    rows.forget(np.array([1, 2]))
    rows.write(np.array([2]), ids[:1], weight_version=6, kind=RowKind.DECODED)
    unfinished = rows.gather_frame(np.arange(4), first_row=0, sample_key=0)
    frame = parse_frame(unfinished.encode().tobytes(), spec=SPEC)
    assert frame.valid_T.tolist() == [True, False, True, True]
    assert [span.weight_version for span in frame.provenance] == [5, capture.NO_VERSION, 6, 5]


@pytest.mark.parametrize("spec", [SPEC, EVERY_OTHER, WIDE, ODD], ids=["range", "every other", "int16", "odd"])
@pytest.mark.parametrize("compiled", [True, False])
def test_weights_lie_with_their_ids_and_are_kept_with_them(spec: RoutingSpec, compiled: bool) -> None:
    buffer, (tensor,) = device_buffer(spec, 6), tensors_of("combine_weights", spec)
    # one more: of a shared expert
    weights = torch.rand(6, spec.num_layers, spec.top_k + 1, generator=torch.manual_seed(0))
    pairs = torch.empty_like(buffer, dtype=torch.int64)
    buffer[:, list(set(range(spec.num_layers)) - {*spec.moe_layers})] = -1  # bits of a NaN
    with Operations() as operations:
        for layer in range(spec.num_layers):
            capture.pair(buffer[:, layer], weights[:, layer], out_TK=pairs[:, layer])
    assert len(operations.names) == spec.num_layers, "a kernel a layer"
    assert torch.equal(pairs.view(torch.int32)[..., ::2], buffer), "bit for bit"
    with numba(compiled):
        held = capture.SlotRows(spec, slots=8, weights=True)
    rows_TN = torch.empty(6, held.row_bytes, dtype=torch.uint8)
    selection = capture.LayerSelection(spec, device="cpu")
    selection.fill(selection.targets(rows_TN), pairs)
    held.write(np.arange(6), rows_TN.numpy(), weight_version=3, kind=RowKind.DECODED)
    kept, at = held.keep(np.array([1, 2]), first_row=1), np.array([7, 1, 2, 5])  # nothing was written to 7
    held.write(np.array([1, 2]), rows_TN[:2].numpy(), weight_version=4, kind=RowKind.PREFILLED)
    for beside in ((kept,), ()):  # over what its slots have, and put back
        made = held.gather_frame(at, first_row=0, sample_key=0, kept=beside)
        frame = tensor_frame(tensor, KeptWeights(made), prompt_tokens=9, new_tokens=1, request_id="s")
        (rows,) = parse_tensors(frame, [tensor], where="x")
        assert (rows.first_row, rows.lengths_T.tolist()) == (0, [0, 1, 1, 1])
        assert np.array_equal(made.ids_TLK[1:], narrowed(spec, buffer)[[1, 2, 5]])
        wanted = weights[[1, 2, 5]][:, list(spec.moe_layers), : spec.top_k].half()
        assert np.array_equal(rows.entries_N["weight"], wanted.numpy())
        held.put_back(at[1:3], kept)


def test_what_requests_keep_is_bounded_counted_and_given_back_as_they_end() -> None:
    rows, slots_T, told = capture.SlotRows(SPEC, slots=8), np.arange(8), list[tuple[str, int]]()
    rows.write(slots_T, narrowed(SPEC, device_buffer(SPEC, 8)), weight_version=1, kind=RowKind.DECODED)
    store = KeptStore(rows, limit_bytes=12 * rows.row_bytes, counted=lambda *fate: told.append(fate))
    first, second = Kept(), Kept()
    for kept in (first, second):
        store.keep(kept, slots_T, first_row=0)
    assert told == [("kept", 8), ("given_up", 8)] and not [*second.rows_between(0, 8)]
    made = rows.gather_frame(slots_T, first_row=0, sample_key=0, kept=[*first.rows_between(2, 8)])
    assert made.kept_rows == 6
    del first, kept
    store.keep(second, slots_T, first_row=0)
    assert told[2:] == [("kept", 8)] and store.nbytes == 8 * rows.row_bytes


def test_rows_of_an_unreadable_weight_version_are_refused() -> None:
    with pytest.raises(RoutingError, match="not a number"):
        draft_of(SPEC, device_buffer(SPEC, 3), version=capture.UNREADABLE_VERSION).encode()


@pytest.mark.parametrize("slots", [[1], [0, 1, 3]], ids=["some written", "all written"])
def test_provenance_outlives_more_weight_versions_than_stamps(slots: list[int]) -> None:
    rows, ids = capture.SlotRows(SPEC, slots=4), narrowed(SPEC, device_buffer(SPEC, 1))
    for slot in slots:
        rows.write(np.array([slot]), ids, weight_version=0, kind=RowKind.PREFILLED)
    early = rows.gather_frame(np.array([1, 1]), first_row=0, sample_key=0)
    early.ids_TLK[:] = ids
    newest = capture.MAX_MAKERS + 9
    for version in range(1, newest + 1):
        rows.write(np.array([2]), ids, weight_version=version, kind=RowKind.DECODED)
    rows.forget(np.array([3]))
    unfinished = rows.gather_frame(np.array([1, 2, 3]), first_row=0, sample_key=0)
    expected = [(0, RowKind.PREFILLED), (newest, RowKind.DECODED), (capture.NO_VERSION, RowKind.MISSING)]
    for each, made in ((unfinished, expected), (early, expected[:1])):
        spans = parse_frame(each.encode().tobytes(), spec=SPEC).provenance
        assert [(span.weight_version, span.kind) for span in spans] == made


@pytest.mark.parametrize("text", ["", "v3", "-1", "1.5", "²", "9" * 30])
def test_weight_versions_are_decimal_counts(text: str) -> None:
    assert [parse_weight_version(text) for text in ("default", "0", "12")] == [0, 0, 12]
    with pytest.raises(ConfigError, match="weight version"):
        parse_weight_version(text)
