"""The stage table and the hidden share of send time."""

from __future__ import annotations

import pytest

from r3channel.clock import Span
from r3channel.report.stages import hidden_share, stage_table


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
