"""Writes the golden frames: `python -m tests.golden.regenerate`. For a wire version that nobody has yet, and never after.

Each `frame_v2_NAME.bin` comes with the ids that it must decode to, `frame_v2_NAME.npy`. Those without ids are refused by name:
`frame_v1.bin`, `frame_v2_uint8_prefix.bin` and `frame_v2_uint8_after_prefix.bin` (rows that two frames share), and
`frame_v2_uint8_layers.bin` (chunks of two layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind
from tests.support.samples import SPEC, WIDE, random_ids

FOLDER = Path(__file__).parent
ROWS = 12


def golden_spec(name: str) -> RoutingSpec:
    return WIDE if name.startswith("int16") else SPEC


def golden_frames() -> Iterator[tuple[str, bytes, Ids]]:
    """(name, bytes, ids) of every golden frame."""
    small, wide = random_ids(ROWS), random_ids(ROWS, spec=WIDE)
    padded = np.tile(wide[:1], (ROWS, 1, 1))
    valid_T = np.arange(ROWS) % 4 != 3
    yield "uint8_stored", _frame(SPEC, small, codec="stored"), small
    yield "uint8_set", _frame(SPEC, small, codec="set"), np.sort(small, axis=-1)
    yield "invalid_rows", _frame(SPEC, small, valid_T=valid_T), small
    yield "int16_lz4", _frame(WIDE, padded, codec="lz4"), padded
    yield "int16_packed9", _frame(WIDE, wide), wide
    yield "int16_set", _frame(WIDE, wide, codec="set"), np.sort(wide, axis=-1)


def _frame(spec: RoutingSpec, ids_TLK: Ids, **options: object) -> bytes:
    spans = [
        ProvenanceSpan(start=0, end=4, weight_version=6, kind=RowKind.PREFILLED),
        ProvenanceSpan(start=4, end=ROWS, weight_version=7, kind=RowKind.DECODED),
    ]
    values = {"expert_ids_TLK": ids_TLK, "provenance": spans, "sample_key": 99} | options
    return encode_frame(spec, **values)  # pyright: ignore[reportArgumentType]


def main() -> None:
    for name, data, ids_TLK in golden_frames():
        (FOLDER / f"frame_v2_{name}.bin").write_bytes(data)
        np.save(FOLDER / f"frame_v2_{name}.npy", ids_TLK, allow_pickle=False)
        print(f"{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
