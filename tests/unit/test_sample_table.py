"""The table of samples and replies against a model of twenty lines, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from r3channel import errors
from r3channel.relay.sample_table import Reply, Rows, SampleTable
from r3channel.wire.parcel import FrameReference


@dataclass(frozen=True, eq=False)
class Held:
    first_row: int
    end_row: int
    sample_key: int = 1
    fold: int = 0
    provenance: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()


def reply(
    name: str, tokens: int, *, serial: int = 0, first_row: int = 0, held: int | None = None, key: int = 1
) -> Reply:
    """The reply for a sample whose first `t` tokens hash to `t`."""
    rows = tokens - 1 - first_row
    reference = (
        FrameReference(sample_key=key, boot_id=7, serial=serial, first_row=first_row, rows=rows)
        if serial
        else None
    )
    return Reply(
        sample_id=name, engine="e", key=1, tokens=tokens, tokens_hash=tokens, prefix_hash=tokens - 1,
        held_hash=held, reference=reference,
    )  # fmt: skip


class Table(RuleBasedStateMachine):
    """Every row that was handed in is in exactly one place: with a sample, unclaimed, or given back to its owner."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.entries = SampleTable()
        self.model: dict[str, list[int | Rows]] = {}  # sample -> turns: a serial that is awaited, or rows
        self.steps: dict[str, int] = {}
        self.unclaimed: dict[int, Rows] = {}
        self.promised: dict[int, tuple[int, int]] = {}  # serial -> rows
        self.used: set[int] = set()
        self.serial = 0
        self.now = 0.0

    @rule(target=names, name=st.sampled_from("abc"))
    def name(self, name: str) -> str:
        return name

    @rule(name=names, direct=st.booleans(), early=st.booleans(), rows=st.integers(1, 5))
    def next_turn(self, name: str, direct: bool, early: bool, rows: int) -> None:
        turns = self.model.get(name, [])
        first = self._end(turns)
        free = name not in self.steps
        self.serial += 1
        held = Held(first, first + rows)
        if direct and early:
            assert self.entries.frame((7, self.serial), held, now_s=self.now)
            self.unclaimed[self.serial] = held
        own = {"serial": self.serial if direct else 0, "first_row": first, "held": first if turns else None}
        said = reply(name, first + rows + 1, **own)
        try:
            self.entries.reply(said, None if direct else held, append=bool(turns), now_s=self.now)
        except errors.SampleTwice:
            assert not free
            return
        assert free
        if direct:
            self.promised[self.serial] = (first, first + rows)
        if direct and early:
            del self.unclaimed[self.serial]
            self.used.add(self.serial)
        self.model[name] = [*turns, self.serial if direct and not early else held]

    @rule(number=st.integers(0, 30))
    def frame_comes(self, number: int) -> None:
        if number not in self.promised:
            return
        rows = Held(*self.promised[number])
        place = next((name for name, turns in self.model.items() if number in turns), None)
        taken = self.entries.frame((7, number), rows, now_s=self.now)
        assert taken == (place is not None)
        if place is not None:
            self.model[place] = [rows if turn == number else turn for turn in self.model[place]]
            self.used.add(number)

    @rule(name=names)
    def second_reply_of_one_name(self, name: str) -> None:
        if name in self.model:
            with pytest.raises(errors.SampleTwice):
                self.entries.reply(reply(name, 9), Held(0, 8), append=False, now_s=self.now)

    @rule(name=names, step=st.integers(0, 9))
    def take(self, name: str, step: int) -> None:
        if name not in self.model or name in self.steps:
            with pytest.raises(errors.SampleUnknown) as raised:
                self.entries.take([name], step=step)
            assert raised.value.samples == (name,)
        elif not any(isinstance(turn, int) for turn in self.model[name]):
            (sample,) = self.entries.take([name], step=step)
            assert list(sample.held) == self.model[name]
            self.steps[name] = step

    @rule(name=names)
    def give_back(self, name: str) -> None:
        if self.steps.pop(name, None) is not None:
            self.entries.give_back([self.entries.samples[name]])

    @rule(name=names)
    def remove(self, name: str) -> None:
        gone = self.entries.remove([name])
        assert [sample.name for sample in gone] == ([name] if name in self.model else [])
        self._forget(name)
        self.steps.pop(name, None)

    @rule()
    def an_hour_passes(self) -> None:
        self.now += 3600
        samples, rows = self.entries.expired(before_s=self.now, unclaimed_s=self.now)
        assert {sample.name for sample in samples} == self.model.keys() - self.steps.keys()
        assert set(map(id, rows.values())) == set(map(id, self.unclaimed.values()))
        for sample in samples:
            self._forget(sample.name)
        self.unclaimed.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.entries.samples.keys() == self.model.keys()
        for name, turns in self.model.items():
            assert self.entries.rows_announced(name) == self._end(turns)
            awaited = [turn.name for _, turn in self.entries.outstanding([name])]
            assert awaited == [(7, turn) for turn in turns if isinstance(turn, int)]
        assert self.entries.unclaimed == len(self.unclaimed)
        assert not any(self.entries.wants((7, serial)) for serial in self.used)

    def _forget(self, name: str) -> None:
        for turn in self.model.pop(name, []):
            if isinstance(turn, int):
                self.used.add(turn)
                del self.promised[turn]

    def _end(self, turns: list[int | Rows]) -> int:
        if not turns:
            return 0
        last = turns[-1]
        return self.promised[last][1] if isinstance(last, int) else last.end_row


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)


def test_rows_are_announced_as_soon_as_a_reference_says_so() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 40, serial=1), None, append=False, now_s=0)
    assert entries.rows_announced("a") == 39


def test_a_damaged_frame_fails_its_sample_and_a_good_copy_heals_it() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9, serial=1), None, append=False, now_s=0)
    assert not entries.frame((7, 1), errors.FrameCorrupt("damaged"), now_s=0)
    with pytest.raises(errors.FrameCorrupt) as raised:
        entries.take(["a"], step=3)
    assert raised.value.samples == ("a",) and raised.value.step == 3
    assert entries.wants((7, 1)) and entries.frame((7, 1), Held(0, 8), now_s=0)
    assert entries.take(["a"], step=3)


def test_a_damaged_frame_that_nobody_claimed_does_not_block_its_good_copy() -> None:
    entries = SampleTable()
    entries.frame((7, 1), errors.FrameCorrupt("damaged"), now_s=0)
    with pytest.raises(errors.FrameCorrupt):
        entries.reply(reply("a", 9, serial=1), None, append=False, now_s=0)
    assert entries.frame((7, 1), Held(0, 8), now_s=0)
    assert entries.reply(reply("a", 9, serial=1), None, append=False, now_s=0).rows is not None


def test_a_frame_of_another_request_is_not_taken_for_a_reference() -> None:
    entries = SampleTable()
    entries.frame((7, 2), Held(0, 8, sample_key=2), now_s=0)
    with pytest.raises(errors.FrameCorrupt, match="were replies swapped"):
        unnamed = replace(reply("a", 9, serial=2), key=None)  # its frame reference names its request
        entries.reply(unnamed, None, append=False, now_s=0)
    assert entries.unclaimed == 1


@pytest.mark.parametrize(
    ("first_row", "held", "words"),
    [(5, 8, "sent again"), (12, 8, "rows between are nowhere"), (8, 99, "tokenized anew")],
)
def test_a_turn_that_does_not_continue_is_refused(first_row: int, held: int, words: str) -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9), Held(0, 8), append=False, now_s=0)
    with pytest.raises(errors.TurnMismatch, match=words) as raised:
        later = reply("a", 20, first_row=first_row, held=held)
        entries.reply(later, Held(first_row, 19), append=True, now_s=0)
    assert raised.value.samples == ("a",)
    assert [turn.end_row for turn in entries.samples["a"].turns] == [8]


def test_an_unknown_sample_in_an_assignment_takes_none() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9), Held(0, 8), append=False, now_s=0)
    with pytest.raises(errors.SampleUnknown) as raised:
        entries.take(["a", *(f"x{i}" for i in range(40))], step=0)
    assert len(raised.value.samples) == 40 and entries.samples["a"].step is None
