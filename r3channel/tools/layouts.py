"""The table of supported layouts. Its rows are the parameters of tests/dist/test_layouts.py, so each one has a proof."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One row."""

    text: str
    """What `TrainerLayout.parse` and `--layout` take."""
    rows: str
    """What a rank's routers see."""
    when: str
    """Which command runs the proof."""


_TEST, _FULL = "make test", "make test-full"

LAYOUTS = (
    Layout("dp=1", "all rows, sequence-major", _TEST),
    Layout("tp=2", "the rank's contiguous half of the rows (sequence parallel)", _FULL),
    Layout("dp=2,ep=2", "the rows of the DP rank, whoever owns the experts", _FULL),
    Layout("tp=2,ep=2", "as tp=2", _FULL),
    Layout("pp=2", "all rows of the stage's layers, 1F1B", _FULL),
    Layout("pp=2,vpp=2", "all rows of the layers of both chunks, interleaved", _TEST),
    Layout("pp=2,uniform=0", "as pp=2, each micro-batch of its own length", _FULL),
    Layout("pp=2,first_layers=3", "all rows of 3 and 5 layers", _FULL),
    Layout("cp=2", "zigzag chunks r and 2*cp-1-r of the sequence", _FULL),
    Layout("cp=2,packing=thd", "the same of each packed sequence, in pack order", _TEST),
    Layout("tp=2,cp=2,packing=thd", "the CP cut, then the contiguous half", _TEST),
    Layout("dp=2,tp=2", "the DP rank's rows, then the contiguous half", _TEST),
    Layout("dp=2,tp=2,ep=2", "the same", _FULL),
    Layout("dp=2,cp=2", "the DP rank's rows, then zigzag", _FULL),
    Layout("dp=2,pp=2,vpp=2", "the DP rank's rows of the layers of both chunks", _FULL),
    Layout("tp=2,pp=2", "the contiguous half of the stage's layers", _FULL),
    Layout("cp=2,pad_policy=live", "as cp=2; the live router chooses for padding and last tokens", _FULL),
    Layout("pp=2,cp=2,packing=thd", "zigzag of each packed sequence, the stage's layers", _FULL),
)
PROVEN = tuple(layout.text for layout in LAYOUTS)
WHEN = {layout.text: layout.when for layout in LAYOUTS}


NOTES = (
    "Each proof: real Megatron-core over gloo, several micro-batches, full recompute; every id that a router used, the loss",
    "and every gradient are compared with one rank's, and the bytes that each rank received with the plan's. Larger sizes",
    "follow the same rules (property tests of the plan). Planned and property-tested, but not run on Megatron here:",
    "`cp_split=contiguous` (all-gather attention; Megatron-core's own rotary embedding is zigzag). Tensor parallelism without",
    "sequence parallelism is tested in log-prob passes only: Megatron refuses to train MoE so.",
)


def lines() -> list[str]:
    """Markdown for `pages`."""
    rows = [f"| `{layout.text}` | {layout.rows} | `{layout.when}` |" for layout in LAYOUTS]
    return ["| layout | a router's rows on one rank | proven by |", "|---|---|---|", *rows, "", *NOTES]
