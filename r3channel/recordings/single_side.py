"""What one side tells without the other: faults that its bytes show, and suspicions that only statistics raise.

Verdicts: rows of zeros, ids that repeat or do not exist, padding's ids, rows that are missing, bytes that are not the ticket's.
Suspicions: rows that stand twice although their tokens differ; a first layer that knows a neighbour's token better than its
own; log-probs that replay makes worse. Whether rows belong to their token, layer or rank, one side cannot know for sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import perm
from typing import Any, NamedTuple

import numpy as np

from r3channel.errors import R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.plan.placement import spread_ids
from r3channel.plan.ticket import TicketSample
from r3channel.recordings.findings import FAULTS, Finding
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
_RARE = 1e-3
"""Rows that may be alike by chance, for those that are alike to be a fault."""
_CLEARER = 0.1
"""By how much another token must explain the first layer's experts better than the row's own."""
CANNOT = (
    "one side alone: rows of another token, layer, sample or rank look like any others; `r3channel check ENGINE ROUTER` compares "
    "two sides"
)


def judge_alone(step: RecordedStep) -> list[Finding]:
    """Raises what reading does."""
    findings: list[Finding] = []
    for sample in step.samples:
        findings += _plain(step, sample)
        if not findings and step.side == "engine":
            findings += _held(step, sample.sample_id)
    return [*_grouped(findings), *_suspicions(step), *judge_beside(step)]


def judge_beside(step: RecordedStep) -> list[Finding]:
    """What came beside the ids: tensors, and log-probs."""
    tensors = [finding for name in step.tokens if name not in step.cut for finding in _unsampled(step, name)]
    return [*_grouped(tensors), *log_probs_suspect(step)]


def _unsampled(step: RecordedStep, name: str) -> Iterator[Finding]:
    """Rows without the token that was sampled from them, of tensors that have it."""
    for tensor in (tensor for tensor in step.ticket.tensors if tensor.chosen):
        *_, length_T, entries_N, _ = step.tensor_whole(tensor, name)
        row_N = np.repeat(np.arange(len(length_T)), length_T)
        has_N = entries_N[tensor.chosen] == step.tokens[name][row_N + 1]
        at = np.flatnonzero((length_T > 0) & (np.bincount(row_N, has_N, len(length_T)) == 0))
        if len(at):
            fields = {"cells": len(at), "what": f"{tensor.name}: {FAULTS['tensor_row']}"}
            yield _finding(step, "tensor_row", name, position=int(at[0]), **fields)


def _plain(step: RecordedStep, sample: TicketSample) -> Iterator[Finding]:
    spec, (ids_TLK, there_T) = step.spec, step.ids(sample.sample_id)
    there_TL = np.repeat(there_T[:, None], spec.num_moe_layers, axis=1)
    gone_TL = ~there_TL & (step.side == "engine")
    for start, end in sample.invalid:
        gone_TL[start:end] = False  # the engine said so itself
    pads_TK, sorted_TLK = spread_ids(spec, positions_T=np.arange(len(ids_TLK))), np.sort(ids_TLK, -1)
    repeats_TL = (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any(-1)
    zero_TL = (ids_TLK == 0).all(-1) & (spec.top_k > 1)
    padded_TL = (ids_TLK == pads_TK[:, None]).all((1, 2))[:, None] & there_TL
    outside_TL = (sorted_TLK[..., -1] >= spec.num_experts) | (sorted_TLK[..., 0] < 0)
    tests = [
        ("zero_rows", zero_TL & there_TL), ("padding_rows", padded_TL & (len(ids_TLK) * _chance(spec) < _RARE)),
        ("out_of_range", outside_TL & there_TL), ("duplicated_ids", repeats_TL & ~zero_TL & there_TL),
        ("missing_prefix" if gone_TL[0].any() else "zero_rows", gone_TL),
    ]  # fmt: skip
    for fault, hit_TL in tests:
        if hit_TL.any():
            row, place = (int(index[0]) for index in np.nonzero(hit_TL))
            at = {"position": row, "layer": spec.moe_layers[place], "cells": int(hit_TL.sum())}
            yield _finding(step, fault, sample.sample_id, seen=tuple(ids_TLK[row, place].tolist()), **at)


def _held(step: RecordedStep, name: str) -> Iterator[Finding]:
    """Compare a sample's rows with the ticket's digest, which the engine computed."""
    try:
        step.rows(name)
    except R3Error as error:
        yield _finding(step, "unexplained", name, what=f"{type(error).__name__}: {error}")


def _grouped(findings: Sequence[Finding]) -> list[Finding]:
    """One finding of each name: its first example, with all its cells."""
    grouped = dict[str, Finding]()
    for finding in findings:
        before = grouped.get(finding.name)
        grouped[finding.name] = replace(before, cells=before.cells + finding.cells) if before else finding
    return list(grouped.values())


# -- statistics ---------------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows of all samples whose tokens were recorded; those that were left to the live router are not among them."""

    names: Sequence[str]
    sample_R: Ids
    position_R: Ids
    ids_RLK: Ids
    token_3R: Ids
    """The token before, the row's own, and the one after it."""
    inner_R: Ids
    """Neither the first nor the last of its sample."""


def _suspicions(step: RecordedStep) -> Iterator[Finding]:
    names = [sample.sample_id for sample in step.samples if sample.sample_id in step.tokens]
    parts = []
    for index, name in enumerate(names):
        ids_TLK, there_T = step.ids(name)
        token_T, at = step.tokens[name], np.flatnonzero(there_T)
        inner = (at > 0) & (at < len(there_T) - 1)
        around = np.stack([token_T[at - 1], token_T[at], token_T[at + 1]]).T
        parts.append((np.full(len(at), index), at, ids_TLK[at], around, inner))
    if parts:
        sample, position, ids, token, inner = map(np.concatenate, zip(*parts, strict=True))
        rows = _Rows(names, sample, position, ids, token.T, inner)
        yield from _twice(step, rows)
        yield from _neighbours(step, rows)


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


def _twice(step: RecordedStep, rows: _Rows) -> Iterator[Finding]:
    """The same experts in all layers for several rows on end, of other tokens: a slot that was not written again."""
    count, token = len(rows.ids_RLK), rows.token_3R[1]
    if not 0 < count * _chance(step.spec) < _RARE:
        return
    words = row_words(items_of(np.ascontiguousarray(rows.ids_RLK).reshape(count, 1, -1))[:, 0])
    _, first, inverse, times = np.unique(words, return_index=True, return_inverse=True, return_counts=True)
    first, times = first[inverse], times[inverse]
    other = np.append((times > 1) & (token != token[first]), np.zeros(_STRETCH, bool))
    at = np.flatnonzero(np.convolve(other, np.ones(_STRETCH), "valid") == _STRETCH)
    if len(at):
        twin, sample = (rows.names[int(rows.sample_R[row])] for row in (first[at[0]], at[0]))
        what = f"{_STRETCH} rows and more have the experts of rows of sample {twin}, of other tokens: {FAULTS['stale_row']}"
        place: dict[str, Any] = {"position": int(rows.position_R[at[0]]), "cells": int(other.sum())}
        yield _finding(step, "stale_row", sample, verdict=False, what=what, **place)


def _neighbours(step: RecordedStep, rows: _Rows) -> Iterator[Finding]:
    """The first layer sees little but the token itself, so equal tokens choose alike; if the neighbours' do more, rows moved."""
    agreement = {by: _agreement(rows, by) for by in (-1, 0, 1)}
    best = max(agreement, key=lambda by: agreement[by])
    if best and agreement[best] > agreement[0] + _CLEARER:
        what = (
            f"the first MoE layer agrees with the token {best:+d} positions on in {agreement[best]:.0%} of its experts, with its "
            f"own in {agreement[0]:.0%}: {FAULTS['off_by_one_row']}"
        )
        fields: dict[str, Any] = {"verdict": False, "what": what, "layer": step.spec.moe_layers[0]}
        yield _finding(step, "off_by_one_row", rows.names[0], **fields)


def _agreement(rows: _Rows, by: int) -> float:
    """Mean share of experts that a row of the first layer has in common with the row before it of the same token."""
    ids_RK, token_R = rows.ids_RLK[rows.inner_R, 0], rows.token_3R[1 + by, rows.inner_R]
    order = np.argsort(token_R, kind="stable")
    same = np.flatnonzero(token_R[order][1:] == token_R[order][:-1])
    if len(same) < _PAIRS:
        return 0.0
    left, right = ids_RK[order[same]], ids_RK[order[same + 1]]
    return float((left[:, :, None] == right[:, None, :]).any(-1).mean())


def _chance(spec: RoutingSpec) -> float:
    """How probable it is that a row has the very ids of another: not small in models of one layer, or of few experts."""
    return float(perm(spec.num_experts, min(spec.top_k, spec.num_experts))) ** -spec.num_moe_layers


def _finding(step: RecordedStep, name: str, sample: str, **values: Any) -> Finding:
    options = {"verdict": True, "what": FAULTS[name]} | values
    return Finding(name=name, step=step.number, sample=sample, **options)
