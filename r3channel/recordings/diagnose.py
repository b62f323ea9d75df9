"""Name the known silent misalignments in a recorded step.

With two sides of a step, the result is the fewest claims that explain the ids that differ. With one side, it is what the bytes
show, and suspicions that only statistics raise. Shapes are right in nearly all of these faults, so only the ids can tell.

Two sides: `search` looks for moves of rows and layers under each reading of the ids. Then cells that show a fault by themselves
are named, and then what is left.

One side: the verdicts are rows of zeros, ids that repeat or do not exist, padding's ids, missing rows, and bytes that are not
the ticket's. The suspicions are equal rows of different tokens, a first layer that agrees better with a neighbour's token than
with its own, and log-probs that replay makes worse. One side cannot know for sure whether rows belong to their token, layer or
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import perm
from typing import Any, NamedTuple

import numpy as np

from r3channel.errors import R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.plan.placement import spread_ids
from r3channel.plan.ticket import TicketSample
from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.logprobs import SIDES
from r3channel.recordings.mistakes import MISTAKES, Finding
from r3channel.recordings.search import search, words_of
from r3channel.recordings.step import RecordedStep, spread
from r3channel.wire.routing import Ids, RowKind

_MOST, _AGAIN = 0.5, 16
"""The share of cells, and the number of cells, at which a pattern is not chance."""
_STRETCH = 4
"""Repeated rows are reported if at least so many follow each other."""
_PAIRS = 200
"""Fewest rows with a token that came before, and fewest log-probs, from which anything is concluded."""
_SURE = 4.0
"""A mean so many standard errors above 0 is not chance."""
_RARE = 1e-3
"""Equal rows are a fault only if chance makes fewer than this many."""
_CLEARER = 0.1
"""Another token must explain the first layer's experts better than the row's own token by this share."""
CANNOT = (
    "one side alone: rows of another token, layer, sample or rank look like any others; `r3channel check ENGINE ROUTER` compares "
    "two sides"
)


# -- what a cell shows by itself ----------------------------------------------------------------------------------------------


def _padding_rows(spec: RoutingSpec, ids_NK: Ids) -> Bools:
    # Padding has consecutive ids. In a model of few experts chance makes such cells, too: they count only if there are more.
    on_end_NK = (ids_NK[:, :1].astype(np.int64) + np.arange(spec.top_k)) % spec.num_experts
    hit_N = np.all(ids_NK == on_end_NK, axis=-1)
    likely = len(hit_N) * spec.num_experts / perm(spec.num_experts, min(spec.top_k, spec.num_experts))
    sure = hit_N.mean() >= _MOST or hit_N.sum() > _AGAIN
    return hit_N if sure and hit_N.sum() > 4 * likely else np.zeros_like(hit_N)


_LOOKS: dict[str, Callable[[RoutingSpec, Ids], Bools]] = {
    "zero_rows": lambda _, ids_NK: np.all(ids_NK == 0, axis=-1),
    "padding_rows": _padding_rows,
    "duplicated_ids": lambda _, ids_NK: np.any(np.diff(np.sort(ids_NK, -1), axis=-1) == 0, axis=-1),
    "out_of_range": lambda spec, ids_NK: np.any((ids_NK >= spec.num_experts) | (ids_NK < 0), axis=-1),
}
"""The plainest first. A cell counts for the first one that it shows."""


def _self_evident(spec: RoutingSpec, ids_RLK: Ids, among_RL: Bools) -> dict[str, Bools]:
    shown = dict[str, Bools]()
    for name, look in _LOOKS.items():
        shown[name] = hit_RL = np.zeros_like(among_RL)
        if among_RL.any():
            hit_RL[among_RL] = look(spec, ids_RLK[among_RL])
            among_RL = among_RL & ~hit_RL
    return shown | {"unexplained": among_RL}


# -- two sides ------------------------------------------------------------------------------------------------------------------


def judge(sides: AlignedPair) -> list[Finding]:
    """Return every fault of one pass of one step.

    The list is empty if the two sides agree.
    """
    other = sides.seen_RLK.shape[2] != sides.spec.top_k  # then neither layers nor rows can be compared
    tests = [_missing, *([_columns] if other else [_extra_layers, _explain])]
    hits = [(name, hit_RL) for test in tests for name, hit_RL in test(sides) if hit_RL.any()]
    options = {"step": sides.ticket.step, "of_pass": sides.of_pass}
    found = [_finding(name, cells=int(hit.sum()), **sides.example(hit), **options) for name, hit in hits]
    return [*found, *(_finding(name, **place, **options) for name, place in _versions(sides))]


def _explain(sides: AlignedPair) -> Iterator[tuple[str, Bools]]:
    again_RL = sides.differs_RL & _decoded_again(sides)[:, None]
    shown = partial(_self_evident, sides.spec, sides.seen_RLK)
    hits, left_RL = search(sides, sides.differs_RL & ~again_RL, lambda left_RL: shown(left_RL)["unexplained"])
    return iter([("retraction_overwrite", again_RL), *hits.items(), *shown(left_RL).items()])


def _missing(sides: AlignedPair) -> Iterator[tuple[str, Bools]]:
    gone_R = sides.valid_R & ~sides.there_R
    for sample in np.unique(sides.sample_R[gone_R]):
        hit_R = gone_R & (sides.sample_R == sample)
        first = sides.position_R[hit_R][0] == 0
        yield "missing_prefix" if first else "zero_rows", _all_layers(sides.spec, hit_R)


def _extra_layers(sides: AlignedPair) -> Iterator[tuple[str, Bools]]:
    """Find MTP layers with a decoder layer's ids.

    A layer that the layout maps to that decoder layer is no fault.
    """
    mapped = sides.ticket.layout.mtp
    for index, move in product(range(sides.extra_RLK.shape[1]), (0, 1)):
        rows = len(sides.want_RLK) - move
        same_RL = np.all(sides.want_RLK[:rows] == sides.extra_RLK[move:, index, None], axis=-1)
        for place in np.flatnonzero(same_RL.sum(0) > max(1, _MOST * rows)):
            if mapped[index : index + 1] != (sides.spec.moe_layers[place],):
                yield "mtp_shift", same_RL & (np.arange(same_RL.shape[1]) == place)


def _columns(sides: AlignedPair) -> Iterator[tuple[str, Bools]]:
    more = sides.seen_RLK[..., sides.spec.top_k :]
    constant = more.size and (more == more[:1, :1]).all()
    yield "fused_shared_expert" if constant else "unexplained", _all_layers(sides.spec, sides.both_R)


def _all_layers(spec: RoutingSpec, hit_R: Bools) -> Bools:
    return np.repeat(hit_R[:, None], spec.num_moe_layers, axis=1)


def _finding(name: str, *, because: str = "", **values: Any) -> Finding:
    return Finding(**{"name": name, "verdict": True, "what": because + MISTAKES[name].what} | values)


# -- versions -----------------------------------------------------------------------------------------------------------------


def _versions(sides: AlignedPair) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find rows whose provenance the two sides report differently."""
    said_4R, again_R = _reported_versions(sides), _decoded_again(sides)
    for name, begin, end in zip(sides.names, sides.begin_S, sides.begin_S[1:], strict=False):
        want_T, _, seen_T, _ = said_4R[:, begin:end]
        off = np.flatnonzero((want_T != seen_T) & ~again_R[begin:end])
        if len(off):
            fewer = len(np.unique(want_T)) > len(np.unique(seen_T))
            by_one = np.unique(np.abs(seen_T[off] - want_T[off])).tolist() == [1]
            fault = "version_off_by_one" if by_one and not fewer else "mixed_versions"
            yield fault, {"sample": name, "position": int(off[0])}


def _decoded_again(sides: AlignedPair) -> Bools:
    _, want_R, _, seen_R = _reported_versions(sides)
    return (want_R == RowKind.DECODED) & (seen_R == RowKind.PREFILLED)


def _reported_versions(sides: AlignedPair) -> Ints:
    """Return each row's version and kind, as both sides report them.

    The result is [4, R]: version and kind from the engines' side, then from the routers' side; -1 unless both sides report them.
    """
    said_4R = np.full((4, len(sides.sample_R)), -1)
    for begin, want, seen in zip(sides.begin_S, sides.want_spans, sides.seen_spans, strict=False):
        if want and seen and want != seen:
            rows = min(want[-1].end, seen[-1].end)
            said_4R[:, begin : begin + rows] = *spread(want, rows), *spread(seen, rows)
    return said_4R


# -- one side -------------------------------------------------------------------------------------------------------------------


def judge_alone(step: RecordedStep) -> list[Finding]:
    """Return every fault and suspicion that one side shows.

    Raises:
        R3Error: the step cannot be read; the errors are those of `RecordedStep.ids` and `RecordedStep.tensor_whole`.
    """
    findings: list[Finding] = []
    for sample in step.samples:
        findings += _plain(step, sample)
        if not findings and step.side == "engine":
            findings += _compare_digest(step, sample.sample_id)
    return [*_merge_findings(findings), *_suspicions(step), *judge_beside(step)]


def judge_beside(step: RecordedStep) -> list[Finding]:
    """Find faults in tensors and log-probs beside the ids."""
    names = [name for name in step.tokens if name not in step.cut]
    tensors = [finding for name in names for finding in _find_unsampled(step, name)]
    return [*_merge_findings(tensors), *log_probs_suspect(step)]


def _find_unsampled(step: RecordedStep, name: str) -> Iterator[Finding]:
    """Find rows without their sampled token, in tensors that have it."""
    for tensor in (tensor for tensor in step.ticket.tensors if tensor.chosen):
        *_, length_T, entries_N, _ = step.tensor_whole(tensor, name)
        row_N = np.repeat(np.arange(len(length_T)), length_T)
        has_N = entries_N[tensor.chosen] == step.tokens[name][row_N + 1]
        at = np.flatnonzero((length_T > 0) & (np.bincount(row_N, has_N, len(length_T)) == 0))
        if len(at):
            place = {"step": step.number, "sample": name, "position": int(at[0]), "cells": len(at)}
            yield _finding("tensor_row", because=f"{tensor.name}: ", **place)


def _plain(step: RecordedStep, sample: TicketSample) -> Iterator[Finding]:
    spec, (ids_TLK, there_T) = step.spec, step.ids(sample.sample_id)
    gone_T = ~there_T & (step.side == "engine")
    pads_TK = spread_ids(spec, positions_T=np.arange(len(ids_TLK)))
    for start, end in sample.invalid:
        gone_T[start:end] = False  # the engine reported these rows as invalid
    padded_T = there_T & (ids_TLK == pads_TK[:, None]).all((1, 2)) & (len(ids_TLK) * _chance(spec) < _RARE)
    rows = (gone_T, padded_T, there_T & ~padded_T)
    gone_TL, padded_TL, other_TL = (_all_layers(spec, one_T) for one_T in rows)
    shown = _self_evident(spec, ids_TLK, other_TL) | {"padding_rows": padded_TL}
    untold = {"unexplained", *(["zero_rows"] if spec.top_k == 1 else [])}
    told = [one for one in shown.items() if one[0] not in untold]
    for fault, hit_TL in [*told, ("missing_prefix" if gone_T[0] else "zero_rows", gone_TL)]:
        if hit_TL.any():
            row, place = (int(index[0]) for index in np.nonzero(hit_TL))
            layer, seen = spec.moe_layers[place], tuple(ids_TLK[row, place].tolist())
            at = {"position": row, "layer": layer, "cells": int(hit_TL.sum()), "seen": seen}
            yield _finding(fault, step=step.number, sample=sample.sample_id, **at)


def _compare_digest(step: RecordedStep, name: str) -> Iterator[Finding]:
    # `step.rows` compares the rows with the ticket's digest, which the engine computed.
    try:
        step.rows(name)
    except R3Error as error:
        yield _finding("unexplained", step=step.number, sample=name, what=f"{type(error).__name__}: {error}")


def _merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    grouped = dict[str, Finding]()
    for finding in findings:
        before = grouped.get(finding.name)
        grouped[finding.name] = replace(before, cells=before.cells + finding.cells) if before else finding
    return list(grouped.values())


# -- statistics ---------------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows of all samples whose tokens were recorded, without rows that were left to the live router."""

    names: Sequence[str]
    sample_R: Ids
    position_R: Ids
    ids_RLK: Ids
    token_R3: Ids
    """The token before, the row's own, and the one after it."""
    inner_R: Ids
    """True for rows that are neither the first nor the last of their sample."""


def _suspicions(step: RecordedStep) -> Iterator[Finding]:
    names = [sample.sample_id for sample in step.samples if sample.sample_id in step.tokens]
    parts = []
    for index, name in enumerate(names):
        ids_TLK, there_T = step.ids(name)
        at = np.flatnonzero(there_T)
        inner = (at > 0) & (at < len(there_T) - 1)
        around = step.tokens[name][at[:, None] + (-1, 0, 1)]
        parts.append((np.full(len(at), index), at, ids_TLK[at], around, inner))
    if parts:
        rows = _Rows(names, *map(np.concatenate, zip(*parts, strict=True)))
        yield from _find_repeats(step, rows)
        yield from _neighbours(step, rows)


def log_probs_suspect(step: RecordedStep) -> Iterator[Finding]:
    """Yield a suspicion if replay moves log-probs away from the engine's.

    Replay should bring the trainer's log-probs nearer to the engine's. If they are further away, by more than chance, then the
    replayed ids are not the engine's.
    """
    if not set(SIDES) <= step.logprobs.keys() or len(step.logprobs["engine"]) < _PAIRS:
        return
    columns = np.stack([step.logprobs[name].astype(np.float64) for name in SIDES])
    finite_N = np.isfinite(columns).all(0)  # one that is not would make the means NaN, which is no suspicion
    engine, on, off = columns[:, finite_N]
    worse = np.abs(on - engine) - np.abs(off - engine)
    if worse.mean() > _SURE * worse.std() / len(worse) ** 0.5:
        sample = int(np.bincount(step.logprobs["sample"][finite_N], worse).argmax())
        near, far = np.abs(on - engine).mean(), np.abs(off - engine).mean()
        because = f"mean |trainer - engine| {near:.3g}, {far:.3g} with replay off: "
        name = step.ticket.samples[sample].sample_id
        yield _finding("replay_hurts", step=step.number, sample=name, verdict=False, because=because)


def _find_repeats(step: RecordedStep, rows: _Rows) -> Iterator[Finding]:
    """Find several rows on end that repeat other tokens' experts.

    The experts are the same in all layers, as in a slot that was not written again.
    """
    count, token = len(rows.ids_RLK), rows.token_R3[:, 1]
    if not count or count * _chance(step.spec) >= _RARE:
        return
    (words,) = words_of(rows.ids_RLK.reshape(count, -1))
    _, first, inverse, times = np.unique(words, return_index=True, return_inverse=True, return_counts=True)
    first, times = first[inverse], times[inverse]
    other = np.append((times > 1) & (token != token[first]), np.zeros(_STRETCH, bool))
    at = np.flatnonzero(np.convolve(other, np.ones(_STRETCH), "valid") == _STRETCH)
    if len(at):
        twin, sample = (rows.names[int(rows.sample_R[row])] for row in (first[at[0]], at[0]))
        because = f"{_STRETCH} rows and more have the experts of rows of sample {twin}, of other tokens: "
        place = {"sample": sample, "position": int(rows.position_R[at[0]]), "cells": int(other.sum())}
        yield _finding("stale_row", step=step.number, verdict=False, because=because, **place)


def _neighbours(step: RecordedStep, rows: _Rows) -> Iterator[Finding]:
    # The first layer sees little but the token itself, so equal tokens choose alike there. If a neighbour's token explains the
    # choice better, rows moved.
    agreement = {by: _agreement(rows, by) for by in (-1, 0, 1)}
    best = max(agreement, key=lambda by: agreement[by])
    if best and agreement[best] > agreement[0] + _CLEARER:
        because = (
            f"the first MoE layer agrees with the token {best:+d} positions on in {agreement[best]:.0%} of its experts, with its "
            f"own in {agreement[0]:.0%}: "
        )
        place = {"sample": rows.names[0], "layer": step.spec.moe_layers[0]}
        yield _finding("off_by_one_row", step=step.number, verdict=False, because=because, **place)


def _agreement(rows: _Rows, by: int) -> float:
    """Return the mean share of experts that equal tokens have in common.

    Each row of the first layer is compared with the row before it whose token, `by` positions on, is the same. The share is 0 if
    there are too few such rows.
    """
    ids_RK, token_R = rows.ids_RLK[rows.inner_R, 0], rows.token_R3[rows.inner_R, 1 + by]
    order = np.argsort(token_R, kind="stable")
    same = np.flatnonzero(token_R[order][1:] == token_R[order][:-1])
    if len(same) < _PAIRS:
        return 0.0
    left, right = ids_RK[order[same]], ids_RK[order[same + 1]]
    return float((left[:, :, None] == right[:, None, :]).any(-1).mean())


def _chance(spec: RoutingSpec) -> float:
    """Return how probable it is that two rows have equal ids.

    The probability is not small in models of one layer, or of few experts. In models of many layers it is 0.0: no float is so
    small.
    """
    return float(perm(spec.num_experts, min(spec.top_k, spec.num_experts))) ** -spec.num_moe_layers
