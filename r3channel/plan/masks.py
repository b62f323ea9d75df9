"""Sampling masks of one shard: cut out of those of its samples, and read again by micro-batch. Pure: one place for both ends.

row lengths    u16, for every token of every micro-batch in the order of the rank's model input; 0 where there is no mask
token ids      u32, row after row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.wire.masks import Masks, Numbers


def cut_masks(shard: Shard, masks: Mapping[str, Sequence[Masks]]) -> bytes:
    """The bytes for one receiver, of the masks of each sample's turns."""
    lengths, ids = list[bytes](), list[bytes]()
    for number, batch in enumerate(shard.microbatches):
        turns = [masks.get(name, ()) for name in batch.sample_ids]
        own = [turn for of_sample in turns for turn in of_sample]
        pool_N = np.concatenate([np.zeros(0, "<u4"), *(turn.token_ids_N for turn in own)])
        begins = iter(accumulate((len(turn.token_ids_N) for turn in own), initial=0))
        spread = [
            _spread(of_sample, tokens, begins) for of_sample, tokens in zip(turns, batch.tokens, strict=True)
        ]
        length_M = shard.lay_out(number, [one for one, _ in spread]).ravel()
        begin_M = shard.lay_out(number, [one for _, one in spread]).ravel()
        lengths.append(length_M.astype("<u2").tobytes())
        ids.append(pool_N[_ranges(begin_M, length_M)].tobytes())
    return b"".join([*lengths, *ids])


def brings_masks(ticket: Ticket, shard: Shard) -> bool:
    """Do masks come to this receiver with its rows? Only the last stage has logits."""
    return ticket.sampling_masks and shard.pp == ticket.layout.pp - 1


def mask_rows(shard: Shard) -> int:
    """Rows for which `cut_masks` has a length."""
    return sum(batch.rows for batch in shard.microbatches) // shard.cp_size


def read_masks(shard: Shard, data_N: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """(offsets [tokens + 1] int64, token ids int32) of each micro-batch: the mask of token i of the model input, flattened, is
    `ids[offsets[i] : offsets[i + 1]]`. ValueError where the bytes are not those of this shard."""
    rows = mask_rows(shard)
    lengths_N, ids_N = data_N[: 2 * rows].view("<u2"), data_N[2 * rows :].view("<i4")
    offsets_N = np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)])
    if offsets_N[-1] != len(ids_N):
        raise ValueError(
            f"{len(ids_N)} token ids, the lengths of {len(lengths_N)} masks add up to {offsets_N[-1]}"
        )
    sizes = (batch.rows // shard.cp_size for batch in shard.microbatches)
    for first, last in pairwise(accumulate(sizes, initial=0)):
        own = offsets_N[first : last + 1]
        yield own - own[0], ids_N[own[0] : own[-1]].copy()  # aligned, and the caller's own


def _spread(turns: Sequence[Masks], tokens: int, begins: Iterator[int]) -> tuple[Numbers, Numbers]:
    """(length, place of the first id in the pool) of each position of a sample."""
    length_T, begin_T = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
    for turn in turns:
        rows = slice(turn.first_row, turn.first_row + len(turn.lengths_T))
        length_T[rows] = turn.lengths_T
        begin_T[rows] = next(begins) + np.cumsum(length_T[rows]) - length_T[rows]
    return length_T, begin_T


def _ranges(begin_M: Numbers, length_M: Numbers) -> Numbers:
    """All indices of the ranges, one range after another.

    >>> _ranges(np.array([5, 0, 2]), np.array([2, 0, 3])).tolist()
    [5, 6, 2, 3, 4]
    """
    before_M = np.cumsum(length_M) - length_M
    return np.repeat(begin_M - before_M, length_M) + np.arange(int(length_M.sum()))
