"""The trainer ranks' ends of the links to engines' ranks, for all updates of a session: who connects, who sends what."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from r3channel.errors import CannotStage, ManifestMismatch
from r3channel.transport.auth import read_token
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener
from r3channel.weights.config import SyncConfig
from r3channel.weights.dryrun import Needs, Part
from r3channel.weights.geometry import Box, Layout, ShardMap, report_of
from r3channel.weights.manifest import Manifest, TensorMeta, is_scale, unit_of
from r3channel.weights.plan import plan_reshard
from r3channel.weights.progress import Deadline
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.wires import NEEDS, RECORD_BYTES, Entry, Piece, RankLink, expect_json, shared_views

_SHOWN = 3
Held = tuple[tuple[TensorMeta, Box], ...]
Sums = list[tuple[dict[str, str], dict[str, str]]]
"""What an engine would hold, by rank: digests and checksums by parameter."""
Push = Callable[[Sequence[torch.Tensor]], None]
"""Takes the next bucket's tensors, in order. They may be overwritten once the next call but one has returned."""


@dataclass(frozen=True, slots=True)
class Given:
    """What one trainer rank gives in an update, without its values."""

    held: Held
    """Boxes of tensors, each in the dtype that is sent."""
    ends: tuple[int, ...]
    """For each bucket, how many boxes lie before its end."""
    manifest: Manifest | None
    """The buckets of whole tensors; None where shards are sent."""
    metas: tuple[TensorMeta, ...] = ()
    """What engines are told of; (): what all trainer ranks hold together."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are held rounded, and may only go where they are rounded alike."""
    giver: str = ""
    """The engine whose memory it is read from."""

    @classmethod
    def whole(cls, manifest: Manifest) -> Given:
        held = tuple((meta, Box.whole(meta.shape)) for bucket in manifest.buckets for meta in bucket.tensors)
        return cls(held, tuple(accumulate(len(bucket.tensors) for bucket in manifest.buckets)), manifest)


class Stages:
    """OPEN -> CLOSED. One thread."""

    def __init__(self, ranks: TrainerRanks, config: SyncConfig) -> None:
        self.session = self.nonce = ""
        self.ranks, self._config = ranks, config
        # `auto` lets a rank without memory for a staged copy refuse
        self._how = {"staged": "auto" if config.staged == "auto" else "yes", "wire": config.wire}
        self._listener: Listener | None = None
        self.attempts: dict[str, int] = {}
        """The last order to connect, by engine. Links of an order that was given up may still come."""
        self.metas: tuple[TensorMeta, ...] = ()
        """The tensors that engines are told of."""
        self._trainers: list[tuple[str, int]] = []
        self._held: Held = ()
        self._source: ShardMap | None = None
        self._planned: tuple[set[RankLink], Sequence[int]] = (set(), ())
        self.committed: dict[int, tuple[str, Sums]] = {}
        """By an engine's number of ranks, what the committed version is there, and who says so."""

    # -- links ---------------------------------------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> None:
        """Let all trainers listen, with the first one's secret, and exchange their addresses."""
        config = self._config
        run_token = read_token(config.token_file) if config.token_file else ""
        self.session, self.nonce, self._listener = self.ranks.connect(config.host, run_token, deadline)
        mine = (config.host, self._listener.port)
        self._trainers = [tuple(where) for where in self.ranks.exchange(mine, deadline)]

    def order(self, engine: str, *, op: str = "open") -> dict[str, Any]:
        """The order that makes every rank of `engine` connect to all trainers, or be held by them."""
        self.attempts[engine] = self.attempts.get(engine, 0) + 1
        told = {
            "op": op,
            "session": self.session,
            "nonce": self.nonce,
            "trainers": self._trainers,
            **self._how,
        }
        told |= {"engine": engine, "attempt": self.attempts[engine]}
        return told | {"tensors": [meta.row() for meta in self.metas]}

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]:
        """The links of these engines (url -> ranks) once they are open. CannotStage tells why a rank cannot receive."""
        found: dict[str, list[RankLink]] = {url: [] for url in wanted}
        refused = ""
        while any(len(found[url]) < ranks for url, ranks in wanted.items()):
            hello, link = self._next(wanted, deadline)
            told = expect_json(link, NEEDS, timeout_s=deadline.left_s())
            refused = refused or told.get("error", "")
            needs = Needs.from_dict(told["needs"]) if "needs" in told else Needs((), ())
            how = told.get("whole", ""), told.get("compared", 0)
            shared = shared_views(needs.params, told["shared"]) if told.get("shared") else []
            found[hello["engine"]].append(RankLink(hello["engine"], hello["rank"], link, needs, *how, shared))
        if refused:
            raise CannotStage(refused)
        return {url: sorted(ranks, key=lambda rank: rank.rank) for url, ranks in found.items()}

    def _next(self, wanted: Mapping[str, int], deadline: Deadline) -> tuple[dict[str, Any], Connection]:
        """The next link of one of these engines, of its last order."""
        assert self._listener is not None
        while True:
            link = self._listener.accept(deadline.left_s())
            hello = json.loads(link.hello)
            if hello.get("engine") in wanted and hello["attempt"] == self.attempts[hello["engine"]]:
                return hello, link
            link.close()

    def close(self) -> None:
        self.ranks.close()
        self._planned = set(), ()  # with the links, what they have mapped
        if self._listener is not None:
            self._listener.close()

    # -- what is sent --------------------------------------------------------------------------------------------------

    def survey(self, given: Given, deadline: Deadline) -> bool:
        """Exchange what each rank holds. Returns whether that changed since the last call."""
        held = given.held
        changed = any(self.ranks.exchange(held != self._held, deadline))
        if changed:
            self._source = ShardMap.gathered(self.ranks.exchange_bytes(report_of(held), deadline))
            self.metas, self._held = given.metas or self._source.metas, held
            self._planned = set(), ()
        return changed

    def aimed_at(self, links: Sequence[RankLink], ends: Sequence[int]) -> bool:
        """Whether the last plan is for these engine ranks: all of the engines, or one that is brought back alone."""
        return self._planned == (set(links), ends)

    def aim(self, links: Sequence[RankLink], ends: Sequence[int], deadline: Deadline) -> None:
        """Plan for these engine ranks (the same order on every trainer) and tell each what will come, by bucket.

        ManifestMismatch with both hashes unless every trainer planned the same."""
        assert self._source is not None
        plan = plan_reshard(
            self._source,
            _target_map(self.metas, links, first=self.ranks.size),
            rank=self.ranks.rank,
            world_size=self.ranks.size + len(links),
        )
        sends = plan.sends()
        index_of = {meta.name: index for index, meta in enumerate(self.metas)}
        shards: dict[str, list[int]] = {}
        for index, (meta, _) in enumerate(self._held):
            shards.setdefault(meta.name, []).append(index)
        for at_rank, link in enumerate(links):
            by_tensor: dict[int, list[tuple[int, Part]]] = {}
            for at, part in enumerate(link.needs.parts):
                by_tensor.setdefault(part.tensor, []).append((at, part))
            buckets: list[list[Piece]] = [[] for _ in ends]
            for op in sends.get(self.ranks.size + at_rank, []):
                name = plan.tensors[op.tensor].name
                shard = self._holder(shards.get(name, ()), name, op.box)
                number = bisect_right(ends, shard)
                inside = shard - (ends[number - 1] if number else 0)
                for at, part in by_tensor[index_of[name]]:
                    if part.box.intersect(op.box) == op.box:
                        whole, kept = self._held[shard], link.dtype(Entry(at, op.box))
                        buckets[number] += _pieces(at, op.box, *whole, inside, RECORD_BYTES // kept.itemsize)
            link.tell(buckets, timeout_s=deadline.left_s())
        hashes = self.ranks.exchange(plan.hash, deadline)
        other = next((rank for rank, seen in enumerate(hashes) if seen != hashes[0]), None)
        if other is not None:
            raise ManifestMismatch(
                f"weights were not sent: rank {other} planned {hashes[other]}, rank 0 planned {hashes[0]}"
            )
        self._planned = set(links), ends

    def _holder(self, shards: Sequence[int], name: str, box: Box) -> int:
        for index in shards:
            if self._held[index][1].intersect(box) == box:
                return index
        raise ManifestMismatch(f"tensor {name}: the plan needs {box} of this rank, which does not hold it")


def _pieces(part: int, box: Box, meta: TensorMeta, held: Box, shard: int, most: int) -> Iterator[Piece]:
    """Cuts a box of a part from what is held, in pieces of at most so many items."""
    for one in box.cut(most):
        yield Piece(Entry(part, one), meta, shard, None if one == held else one.within(held))


def _target_map(metas: Sequence[TensorMeta], links: Sequence[RankLink], *, first: int) -> ShardMap:
    """What the engines' ranks need, numbered after the trainers, in the dtypes that they keep."""
    held: dict[int, dict[tuple[int, Box], None]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for number, link in enumerate(links):
        for part in link.needs.parts:
            if part.box.numel:
                held.setdefault(part.tensor, {})[first + number, part.box] = None
                dtypes.setdefault(part.tensor, link.needs.params[part.param].dtype)
    rows = []
    for tensor in sorted(held):
        meta = TensorMeta(name=metas[tensor].name, dtype=dtypes[tensor], shape=metas[tensor].shape)
        rows.append((meta, Layout.of(meta.shape, held[tensor])))
    return ShardMap(rows)


def check_complete(
    ranks: Sequence[RankLink], metas: Sequence[TensorMeta], *, names: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """ManifestMismatch, naming what, unless these tensors fill every parameter of every rank.

    Returns what the engines keep in another dtype (tensor -> `float32 -> bfloat16`), and what has no place there.
    """
    rounded = cast_by(ranks, metas)
    missing = sorted({name for rank in ranks for name in rank.needs.missing})
    used = {part.tensor for rank in ranks for part in rank.needs.parts}
    unknown = [meta.name for index, meta in enumerate(metas) if index not in used]
    placed = {unit_of(metas[index].name) for index in used}
    scale = next((name for name in unknown if is_scale(name) and unit_of(name) in placed), None)
    if scale is not None:
        raise ManifestMismatch(
            f"the engine has no place for {scale}, the scale of a float8 weight: it keeps plain weights. Give it those"
        )
    if missing and names:
        raise ManifestMismatch(
            f"{len(missing)} parameters of the engine would keep their old values, first {missing[:_SHOWN]}; of the tensors "
            f"{len(unknown)} have no place there: {unknown[:_SHOWN]}. Is one misspelt, or the model given in part?"
        )
    return rounded, tuple(unknown)


def cast_by(ranks: Sequence[RankLink], metas: Sequence[TensorMeta]) -> dict[str, str]:
    """Tensors that engines keep in another dtype. ManifestMismatch where that is float8: a cast alone lands under old scales."""
    found = {}
    for rank in ranks:
        for part in rank.needs.parts:
            own, kept = metas[part.tensor], rank.needs.params[part.param]
            if own.dtype == kept.dtype:
                continue
            if kept.dtype_name.startswith("float8"):
                raise ManifestMismatch(
                    f"engine {rank.engine} keeps {own.name} in {kept.dtype_name}, the trainer gives {own.dtype_name}: it is "
                    "not quantised on the way. Give float8 tensors with their scales (examples/float8_blocks.py), or start the "
                    "engine without --quantization"
                )
            found[own.name] = f"{own.dtype_name} -> {kept.dtype_name}"
    return found
