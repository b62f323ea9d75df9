"""An update without our half in the engine: SGLang itself loads flattened buckets in place while it is paused."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.checksums import engine_names
from r3channel.weights.engine import EngineHandle
from r3channel.weights.executor import Work
from r3channel.weights.group import WeightGroup
from r3channel.weights.manifest import Bucket, is_scale
from r3channel.weights.pack import Packer
from r3channel.weights.progress import background, wait_all
from r3channel.weights.transaction import Kind

_SHOWN = 3


class Broadcast(Work):
    """One update. A bucket leaves in a thread while the next one is packed."""

    way = "broadcast"

    def __init__(self, *work: Any, packer: Packer, **options: Any) -> None:
        """`packer` makes buckets flat; for the rest see `Work`."""
        super().__init__(*work, **options)
        self._packer = packer
        self._buckets: Sequence[Bucket] = ()
        self._number = -1
        self._held = set[str]()

    def _survey(self) -> None:
        """ManifestMismatch where no engine would say that it has no place for a tensor."""
        assert self._given.manifest is not None
        self._buckets = self._given.manifest.buckets
        scale = next((meta.name for meta, _ in self._given.held if is_scale(meta.name)), None)
        if scale is not None and self._config.expected is None:  # SGLang skips a name that it does not have
            raise ManifestMismatch(
                f"tensor {scale} is the scale of a float8 weight, and an engine of plain weights would serve float8 ones without "
                "it; expected=None does not look"
            )

    def _hold(self, handle: EngineHandle, left_s: float) -> None:
        """Open links that ask for no tensors: while they stand, our half refuses weights from other sessions."""
        if not handle.takes_orders or handle.staged(()) or handle.unheld:
            return
        handle.unheld = not handle.hold(self._stages.order(handle.url, op="hold"), left_s)
        handle.ranks, handle.metas, handle.gives = [], (), None
        if not handle.unheld:
            self._held.add(handle.url)

    def _accept(self) -> None:
        wanted = {member.url: member.size for member in self.members if member.url in self._held}
        links = self._stages.accept(wanted, self._run.deadline) if wanted else {}
        for member in self.members:
            member.ranks = links.get(member.url, member.ranks)

    def _check(self, handle: EngineHandle, left_s: float) -> None:
        """ManifestMismatch unless an update of these names (the engine's own) fills every parameter and has no other."""
        names = engine_names(name for bucket in self._buckets for name in bucket.names)
        if self._config.expected is None or names == handle.names:
            return
        held = {name for sums in handle.weight_checksums(timeout_s=left_s) for name in sums}
        missing, unknown = sorted(held - names), sorted(names - held)
        if held and (missing or unknown):
            raise ManifestMismatch(
                f"engine {handle.url}: {len(missing)} parameters would keep their old values, first {missing[:_SHOWN]}; "
                f"{len(unknown)} of the update have no place there, first {unknown[:_SHOWN]}. Is a name misspelt, or the model "
                "given in part? expected=None does not look"
            )
        handle.names = names

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Pack the next bucket, wait for the one before, then send it; raises the error of the one before."""
        number = self._number + 1
        payload = self._packer.pack(number, self._buckets[number], tensors, self._run)
        self._landed()
        self._number, self._payload = number, payload
        self._happen(Kind.BUCKET)

    def _load(self, handle: EngineHandle, left_s: float) -> None:
        group, number, bucket = handle.group, self._number, self._buckets[self._number]
        assert group is not None
        flush = number == len(self._buckets) - 1 and self._config.flush
        how = {"group_name": group.name, "flush_cache": flush, "timeout_s": left_s}
        load = background(partial(handle.update_tensors, bucket.tensors, **how))
        wire = background(partial(group.broadcast, self._payload, timeout_s=left_s))
        what = {load: handle.url, wire: f"the broadcast to {handle.url}"}
        wait_all(what, f"bucket {number} ({bucket})", left_s)

    def _commit(self, handle: EngineHandle, left_s: float) -> None:
        handle.commit(self._version, left_s)

    def _join(self, handle: EngineHandle, left_s: float) -> None:
        if handle.group is not None:
            return
        config = self._config
        name = f"{self._stages.session}-{secrets.token_hex(4)}"  # SGLang refuses one that it has seen
        group = WeightGroup(name, world_size=1 + handle.size, host=config.host, backend=config.backend)
        calls = {
            background(partial(handle.init_group, group, timeout_s=left_s)): handle.url,
            background(partial(group.join, timeout_s=left_s)): "rank 0",
        }
        try:
            wait_all(calls, f"join of weight group {name} with {handle.url}", left_s)
        except BaseException:
            group.close()  # its store goes with it, so engines that still wait there fail at once
            raise
        handle.group = group
