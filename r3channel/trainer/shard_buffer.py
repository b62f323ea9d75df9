"""A shard while it is received: rows are written to their places and compared with the engines' digests.

Knows the plan and the digests; no connection and no router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from r3channel.errors import TicketMismatch
from r3channel.plan.placement import Placement
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket
from r3channel.trainer.router_digests import upload
from r3channel.wire.digest import fold
from r3channel.wire.routing import Ids
from r3channel.wire.token_tensors import TokenTensor


class ShardBuffer:
    """A shard that fills, attempt after attempt, on one thread.

    (begin -> rows*, tensor* -> verify)* -> whole.
    """

    def __init__(
        self, ticket: Ticket, shard: Shard, rows_N: Any, *, place: Callable[[Stream, Any], Any] = Placement
    ) -> None:
        """Prepare to fill a shard.

        Rows that do not travel are written here.

        Args:
            ticket: The step's ticket.
            shard: The shard to fill.
            rows_N: `shard.nbytes` bytes of any content, where `place` writes them.
            place: Makes the placement: `Placement` or `DevicePlacement`.
        """
        self.ticket, self.shard, self.rows_N = ticket, shard, rows_N
        self.stream = Stream.of(ticket, shard)
        """The rows that fill it."""
        self._placement = place(self.stream, rows_N)
        self._placement.pads()
        self.digests_CSL: Any = None
        """[TP slot, sample of the DP rank, layer] int64, where the shard is placed: digests of the rows that the slot holds."""
        self.tensors = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]()
        """The tensors that came after the rows, by name, as bytes (see `plan.token_tensors`)."""

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the digests that follow the rows."""
        return 8 * len(self.stream.samples) * (self.shard.spec.num_moe_layers + len(self.stream.columns))

    def begin(self) -> None:
        """Begin an attempt.

        Rows come in order, then tensors, then the rows' digests.
        """
        self._sums = self._placement.new_digests()

    def rows(self, ids_TCK: Any, *, begin: int) -> None:
        self._placement.rows(ids_TCK, self._sums, begin=begin)

    def tensor(self, tensor: TokenTensor, data: bytearray) -> None:
        self.tensors[tensor.name] = np.frombuffer(data, np.uint8)

    def verify(self, digests: bytes) -> list[str]:
        """Compare the rows with the relay's and the engines' digests.

        Rows are compared with what the relay announced, and that with what the engines hashed.

        Args:
            digests: The bytes that followed the rows.

        Returns:
            The samples that came damaged.

        Raises:
            TicketMismatch: The rows belong to other samples than the ticket's.
        """
        stream, samples = self.stream, len(self.stream.samples)
        both = np.split(np.frombuffer(digests, "<u8"), [samples * self.shard.spec.num_moe_layers])
        engine_SL, part_SC = (each.reshape(samples, -1) for each in both)
        columns = [stream.columns.index(source) for source in self.shard.sources]
        table_CSL = torch.as_tensor(self._placement.table(self._sums))
        announced_SL = upload(np.ascontiguousarray(part_SC[:, columns]).view(np.int64), table_CSL.device)
        differs_S = (table_CSL.sum(0) != announced_SL).any(-1)
        # one byte is read from a device, and more only where something is wrong
        wrong_S = differs_S.cpu().numpy() if bool(differs_S.any()) else np.zeros(len(part_SC), bool)
        if self.shard.cp_size == 1:  # all rows are here to compare with the engine's
            wrong_S |= (part_SC != engine_SL[:, list(stream.columns)]).any(axis=1)
        if not wrong_S.any():
            self._check_samples(engine_SL)
            self.digests_CSL = table_CSL
        return [stream.samples[index].sample_id for index in np.flatnonzero(wrong_S).tolist()]

    def _check_samples(self, engine_SL: Ids) -> None:
        wrong = [
            sample.sample_id
            for sample, engine_L in zip(self.stream.samples, engine_SL, strict=True)
            if sample.digest and fold(engine_L) != sample.digest
        ]
        if wrong:
            raise TicketMismatch(
                f"step {self.ticket.step}: {len(wrong)} samples have other rows than their ticket says: {wrong[:5]}. Did the "
                "relay send another rank's, or another step's?",
                samples=wrong,
                step=self.ticket.step,
                ranks=[self.shard.key],
            )
