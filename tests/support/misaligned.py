"""An engine's side of a small step under any layout, and the routers' side with one known mistake in it.

Each mistake is made where a framework makes it: in the order of a rank's routers, in layers, in ids. `CASES` has them by
their name in `r3channel.recordings.diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import spread_ids
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recordings.consumed import ConsumedRows
from r3channel.recordings.step import RecordedStep
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, as_tokens, hash_tokens
from tests.support import combined as mistakes
from tests.support.combined import State, made
from tests.support.samples import random_ids, span

LAYOUTS = (
    "", "dp=2", "tp=2", "cp=2", "tp=2,cp=2", "tp=2,cp=2,packing=thd", "pp=2", "dp=2,pp=2,packing=thd", "cp=2,packing=thd",
    "tp=4,cp=2",
)  # fmt: skip
PLAIN = RoutingSpec(num_layers=6, moe_layers=tuple(range(6)), num_experts=64, top_k=4)
DENSE = RoutingSpec(num_layers=6, moe_layers=(1, 2, 3, 4, 5), num_experts=64, top_k=4)
WIDE = RoutingSpec(num_layers=6, moe_layers=tuple(range(6)), num_experts=384, top_k=4)
Rows = dict[str, Ids]


def engine_step(
    spec: RoutingSpec = PLAIN, layout: str = "", *, seed: int = 0, lengths: tuple[int, ...] = (33, 25, 33, 25),
    shared: int = 0,
) -> RecordedStep:  # fmt: skip
    """Two micro-batches on each DP rank; with `shared`, all samples begin with the same so many tokens and rows. Two weight
    versions in each sample: an early part, prefilled, and a later one."""
    rng, cut = np.random.default_rng(seed), TrainerLayout.parse(layout)
    common = random_ids(shared, spec=spec, seed=rng)
    prompt = rng.integers(4, 512, max(shared, 1))[:shared].astype(np.int32)
    parts = []
    for count in lengths * cut.dp:
        ids = random_ids(count - 1, spec=spec, seed=rng)
        ids[:shared] = common[: count - 1]
        own = rng.integers(4, 512, count).astype(np.int32)
        own[:shared] = prompt[:count]
        middle = (count - 1) // 2
        spans = _spans((0, middle, 3, RowKind.PREFILLED), (middle, count - 1, 4, RowKind.DECODED))
        parts.append(Part(ids, own, [spans]))
    return step_of(spec, cut, parts)


def combined(seed: int, kind: str = "") -> tuple[set[str], RecordedStep, RecordedStep]:
    """Mistakes under one of the layouts, as `combined.combination`: (their names, engines' side, routers' side)."""
    rng, layout = np.random.default_rng(seed + 1_000_000), LAYOUTS[seed % len(LAYOUTS)]
    spec = PLAIN if "pp=2" in layout else (PLAIN, DENSE, WIDE)[rng.integers(3)]
    lengths = tuple(rng.integers(20, 60, int(rng.integers(2, 5)) * 2).tolist())
    step = engine_step(spec, layout, seed=seed, lengths=lengths)
    names, seen = mistakes.combination(step, seed, kind)
    return names, step, seen


def variation(real: RecordedStep, layout: str = "", *, seed: int = 0) -> RecordedStep:
    """A clean step out of a real one's rows and tokens: beginnings of its samples, in several turns under several versions; some
    go on after a retraction, some share a prompt, of some the engine has no rows for a stretch."""
    rng, cut = np.random.default_rng(seed), TrainerLayout.parse(layout)
    parts = []
    for index in range(4 * cut.dp):
        source = real.samples[int(rng.integers(len(real.samples)))]
        ids, own = np.array(real.rows(source.sample_id)), np.array(real.tokens[source.sample_id])
        count = int(rng.integers(2, len(own) + 1))
        ids, own = ids[: count - 1], own[:count]
        if index and seed % 3 == 1:
            common = min(int(rng.integers(1, 9)), count - 1, len(parts[-1].ids))
            ids[:common], own[:common] = parts[-1].ids[:common], parts[-1].tokens[:common]
        cuts = sorted({0, *rng.integers(0, count - 1, seed % 4).tolist()})
        turns = [_turn(rng, *ends, version) for version, ends in enumerate(pairwise([*cuts, count - 1]))]
        start = int(rng.integers(count - 1))
        gone = ((start, min(start + 3, count - 1)),) if seed % 5 == 4 and index % 2 else ()
        parts.append(Part(ids, own, turns, gone))
    return step_of(real.spec, cut, parts)


def _turn(rng: np.random.Generator, start: int, end: int, version: int) -> tuple[ProvenanceSpan, ...]:
    """Prefilled, decoded, and for some prefilled again and decoded on: a retraction."""
    edges = [start, *sorted(rng.integers(start, end + 1, int(rng.integers(0, 4))).tolist()), end]
    kinds = [RowKind.PREFILLED, RowKind.DECODED] * 2
    return _spans(*((a, b, version, kind) for (a, b), kind in zip(pairwise(edges), kinds, strict=False)))


def _spans(*parts: tuple[int, int, int, RowKind]) -> tuple[ProvenanceSpan, ...]:
    return tuple(span(*part) for part in parts if part[1] > part[0])


@dataclass(frozen=True)
class Part:
    """One sample's rows, tokens, and the spans of each of its turns."""

    ids: Ids
    tokens: Ids
    turns: list[tuple[ProvenanceSpan, ...]]
    invalid: tuple[tuple[int, int], ...] = ()

    def sample(self, name: str) -> TicketSample:
        spans, count = tuple(chain(*self.turns)), len(self.tokens)
        digest = fold(layer_digests(self.ids, first_row=0, valid_T=self._valid))
        tokens_hash = hash_tokens(as_tokens(self.tokens))
        return TicketSample(name, count, tokens_hash, digest, spans, self.invalid)

    def frames(self, spec: RoutingSpec) -> list[bytes]:
        valid_T, frames = self._valid, []
        for spans in filter(None, self.turns):
            own = slice(spans[0].start, spans[-1].end)
            how: dict[str, Any] = {"first_row": own.start, "provenance": spans, "codec": "stored"}
            valid = None if valid_T is None else valid_T[own]
            frames.append(encode_frame(spec, expert_ids_TLK=self.ids[own].copy(), valid_T=valid, **how))
        return frames

    @property
    def _valid(self) -> Ids | None:
        valid_T = np.ones(len(self.ids), bool)
        for start, end in self.invalid:
            valid_T[start:end] = False
        return valid_T if self.invalid else None


def step_of(spec: RoutingSpec, layout: TrainerLayout, parts: list[Part]) -> RecordedStep:
    named = {f"s{index}": part for index, part in enumerate(parts)}
    assignment = given(list(named), dp=layout.dp)
    samples = tuple(named[name].sample(name) for name in assignment.sample_ids)
    frames = {name: part.frames(spec) for name, part in named.items()}
    tokens = {name: as_tokens(part.tokens) for name, part in named.items()}
    return RecordedStep(Ticket("run", 7, spec, layout, assignment, samples, 1024), frames, tokens, spec)


def given(names: list[str], *, dp: int) -> Assignment:
    """Two micro-batches on each rank, samples in their order."""
    size = len(names) // (2 * dp)
    batches = [names[begin : begin + size] for begin in range(0, len(names), size)]
    return Assignment.given([batches[2 * rank : 2 * rank + 2] for rank in range(dp)])


def rows_of(step: RecordedStep) -> Rows:
    return {sample.sample_id: np.array(step.ids(sample.sample_id)[0]) for sample in step.samples}


def router_step(
    step: RecordedStep, rows: Rows, *, spec: RoutingSpec | None = None, of_pass: str = "forward",
    beside: Rows | None = None,
) -> RecordedStep:  # fmt: skip
    """`rows` as what routers used; `beside` is the forward pass where `rows` are another one's."""
    found = ConsumedRows(step.ticket, spec or step.spec)
    for name, ids in rows.items():
        found.ids[of_pass, name] = ids.astype(found.spec.id_dtype)
        found.there[of_pass, name] = np.ones(ids.shape[:2], bool)
    for name, ids in (beside or {}).items():
        found.ids["forward", name], found.there["forward", name] = ids, np.ones(ids.shape[:2], bool)
    return found.step()


def changed(step: RecordedStep, change: Callable[[str, Ids], Ids], **options: Any) -> RecordedStep:
    return router_step(step, {name: change(name, ids) for name, ids in rows_of(step).items()}, **options)


def written(where: Any, what: Callable[[Ids], Any]) -> Callable[[RecordedStep], RecordedStep]:
    """Something else in a part of sample s1."""

    def change(name: str, ids: Ids) -> Ids:
        if name == "s1":
            ids[where] = what(ids)
        return ids

    return lambda step: changed(step, change)


def shifted(by: int) -> Callable[[RecordedStep], RecordedStep]:
    """Each row has the ids that stand so many rows on."""
    return lambda step: changed(step, lambda _, ids: ids[(np.arange(len(ids)) + by).clip(0, len(ids) - 1)])


def rechunked(order: list[int]) -> Callable[[RecordedStep], RecordedStep]:
    """The context-parallel chunks of each sample in another order."""

    def change(state: State) -> None:
        for name in state.names:
            slots = state.slots(name)
            chunks = np.array_split(slots, len(order))
            state.ids_SLK[slots] = state.ids_SLK[np.concatenate([chunks[chunk] for chunk in order])]

    return made(change)


def padding_rows(step: RecordedStep) -> RecordedStep:
    pads = spread_ids(step.spec, positions_T=np.arange(40))
    return written(slice(20, 24), lambda _: pads[20:24, None])(step)


def dense_layer_counted(step: RecordedStep) -> RecordedStep:
    """Layer l reads column l of a buffer that has one for MoE layers only."""
    layers = [min(layer, step.spec.num_moe_layers - 1) for layer in step.spec.moe_layers]
    return changed(step, lambda _, ids: ids[:, layers])


def mtp_shift(step: RecordedStep) -> RecordedStep:
    """The MTP layer's router takes the last decoder layer's ids."""
    count = step.spec.num_layers
    more = replace(step.spec, num_layers=count + 1, moe_layers=(*step.spec.moe_layers, count))
    return changed(step, lambda _, ids: np.concatenate([ids, ids[:, -1:]], axis=1), spec=more)


def retraction_overwrite(step: RecordedStep) -> RecordedStep:
    """Decoded rows 20..30 of one sample come back prefilled, with other ids in half of them."""
    rows, sample = rows_of(step), step.ticket.sample("s0")
    rows["s0"][20:30:2] = random_ids(5, spec=step.spec, seed=99)
    first, second = sample.provenance
    again = second._replace(start=20, end=30, kind=RowKind.PREFILLED)
    spans = (first, second._replace(end=20), again, second._replace(start=30))
    return with_spans(step, router_step(step, rows), {"s0": spans})


def with_spans(step: RecordedStep, router: RecordedStep, spans: dict[str, Any]) -> RecordedStep:
    passes = dict(router.passes)
    for name, own in spans.items():
        frame = encode_frame(step.spec, expert_ids_TLK=router.ids(name)[0], provenance=own, codec="stored")
        passes["forward", name] = [frame]
    return replace(router, passes=passes)


def versions_said(say: Callable[[TicketSample], Any]) -> Callable[[RecordedStep], RecordedStep]:
    """The rows as they are, under other versions."""
    told = lambda step: {sample.sample_id: say(sample) for sample in step.samples}  # noqa: E731
    return lambda step: with_spans(step, router_step(step, rows_of(step)), told(step))


def of_last_version(sample: TicketSample) -> Any:
    """The whole sample is said to be of the version that its last row has."""
    return _spans((0, sample.tokens - 1, sample.provenance[-1].weight_version, RowKind.DECODED))


def one_later(sample: TicketSample) -> Any:
    return tuple(one._replace(weight_version=one.weight_version + 1) for one in sample.provenance)


def cp_chunks_swapped(state: State) -> None:
    one, other = (np.array_split(state.slots(name), 4)[1] for name in ("s0", "s2"))
    state.swap(one, other)


def fused_shared_expert(step: RecordedStep, *, mtp: int = 0) -> RecordedStep:
    spec, count = step.spec, step.spec.num_layers
    more = replace(spec, num_layers=count + mtp, moe_layers=(*spec.moe_layers, *range(count, count + mtp)))
    more = replace(more, top_k=spec.top_k + 1, num_experts=spec.num_experts + 1)
    width = ((0, 0), (0, mtp), (0, 1))
    return changed(step, lambda _, ids: np.pad(ids, width, constant_values=step.spec.num_experts), spec=more)


other_microbatch = made(lambda state: state.take_calls(lambda dp, batch, *part: (dp, 1 - batch, *part)))


def recompute_other_microbatch(step: RecordedStep) -> RecordedStep:
    return router_step(step, rows_of(other_microbatch(step)), of_pass="recompute", beside=rows_of(step))


def int16_as_uint8(step: RecordedStep) -> RecordedStep:
    half = lambda ids: ids.astype("<i2").view(np.uint8)[..., : step.spec.top_k]  # noqa: E731
    return changed(step, lambda _, ids: np.ascontiguousarray(half(np.ascontiguousarray(ids))))


CASES: dict[str, list[tuple[RoutingSpec, str, Callable[[RecordedStep], RecordedStep]]]] = {
    "zero_rows": [(PLAIN, "", written(slice(5, 9), lambda _: 0))],
    "duplicated_ids": [(PLAIN, "", written((slice(5, 9), 2, 1), lambda ids: ids[5:9, 2, 0]))],
    "padding_rows": [(PLAIN, "", padding_rows)],
    "off_by_one_row": [(PLAIN, "dp=2", shifted(1)), (DENSE, "tp=2", shifted(-1))],
    "missing_prefix": [(PLAIN, "", shifted(6))],
    "shifted_layer": [(PLAIN, "", lambda step: changed(step, lambda _, ids: np.roll(ids, 1, axis=1)))],
    "dense_layer_counted": [(DENSE, "", dense_layer_counted)],
    "mtp_shift": [(DENSE, "", mtp_shift)],
    "retraction_overwrite": [(PLAIN, "", retraction_overwrite)],
    "mixed_versions": [(PLAIN, "", versions_said(of_last_version))],
    "version_off_by_one": [(PLAIN, "", versions_said(one_later))],
    "stale_row": [(PLAIN, "", made(lambda state: state.take(state.slots("s2")[:7], state.ids_SLK[state.slots("s0")[:7]])))],
    "swapped_samples": [(PLAIN, "", made(mistakes.swap)), (PLAIN, "cp=2", made(mistakes.swap))],
    "cp_chunks_swapped": [(PLAIN, "cp=2,packing=thd", made(cp_chunks_swapped))],
    "zigzag_order": [
        (PLAIN, "cp=2", rechunked([0, 2, 3, 1])), (DENSE, "cp=4,packing=thd", rechunked([0, 7, 1, 6, 2, 5, 3, 4])),
    ],
    "sp_halves_swapped": [(PLAIN, "tp=2", made(lambda state: state.take_parts([1, 0])))],
    "stage_reversed": [(PLAIN, "pp=2", made(mistakes.layers_reversed)), (PLAIN, "", made(mistakes.layers_reversed))],
    "rotated_rows": [(PLAIN, "packing=thd", made(mistakes.roll)), (PLAIN, "", made(mistakes.roll))],
    "physical_ids": [(PLAIN, "", made(mistakes.relabel)), (WIDE, "", made(mistakes.relabel))],
    "fused_shared_expert": [(PLAIN, "", fused_shared_expert), (DENSE, "", partial(fused_shared_expert, mtp=1))],
    "recompute_other_microbatch": [(PLAIN, "", recompute_other_microbatch)],
    "int16_as_uint8": [(WIDE, "", int16_as_uint8)],
    "swapped_layers": [(PLAIN, "", made(mistakes.layers_exchanged))],
    "shifted_padding": [(PLAIN, "", made(mistakes.padding_shifted))],
    "tp_cp_exchanged": [(PLAIN, "tp=2,cp=2", made(mistakes.tp_cp_exchanged)), (PLAIN, "tp=2", made(mistakes.tp_cp_exchanged))],
    "other_microbatch_size": [(PLAIN, "", made(mistakes.size_changed))],
    "other_microbatch": [(PLAIN, "", other_microbatch)],
}  # fmt: skip
"""Name in the catalogue -> (spec, layout, mistake) of each case."""
