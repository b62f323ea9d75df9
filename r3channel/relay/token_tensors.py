"""The tensors of a reply beside its expert ids, checked and kept: they count at the store's ceiling, and go with their turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from r3channel.errors import FrameCorrupt, RowCountMismatch
from r3channel.plan.shards import Shard
from r3channel.plan.token_tensors import cut_tensor
from r3channel.relay.memory import Block, Store
from r3channel.wire.source import Source
from r3channel.wire.tensor_frame import TensorRows, parse_tensors
from r3channel.wire.token_tensors import TokenTensor


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors:
    """The tensors of one turn, valid until their `block` is freed."""

    rows: Mapping[str, TensorRows]
    """By the tensor's name."""
    block: Block
    _hash: int
    """xxh3_64 of the block when it came."""

    def whole(self, tensor: TokenTensor, sample_id: str, *, step: int) -> TensorRows:
        """Raises FrameCorrupt where memory or disk was damaged meanwhile."""
        if xxh3_64_intdigest(self.block.view) != self._hash:
            raise FrameCorrupt(
                f"step {step}: the {tensor.name} of sample {sample_id} at rest are not those that came; was memory or disk "
                "damaged? Abandon the step, discard the sample and generate it again",
                samples=[sample_id],
                step=step,
            )
        return self.rows[tensor.name]


HeldOfSample = Mapping[str, Sequence[HeldTensors]]
"""Sample -> its turns' tensors."""


def keep_tensors(
    source: Source, store: Store, tensors: Sequence[TokenTensor], *, where: str, key: int | None, tokens: int,
    held_rows: int, room_s: float,
) -> HeldTensors:  # fmt: skip
    """The tensors that are left of a reply's bytes; they fit a reply of so many tokens, of which `held_rows` rows came before.

    Raises RowCountMismatch, StoreFull and what `parse_tensors` does; then nothing is kept."""
    block = store.allocate(source.left, timeout_s=room_s, what=where)
    try:
        source.fill(block.view)
        found = parse_tensors(block.view, tensors, where=where)
        for rows in found:
            if rows.end_row != tokens - 1 or rows.first_row < held_rows or key not in (None, rows.sample_key):
                raise RowCountMismatch(
                    f"{where}: {rows.tensor.name} of rows {rows.first_row}..{rows.end_row}, request key {rows.sample_key:#x}; "
                    f"expected rows that begin at {held_rows} or later and end at {tokens - 1}, key {key}. Was the text cut "
                    "after generation, or were replies swapped?"
                )
    except BaseException:
        block.free()
        raise
    return HeldTensors({rows.tensor.name: rows for rows in found}, block, xxh3_64_intdigest(block.view))


def cut_held(shard: Shard, tensor: TokenTensor, held: HeldOfSample, *, step: int) -> bytes:
    """A receiver's part of a tensor. Raises FrameCorrupt."""
    names = [name for batch in shard.microbatches for name in batch.sample_ids]
    whole = {name: [turn.whole(tensor, name, step=step) for turn in held.get(name, ())] for name in names}
    return cut_tensor(shard, tensor, whole)
