"""What one side tells without the other: faults that its bytes show, and suspicions that only statistics raise.

Verdicts: rows of zeros, ids that repeat or do not exist, padding's ids, rows that are missing, bytes that are not the ticket's.
Suspicions: rows that stand twice although their tokens differ; a first layer that knows a neighbour's token better than its
own; log-probs that replay makes worse. Whether rows belong to their token, layer or rank, one side cannot know for sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from r3channel.errors import R3Error
from r3channel.plan.placement import spread_ids
from r3channel.recordings.diagnose import FAULTS
from r3channel.recordings.findings import Finding
from r3channel.recordings.logprobs import SIDES
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids
from r3channel.wire.validate import items_of, row_words

_STRETCH = 4
"""So many rows in a row must stand twice before it is reported."""
_PAIRS = 200
"""With fewer rows whose token stood before, the first layer's agreement says nothing."""
_SURE = 4.0
"""Standard errors of a mean that are no chance."""
_CLEARER = 0.1
"""By how much another token must explain the first layer's experts better than the row's own."""
CANNOT = (
    "one side alone: rows of another token, layer, sample or rank look like any others; `r3channel check ENGINE ROUTER` compares "
    "two sides"
)


def judge_alone(step: RecordedStep) -> list[Finding]:
    """Raises what reading does."""
    found: list[Finding] = []
    for sample in step.samples:
        ids_TLK, there_T = step.ids(sample.sample_id)
        found += _plain(step, sample.sample_id, ids_TLK, there_T)
        if not found and step.side == "engine":
            found += _held(step, sample.sample_id)
    return [*_grouped(found), *_suspicions(step), *log_probs_suspect(step)]


def _plain(step: RecordedStep, name: str, ids_TLK: Ids, there_T: Ids) -> Iterator[Finding]:
    spec = step.spec
    pads_TK = spread_ids(spec, positions_T=np.arange(len(ids_TLK)))
    sorted_TLK = np.sort(ids_TLK, -1)
    repeats_TL = (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any(-1)
    zero_TL = (ids_TLK == 0).all(-1) & (spec.top_k > 1)
    padded_TL = np.broadcast_to((ids_TLK == pads_TK[:, None]).all((1, 2))[:, None], zero_TL.shape)
    tests = {
        "zero_rows": zero_TL,
        "padding_rows": padded_TL & (spec.num_moe_layers * spec.top_k > 2),
        "out_of_range": (sorted_TLK[..., -1] >= spec.num_experts) | (sorted_TLK[..., 0] < 0),
        "duplicated_ids": repeats_TL & ~zero_TL,
    }
    for fault, hit_TL in tests.items():
        hit_TL = hit_TL & there_T[:, None]
        if hit_TL.any():
            row, place = (int(index[0]) for index in np.nonzero(hit_TL))
            at = {"position": row, "layer": spec.moe_layers[place], "seen": ids_TLK[row, place]}
            yield _finding(step, fault, name, **at, cells=int(hit_TL.sum()))
    invalid = step.ticket.sample(name).invalid if step.side == "engine" else ()
    gone_T = ~there_T
    for start, end in invalid:
        gone_T[start:end] = False  # the engine said so itself
    if gone_T.any() and step.side == "engine":
        row = int(np.flatnonzero(gone_T)[0])
        fault = "missing_prefix" if row == 0 else "zero_rows"
        yield _finding(step, fault, name, position=row, cells=int(gone_T.sum()) * spec.num_moe_layers)


def _held(step: RecordedStep, name: str) -> Iterator[Finding]:
    """Compare a sample's rows with the ticket's digest, which the engine computed."""
    try:
        step.rows(name)
    except R3Error as error:
        yield _finding(step, "unexplained", name, what=f"{type(error).__name__}: {error}")


def _grouped(found: Sequence[Finding]) -> list[Finding]:
    """One finding of each name: its first example, with all its cells."""
    first: dict[str, Finding] = {}
    cells: dict[str, int] = {}
    for one in found:
        first.setdefault(one.name, one)
        cells[one.name] = cells.get(one.name, 0) + one.cells
    return [replace(one, cells=cells[name]) for name, one in first.items()]


# -- statistics ---------------------------------------------------------------------------------------------------------------


def _suspicions(step: RecordedStep) -> Iterator[Finding]:
    names = [sample.sample_id for sample in step.samples if sample.sample_id in step.tokens]
    if names:
        rows = [step.ids(name)[0] for name in names]
        yield from _twice(step, names, rows)
        yield from _neighbours(step, names, rows)


def log_probs_suspect(step: RecordedStep) -> Iterator[Finding]:
    """Replay brings the trainer nearer to the engine; further away, by more than chance, it replays what is not the engine's."""
    if not set(SIDES) <= step.logprobs.keys() or len(step.logprobs["engine"]) < _PAIRS:
        return
    engine, on, off = (step.logprobs[name].astype(np.float64) for name in SIDES)
    worse = np.abs(on - engine) - np.abs(off - engine)
    if worse.mean() > _SURE * worse.std() / len(worse) ** 0.5:
        sample = int(np.bincount(step.logprobs["sample"], worse).argmax())
        what = f"mean |trainer - engine| {np.abs(on - engine).mean():.3g}, {np.abs(off - engine).mean():.3g} with replay off: "
        name = step.ticket.samples[sample].sample_id
        yield _finding(step, "replay_hurts", name, verdict=False, what=what + FAULTS["replay_hurts"])


def _twice(step: RecordedStep, names: Sequence[str], rows: Sequence[Ids]) -> Iterator[Finding]:
    """The same experts in all layers for several rows on end, of other tokens: a slot that was not written again."""
    if step.spec.num_moe_layers * step.spec.top_k < 8:
        return
    words = [row_words(items_of(np.ascontiguousarray(ids).reshape(len(ids), 1, -1))[:, 0]) for ids in rows]
    own = np.concatenate(words)
    token = np.concatenate([step.tokens[name][:-1] for name in names])
    _, inverse, times = np.unique(own, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    first = order[np.concatenate(([0], np.cumsum(times)[:-1]))][inverse]
    other = (times[inverse] > 1) & (token != token[first])
    at = _stretch(other)
    if at is not None:
        sample, position = _place(names, rows, at)
        twin, _ = _place(names, rows, int(first[at]))
        what = f"{_STRETCH} rows and more have the experts of rows of sample {twin}, of other tokens: {FAULTS['stale_row']}"
        yield _finding(
            step, "stale_row", sample, position=position, verdict=False, what=what, cells=int(other.sum())
        )


def _stretch(flags: Ids) -> int | None:
    """Where so many are set on end for the first time."""
    if len(flags) < _STRETCH:
        return None
    sums = np.convolve(flags.astype(np.int64), np.ones(_STRETCH, np.int64), "valid")
    found = np.flatnonzero(sums == _STRETCH)
    return int(found[0]) if len(found) else None


def _place(names: Sequence[str], rows: Sequence[Ids], at: int) -> tuple[str, int]:
    ends = np.cumsum([len(ids) for ids in rows])
    index = int(np.searchsorted(ends, at, side="right"))
    return names[index], at - int(ends[index - 1] if index else 0)


def _neighbours(step: RecordedStep, names: Sequence[str], rows: Sequence[Ids]) -> Iterator[Finding]:
    """The first layer sees little but the token itself, so equal tokens choose alike; if the neighbours' do more, rows moved."""
    agreement = {by: _agreement(step, names, rows, by) for by in (-1, 0, 1)}
    best = max(agreement, key=lambda by: agreement[by])
    if best and agreement[best] > agreement[0] + _CLEARER:
        what = (
            f"the first MoE layer agrees with the token {best:+d} positions on in {agreement[best]:.0%} of its experts, with its "
            f"own in {agreement[0]:.0%}: {FAULTS['off_by_one_row']}"
        )
        yield _finding(
            step, "off_by_one_row", names[0], verdict=False, what=what, layer=step.spec.moe_layers[0]
        )


def _agreement(step: RecordedStep, names: Sequence[str], rows: Sequence[Ids], by: int) -> float:
    """Mean share of experts that a row of the first layer has in common with the row before it of the same token."""
    ids_RK = np.concatenate([ids[1:-1, 0] for ids in rows])
    token_R = np.concatenate(
        [step.tokens[name][1 + by : len(ids) - 1 + by] for name, ids in zip(names, rows, strict=True)]
    )
    order = np.argsort(token_R, kind="stable")
    same = np.flatnonzero(token_R[order][1:] == token_R[order][:-1])
    if len(same) < _PAIRS:
        return 0.0
    left, right = ids_RK[order[same]], ids_RK[order[same + 1]]
    return float((left[:, :, None] == right[:, None, :]).any(-1).mean())


def _finding(step: RecordedStep, name: str, sample: str, **values: Any) -> Finding:
    seen = tuple(int(one) for one in values.pop("seen", ()))
    options = {"verdict": True, "what": FAULTS[name]} | values
    return Finding(name=name, step=step.number, sample=sample, seen=seen, **options)
