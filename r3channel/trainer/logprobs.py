"""Keeps log-probs of an open step for a recording, in the layout of the model's output. Knows no Megatron."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from r3channel.errors import UsageError
from r3channel.plan.layout import RankCoords
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.recordings.logprobs import write_logprobs
from r3channel.wire.routing import Ids

log = logging.getLogger(__name__)


class KeptLogprobs:
    """A step's log-probs until they are recorded: add* -> write.

    Nothing waits for the device before `write`. A micro-batch that comes again replaces its earlier values.
    """

    def __init__(self, ticket: Ticket, shard: Shard) -> None:
        self._ticket, self._shard = ticket, shard
        self._place = {sample.sample_id: place for place, sample in enumerate(ticket.samples)}
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, microbatch: int, mask: torch.Tensor, **sides: torch.Tensor | None) -> None:
        """Keep a micro-batch's log-probs where `mask` > 0.

        Args:
            microbatch: The index of the micro-batch.
            mask: [b, s / cp] ([1, t / cp] for a pack).
            sides: By name each side's log-probs, of the same shape.

        Raises:
            UsageError: The shape is not that of the model's output.
        """
        expected = self._shard.token_map(microbatch)[0].shape
        if mask.shape != expected:
            raise UsageError(
                f"step {self._ticket.step}, micro-batch {microbatch}: log-probs {tuple(mask.shape)}, expected {expected}: the "
                "model's output, which a recording can place"
            )
        given = {name: values.detach() for name, values in sides.items() if values is not None}
        self._kept[microbatch] = {"mask": mask, **given}

    def write(self, folder: Path) -> bool:
        """Write the file.

        Returns:
            Whether later steps are to be written too.
        """
        try:
            if self._kept:
                at, layout = self._shard, self._ticket.layout
                rank = layout.rank(RankCoords(dp=at.dp, pp=at.pp, cp=at.cp, tp=0))
                write_logprobs(folder, self._ticket.step, rank, self._columns())
        except OSError as error:
            log.warning("r3channel: log-probs are recorded no more, the channel goes on: %s", error)
            return False
        return True

    def _columns(self) -> dict[str, Ids]:
        parts = [self._columns_of(index, kept) for index, kept in sorted(self._kept.items())]
        shared = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: np.concatenate([part[name] for part in parts]) for name in shared}

    def _columns_of(self, microbatch: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Ids]:
        sample, position = self._shard.token_map(microbatch)
        batch = self._shard.microbatches[microbatch]
        last = np.asarray([tokens - 1 for tokens in batch.tokens] + [0])  # the last output predicts no token
        chosen = (kept["mask"].cpu().numpy() > 0) & (position < last[sample])
        places = np.asarray([self._place[name] for name in batch.sample_ids])
        return {
            "sample": places[sample[chosen]],
            "position": position[chosen],
            **{name: own.float().cpu().numpy()[chosen] for name, own in kept.items() if name != "mask"},
        }
