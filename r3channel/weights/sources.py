"""Where an update's values come from: the caller's tensors, or the memory of another engine.

The caller's are read once and in the caller's thread: their iterator may be collective. Between two tensors the update's deadline
is looked at. How long the next one may take is the affair of who gives it: a gathering has the timeout of its own group.

An engine that lost its weights gets those of another one that serves on, so that no copy need be kept. Trainer ranks divide that
engine's ranks among themselves and read parameters over the links that stand. They hold what they read like shards of their own,
and the exact plan sends it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.checksums import finite, nonfinite
from r3channel.weights.engine import EngineHandle
from r3channel.weights.geometry import Part
from r3channel.weights.manifest import Manifest, TensorMeta, fill_buckets
from r3channel.weights.progress import Run
from r3channel.weights.rank_link import RankLink
from r3channel.weights.send_planner import Feed, Push, SendPlanner, UpdateSpec, cast_by
from r3channel.weights.transaction import EngineState

Named = tuple[str, torch.Tensor]
Given = tuple[UpdateSpec, Feed]
"""What one trainer rank gives in an update, and its values."""


def read_first(named_tensors: Iterator[Named], run: Run, *, cap_bytes: int) -> tuple[Manifest, list[Named]]:
    """Copy all tensors to the host and group them into buckets.

    Args:
        named_tensors: read once, in the caller's thread.
        run: the update; its deadline is checked between two tensors.
        cap_bytes: a bucket's size at most.

    Returns:
        The manifest, and the copies in the order in which they came.

    Raises:
        ManifestMismatch: `fill_buckets` refuses a tensor.
        NonFiniteWeights: a tensor holds NaN or Inf.
        Exception: whatever the iterator raises.
    """
    copies = list[Named]()
    for name, tensor in _in_time(named_tensors, run):
        with run.stage("pack"):
            copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        with run.stage("digest"):
            if not finite(copy):
                raise nonfinite(f"after {len(copies)} tensors", TensorMeta.of(name, copy))
        copies.append((name, copy))
    return fill_buckets(itertools.starmap(TensorMeta.of, copies), cap_bytes=cap_bytes), copies


def read_again(named_tensors: Iterator[Named], manifest: Manifest, run: Run, push: Push) -> None:
    """Give `push` each bucket's tensors once all have come.

    They are given in the bucket's order.

    Args:
        named_tensors: read once, in the caller's thread.
        manifest: what the first update gave.
        run: the update; its deadline is checked between two tensors.
        push: takes a bucket's tensors.

    Raises:
        ManifestMismatch: other tensors came than the first time; the text names which.
    """
    rows: list[dict[int, torch.Tensor]] = [{} for _ in manifest.buckets]
    due, come = 0, 0
    for come, (name, tensor) in enumerate(_in_time(named_tensors, run), start=1):
        if come > len(manifest.arrivals):
            raise ManifestMismatch(f"the update gives more tensors than the first one did: {name}")
        meta, bucket, slot = manifest.arrivals[come - 1]
        if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
            raise ManifestMismatch(
                f"tensor {come}: expected {meta}, got {TensorMeta.of(name, tensor)}; did model, layout or cast change since?"
            )
        rows[bucket][slot] = tensor
        while due < len(rows) and len(rows[due]) == len(manifest.buckets[due].tensors):
            full, rows[due] = rows[due], {}
            due += 1
            push([full[slot] for slot in range(len(full))])
    if come < len(manifest.arrivals):
        missing, total = manifest.arrivals[come][0], len(manifest.arrivals)
        raise ManifestMismatch(f"the update ended after {come} of {total} tensors; expected {missing} next")


def _in_time(named_tensors: Iterator[Named], run: Run) -> Iterator[Named]:
    while True:
        with run.stage("convert"):
            named = next(named_tensors, None)
        if named is None:
            return
        run.deadline.left_s()
        yield named


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
    if (peer := _chosen(members, planner, run)) is None:
        return None
    # each: a rank, a parameter's number there, and the checkpoint's parts in the parameter
    reads, param_of = list[tuple[RankLink, int, list[Part]]](), attrgetter("param")
    for rank in peer.ranks[planner.ranks.rank :: planner.ranks.size]:
        parts = sorted((part for part in rank.needs.parts if part.box.numel), key=param_of)
        reads += [(rank, param, list(same)) for param, same in itertools.groupby(parts, key=param_of)]
    held = tuple(tuple((peer.metas[part.tensor], part.box) for part in parts) for *_, parts in reads)

    def feed(push: Push) -> None:
        for rank, param, parts in reads:
            with run.stage("convert"):
                flat = rank.fetch(run.version, param, timeout_s=run.deadline.left_s())
            push([part.view(flat) for part in parts])

    return UpdateSpec(held, None, peer.metas, cast_by(peer.ranks, peer.metas)), feed


def _chosen(members: Sequence[EngineHandle], planner: SendPlanner, run: Run) -> EngineHandle | None:
    """Return the engine to read, the same on every trainer rank.

    All trainers have links to it, and the first one knows what it serves. None if there is no such engine.
    """
    able = [m for m in members if m.staged(m.metas) and not any(rank.whole for rank in m.ranks)]
    if planner.ranks.leads:
        able = [m for m in able if m.now.state is EngineState.SERVING and m.gives == run.version]
    said = planner.ranks.exchange([m.url for m in able], run.deadline)
    return next((m for m in able if all(m.url in urls for urls in said)), None)
