"""Reads the committed weights out of an engine's memory for an engine that lost its own, so that no copy need be kept.

The engine serves on. Trainer ranks divide its ranks among themselves and read parameters over the links that stand. They hold
what they read like shards of their own, and the exact plan sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from r3channel.weights.dryrun import Part
from r3channel.weights.engine import EngineHandle
from r3channel.weights.executor import Feed
from r3channel.weights.progress import Run
from r3channel.weights.stages import Given, Push, Stages, cast_by
from r3channel.weights.transaction import EngineState
from r3channel.weights.wires import RankLink

_Read = tuple[RankLink, int, Sequence[Part]]
"""One parameter of one rank, by its number there, and the checkpoint's parts in it."""


def from_peer(
    members: Sequence[EngineHandle], stages: Stages, version: int, *, cap_bytes: int, run: Run
) -> tuple[Given, Feed] | None:
    """What this trainer rank gives of `version`, and its values, out of one of `members`; None where none can give it.

    Every trainer rank calls. The values come bucket by bucket, of parameters of `cap_bytes` together; giving them raises
    GiverChanged where the engine has other bytes than were committed, TransportError where it dies.
    """
    peer = _chosen(members, stages, version, run)
    if peer is None:
        return None
    buckets, nbytes = list[list[_Read]](), 0
    for read in _reads(peer.ranks[stages.ranks.rank :: stages.ranks.size]):
        size = read[0].needs.params[read[1]].nbytes
        if not buckets or nbytes + size > cap_bytes:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(read)
        nbytes += size
    parts = [[part for *_, read in bucket for part in read] for bucket in buckets]
    held = tuple((peer.metas[part.tensor], part.box) for bucket in parts for part in bucket)

    def feed(push: Push) -> None:
        for bucket in buckets:
            tensors = []
            with run.stage("convert"):
                for rank, param, held_there in bucket:
                    flat = rank.fetch(version, param, timeout_s=run.deadline.left_s())
                    tensors += [part.view(flat) for part in held_there]
            push(tensors)

    rounded = cast_by(peer.ranks, peer.metas)
    return Given(held, tuple(accumulate(map(len, parts))), None, peer.metas, rounded), feed


def _chosen(members: Sequence[EngineHandle], stages: Stages, version: int, run: Run) -> EngineHandle | None:
    """The engine to read, the same on every trainer rank: all have links to it, and the first knows what it serves."""
    able = [m for m in members if m.staged(m.metas) and not any(rank.whole for rank in m.ranks)]
    if stages.ranks.leads:
        able = [m for m in able if m.now.state is EngineState.SERVING and m.gives == version]
    first, *others = stages.ranks.exchange([m.url for m in able], run.deadline)
    url = next((url for url in first if all(url in urls for urls in others)), None)
    return next((m for m in able if m.url == url), None)


def _reads(ranks: Sequence[RankLink]) -> Iterator[_Read]:
    for rank in ranks:
        by_param: dict[int, list[Part]] = {}
        for part in rank.needs.parts:
            if part.box.numel:
                by_param.setdefault(part.param, []).append(part)
        for param, parts in sorted(by_param.items()):
            yield rank, param, parts
