"""The stage table and the hidden share of send time."""

from __future__ import annotations

import pytest

from r3channel.observe.stage_clock import Span
from r3channel.tools.stages import hidden_share, stage_table, waits_of


def spans(stage: str, *intervals: tuple[float, float]) -> list[Span]:
    return [Span(stage, None, "any", start_s, end_s) for start_s, end_s in intervals]


def test_the_table_has_a_line_per_stage_in_the_order_of_the_design() -> None:
    table = stage_table({"relay": {"send": 2.0, "ingest": 1.0}, "trainer 0": {"send": 0.5}})
    assert [line.split() for line in table.splitlines()] == [
        ["stage", "(seconds)", "relay", "trainer", "0"],
        ["ingest", "1.000", "-"],
        ["send", "2.000", "0.500"],
    ]


def test_the_table_says_what_share_of_wall_the_stages_explain() -> None:
    table = stage_table({"trainer 0": {"forward": 1.0, "backward": 2.0}}, wall_s={"trainer 0": 4.0})
    assert [line.split()[1] for line in table.splitlines()[-3:]] == ["3.000", "4.000", "75.0%"]


def test_a_send_outside_every_wait_is_hidden() -> None:
    assert hidden_share(spans("send", (0, 1), (2, 4)), spans("wait_relay", (1, 2), (4, 5))) == 1.0


def test_work_is_what_follows_the_seal_and_a_wait_is_one_for_routing() -> None:
    relay = spans("place", (0, 3)) + spans("send", (3, 4)) + spans("verify", (0, 9))
    trainer = spans("wait_wire", (3, 4)) + spans("wait_generation", (0, 4)) + spans("forward", (0, 4))
    assert hidden_share(relay, trainer) == 0.75


def test_a_trainers_waits_are_added_up_by_step() -> None:
    waits = [
        Span("wait_relay", 3, "t", 0, 1),
        Span("wait_wire", 3, "t", 1, 1.5),
        Span("wait_relay", 4, "t", 2, 3),
    ]
    others = [
        Span("wait_generation", 3, "t", 5, 9),
        Span("forward", 4, "t", 9, 10),
        Span("wait_join", None, "t", 0, 1),
    ]
    assert waits_of(waits + others) == {3: 1.5, 4: 1.0}


def test_overlapping_waits_of_several_trainers_expose_a_moment_once() -> None:
    waits = spans("wait_relay", (1, 3), (2, 4)) + spans("wait_wire", (3.5, 4))
    assert hidden_share(spans("send", (0, 10)), waits) == pytest.approx(0.7)


def test_sends_at_the_same_time_each_count() -> None:
    sends = spans("send", (0, 2), (0, 2))
    assert hidden_share(sends, spans("wait_relay", (0, 1))) == pytest.approx(0.5)


def test_a_send_within_a_wait_is_exposed() -> None:
    assert hidden_share(spans("send", (1, 2)), spans("wait_wire", (0, 5))) == 0.0


def test_no_send_shows_nothing_hidden() -> None:
    assert hidden_share([], spans("wait_wire", (0, 5))) == 0.0
