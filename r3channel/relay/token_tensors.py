"""The sampling masks of a reply, checked and kept: they count at the store's ceiling, and go where their turn goes."""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from r3channel.errors import FrameCorrupt, RoutingMissing, RowCountMismatch
from r3channel.relay.memory import Block, Store
from r3channel.wire.masks import Masks, parse_masks
from r3channel.wire.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class HeldMasks:
    """The masks of one turn, valid until its `block` is freed."""

    masks: Masks
    block: Block
    _hash: int
    """xxh3_64 of the block when it came."""

    def whole(self, sample_id: str, *, step: int) -> Masks:
        """Raises FrameCorrupt where memory or disk was damaged meanwhile."""
        if xxh3_64_intdigest(self.block.view) != self._hash:
            raise FrameCorrupt(
                f"step {step}: the sampling masks of sample {sample_id} at rest are not those that came; was memory or disk "
                "damaged? Abandon the step, discard the sample and generate it again",
                samples=[sample_id],
                step=step,
            )
        return self.masks


def keep_masks(
    source: Source, store: Store, *, where: str, key: int | None, tokens: int, held_rows: int, room_s: float
) -> HeldMasks:
    """The masks that are left of a reply's bytes; they fit a reply of so many tokens, of which `held_rows` rows came before.

    Raises RoutingMissing, RowCountMismatch, StoreFull and what `parse_masks` does; then nothing is kept."""
    if not source.left:
        raise RoutingMissing(
            f"{where}: no sampling masks behind the routing, expected some (sampling_masks is on). Was return_sampling_mask set, "
            "and did the engine start with R3CHANNEL_SAMPLING_MASKS=1?"
        )
    block = store.allocate(source.left, timeout_s=room_s, what=where)
    try:
        source.fill(block.view)
        found = parse_masks(block.view, where=f"{where}: sampling masks")
        if found.end_row != tokens - 1 or found.first_row < held_rows or key not in (None, found.sample_key):
            raise RowCountMismatch(
                f"{where}: sampling masks of rows {found.first_row}..{found.end_row}, request key {found.sample_key:#x}; "
                f"expected rows that begin at {held_rows} or later and end at {tokens - 1}, key {key}. Was the text cut after "
                "generation, or were replies swapped?"
            )
    except BaseException:
        block.free()
        raise
    return HeldMasks(found, block, xxh3_64_intdigest(block.view))
