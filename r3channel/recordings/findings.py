"""One thing that is wrong with recorded routing, or may be. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = {
    "zero_rows": "rows of zeros: memory that nobody wrote, or a path that never captures",
    "duplicated_ids": "an expert stands twice in a row: zero-filled, stale or overlapping memory",
    "padding_rows": "rows hold padding's made-up ids: the end of the padding was taken for rows",
    "fused_shared_expert": "the shared expert's column is among the routed ones: cut it off",
    "int16_as_uint8": "ids above 8 bits were read as single bytes: another id type than the sender's",
    "physical_ids": "ids are mapped one to one: physical experts (after load balancing), not logical ones",
    "out_of_range": "ids that the model does not have",
    "off_by_one_row": "each row has its neighbour's ids: a last token without a row, padding or shifted labels",
    "missing_prefix": "the leading rows are not there: a start offset, or a cached prompt that was not returned",
    "dense_layer_counted": "decoder layers and MoE layers were counted alike: dense layers have no routing",
    "mtp_shift": "an MTP layer took a decoder layer's ids, or pushed all others on: layer numbers collide",
    "shifted_layer": "each layer has its neighbour's ids: layers are bound by the order of construction",
    "swapped_layers": "layers have each other's ids: an order or a table of layers is wrong",
    "stage_reversed": "the layers of a pipeline stage are bound from the last to the first",
    "swapped_samples": "two samples have each other's rows: an order was changed on one side only",
    "shifted_padding": "rows stand before or behind their places, as far as padding goes: it is on the other side",
    "cp_chunks_swapped": "context-parallel chunks of two sequences are exchanged: a pack's offsets",
    "zigzag_order": "context-parallel chunks are in the other order, zigzag against contiguous",
    "sp_halves_swapped": "sequence-parallel parts are exchanged between TP ranks",
    "tp_cp_exchanged": "TP and CP are exchanged: ranks are counted in the other order",
    "rotated_rows": "the rows of a micro-batch are rotated: a start offset within the pack",
    "other_microbatch": "a micro-batch's routers have another one's rows",
    "other_microbatch_size": "rows were laid out for micro-batches of another size",
    "recompute_other_microbatch": "the recompute took another micro-batch's ids than its forward pass: one queue for all",
    "stale_row": "rows are those of another request: a cached slot was not written again",
    "retraction_overwrite": "rows that were decoded came back prefilled: a retracted request was computed again over its own",
    "mixed_versions": "one range of rows is said to be of one weight version, and is of several",
    "version_off_by_one": "weight versions are one off: stamped before instead of after the update",
    "replay_hurts": "log-probs are further from the engine's with replay than without: rows of other tokens or layers",
    "tensor_row": "rows of a tensor beside the ids do not have the token that they sampled: rows of another position or sample",
    "row_order": "the same experts in another order: nothing is lost unless weights travel in that order",
    "unexplained": "rows differ, and no known mistake explains them",
}
"""Name -> what it is and what usually makes it."""
NOTES = frozenset({"row_order"})
"""Names that are reported and are no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault, named as in `FAULTS`, with the first cell that shows it as an example of `cells`."""

    name: str
    verdict: bool
    """True: the bytes say so. False: a suspicion, from statistics."""
    what: str
    """The fault in a sentence, and what usually makes it."""
    step: int
    sample: str
    position: int = -1
    layer: int = -1
    expected: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    cells: int = 0
    """(row, layer) pairs that it explains."""
    of_pass: str = "forward"

    def __str__(self) -> str:
        kind = "" if self.verdict else "suspicion: "
        place = f"step {self.step}, sample {self.sample}"
        if self.position >= 0:
            place += f", position {self.position}"
        if self.layer >= 0:
            place += f", layer {self.layer}"
        ids = f": expected {list(self.expected)}, seen {list(self.seen)}" if self.seen else ""
        count = f" ({self.cells:,} rows of layers)" if self.cells else ""
        passed = f" in the {self.of_pass} pass" if self.of_pass != "forward" else ""
        return f"{kind}{self.name}{count}{passed}: {place}{ids}. {self.what}"
