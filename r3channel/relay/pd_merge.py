"""Merges the rows of one request that two engines hold (prefill/decode disaggregation). Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from r3channel.errors import RoutingError
from r3channel.model.spec import RoutingSpec
from r3channel.relay.reply import frame_bytes_of, key_of
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.routing import SampleRouting, columns_of, spans_of


def merge(prefill: SampleRouting, decode: SampleRouting) -> SampleRouting:
    """Merge the rows of a prefill engine and of a decode engine.

    The decode engine knows all tokens but never made the prompt's rows, so they are invalid there. Each such row is taken from
    the prefill engine if that has it. A row that both have is the decode engine's: it is the KV that generation went on with.
    Rows that neither has stay invalid, for the caller's policy to name.

    Args:
        prefill: The prefill engine's rows: a beginning of the same sample.
        decode: The decode engine's rows.

    Returns:
        One sample with the rows of both.

    Raises:
        RoutingError: The two do not have the same routing spec, or the prefill engine's rows are no beginning of the other's.
    """
    if prefill.spec != decode.spec:
        raise RoutingError(f"sample {decode.sample_id}: the two engines serve models with different routing")
    if prefill.first_row != decode.first_row or len(prefill.valid_T) > len(decode.valid_T):
        raise RoutingError(
            f"sample {decode.sample_id}: the prefill engine has rows {prefill.first_row}.."
            f"{prefill.first_row + len(prefill.valid_T)}, the decode engine {decode.first_row}.."
            f"{decode.first_row + len(decode.valid_T)}; expected a beginning of the same sample"
        )
    rows = len(prefill.valid_T)
    taken_T = np.zeros(len(decode.valid_T), dtype=bool)
    taken_T[:rows] = prefill.valid_T & ~decode.valid_T[:rows]
    ids_TLK = decode.expert_ids_TLK.copy()
    ids_TLK[taken_T] = prefill.expert_ids_TLK[taken_T[:rows]]
    versions_T, kinds_T = columns = columns_of(decode.provenance)
    for column_T, prefill_T in zip(columns, columns_of(prefill.provenance), strict=True):
        column_T[taken_T] = prefill_T[taken_T[:rows]]
    spans = spans_of(versions_T, kinds_T, first_row=decode.first_row)
    valid_T = decode.valid_T | taken_T
    return replace(decode, expert_ids_TLK=ids_TLK, valid_T=valid_T, provenance=spans, checked=False)


def merged_frame(
    prefill: Mapping[str, Any], decode: Mapping[str, Any], *, spec: RoutingSpec, sample_id: str = "?"
) -> bytes:
    """Make one frame of both engines' replies to one request.

    Every row is checked against its own engine's digest first. Both frames must be in the replies. With direct delivery they go
    to the relay instead, and neither is whole.

    Args:
        prefill: The prefill engine's reply, parsed JSON.
        decode: The decode engine's reply, parsed JSON.
        spec: The model's routing spec.
        sample_id: The sample's name, which errors use.

    Returns:
        The frame's bytes, for `Relay.add_frame`.

    Raises:
        RoutingMissing: A reply has no frame.
        RoutingError: What `parse_frame`, `Frame.verify` and `merge` raise.
    """
    halves = list[SampleRouting]()
    for reply, engine in ((prefill, "prefill"), (decode, "decode")):
        data = frame_bytes_of(reply, where=f"sample {sample_id} from engine {engine}")
        frame = parse_frame(data, spec=spec, sample_id=sample_id, engine=engine)
        halves.append(frame.routing(sample_id=sample_id))
    whole = merge(*halves)
    return encode_frame(
        spec, expert_ids_TLK=whole.expert_ids_TLK, first_row=whole.first_row, valid_T=whole.valid_T,
        provenance=whole.provenance, sample_key=key_of(decode) or 0,
    )  # fmt: skip
