"""The pure part of the engine room, on real tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3channel.engine.capture import (
    NO_VERSION,
    UNREADABLE_VERSION,
    LayerSelection,
    SlotProvenance,
    build_frame,
    captured_rows,
    check_representable,
    parse_weight_version,
    torch_id_dtype,
)
from r3channel.errors import ConfigError, RoutingError
from r3channel.routing import ProvenanceSpan, RowKind
from r3channel.spec import RoutingSpec
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import parse_frame

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
EVERY_OTHER = RoutingSpec(num_layers=5, moe_layers=(1, 3), num_experts=128, top_k=8)
WIDE = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=384, top_k=8)
FULL_BYTE = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=256, top_k=2)


def device_buffer(spec: RoutingSpec, rows: int, *, seed: int = 0) -> torch.Tensor:
    """int32 [rows, all layers, K] as SGLang's TopK leaves it: dense layers stay zero."""
    rng = np.random.default_rng(seed)
    buffer = np.zeros((rows, spec.num_layers, spec.top_k), np.int32)
    for layer in spec.moe_layers:
        scores = rng.random((rows, spec.num_experts))
        buffer[:, layer] = np.argsort(scores, axis=1)[:, : spec.top_k]
    return torch.from_numpy(buffer)


def narrowed(spec: RoutingSpec, buffer: torch.Tensor) -> torch.Tensor:
    return LayerSelection(spec, device="cpu").narrow(buffer)


def versions(rows: int, value: int = 0) -> np.ndarray:
    return np.full(rows, value, np.int64)


def kinds(rows: int, kind: RowKind = RowKind.DECODED) -> np.ndarray:
    return np.full(rows, kind, np.uint8)


@pytest.mark.parametrize("spec", [SPEC, EVERY_OTHER, WIDE], ids=["range", "every other layer", "int16"])
def test_only_moe_layers_leave_the_device_and_in_the_id_dtype(spec: RoutingSpec) -> None:
    buffer = device_buffer(spec, 20)
    ids_TLK = narrowed(spec, buffer)
    assert ids_TLK.dtype == torch_id_dtype(spec)
    assert ids_TLK.numpy().dtype == spec.id_dtype
    assert torch.equal(ids_TLK.int(), buffer[:, list(spec.moe_layers)])


def test_narrowed_rows_survive_the_next_forward_pass_over_the_buffer() -> None:
    buffer = device_buffer(SPEC, 5)
    ids_TLK, before = narrowed(SPEC, buffer), buffer[:, 1:].clone()
    buffer.zero_()
    assert torch.equal(ids_TLK.int(), before)


@pytest.mark.parametrize("spec", [SPEC, WIDE, FULL_BYTE], ids=["uint8", "int16", "256 experts"])
def test_a_padding_row_is_not_taken_for_a_captured_one(spec: RoutingSpec) -> None:
    buffer = device_buffer(spec, 6)
    buffer[4] = -1
    assert captured_rows(narrowed(spec, buffer).numpy(), spec=spec).tolist() == [True] * 4 + [False, True]


def test_a_layer_that_was_never_written_makes_the_row_invalid() -> None:
    buffer = device_buffer(SPEC, 6)
    buffer[2, 3] = 0
    assert captured_rows(narrowed(SPEC, buffer).numpy(), spec=SPEC).tolist() == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]


def test_a_shape_where_padding_would_look_real_is_refused() -> None:
    with pytest.raises(ConfigError, match="top-1"):
        check_representable(RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=256, top_k=1))


def test_a_frame_holds_exactly_the_rows_it_was_built_from() -> None:
    buffer = device_buffer(SPEC, 30)
    data = build_frame(
        SPEC,
        expert_ids_TLK=narrowed(SPEC, buffer),
        weight_versions_T=versions(30),
        kinds_T=kinds(30),
        first_row=7,
        sample_key=99,
        row_digests=True,
    )
    frame = parse_frame(data, spec=SPEC)
    routing = frame.routing(sample_id="s")
    assert np.array_equal(routing.expert_ids_TLK, buffer[:, 1:].numpy())
    assert (frame.first_row, frame.sample_key, bool(frame.valid_T.all())) == (7, 99, True)
    expected = layer_digests(routing.expert_ids_TLK, positions_T=np.arange(7, 37), layers_L=SPEC.moe_layers)
    assert frame.digests_L is not None
    assert np.array_equal(frame.digests_L, expected)


def test_no_rows_give_an_empty_frame() -> None:
    data = build_frame(
        SPEC,
        expert_ids_TLK=narrowed(SPEC, device_buffer(SPEC, 0)),
        weight_versions_T=versions(0),
        kinds_T=kinds(0),
        first_row=12,
    )
    assert (parse_frame(data, spec=SPEC).rows, parse_frame(data, spec=SPEC).provenance) == (0, ())


def test_provenance_follows_the_slot_and_not_the_request() -> None:
    provenance = SlotProvenance(16)
    provenance.stamp(torch.tensor([3, 4, 5]), weight_version=1, kind=RowKind.PREFILLED)
    provenance.stamp(
        torch.tensor([9, 5]), weight_version=2, kind=RowKind.DECODED
    )  # slot 5 was freed and reused
    weight_versions_T, kinds_T = provenance.gather(torch.tensor([4, 3, 5, 9]))
    assert weight_versions_T.tolist() == [1, 1, 2, 2]
    assert kinds_T.tolist() == [RowKind.PREFILLED, RowKind.PREFILLED, RowKind.DECODED, RowKind.DECODED]


def test_rows_without_usable_ids_become_missing_rows_of_no_version() -> None:
    provenance = SlotProvenance(8)
    provenance.stamp(torch.tensor([0, 1, 3]), weight_version=5, kind=RowKind.DECODED)
    weight_versions_T, kinds_T = provenance.gather(torch.tensor([0, 1, 2, 3]))  # slot 2 was never written
    buffer = device_buffer(SPEC, 4)
    buffer[3] = -1
    frame = parse_frame(
        build_frame(
            SPEC, expert_ids_TLK=narrowed(SPEC, buffer), weight_versions_T=weight_versions_T, kinds_T=kinds_T
        ),
        spec=SPEC,
    )
    assert frame.valid_T.tolist() == [True, True, False, False]
    assert frame.provenance == (
        ProvenanceSpan(start=0, end=2, weight_version=5, kind=RowKind.DECODED),
        ProvenanceSpan(start=2, end=4, weight_version=NO_VERSION, kind=RowKind.MISSING),
    )
    assert np.array_equal(frame.routing(sample_id="s").expert_ids_TLK[:2], buffer[:2, 1:].numpy())


def test_rows_of_an_unreadable_weight_version_are_refused() -> None:
    with pytest.raises(RoutingError, match="not a number"):
        build_frame(
            SPEC,
            expert_ids_TLK=narrowed(SPEC, device_buffer(SPEC, 3)),
            weight_versions_T=versions(3, UNREADABLE_VERSION),
            kinds_T=kinds(3),
        )


def test_weight_versions_are_decimal_counts() -> None:
    assert [parse_weight_version(text) for text in ("default", "0", "12")] == [0, 0, 12]


@pytest.mark.parametrize("text", ["", "v3", "-1", "1.5", "²", "9" * 30])
def test_any_other_weight_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="weight version"):
        parse_weight_version(text)
