"""A tensor per token in one shard: cut out of its samples' rows, and read again by micro-batch. Pure: one place for both ends.

row lengths    u16, for every token of every micro-batch in the order of the rank's model input; 0 where it has no row
values         the entries, row after row
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.wire.tensor_frame import TensorRows, entries_of, row_lengths
from r3channel.wire.token_tensors import TokenTensor, Values


def received_tensors(ticket: Ticket, shard: Shard) -> tuple[TokenTensor, ...]:
    """Return the tensors that a receiver gets with its rows.

    They come in order, and have the receiver's layers.

    Args:
        ticket: The ticket of the step.
        shard: The receiver's shard.
    """
    return tuple(tensors_in(shard, ticket.tensors, stages=ticket.layout.pp))


def tensors_in(shard: Shard, tensors: Iterable[TokenTensor], *, stages: int) -> Iterator[TokenTensor]:
    """Yield those of some tensors that come to a shard.

    Args:
        shard: The shard; the tensors have its layers.
        tensors: Tensors as they are declared.
        stages: The number of pipeline stages.
    """
    for tensor in tensors:
        reaches = tensor.stage == "every" or shard.pp == stages - 1
        if reaches and (shard.layers or not tensor.by_layer):
            yield tensor.reshape(len(shard.layers), shard.spec.top_k)


def cut_tensor(shard: Shard, tensor: TokenTensor, rows: Mapping[str, Sequence[TensorRows]]) -> bytes:
    """Return the bytes of a tensor for one receiver.

    Args:
        shard: The receiver's shard.
        tensor: The tensor as `received_tensors` has it.
        rows: The rows of each sample's turns; they have all layers.
    """
    lengths, entries = list[Any](), list[Any]()
    for number, batch in enumerate(shard.microbatches):
        turns = [rows.get(name, ()) for name in batch.sample_ids]
        pool_N = entries_of(tensor, [_own_layers(shard, turn) for of_sample in turns for turn in of_sample])
        counts = [row_lengths(*each) for each in zip(turns, batch.tokens, strict=True)]
        whole_N = np.concatenate(counts)
        begins = np.split(np.cumsum(whole_N) - whole_N, np.cumsum(batch.tokens)[:-1])
        length_M, begin_M = (shard.lay_out(number, each).ravel() for each in (counts, begins))
        lengths.append(length_M.astype("<u2"))
        entries.append(pool_N.take(_ranges(begin_M, length_M)))
    return b"".join([*lengths, *entries])


def _own_layers(shard: Shard, turn: TensorRows) -> TensorRows:
    if not turn.tensor.by_layer or shard.sources == (*range(shard.spec.num_moe_layers),):
        return turn  # entries without layers, or with all
    own_N = np.empty(len(turn.entries_N), turn.tensor.reshape(len(shard.sources), shard.spec.top_k).entry)
    for name in own_N.dtype.names or ():
        own_N[name] = turn.entries_N[name].take(shard.sources, axis=1)
    return turn._replace(entries_N=own_N)


def length_bytes(shard: Shard) -> int:
    """Return the bytes of the row lengths that `cut_tensor` begins with."""
    return 2 * sum(batch.rows for batch in shard.microbatches) // shard.cp_size


def tensor_bytes(tensor: TokenTensor, lengths: bytes | bytearray | Values) -> int:
    """Return all bytes of a tensor that has these row lengths."""
    return len(lengths) + tensor.entry.itemsize * int(np.frombuffer(lengths, "<u2").sum(dtype=np.int64))


def read_tensor(shard: Shard, tensor: TokenTensor, data_N: Values) -> Iterator[tuple[Values, Values]]:
    """Read the rows of a tensor, micro-batch by micro-batch.

    Args:
        shard: The receiver's shard.
        tensor: The tensor as `received_tensors` has it.
        data_N: What `cut_tensor` made.

    Yields:
        (offsets [tokens + 1] int64, entries) of every micro-batch: the row of token i of the model input, flattened, is
        `entries[offsets[i] : offsets[i + 1]]`.

    Raises:
        ValueError: The bytes are not those of this shard.
    """
    lengths_N, values_N = np.split(data_N, [length_bytes(shard)])
    if len(data_N) != tensor_bytes(tensor, lengths_N):
        raise ValueError(
            f"{len(data_N)} bytes of {tensor.name}: its row lengths say {tensor_bytes(tensor, lengths_N)}"
        )
    entries_N = np.frombuffer(values_N, tensor.entry)
    offsets_N = np.concatenate([[0], np.cumsum(lengths_N.view("<u2"), dtype=np.int64)])
    sizes = (batch.rows // shard.cp_size for batch in shard.microbatches)
    for first, last in pairwise(accumulate(sizes, initial=0)):
        own = offsets_N[first : last + 1]
        yield own - own[0], entries_N[own[0] : own[-1]]


def slot_bytes(shard: Shard, tensor: TokenTensor, data_N: Values) -> list[Values]:
    """Return the bytes of a tensor that each TP slot keeps.

    A tensor that goes by layer keeps a slot's own rows, as its routers see them, with zeros where a row is not there. Of other
    tensors each slot keeps all bytes.

    Args:
        shard: The receiver's shard.
        tensor: The tensor as `received_tensors` has it.
        data_N: What `cut_tensor` made.

    Raises:
        ValueError: The bytes are not those of this shard.
    """
    if not tensor.by_layer:
        return [data_N] * shard.tp_slots
    slots = [np.empty((shard.tp_slots, 0), tensor.entry)]
    for batch, (offsets, entries_N) in zip(
        shard.microbatches, read_tensor(shard, tensor, data_N), strict=True
    ):
        rows_N = np.zeros(len(offsets) - 1, tensor.entry)
        rows_N[np.diff(offsets) > 0] = entries_N
        slots.append(rows_N.reshape(batch.width, -1).T.reshape(shard.tp_slots, -1))
    return list(np.concatenate(slots, axis=1).view(np.uint8))


def read_slot(shard: Shard, tensor: TokenTensor, data_N: Values) -> Iterator[tuple[Values, Values]]:
    """Read the rows that a TP slot keeps, by micro-batch.

    Args:
        shard: The receiver's shard.
        tensor: The tensor as `received_tensors` has it.
        data_N: What `slot_bytes` has for the slot.

    Yields:
        What `read_tensor` yields.

    Raises:
        ValueError: The bytes are not those of this shard.
    """
    if not tensor.by_layer:
        yield from read_tensor(shard, tensor, data_N)
        return
    for first, last in pairwise(accumulate(map(shard.slot_rows, range(len(shard.microbatches))), initial=0)):
        yield np.arange(last - first + 1), np.frombuffer(data_N, tensor.entry)[first:last]


def _ranges(begin_M: Values, length_M: Values) -> Values:
    """Return all indices of the ranges, one range after another.

    >>> _ranges(np.array([5, 0, 2]), np.array([2, 0, 3])).tolist()
    [5, 6, 2, 3, 4]
    """
    before_M = np.cumsum(length_M) - length_M
    return np.repeat(begin_M - before_M, length_M) + np.arange(int(length_M.sum()))
