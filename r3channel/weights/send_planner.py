"""The trainer ranks' ends of the links to engines' ranks, for all updates of a session: who connects, who sends what.

An engine that lost its weights gets those of another one that serves on, so that no copy need be kept. Trainer ranks divide that
engine's ranks among themselves and read parameters over the links that stand. They hold what they read like shards of their own,
and the exact plan sends it (`from_peer`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from r3channel.errors import CannotStage, ManifestMismatch, WeightsCorrupt
from r3channel.transport.auth import read_token
from r3channel.transport.connection import Connection
from r3channel.weights import rank_link
from r3channel.weights.config import SyncConfig
from r3channel.weights.engine import EngineHandle
from r3channel.weights.geometry import Box, Needs, Part, RankPlan, ShardMap, plan_reshard, report_of
from r3channel.weights.groups import JointGroup, Source
from r3channel.weights.manifest import SHOWN, Manifest, Push, TensorMeta, is_scale, unit_of
from r3channel.weights.progress import Deadline, Run
from r3channel.weights.rank_link import NEEDS, TABLE, Digests, Piece, RankLink, Record
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.staged_copy import shared_views
from r3channel.weights.transaction import EngineState

_RECORD_BYTES: dict[str, int] = {"gloo": 4 << 20, "cuda_ipc": 64 << 20, "nccl": 64 << 20}
"""A record's bytes at most, by wire, where it is not `rank_link.RECORD_BYTES`: each record waits for a GPU, or in a group for a
turn."""
Held = tuple[tuple[tuple[TensorMeta, Box], ...], ...]
Links = dict[str, list[RankLink]]
"""By an engine's URL, the links to its ranks in their order."""
Feed = Callable[[Push], object]
"""Gives an update's values, bucket by bucket."""


class UpdateSpec(NamedTuple):
    """What one trainer rank gives in an update, without its values."""

    held: Held
    """By bucket, boxes of tensors, each in the dtype that is sent."""
    manifest: Manifest | None
    """The buckets of whole tensors; None where shards are sent."""
    metas: tuple[TensorMeta, ...] = ()
    """The tensors that engines are told of; () stands for all that the trainer ranks hold together."""
    rounded: Mapping[str, str] = {}
    """Tensors that are held rounded, and may only go where they are rounded alike."""

    @classmethod
    def whole(cls, manifest: Manifest) -> UpdateSpec:
        buckets = ([(meta, Box.whole(meta.shape)) for meta in bucket.tensors] for bucket in manifest.buckets)
        return cls(tuple(map(tuple, buckets)), manifest)


Given = tuple[UpdateSpec, Feed]
"""What one trainer rank gives in an update, and its values."""


class SendPlanner:
    """Plans what a trainer rank sends to engines' ranks, and keeps the links to these. OPEN -> CLOSED. One thread."""

    def __init__(self, ranks: TrainerRanks, config: SyncConfig) -> None:
        self.session = self.nonce = ""
        self.joint, self.source = JointGroup(ranks, config), Source(config)
        """This rank's ends of the joint group and of broadcasts."""
        self.ranks, self.config = ranks, config
        self.attempts: dict[str, int] = {}
        """The last order to connect, by engine. Links of an order that was given up may still come."""
        self.metas: tuple[TensorMeta, ...] = ()
        """The tensors that engines are told of."""
        self.trainers: list[tuple[str, int]] = []
        self._source = ShardMap(())
        self._held: tuple[str, Held] = "", ()
        """A digest of what all trainers hold, and what this trainer holds."""
        self._shards: dict[str, list[tuple[int, int, TensorMeta, Box]]] = {}
        """By tensor, the boxes of it that are held, with their bucket and place there."""
        self.committed: dict[int, tuple[str, list[Digests]]] = {}
        """By an engine's number of ranks: the committed version's name in errors, and its digests by rank."""

    # -- links ---------------------------------------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> None:
        """Start listening on all trainers and exchange their addresses.

        All trainers use the first one's secret. Nothing changes where they have met: an engine has failed the call before.
        """
        host, run_token = self.config.host, read_token(file) if (file := self.config.token_file) else ""
        if not self.trainers:
            self.session, self.nonce, port = self.ranks.connect(host, run_token, deadline)
            self.trainers = [tuple(where) for where in self.ranks.exchange((host, port), deadline)]

    def order(self, engine: str, *, op: str = "open") -> dict[str, Any]:
        """Return the order that makes every rank of `engine` connect.

        Args:
            engine: the engine's URL. Its attempt number rises by one.
            op: with `open` each rank connects to all trainers; with any other it connects to the first trainer alone, which holds
                it.
        """
        self.attempts[engine] = self.attempts.get(engine, 0) + 1
        trainers = self.trainers if op == "open" else self.trainers[:1]
        order = {"op": op, "session": self.session, "nonce": self.nonce, "trainers": trainers}
        order |= {"engine": engine, "attempt": self.attempts[engine], "wire": self.config.wire}
        # `auto` lets a rank without memory for a staged copy refuse
        order["staged"] = "auto" if self.config.staged == "auto" else "yes"
        return order | {"tensors": [meta.row() for meta in self.metas]}

    def accept(self, wanted: Mapping[str, int], deadline: Deadline, told: Sequence[TensorMeta]) -> Links:
        """Return the links of the `wanted` engines once all are open.

        Args:
            wanted: by an engine's URL, its number of ranks.
            deadline: limits the whole call.
            told: the tensors that these engines were told of.

        Returns:
            By an engine's URL, its links in the order of its ranks.

        Raises:
            CannotStage: a rank cannot receive; the text says why.
            WeightsCorrupt: a rank reported needs that cannot be read.
        """
        links: Links = {url: [] for url in wanted}
        refused = ""
        while any(len(links[url]) < ranks for url, ranks in wanted.items()):
            hello, link = self._next(wanted, deadline)
            reply = rank_link.expect_json(link, NEEDS, timeout_s=deadline.left_s())
            refused = refused or str(reply.get("error", ""))
            try:
                needs = Needs.from_dict(reply["needs"], len(told)) if "needs" in reply else Needs()
                shared = shared_views(needs.params, reply["shared"]) if reply.get("shared") else []
                how = str(reply.get("whole", "")), int(reply.get("compared", 0)), bool(reply.get("summed"))
                rank = RankLink(hello["engine"], int(hello["rank"]), link, needs, *how, shared)
                rank.record_bytes = _RECORD_BYTES.get(self.config.wire, rank.record_bytes)
                links[rank.engine].append(rank)
            except rank_link.UNREADABLE as error:
                raise WeightsCorrupt(f"engine {hello['engine']} has no such needs: {error!r:.300}") from error
        if refused:
            raise CannotStage(refused)
        return {url: sorted(ranks, key=lambda rank: rank.rank) for url, ranks in links.items()}

    def _next(self, wanted: Mapping[str, int], deadline: Deadline) -> tuple[dict[str, Any], Connection]:
        assert self.ranks.listener is not None
        while True:
            link = self.ranks.listener.accept(deadline.left_s())
            with suppress(*rank_link.UNREADABLE):
                hello = json.loads(link.hello)
                if hello["engine"] in wanted and hello["attempt"] == self.attempts[hello["engine"]]:
                    return hello, link
            link.close()

    def leave(self) -> None:
        """Leave all groups; members that wait in one fail at once."""
        self.source.leave()
        self.joint.leave()

    def close(self) -> None:
        self.leave()
        self.source = Source(self.config)  # frees the buffers
        self.ranks.close()

    # -- what is sent --------------------------------------------------------------------------------------------------

    def survey(self, spec: UpdateSpec, deadline: Deadline) -> None:
        """Gather what all ranks hold, if it changed anywhere.

        One rank's change since the last call is enough: then all ranks exchange what they hold. So they do where a rank failed
        in the last call, and has not heard what the others did.
        """
        known = self.ranks.exchange(self._held[0] if spec.held == self._held[1] else "", deadline)
        if "" in known or len({*known}) > 1:
            report = report_of(chain.from_iterable(spec.held))
            self._source = ShardMap.gathered(self.ranks.exchange_bytes(report, deadline))
            self._held, self._shards = (self._source.digest, spec.held), {}
            self.metas = spec.metas or self._source.metas
            for bucket, boxes in enumerate(spec.held):
                for at, (meta, box) in enumerate(boxes):
                    self._shards.setdefault(meta.name, []).append((bucket, at, meta, box))

    def outdated_links(self, links: Sequence[RankLink]) -> list[int]:
        """Return the indexes of links whose ranks need a new plan.

        These ranks were not told what they get of what is held now.
        """
        return [at for at, link in enumerate(links) if link.aimed != self._held]

    def aim(self, links: Sequence[RankLink], deadline: Deadline) -> None:
        """Send ranks that are due a plan of what will come.

        Each rank gets a table, bucket by bucket. A rank that is not due keeps the table that it has.

        Args:
            links: the engines' ranks, in the same order on every trainer.
            deadline: limits the whole call.

        Raises:
            ManifestMismatch: two trainers planned differently; the text has both hashes.
        """
        # every trainer is asked: one that failed alone, or came late, has told ranks less than the others
        due = set[int]().union(*self.ranks.exchange(self.outdated_links(links), deadline))
        if not due:
            return
        links = [links[number] for number in sorted(due)]
        for link in links:
            link.aimed = None
        first, target = self.ranks.size, _target_map(self.metas, links, first=self.ranks.size)
        plan = plan_reshard(self._source, target, rank=self.ranks.rank, world_size=first + len(links))
        self._tell(links, plan, target, deadline)
        hashes = self.ranks.exchange(plan.hash, deadline)
        other = next((rank for rank, seen in enumerate(hashes) if seen != hashes[0]), None)
        if other is not None:
            raise ManifestMismatch(f"rank {other} planned {hashes[other]}, rank 0 planned {hashes[0]}")
        for link in links:
            link.aimed = self._held

    def _tell(self, links: Sequence[RankLink], plan: RankPlan, target: ShardMap, deadline: Deadline) -> None:
        index_of = {meta.name: index for index, meta in enumerate(self.metas)}
        # ranks at the same place of several engines share their needs
        for needs, numbers in _group_alike(links).items():
            made: dict[tuple[tuple[int, Box], ...], tuple[list[list[Record]], bytes]] = {}
            for number in numbers:
                link, sent = links[number], tuple(plan.sends.get(self.ranks.size + number, ()))
                if link.shared or sent not in made:
                    buckets = list[list[Piece]]([] for _ in self._held[1])
                    for tensor, box in sent:
                        at = index_of[target.metas[tensor].name]
                        for bucket, piece in self._pieces(needs, at, box, link.record_bytes):
                            buckets[bucket].append(piece)
                    made[sent] = link.records(buckets)
                link.buckets, table = made[sent]
                rank_link.send_blob(link.link, TABLE, table, timeout_s=deadline.left_s())

    def _pieces(self, needs: Needs, tensor: int, box: Box, record_bytes: int) -> Iterator[tuple[int, Piece]]:
        """Yield a needed box in pieces of at most one record."""
        held = (shard for shard in self._shards[self.metas[tensor].name] if shard[3].holds(box))
        # a holder exists: the plan was made of what all ranks reported
        bucket, shard, meta, whole = next(held)
        for at in range(*np.searchsorted(needs.parts.tensor_P, (tensor, tensor + 1)).tolist()):
            part = needs.parts[at]
            if part.box.holds(box):
                dtype = needs.params[part.param].dtype
                for small, cut in _cuts(box, whole, record_bytes // dtype.itemsize):
                    yield bucket, Piece(at, small, dtype, meta, shard, cut)


@lru_cache  # the same for all experts of a model
def _cuts(box: Box, held: Box, most: int) -> list[tuple[Box, tuple[slice, ...]]]:
    return [(small, () if small == held else small.slices_in(held)) for small in box.cut(most)]


def _group_alike(links: Sequence[RankLink]) -> dict[Needs, list[int]]:
    numbers: dict[Needs, list[int]] = {}
    for number, link in enumerate(links):
        numbers.setdefault(link.needs, []).append(number)
    return numbers


def _target_map(metas: Sequence[TensorMeta], links: Sequence[RankLink], *, first: int) -> ShardMap:
    """Return what engines' ranks need, in the dtypes they keep."""
    held: dict[int, tuple[torch.dtype, list[int]]] = {}
    holders = list[tuple[list[int], Box]]()
    for needs, numbers in _group_alike(links).items():
        table = needs.parts
        kept = np.array([box.numel > 0 for box, _ in table.kinds], dtype=bool)[table.kind_P]
        columns = table.tensor_P, table.kind_P + len(holders), table.param_P
        for tensor, holder, param in zip(*(column[kept].tolist() for column in columns), strict=True):
            held.setdefault(tensor, (needs.params[param].dtype, []))[1].append(holder)
        holders += [([first + number for number in numbers], box) for box, _ in table.kinds]
    sent = ((replace(metas[at], dtype=dtype), indexes) for at, (dtype, indexes) in sorted(held.items()))
    return ShardMap.of_holders(sent, holders)


def check_complete(
    ranks: Sequence[RankLink], metas: Sequence[TensorMeta], *, names: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Check that these tensors fill every parameter of every rank.

    Args:
        ranks: the engines' ranks.
        metas: the tensors that the trainers give.
        names: whether a parameter that no tensor fills is an error.

    Returns:
        Tensors that the engines keep in another dtype (tensor -> `float32 -> bfloat16`), and the tensors that have no place
        there.

    Raises:
        ManifestMismatch: parameters would keep old values, a scale has no place, or a cast is refused (`cast_by`). The text names
            which.
    """
    rounded = cast_by(ranks, metas)
    missing = sorted({name for rank in ranks for name in rank.needs.missing})
    used = {tensor for needs in _group_alike(ranks) for tensor in np.unique(needs.parts.tensor_P).tolist()}
    unknown = [meta.name for index, meta in enumerate(metas) if index not in used]
    scales = [name for name in unknown if is_scale(name)]
    placed = {unit_of(metas[index].name) for index in used} if scales else ()
    scale = next((name for name in scales if unit_of(name) in placed), None)
    if scale is not None:
        raise ManifestMismatch(f"the engine keeps plain weights: it has no place for {scale}. Give it those")
    if missing and names:
        raise ManifestMismatch(
            f"{len(missing)} parameters of the engine would keep their old values, first {missing[:SHOWN]}; of the tensors "
            f"{len(unknown)} have no place there: {unknown[:SHOWN]}. Is one misspelt, or the model given in part?"
        )
    return rounded, tuple(unknown)


def cast_by(ranks: Sequence[RankLink], metas: Sequence[TensorMeta]) -> dict[str, str]:
    """Return the tensors that engines keep in another dtype.

    Returns:
        By a tensor's name, both dtypes, as `float32 -> bfloat16`.

    Raises:
        ManifestMismatch: an engine keeps float8, where a cast alone would land under old scales, or integers in place of floats,
            as exponents of scales are.
    """
    casts = {}
    dtype_T = np.array([meta.dtype for meta in metas], dtype=object)
    for needs, (first, *_) in _group_alike(ranks).items():
        kept_P = np.array([meta.dtype for meta in needs.params], dtype=object)[needs.parts.param_P]
        for at in np.flatnonzero(dtype_T[needs.parts.tensor_P] != kept_P).tolist():
            sent, kept = metas[needs.parts.tensor_P[at]], needs.params[needs.parts.param_P[at]]
            to_integers = sent.dtype.is_floating_point and not kept.dtype.is_floating_point
            if to_integers or kept.dtype_name.startswith("float8"):
                raise ManifestMismatch(
                    f"engine {ranks[first].engine} keeps {kept}, the trainer gives {sent}: a cast quantises nothing. Give "
                    "float8 with its scales (examples/float8_blocks.py makes float32 ones; UE8M0's exponents would have to come "
                    "as the engine's own bytes), or leave out --quantization"
                )
            casts[sent.name] = f"{sent.dtype_name} -> {kept.dtype_name}"
    return casts


# -- another engine's memory -----------------------------------------------------------------------------------------------


def from_peer(members: Sequence[EngineHandle], planner: SendPlanner, run: Run) -> Given | None:
    """Return what this trainer rank gives, read from another engine.

    Every trainer rank calls. The values come parameter by parameter.

    Args:
        members: engines that may be read.
        planner: the links' planner.
        run: the update; its version is read.

    Returns:
        What this rank gives of that version, and the call that gives its values; None if no engine can give them. That call
        raises GiverChanged where the engine has other bytes than were committed, and TransportError where it dies.
    """
    if (peer := _choose(members, planner, run)) is None:
        return None
    # each: a rank, a parameter's number there, and the checkpoint's parts in the parameter
    reads, param_of = list[tuple[RankLink, int, list[Part]]](), attrgetter("param")
    for rank in peer.ranks[planner.ranks.rank :: planner.ranks.size]:
        parts = sorted((part for part in rank.needs.parts if part.box.numel), key=param_of)
        reads += [(rank, param, list(same)) for param, same in groupby(parts, key=param_of)]
    held = tuple(tuple((peer.metas[part.tensor], part.box) for part in parts) for *_, parts in reads)

    def feed(push: Push) -> None:
        for rank, param, parts in reads:
            with run.stage("convert"):
                flat = rank.fetch(run.version, param, timeout_s=run.deadline.left_s())
            push([part.view(flat) for part in parts])

    return UpdateSpec(held, None, peer.metas, cast_by(peer.ranks, peer.metas)), feed


def _choose(members: Sequence[EngineHandle], planner: SendPlanner, run: Run) -> EngineHandle | None:
    """Return the engine to read, the same on every trainer rank."""
    able = [m for m in members if m.is_linked_for(m.metas) and not any(rank.whole for rank in m.ranks)]
    if planner.ranks.leads:  # the others do not know what an engine serves
        able = [m for m in able if m.now.state is EngineState.SERVING and m.gives == run.version]
    said = planner.ranks.exchange([m.url for m in able], run.deadline)
    return next((m for m in able if all(m.url in urls for urls in said)), None)
