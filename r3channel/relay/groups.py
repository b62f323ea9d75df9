"""The groups through which placed shards leave, one for each DP rank, with the rendezvous and the mailbox that they share.

What one group does is `relay.sender`; the steps are `relay.ledger`'s. Knows nothing of samples and frames.
"""

from __future__ import annotations

import threading
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.errors import TicketMismatch
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey
from r3channel.relay.ledger import StepLedger
from r3channel.relay.sender import DeliveryGroup
from r3channel.transport.base import Rendezvous, open_store
from r3channel.transport.object_store import Mailbox


class Groups:
    """start -> hello, ready, acknowledged -> stop. Any thread."""

    def __init__(
        self,
        layout: TrainerLayout,
        config: ChannelConfig,
        *,
        run: str,
        ledger: StepLedger,
        clock: StageClock,
        metrics: Metrics,
    ) -> None:
        self._layout, self._config, self._run = layout, config, run
        self._ledger, self._clock, self._metrics = ledger, clock, metrics
        self._store = open_store(config.interface) if config.backend in ("gloo", "nccl") else None
        self.mailbox = Mailbox()
        self._groups = [self._group(dp) for dp in range(layout.dp)]

    def start(self) -> None:
        for group in self._groups:
            group.start()

    def hello(self, key: ShardKey, *, boot_id: str, after_epoch: int) -> Rendezvous | None:
        """See `DeliveryGroup.hello`. Raises `TicketMismatch` for a rank that the layout has not."""
        dp, pp, cp = key
        layout = self._layout
        if not (0 <= dp < layout.dp and 0 <= pp < layout.pp and 0 <= cp < layout.cp):
            raise TicketMismatch(f"hello from dp {dp} pp {pp} cp {cp}; this relay serves layout {layout}")
        return self._groups[dp].hello(
            pp=layout.member(pp=pp, cp=cp), boot_id=boot_id, after_epoch=after_epoch
        )

    def ready(self, key: ShardKey, *, step: int, epoch: int, wait_s: float) -> bool:
        """See `DeliveryGroup.ready`; for a shard that is placed."""
        dp, pp, cp = key
        member = self._layout.member(pp=pp, cp=cp)
        return self._groups[dp].ready(pp=member, step=step, epoch=epoch, wait_s=wait_s)

    def acknowledged(self, key: ShardKey) -> None:
        """A rank has acknowledged a shard. With the ledger's condition held."""
        self._groups[key[0]].acknowledged()

    def stop(self) -> list[threading.Thread]:
        """Ask every group's thread to end, and return them to be joined. One that waits for members to join gives up at once,
        because the store or the mailbox through which they would find each other is gone."""
        threads = [group.stop() for group in self._groups]
        self.mailbox.close()
        if self._store is not None:
            self._store.close()
        return threads

    def status(self) -> dict[int, dict[str, Any]]:
        """By DP rank."""
        with self._ledger.changed:
            return {group.dp: group.status() for group in self._groups}

    @property
    def error(self) -> BaseException | None:
        """What ended a group's thread."""
        return next((group.error for group in self._groups if group.error is not None), None)

    @property
    def epoch(self) -> int:
        """The newest of all groups."""
        return max(group.epoch for group in self._groups)

    @property
    def peak_staging_bytes(self) -> int:
        return max(group.peak_staging_bytes for group in self._groups)

    def _group(self, dp: int) -> DeliveryGroup:
        return DeliveryGroup(
            dp=dp,
            stages=self._layout.members,
            config=self._config,
            rendezvous=self._rendezvous,
            mailbox=self.mailbox,
            changed=self._ledger.changed,
            steps=self._ledger.steps,
            clock=self._clock,
            metrics=self._metrics,
        )

    def _rendezvous(self, *, backend: str, name: str, epoch: int, rank: int, world_size: int) -> Rendezvous:
        host, port = (self._store.host, self._store.port) if self._store is not None else ("", 0)
        return Rendezvous(
            backend=backend,
            name=f"{self._run}/{name}/epoch{epoch}",
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            host=host,
            port=port,
        )
