"""Compares the trainer's batch, and then the model's input, with the ticket. Knows no transport and no framework.

Rows are right only where the trainer's batch is laid out as planned. A left-padded batch, samples in another order, or another
context-parallel cut have the planned shapes, and replay rows of other tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from r3channel.errors import TicketMismatch
from r3channel.plan.row_order import RowTable
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.trainer.rank_shard import RankShard
from r3channel.wire.routing import Ids, as_tokens, hash_tokens

log = logging.getLogger(__name__)
Batches = Sequence[Sequence[Sequence[int]]]
"""Token ids of each sample of each micro-batch."""
# The names in parentheses are those of `recordings.mistakes`.
_LEFT = "it is padded on the left (shifted_padding)"
_UNKNOWN = "no layout that is known explains them; are they of another batch?"


@cache
def say_once(why: str) -> None:
    """Log once per process why the model's token ids are not checked."""
    log.warning("r3channel: the token ids that the model is given are not held against tickets: %s", why)


def check_batches(
    ticket: Ticket, shard: Shard, tokens: Batches | None, samples: Sequence[Sequence[str]] | None
) -> None:
    """Check that a trainer's micro-batches are the planned ones.

    Args:
        ticket: The step's ticket.
        shard: The plan's shard of this rank.
        tokens: Token ids of each sample of each micro-batch; lengths and ids are not checked without them.
        samples: Their names, which are not checked where there are none.

    Raises:
        TicketMismatch: Names, lengths or token ids differ.
    """
    names = [batch.sample_ids for batch in shard.microbatches]
    if samples is not None:
        _check_fact(ticket, shard, "named", names, [*map(tuple, samples)])
    if tokens is not None:
        lengths = [tuple(map(len, own)) for own in tokens]
        _check_fact(ticket, shard, "of lengths", [batch.tokens for batch in shard.microbatches], lengths)
        # last, so that nothing is hashed where lengths differ
        hashes = [tuple(hash_tokens(as_tokens(one)) for one in own) for own in tokens]
        planned = [tuple(ticket.sample(name).tokens_hash for name in own) for own in names]
        _check_fact(ticket, shard, "of token hashes", planned, hashes)


def _check_fact(ticket: Ticket, shard: Shard, what: str, planned: list[Any], given: list[Any]) -> None:
    """Compare what is planned and given, a tuple for each micro-batch."""
    where, batches = f"ticket of step {ticket.step}, dp {shard.dp}", shard.microbatches
    if len(given) != len(batches):
        said = f"{where}: {len(batches)} micro-batches planned, this trainer runs {len(given)}. Is micro-batch size or token "
        raise TicketMismatch(said + "budget another on the two sides?", ranks=[shard.key], step=ticket.step)
    for index, (batch, ours, theirs) in enumerate(zip(batches, planned, given, strict=True)):
        if ours != theirs:
            pairs = zip_longest(batch.sample_ids, ours, theirs)
            wrong = [name for name, own, other in pairs if own != other and name is not None]
            raise TicketMismatch(
                f"{where}, micro-batch {index}: samples {what} {ours} planned, here {theirs}: {wrong[:5]} differ. "
                "Was the batch sorted, trimmed or padded after it was sealed, or is it in another order than the ticket's?",
                samples=wrong, ranks=[shard.key], step=ticket.step,
            )  # fmt: skip


class ModelTokens:
    """The token ids that this rank's first model chunk is to be given in one step."""

    def __init__(self, shard: RankShard, tokens: Batches | None = None) -> None:
        """Take the step's shard and the tokens of its micro-batches.

        Args:
            shard: The step's shard.
            tokens: Token ids of each sample of each micro-batch, where the loop has them. Without them the ticket's hashes tell
                samples apart; a context-parallel rank, which sees parts of samples, then checks nothing.
        """
        self._shard, self._tokens = shard, tokens
        self._map = lru_cache(1)(shard.shard.token_map)
        self._at_once, self._noted = shard.data_N.device.type == "cpu", list[tuple[int, torch.Tensor]]()
        self._can_check = tokens is not None or shard.shard.cp_size == 1
        if not self._can_check:
            say_once("give step(tokens=...): a context-parallel rank sees parts of samples, no whole one")

    def check(self, microbatch: int, ids: torch.Tensor) -> None:
        """Check the ids of one forward pass.

        On a CPU the ids are checked at once, on a GPU in `verify`.

        Args:
            microbatch: The index of the micro-batch.
            ids: [b, s / cp] ([1, t / cp] for a pack), or [rows] in the routers' order; any integer type. May be overwritten once
                the call has returned.

        Raises:
            TicketMismatch: The ids are not those that the ticket's rows are of. Names samples and the cause.
        """
        if self._can_check and self._at_once and ids.device.type == "cpu":
            self._compare(microbatch, ids.numpy())
        elif self._can_check:
            self._noted.append((microbatch, ids.clone()))

    def verify(self) -> None:
        """Read once what a GPU was given, and check it.

        Raises:
            TicketMismatch: As `check` raises it.
        """
        noted, self._noted = self._noted, []
        for microbatch, ids in noted:
            self._compare(microbatch, ids.cpu().numpy())

    def _compare(self, microbatch: int, found: Ids) -> None:
        sample = self._map(microbatch)[0]
        if found.size != sample.size:
            return  # the routers refuse another number of rows
        found = found.reshape(sample.T.shape).T if found.ndim == 1 else found.reshape(sample.shape)
        for index, name in enumerate(self._shard.shard.microbatches[microbatch].sample_ids):
            wrong = self._wrong_positions(microbatch, index, found[sample == index])
            if len(wrong):
                raise self._mismatch(microbatch, name, int(wrong.min()), found)

    def _wrong_positions(self, microbatch: int, index: int, found_T: Ids) -> Ids:
        """Return the positions where a sample's tokens differ.

        Where only the sample's hash is known, these are all its positions or none.
        """
        sample, position = self._map(microbatch)
        position_T, batch = position[sample == index], self._shard.shard.microbatches[microbatch]
        real_T = position_T < batch.tokens[index]
        found_T, position_T = as_tokens(found_T[real_T]), position_T[real_T]
        if self._tokens is not None:
            return position_T[found_T != as_tokens(self._tokens[microbatch][index])[position_T]]
        same = hash_tokens(found_T) == self._shard.ticket.sample(batch.sample_ids[index]).tokens_hash
        return position_T[:0] if same else position_T

    def _mismatch(self, microbatch: int, name: str, position: int, found: Ids) -> TicketMismatch:
        ticket, key = self._shard.ticket, self._shard.shard.key
        where = f" at its position {position}" if self._tokens is not None else ""
        cause = next((cause for cause, is_so in self._causes(microbatch, found) if is_so), _UNKNOWN)
        return TicketMismatch(
            f"step {ticket.step}, (dp, pp, cp) {key}, micro-batch {microbatch}: the model got other tokens than the ticket's "
            f"rows are of, first in sample {name!r}{where}. Cause: {cause}. shard.model_input(i, tokens) lays them out",
            samples=[name], ranks=[key], step=ticket.step,
        )  # fmt: skip

    def _causes(self, microbatch: int, found: Ids) -> Iterator[tuple[str, bool]]:
        shard = self._shard.shard
        batch, (sample, position) = shard.microbatches[microbatch], self._map(microbatch)
        order = self._order(microbatch, found)
        yield f"its samples stand in the order {order} of the ticket's (swapped_samples)", bool(order)
        if not batch.packed and shard.cp_size == 1:
            rows = [np.roll(row, count - len(row)) for row, count in zip(found, batch.tokens, strict=True)]
            wrong = [self._wrong_positions(microbatch, index, row) for index, row in enumerate(rows)]
            yield _LEFT, not any(map(len, wrong))
        if self._tokens is None:
            return
        given = [as_tokens(own) + 1 for own in self._tokens[microbatch]]  # 0: no token
        planned = shard.lay_out(microbatch, given)
        for by, side in ((1, "right"), (-1, "left")):
            # only between neighbours of one sample: not where a cut or another sample begins
            same, next_to = sample == np.roll(sample, by, 1), position == np.roll(position, by, 1) + by
            moved = np.where(same & next_to & (planned > 0), np.roll(planned, by, 1), 0)
            yield f"it is shifted to the {side} by one (off_by_one_row)", _is_given(found, moved)
        if shard.cp_size > 1:
            left = [np.pad(own, (batch.seq_len - len(own), 0)) for own in given]
            yield _LEFT, not batch.packed and _is_given(found, shard.lay_out(microbatch, left))
            own = self._shard.ticket.layout
            layout = replace(own, cp_split="zigzag" if own.cp_split == "contiguous" else "contiguous")
            if not any(size % (2 * layout.cp) for size in batch.padded):
                cut = replace(shard, table=RowTable(shard.microbatches, layout)).lay_out(microbatch, given)
                said = f"context-parallel ranks are cut {layout.cp_split}, planned {own.cp_split}"
                yield f"{said} (zigzag_order)", _is_given(found, cut)

    def _order(self, microbatch: int, found: Ids) -> list[int]:
        """Return the order of the ticket's samples in the batch, or []."""
        batch, sample = self._shard.shard.microbatches[microbatch], self._map(microbatch)[0]
        left, order, at = list(range(len(batch.tokens))), list[int](), 0
        while left:
            for index in left:
                size = int((sample == index).sum())
                part = found[0, at : at + size] if batch.packed else found[len(order)]
                if len(part) == size and not len(self._wrong_positions(microbatch, index, part)):
                    break
            else:
                return []
            left.remove(index)
            order.append(index)
            at += size
        return order


def _is_given(found: Ids, wanted: Ids) -> bool:
    # `wanted` has each token plus one; 0 stands for any token.
    return (
        found.shape == wanted.shape and bool(wanted.any()) and bool((found + 1 == wanted)[wanted > 0].all())
    )
