"""The words of a layout: parsing, rank order, what is refused by name, and that every supported one is proven."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import RankCoords, TrainerLayout
from tests.support.pages import LAYOUTS, WHEN


@pytest.mark.parametrize("rank", range(16))
def test_rank_order_is_megatrons_default(rank: int) -> None:
    layout = TrainerLayout(dp=2, tp=2, pp=2, cp=2)
    expected = RankCoords(tp=rank % 2, cp=rank // 2 % 2, dp=rank // 4 % 2, pp=rank // 8)
    assert layout.coords(rank) == expected
    assert layout.rank(layout.coords(rank)) == rank


def test_every_field_can_be_said_in_text() -> None:
    text = "cp=2,pp=2,vpp=2,packing=thd,cp_split=contiguous,pad_policy=live,pad_multiple=4,uniform=0,mtp=3+1"
    layout = TrainerLayout.parse(text)
    assert not TrainerLayout.parse("tp=2,sp=0").sequence_parallel
    assert layout.mtp == (3, 1) and layout.uniform is False and layout.packing == "thd"
    assert TrainerLayout.from_dict(layout.to_dict()) == layout
    assert "cp_split=contiguous" in str(layout) and "mtp=(3, 1)" in str(layout)


@pytest.mark.parametrize(
    "text",
    ["dp=0", "dp=x", "zz=1", "tp=1,sp=1", "ep=3", "vpp=2", "packing=ragged", "cp_split=x", "pad_policy=zero", "first_layers=0"],
)  # fmt: skip
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TrainerLayout.parse(text)


@pytest.mark.parametrize(
    "values",
    [{"dp": 2.0}, {"tp": "2"}, {"cp": None}, {"pad_multiple": float("inf")}, {"mtp": (1.5,)}, {"sp": 2}, {"uniform": "on"}],
)  # fmt: skip
def test_values_of_other_types_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"layout: {next(iter(values))}="):
        TrainerLayout(**values)
    with pytest.raises(ConfigError, match="'zz'"):
        TrainerLayout.from_dict({"dp": 1, "zz": 2})


def test_numbers_of_numpy_become_plain_ones() -> None:
    layout = TrainerLayout(dp=np.int16(300), tp=np.int16(300))  # type: ignore[arg-type]
    assert layout == TrainerLayout(dp=300, tp=300) and layout.world_size == 90000


SPEC8 = RoutingSpec(num_layers=8, moe_layers=tuple(range(8)), num_experts=8, top_k=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda layout: layout.coords(-1), lambda layout: layout.coords(16),
        lambda layout: layout.rank(RankCoords(dp=0, pp=-1, cp=0, tp=0)),
        lambda layout: layout.stage_layers(SPEC8, pp=-1), lambda layout: layout.chunk_layers(SPEC8, pp=0, chunk=1),
    ],
)  # fmt: skip
def test_ranks_that_a_layout_does_not_have_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"=(-1|1|2|16): expected 0\.\."):
        call(TrainerLayout(dp=2, tp=2, pp=2, cp=2))


def test_an_interleaved_pipeline_of_which_megatron_cannot_compute_the_middle_is_refused() -> None:
    """Megatron-core 0.16.1 divides by its number of stages between the first and the last, where both sizes are given."""
    with pytest.raises(ConfigError, match="Give one of the two"):
        TrainerLayout(pp=2, vpp=2, first_layers=2, last_layers=6).stage_sizes(8)
    one = TrainerLayout(pp=2, vpp=2, first_layers=2)
    assert one.stage_sizes(8) == (2, 6)
    chunks = [[one.chunk_layers(SPEC8, pp=pp, chunk=chunk) for chunk in range(2)] for pp in range(2)]
    assert chunks == [[(0,), (4,)], [(1, 2, 3), (5, 6, 7)]]


def test_megatrons_own_arguments_give_the_layout() -> None:
    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None,
        context_parallel_size=2, expert_model_parallel_size=4, sequence_parallel=True,
        decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=None,
    )  # fmt: skip
    made = TrainerLayout.from_megatron_args(args, world_size=16, packing="thd", pad_multiple=128)
    assert made == TrainerLayout.parse(
        "dp=2,tp=2,pp=2,cp=2,ep=4,sp=1,packing=thd,pad_multiple=128,first_layers=3"
    )


# -- the table of supported layouts --------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
ASKED = (
    "dp=1", "tp=2", "dp=2,ep=2", "pp=2", "pp=2,vpp=2", "cp=2", "cp=2,packing=thd", "tp=2,cp=2,packing=thd", "dp=2,tp=2",
)  # fmt: skip


def test_every_layout_that_was_asked_for_is_proven_and_fits_eight_processes() -> None:
    assert set(ASKED) <= set(WHEN) and len(WHEN) == len(LAYOUTS)
    assert all(TrainerLayout.parse(text).world_size <= 8 for text in WHEN)
