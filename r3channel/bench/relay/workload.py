"""The data of `bench relay`: one step's samples as bodies of replies and as arrays, equal for every path. Knows no transport."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pybase64

from r3channel.bench.routing_data import generate
from r3channel.models import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Plan, plan_shards
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_frame, sample_key

_GENERATED_ROWS = 4096
"""Rows that are drawn; a sample is a stretch of them that begins elsewhere, end to end as often as it takes."""
_SAMPLE_TOKENS = 4096
_PACK_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one measurement moves, as plain values; each process builds the same plan from it."""

    model: str
    tokens: int
    layout: str
    layers: int = 0
    """Decoder layers, all with routers, in place of the model's; 0 keeps those."""

    @property
    def spec(self) -> RoutingSpec:
        spec = model_named(self.model).spec
        if not self.layers:
            return spec
        return RoutingSpec(
            num_layers=self.layers,
            moe_layers=tuple(range(self.layers)),
            num_experts=spec.num_experts,
            top_k=spec.top_k,
        )

    @property
    def trainer(self) -> TrainerLayout:
        return TrainerLayout.parse(f"{self.layout},packing=thd")

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens by sample: uneven, 4,096 in the mean, `tokens` in all."""
        count = max(4 * self.trainer.dp, self.tokens // _SAMPLE_TOKENS)
        share = np.random.default_rng(0).uniform(0.5, 1.5, count)
        tokens = np.maximum(2, (share / share.sum() * self.tokens).astype(int))
        tokens[-1] += self.tokens - tokens.sum()
        return {f"sample-{index}": int(length) for index, length in enumerate(tokens)}

    def plan(self) -> tuple[Assignment, Plan]:
        """Micro-batches are packs of at most 16,384 tokens, balanced over DP ranks."""
        lengths, layout = self.lengths, self.trainer
        assignment = Assignment.dynamic(lengths, dp=layout.dp, max_tokens=_PACK_TOKENS)
        return assignment, plan_shards(assignment, tokens=lengths, spec=self.spec, layout=layout)


class Workload:
    """A case's bytes, made when they are first asked for and kept: every path starts from the same memory."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.lengths = case, case.spec, case.lengths
        self.assignment, self.plan = case.plan()
        self._rows_TLK = _drawn(case.model, case.spec.num_moe_layers)

    def ids(self, sample_id: str) -> Ids:
        """[tokens - 1, L, K] in the id dtype; a new array."""
        start = 257 * int(sample_id.rpartition("-")[2])
        rows = (start + np.arange(self.lengths[sample_id] - 1)) % len(self._rows_TLK)
        return self._rows_TLK[rows]

    @cached_property
    def bodies(self) -> dict[str, bytes]:
        """What an engine of ours returns per sample."""
        return {name: self.reply(name, self.frame(name)) for name in self.lengths}

    def frame(self, sample_id: str) -> bytes:
        """As an engine of ours makes it."""
        key = sample_key(sample_id)
        return encode_frame(self.spec, expert_ids_TLK=self.ids(sample_id), sample_key=key)

    @cached_property
    def narrow(self) -> dict[str, Ids]:
        """Decoded ids in the id dtype."""
        return {name: self.ids(name) for name in self.lengths}

    @cached_property
    def wide(self) -> dict[str, Ids]:
        """Decoded ids as int32, as SGLang sends them."""
        return {name: self.ids(name).astype(np.int32) for name in self.lengths}

    def reply(self, sample_id: str, raw: Any) -> bytes:
        """An engine's JSON reply whose `routed_experts` is `raw` (bytes or a contiguous array) in base64. Its token ids are those
        of the whole sequence, so that no prompt is needed beside it."""
        text = pybase64.b64encode(raw).decode()
        meta = {"id": sample_id, "finish_reason": {"type": "stop"}, "routed_experts": text}
        tokens = list(range(self.lengths[sample_id]))
        return json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}).encode()

    def stock_reply(self, sample_id: str) -> bytes:
        """SGLang's reply: int32 over all decoder layers, dense ones included."""
        return self.reply(sample_id, self._all_layers(self.wide[sample_id]))

    def of_rank(self, dp: int) -> list[str]:
        """The samples of a DP rank, micro-batch by micro-batch."""
        return [name for microbatch in self.assignment.ranks[dp] for name in microbatch]

    def _all_layers(self, ids_TLK: Ids) -> Ids:
        if self.spec.num_moe_layers == self.spec.num_layers:
            return ids_TLK
        stock_TAK = np.zeros((len(ids_TLK), self.spec.num_layers, self.spec.top_k), np.int32)
        stock_TAK[:, list(self.spec.moe_layers)] = ids_TLK
        return stock_TAK


@cache
def _drawn(model: str, layers: int) -> Ids:
    rows_TLK = generate(model_named(model), regime="Zmid", rows=_GENERATED_ROWS)
    repeats = -(-layers // rows_TLK.shape[1])
    return np.ascontiguousarray(np.tile(rows_TLK, (1, repeats, 1))[:, :layers])
