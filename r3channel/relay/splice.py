"""Rows of one sample that came in several frames, put together. Pure functions of checked routings.

`append` is for multi-turn and for resumed requests (`routed_experts_start_len`): only new rows travel, and rows that do not
begin exactly where the held ones end are refused. `merge` is for prefill/decode disaggregation, where two engines each hold
a part of the rows.
"""

from __future__ import annotations

import numpy as np

from r3channel.errors import PayloadCorrupt, RoutingError, RowGap, RowOverlap
from r3channel.routing import RowKind, SampleRouting, spans_of
from r3channel.wire.frame import Frame, encode_frame, parse_frame


def check_adjoins(*, held_rows: int, first_row: int, where: str) -> None:
    """Raise RowGap or RowOverlap unless the new rows begin where the held ones end."""
    if first_row == held_rows:
        return
    kind, what = (RowGap, "rows between are nowhere") if first_row > held_rows else (RowOverlap, "sent again")
    raise kind(
        f"{where}: rows from {first_row} on, but rows 0..{held_rows} are held; expected to begin at row {held_rows} ({what}). "
        "Set routed_experts_start_len to the tokens of the turns before, less one"
    )


def append(held: SampleRouting, turn: SampleRouting) -> SampleRouting:
    """One sample with the rows of both; `turn` must begin where `held` ends. Nothing of either is changed."""
    where = f"sample {turn.sample_id}"
    check_adjoins(held_rows=held.first_row + len(held.valid_T), first_row=turn.first_row, where=where)
    return SampleRouting(
        spec=held.spec,
        sample_id=turn.sample_id,
        tokens=turn.tokens,
        first_row=held.first_row,
        expert_ids_TLK=np.concatenate([held.expert_ids_TLK, turn.expert_ids_TLK]),
        valid_T=np.concatenate([held.valid_T, turn.valid_T]),
        provenance=(*held.provenance, *turn.provenance),
    )


def merge(prefill: SampleRouting, decode: SampleRouting) -> SampleRouting:
    """One sample from the rows of a prefill engine and those of a decode engine.

    The decode engine knows all tokens but never made the prompt's rows, so they are invalid there; each is taken from the
    prefill engine when that has it. A row that both have is the decode engine's (it is the KV that generation went on
    with). Rows that neither has stay invalid, for the caller's policy to name.
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
    versions_T, kinds_T = _per_row(decode)
    prefill_versions_T, prefill_kinds_T = _per_row(prefill)
    versions_T[taken_T] = prefill_versions_T[taken_T[:rows]]
    kinds_T[taken_T] = prefill_kinds_T[taken_T[:rows]]
    return SampleRouting(
        spec=decode.spec,
        sample_id=decode.sample_id,
        tokens=decode.tokens,
        first_row=decode.first_row,
        expert_ids_TLK=ids_TLK,
        valid_T=decode.valid_T | taken_T,
        provenance=spans_of(versions_T, kinds_T, first_row=decode.first_row),
    )


def _per_row(routing: SampleRouting) -> tuple[np.ndarray, np.ndarray]:
    """(weight versions int64 [T], kinds uint8 [T])."""
    lengths = [span.end - span.start for span in routing.provenance]
    versions = np.array([span.weight_version for span in routing.provenance], np.int64)
    kinds = np.array([span.kind for span in routing.provenance], np.uint8)
    assert all(kind in RowKind._value2member_map_ for kind in kinds.tolist())
    return np.repeat(versions, lengths), np.repeat(kinds, lengths)


def frame_of(
    routing: SampleRouting, *, sample_key: int = 0, row_digests: bool = False, codec: str = "auto"
) -> bytes:
    """The frame of a routing that was put together."""
    return encode_frame(
        routing.spec,
        expert_ids_TLK=routing.expert_ids_TLK,
        first_row=routing.first_row,
        valid_T=routing.valid_T,
        provenance=routing.provenance,
        sample_key=sample_key,
        codec=codec,
        row_digests=row_digests,
    )


def join_frames(before: Frame, turn: Frame, *, sample_id: str) -> tuple[Frame, bytes]:
    """(frame, its bytes) with the rows of both; the engines' digests must add up to those of the joined rows.

    Where one of them has lost the order within its rows, the joined frame says so of all, and the digests are left out.
    """
    ordered = before.ordered and turn.ordered
    joined = append(before.routing(sample_id=sample_id), turn.routing(sample_id=sample_id))
    expected_L = None
    if before.digests_L is not None and turn.digests_L is not None and before.ordered == turn.ordered:
        expected_L = before.digests_L + turn.digests_L  # modulo 2**64
    data = frame_of(
        joined,
        sample_key=turn.sample_key,
        row_digests=expected_L is not None,
        codec="auto" if ordered else "set",
    )
    frame = parse_frame(data, spec=before.spec, sample_id=sample_id, engine="relay")
    if expected_L is not None and not np.array_equal(frame.digests_L, expected_L):  # type: ignore[arg-type]
        raise PayloadCorrupt(
            f"sample {sample_id}: the turns' digests do not add up to those of the joined rows"
        )
    return frame, data
