"""The words of a layout: parsing, rank order, and what is refused by name."""

from __future__ import annotations

import pytest

from r3channel.errors import ConfigError
from r3channel.plan.layout import RankCoords, TrainerLayout


@pytest.mark.parametrize("rank", range(16))
def test_rank_order_is_megatrons_default(rank: int) -> None:
    layout = TrainerLayout(dp=2, tp=2, pp=2, cp=2)
    expected = RankCoords(tp=rank % 2, cp=rank // 2 % 2, dp=rank // 4 % 2, pp=rank // 8)
    assert layout.coords(rank) == expected
    assert layout.rank(layout.coords(rank)) == rank


def test_layout_text_is_parsed_and_sequence_parallel_follows_tp() -> None:
    assert TrainerLayout.parse("dp=2,tp=2,pp=1,cp=1") == TrainerLayout(dp=2, tp=2)
    assert TrainerLayout.parse("tp=2").sequence_parallel
    assert not TrainerLayout.parse("tp=2,sp=0").sequence_parallel


def test_every_field_can_be_said_in_text() -> None:
    text = (
        "cp=2,pp=2,vpp=2,packing=thd,cp_split=contiguous,pad_policy=native,pad_multiple=4,uniform=0,mtp=3+1"
    )
    layout = TrainerLayout.parse(text)
    assert layout.mtp == (3, 1) and layout.uniform is False and layout.packing == "thd"
    assert TrainerLayout.from_dict(layout.to_dict()) == layout
    assert "cp_split=contiguous" in str(layout) and "mtp=(3, 1)" in str(layout)


@pytest.mark.parametrize(
    "text",
    ["dp=0", "dp=x", "zz=1", "tp=1,sp=1", "ep=3", "vpp=2", "packing=ragged", "cp_split=x", "pad_policy=zero"],
)
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TrainerLayout.parse(text)


def test_members_are_the_stages_and_context_ranks_of_a_dp_rank() -> None:
    layout = TrainerLayout(pp=2, cp=3)
    numbers = [layout.member(pp=pp, cp=cp) for pp in range(2) for cp in range(3)]
    assert numbers == list(range(layout.members))
