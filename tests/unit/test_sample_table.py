"""The rules of the table of samples and replies, one by one; all of them together: `contract/test_relay_machine.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from r3channel import errors
from r3channel.relay.sample_table import Reply, SampleTable
from r3channel.wire.parcel import FrameReference


@dataclass(frozen=True, eq=False)
class Held:
    first_row: int
    end_row: int
    sample_key: int = 1
    fold: int = 0
    provenance: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()


def reply(name: str, tokens: int, *, serial: int = 0) -> Reply:
    """The reply for a sample whose first `t` tokens hash to `t`."""
    reference = FrameReference(sample_key=1, boot_id=7, serial=serial, first_row=0, rows=tokens - 1)
    return Reply(
        sample_id=name, engine="e", key=1, tokens=tokens, tokens_hash=tokens, prefix_hash=tokens - 1,
        held_hash=None, reference=reference if serial else None,
    )  # fmt: skip


def test_a_damaged_frame_fails_its_sample_and_a_good_copy_heals_it() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9, serial=1), None, append=False, now_s=0)
    assert not entries.frame((7, 1), errors.FrameCorrupt("damaged"), now_s=0)
    with pytest.raises(errors.FrameCorrupt) as raised:
        entries.take(["a"], step=3)
    assert raised.value.samples == ("a",) and raised.value.step == 3
    assert entries.wants((7, 1)) and entries.frame((7, 1), Held(0, 8), now_s=0)
    assert not entries.frame((7, 1), Held(0, 8), now_s=0) and entries.take(["a"], step=3)


def test_the_frame_of_a_sample_that_is_gone_is_not_outstanding() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9, serial=1), None, append=False, now_s=0)
    assert entries.remove(["a"]) and not entries.outstanding(["a"])


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


def test_an_unknown_sample_in_an_assignment_takes_none() -> None:
    entries = SampleTable()
    entries.reply(reply("a", 9), Held(0, 8), append=False, now_s=0)
    with pytest.raises(errors.SampleUnknown) as raised:
        entries.take(["a", *(f"x{i}" for i in range(40))], step=0)
    assert len(raised.value.samples) == 40 and entries.samples["a"].step is None
