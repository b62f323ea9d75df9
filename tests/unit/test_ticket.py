"""The ticket: what it holds survives the trip, a changed bit is refused, and no bytes make reading it slow, large or untyped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import xxhash

from r3channel.errors import ConfigError, FrameCorrupt, SampleUnknown, TicketMismatch
from r3channel.model.spec import RoutingSpec
from r3channel.plan import ticket as ticket_module
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.header import MAX_ROWS
from r3channel.wire.routing import RowKind
from tests.support.memory import growth_of
from tests.support.samples import SPEC, flipped, random_ids, span

HEAD = ticket_module._HEAD


WHOLE = TicketSample("a", 9, 2**64 - 1, 2**63, (span(0, 3, 5, RowKind.PREFILLED), span(3, 8, 6)))
TURNS = TicketSample("b\ud83d\ude00", 12, 0, 7, (span(0, 4, -(2**63)), span(6, 11, 9)), ((4, 6),))
NOWHERE = TicketSample("", 5, 1, 0, (), ((0, 4),))


def make_ticket(*samples: TicketSample, **changes: Any) -> Ticket:
    samples = samples or (WHOLE, TURNS, NOWHERE)
    values: dict[str, Any] = {
        "run": "run", "step": 3, "spec": SPEC, "layout": TrainerLayout(tp=2, mtp=(3,)), "samples": samples,
        "assignment": Assignment.given([[[sample.sample_id] for sample in samples]]), "bucket_bytes": 1 << 20,
    }  # fmt: skip
    return Ticket(**(values | changes))


def signed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def test_a_ticket_survives_the_trip_and_is_small() -> None:
    ticket = make_ticket()
    data = ticket.to_bytes()
    again = Ticket.from_bytes(data)
    assert again == ticket and ticket == again and hash(again) == hash(ticket)
    assert len(data) < 1000 and again.samples[1:] == (TURNS, NOWHERE) and len(again.samples) == 3
    assert again.run == "run" and again.weight_versions == (-(2**63), 5, 6, 9)
    assert again.plan == ticket.plan and again.plan.digest == ticket.plan.digest


def test_a_sample_that_is_not_there_is_named() -> None:
    with pytest.raises(SampleUnknown) as refusal:
        make_ticket().sample("zz")
    assert refusal.value.samples == ("zz",)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "other"}, {"step": 4}, {"bucket_bytes": 1}, {"token_tensors": ("sampling_masks",)}, {"layout": TrainerLayout()},
        {"spec": replace(SPEC, top_k=4)},
        {"assignment": Assignment.given([[["a", TURNS.sample_id], [""]]])},
        {"assignment": Assignment.given([[["a"], [TURNS.sample_id], [""]]], steps=[1, 2])},
        *({"samples": (WHOLE._replace(**change), TURNS, NOWHERE)} for change in (
            {"tokens_hash": 3}, {"digest": 3}, {"provenance": ()}, {"invalid": ((0, 1),)},
        )),
    ],
)  # fmt: skip
def test_every_field_counts(changes: dict[str, Any]) -> None:
    other = make_ticket(**changes)
    again = Ticket.from_bytes(other.to_bytes())
    assert again == other != make_ticket() != again
    assert other.to_bytes() != make_ticket().to_bytes()


def test_any_changed_bit_is_damage() -> None:
    data = make_ticket().to_bytes()
    for place in range(len(data)):
        with pytest.raises(TicketMismatch, match="damaged"):
            Ticket.from_bytes(flipped(data, 8 * place + place % 8))


@pytest.mark.parametrize(
    "data", [b"", b"x" * 15, b"{}", b'{"ticket":3}', b"[" * 100_000, signed(b""), signed(b"R3K\x05"), signed(b"x" * 35)]
)  # fmt: skip
def test_bytes_that_are_no_ticket_are_refused(data: bytes) -> None:
    with pytest.raises(TicketMismatch, match="damaged or no ticket"):
        Ticket.from_bytes(data)


@pytest.mark.parametrize("at", [3, 4])
def test_another_format_or_plan_version_asks_for_the_same_release(at: int) -> None:
    body = bytearray(make_ticket().to_bytes()[:-16])
    body[at] += 1
    with pytest.raises(TicketMismatch, match="do both sides run the same r3channel version"):
        Ticket.from_bytes(signed(bytes(body)))


# -- what a hash alone does not stop -----------------------------------------------------------------------------------


def with_json(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A ticket whose JSON was changed, in place or for the bytes that come back, and whose hash was made anew."""
    data = make_ticket().to_bytes()[:-16]
    head = list(HEAD.unpack_from(data))
    begin = len(data) - head[4] - head[5]
    values = json.loads(data[begin : begin + head[4]])
    new = change(values)
    text = new if isinstance(new, bytes) else json.dumps(values).encode()
    names, head[4] = data[begin + head[4] :], len(text)
    return signed(HEAD.pack(*head) + data[HEAD.size : begin] + text + names)


LARGE_NUMBERS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "pp": lambda v, n: (v["spec"].update(num_layers=n), v["layout"].update(pp=n, tp=1)),
    "vpp": lambda v, n: (v["spec"].update(num_layers=2 * n), v["layout"].update(pp=2, vpp=n)),
    "layers": lambda v, n: v["spec"].update(num_layers=n), "cp": lambda v, n: v["layout"].update(cp=n),
    "tp": lambda v, n: v["layout"].update(tp=n), "dp": lambda v, n: v["layout"].update(dp=n),
    "pad_multiple": lambda v, n: v["layout"].update(pad_multiple=n * 10**4),
    "ep": lambda v, n: v["layout"].update(ep=n), "steps": lambda v, n: v.update(steps=[n]),
}  # fmt: skip


def reading_large_numbers() -> Iterator[None]:
    """All in turn: the largest of them is what is seen."""
    Ticket.from_bytes(make_ticket().to_bytes())
    yield
    for change, number in product(LARGE_NUMBERS.values(), (10**4, 10**6, 10**8, 10**12, 10**30)):
        with pytest.raises(TicketMismatch):
            Ticket.from_bytes(with_json(lambda values, change=change, number=number: change(values, number)))


def test_large_numbers_are_refused_before_anything_is_made_of_them() -> None:
    assert growth_of(reading_large_numbers).peak < 10_000_000


def cutting_the_largest_layout() -> Iterator[None]:
    Ticket.from_bytes(make_ticket().to_bytes()).plan.shard(dp=0, pp=0, cp=0)
    spec = RoutingSpec(num_layers=4096, moe_layers=tuple(range(4096)), num_experts=8, top_k=1)
    layout = TrainerLayout(pp=2, vpp=2048, cp=64, tp=64, pad_multiple=4096)
    ticket = make_ticket(WHOLE, spec=spec, layout=layout)
    yield
    shard = Ticket.from_bytes(ticket.to_bytes()).plan.shard(dp=0, pp=1, cp=63)
    assert len(shard.layers) == 2048


def test_the_largest_layout_that_is_read_is_cut_without_much_memory() -> None:
    assert growth_of(cutting_the_largest_layout).peak < 50_000_000


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(step=1.0), lambda v: v.update(step=True), lambda v: v.update(step=1 << 70),
        lambda v: v.update(bucket_bytes=float("inf")), lambda v: v.update(bucket_bytes=0), lambda v: v.update(bucket_bytes=-1),
        lambda v: v.update(run=5), lambda v: v.update(token_tensors=["other"]), lambda v: v.pop("run"),
        lambda v: v["layout"].update(zz=1), lambda v: v["layout"].update(dp=1.0), lambda v: v["layout"].update(mtp=[0]),
        lambda v: v["spec"].update(top_k=[]), lambda v: v.update(layout=[]), lambda v: v.update(steps=[1, 1]),
        lambda _: b"[" * 100_000,
    ],
)  # fmt: skip
def test_json_of_another_shape_is_no_ticket(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(TicketMismatch, match="no ticket that can be used"):
        Ticket.from_bytes(with_json(change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 1}, "tokens of a sample"), ({"tokens": (1 << 24) + 2}, "tokens of a sample"),
        ({"tokens": -1}, "does not fit"), ({"tokens": 1 << 40}, "does not fit"), ({"tokens_hash": -1}, "does not fit"),
        ({"digest": 1 << 64}, "does not fit"), ({"provenance": (span(0, 3, 5), span(2, 8, 5))}, "span_count"),
        ({"provenance": (span(0, 9, 5),)}, "span_count"), ({"provenance": (span(3, 3, 5),)}, "span_count"),
        ({"provenance": (span(-1, 3, 5),)}, "does not fit"), ({"invalid": ((3, 5), (4, 6))}, "invalid_count"),
        ({"invalid": ((5, 6), (1, 2))}, "invalid_count"), ({"invalid": ((7, 9),)}, "invalid_count"),
        ({"layout": TrainerLayout(pp=3)}, "pp=3"), ({"layout": TrainerLayout(dp=2)}, "DP ranks"),
        ({"layout": TrainerLayout(mtp=(0,))}, "mtp"), ({"layout": TrainerLayout(cp=1 << 13)}, "the layout's cp"),
        ({"bucket_bytes": 0}, "bucket_bytes"), ({"samples": (WHOLE, TURNS)}, "not those of its assignment"),
        ({"assignment": Assignment.given([[[""], ["a"], [TURNS.sample_id]]])}, "in its order"),
    ],
)  # fmt: skip
def test_what_receivers_would_refuse_is_not_sealed(change: dict[str, Any], words: str) -> None:
    whole = {name: value for name, value in change.items() if name in TicketSample._fields}
    ticket = make_ticket(WHOLE._replace(**whole), TURNS, NOWHERE, **{} if whole else change)
    with pytest.raises(ConfigError, match=words):
        ticket.to_bytes()


@pytest.mark.parametrize("beyond", [0, 1])
def test_frames_and_tickets_have_one_limit_for_the_rows_of_a_sample(beyond: int) -> None:
    last = MAX_ROWS - 1 + beyond
    frame = encode_frame(SPEC, expert_ids_TLK=random_ids(1), first_row=last)
    ticket = make_ticket(TicketSample("a", last + 2, 0, 1, (), ((0, last + 1),)))
    with pytest.raises(FrameCorrupt, match="impossible numbers") if beyond else nullcontext():
        parse_frame(frame, spec=SPEC)
    with pytest.raises(ConfigError, match="tokens of a sample") if beyond else nullcontext():
        assert Ticket.from_bytes(ticket.to_bytes()) == ticket


def test_reading_a_large_ticket_makes_no_sample_and_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"sample-{i}" for i in range(512)]
    held = tuple(TicketSample(name, 9, 0, 0, (span(0, 8, 1),)) for name in names)
    assignment = Assignment.given([[[name] for name in names[dp::64]] for dp in range(64)])
    held = sorted(held, key=lambda sample: assignment.sample_ids.index(sample.sample_id))
    ticket = make_ticket(*held, assignment=assignment, layout=TrainerLayout(dp=64))
    data, made = ticket.to_bytes(), []
    monkeypatch.setattr(ticket_module, "TicketSample", lambda *values: made.append(values))
    again = Ticket.from_bytes(data)
    shard = again.plan.shard(dp=3, pp=0)
    assert [batch.sample_ids[0] for batch in shard.microbatches] == names[3::64]
    assert made == [] and len(again.plan.microbatches._made) == 1
    assert np.array_equal(shard.row_map(0, tp=0)[1], [*range(8), -1])
