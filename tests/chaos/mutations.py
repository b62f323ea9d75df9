"""What a hostile peer may send: small inputs of every kind, made by the real encoders, and how they are changed.

A changed input is signed anew where its format has hashes, so that it reaches the checks behind them. What the package reads of
it must be what an oracle reads: a second reader in plain Python, or what was read once more.
"""

from __future__ import annotations

import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.weights import rank_link
from r3channel.weights.geometry import Box, Part
from r3channel.wire import parcel
from r3channel.wire import row_protocol as rows
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import HEADER_BYTES, encode_error, encode_frame, parse_frame
from r3channel.wire.hello import Hello
from r3channel.wire.routing import RowKind
from r3channel.wire.source import InHand
from r3channel.wire.tensor_frame import TensorRows, encode_tensor, parse_tensors
from r3channel.wire.token_tensors import tensors_of
from tests.chaos.oracle import read as oracle_rows
from tests.support.direct import hello_of
from tests.support.samples import SPEC, WIDE, frame_of, random_ids, span

Parts = dict[str, bytes]
"""An input: one part, or a part for each file of a folder, member of an archive or message of a connection."""
SPECS, ROWS = {"small": SPEC, "wide": WIDE}, 12
TENSORS = tensors_of("sampling_masks,sampling_support")
PARTS = [Part(0, Box((0, 0), (4, 6)), 0, 0, (6, 1)), Part(1, Box((), ()), 1, 0, ())]
BOXES = (0, Box((0, 0), (4, 3))), (1, Box((), ())), (0, Box((1, 3), (4, 6)))


class Kind(NamedTuple):
    """One kind of input. `read` raises a typed error or returns what it read, `told` what that must be."""

    share: int
    corpus: Sequence[Parts]
    read: Callable[[Parts], Any]
    told: Callable[[Parts], Any] | None = None
    sign: Callable[[str, bytearray, random.Random], object] = lambda *_: None
    """Makes lengths and hashes of a part true again."""


# -- changes ---------------------------------------------------------------------------------------------------------------

NUMBERS = (
    0, 1, 2, 63, 127, 255, 4096, 1 << 16, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, -1, -2,
)  # fmt: skip
LITERALS = [
    b"Infinity", b"NaN", b"1e999", b"-1", b"0", b"true", b"null", b"[]", b"{}", b'""', b'"\\ud800"', b"1.5", b'"a b"', b"[[1]]",
    b"9" * 400, b"9" * 4301, b"1" + b"0" * 30, b"[" * 900 + b"]" * 900, b"[" * 20_000, b'{"a":' * 500 + b"1" + b"}" * 500,
]  # fmt: skip
_LITERAL = re.compile(rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?[0-9][0-9.]*|true|false|null|\[\]|\{\}|\[[^\[\]{}]*\]')


def change(data: bytearray, rng: random.Random) -> None:
    """A literal of JSON, a number, a run of bytes. Half of the places lie where heads and lengths do."""
    at, to = (rng.randrange(min(len(data), 128) if rng.random() < 0.5 else len(data)) for _ in range(2))
    size, what = rng.choice((1, 1, 2, 4, 4, 8)), rng.random()
    if what < 0.3 and (found := list(_LITERAL.finditer(data)) if b'":' in data else []):
        data[slice(*rng.choice(found).span())] = rng.choice(LITERALS)
    elif what < 0.7:
        at &= -size
        old = int.from_bytes(data[at : at + size], "little")
        near = old + 1, old - 1, 2 * old, old ^ 1 << rng.randrange(8 * size), rng.getrandbits(8 * size)
        data[at : at + size] = (rng.choice((*NUMBERS, *near)) % (1 << 8 * size)).to_bytes(size, "little")
    elif what < 0.85:
        data[to : to + size * rng.randrange(2)] = data[at : at + size * rng.randrange(1, 4)]
    else:
        del data[at : at + rng.choice((size, 16, len(data)))]


def mutated(kind: Kind, good: Parts, rng: random.Random) -> tuple[Parts, bool]:
    """(the changed input, whether its lengths and hashes were made true again)."""
    name, signed = rng.choice(list(good)), rng.random() < 0.85
    data = bytearray(good[name])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if data:
            change(data, rng)
    if signed:
        kind.sign(name, data, rng)
    return {**good, name: bytes(data)}, signed and name != "zip"


# -- frames ----------------------------------------------------------------------------------------------------------------


def frames() -> list[Parts]:
    """One of every codec, section and kind."""
    alike = {name: np.tile(random_ids(1, spec=spec), (ROWS, 1, 1)) for name, spec in SPECS.items()}
    gaps, stored = frame_of(ROWS + 1, valid_T=np.arange(ROWS) % 5 != 2), frame_of(ROWS + 1, codec="stored")
    small = stored, gaps, encode_error("no"), frame_of(1)
    both = [
        {name: data} for name, spec in SPECS.items()
        for data in (frame_of(ROWS + 1, spec=spec), frame_of(ROWS + 1, spec=spec, codec="set"),
                     encode_frame(spec, expert_ids_TLK=alike[name], codec="lz4"))
    ]  # fmt: skip
    return both + [{"small": data} for data in small]


def rehash(data: bytearray) -> None:
    """Make both hashes of a frame true again, as a faulty or hostile encoder would."""
    if len(data) >= HEADER_BYTES:
        (size,) = struct.unpack_from("<I", data, 44)
        sections = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        struct.pack_into("<Q", data, HEADER_BYTES - 16, xxhash.xxh3_64_intdigest(sections))
        data[HEADER_BYTES - 8 : HEADER_BYTES] = xxhash.xxh3_64_digest(bytes(data[: HEADER_BYTES - 8]))[::-1]


def sign_frame(name: str, data: bytearray, rng: random.Random) -> None:
    """The size half of the time; the digests, too, where the frame can be decoded at all."""
    if len(data) >= HEADER_BYTES and rng.random() < 0.5:
        (sections,) = struct.unpack_from("<I", data, 44)
        struct.pack_into("<Q", data, 56, max(0, len(data) - HEADER_BYTES - sections))
    rehash(data)
    with suppress(errors.R3Error):
        frame = parse_frame(bytes(data), spec=SPECS[name], max_rows=64)
        digests_L = layer_digests(frame.ids(), first_row=frame.first_row, valid_T=frame.valid_T)
        at = HEADER_BYTES + (-(-frame.rows // 8) if data[7] & 1 else 0) + 24 * len(frame.provenance)
        data[at : at + digests_L.nbytes] = digests_L.tobytes()
        rehash(data)


def read_frame(parts: Parts) -> Any:
    ((name, data),) = parts.items()
    found = parse_frame(data, spec=SPECS[name], max_rows=64).routing(sample_id="m")
    spans = [(one.start, one.end, one.weight_version, one.kind) for one in found.provenance]
    return found.first_row, found.expert_ids_TLK.tolist(), found.valid_T.tolist(), spans


# -- what engines send beside frames ---------------------------------------------------------------------------------------


def read_parcel(parts: Parts) -> Any:
    boot_id, count = parcel.open_parcel(source := InHand(parts[""]))
    found = parcel.frames_in(source, count, boot_id=boot_id)
    return boot_id, [(serial, bytes(frame.take(frame.left))) for serial, frame in found]


def entries_of(data: bytes | bytearray) -> list[tuple[int, int, int]]:
    """(place, serial, size) of each entry of a parcel, as far as there is one."""
    at, found = 16, []
    while at + 16 <= len(data):
        found.append((at, *struct.unpack_from("<QI", data, at)))
        at += 16 + -(-found[-1][2] // 16) * 16
    return found


def parcel_told(parts: Parts) -> Any:
    data = parts[""]
    frames = [(serial, data[at + 16 : at + 16 + size]) for at, serial, size in entries_of(data)]
    return struct.unpack_from("<Q", data, 8)[0], frames


def sign_parcel(name: str, data: bytearray, rng: random.Random) -> None:
    """The checks, and where a frame begins it that frame's hashes."""
    for at, _, size in entries_of(data)[:1]:
        sign_frame("small", frame := data[at + 16 : at + 16 + size], rng)
        data[at + 16 : at + 16 + size] = frame
    boot_id = int.from_bytes(data[8:16], "little")
    for at, serial, size in entries_of(data):
        struct.pack_into("<I", data, at + 12, parcel._check(boot_id, serial, size))


def sign_hello(name: str, data: bytearray, rng: random.Random) -> None:
    data[4:8] = max(0, len(data) - 8).to_bytes(4, "little")


def read_hello(parts: Parts) -> Any:
    hello, rest = Hello.split(parts[""])
    return hello and (hello.engine, hello.boot_id, hello.context), rest


def hello_told(parts: Parts) -> Any:
    data, size = parts[""], int.from_bytes(parts[""][4:8], "little")
    if data[:4] != b"R3H\x01":
        return None, data
    values = {"context": 0} | json.loads(data[8 : 8 + size])
    return (values["engine"], values["boot_id"], values["context"]), data[8 + size :]


def tensor_frames() -> bytes:
    lengths_T = np.array([1, 0, 3, 2], np.uint16)
    return b"".join(encode_tensor(TensorRows(t, 4, lengths_T, np.zeros(6, t.entry), 7)) for t in TENSORS)


def read_tensors(parts: Parts) -> Any:
    found = parse_tensors(parts[""], TENSORS, where="m")
    return [(r.sample_key, r.first_row, r.lengths_T.tolist(), r.entries_N.tobytes()) for r in found]


def tensors_told(parts: Parts) -> Any:
    data, found = parts[""], []
    for _ in TENSORS:
        count, first_row, sections, raw, key = struct.unpack_from("<II8xIQ8xQ", data, 28)
        lengths = struct.unpack_from(f"<{count}H", data, HEADER_BYTES + raw)
        found.append((key, first_row, [*lengths], data[HEADER_BYTES : HEADER_BYTES + raw]))
        data = data[HEADER_BYTES + sections :]
    return found


def sign_tensors(name: str, data: bytearray, rng: random.Random) -> None:
    size = HEADER_BYTES + int.from_bytes(data[44:48], "little")
    rehash(first := data[:size])
    rehash(second := data[size:])
    data[:] = first + second


# -- tickets, messages and tables ------------------------------------------------------------------------------------------


def tickets() -> list[Parts]:
    samples = (
        TicketSample("a", 9, 2**64 - 1, 2**63, (span(0, 3, 5, RowKind.PREFILLED), span(3, 8, 6))),
        TicketSample("b\ud83d\ude00", 12, 0, 7, (span(0, 4, -(2**63)), span(6, 11, 9)), ((4, 6),)),
        TicketSample("", 5, 1, 0, (), ((0, 4),)),
    )
    order = Assignment.given([[[one.sample_id] for one in samples]])
    told = "run", 3, SPEC, TrainerLayout(tp=2, mtp=(3,)), order, samples
    made = Ticket(*told, 1 << 20), Ticket(*told, 1, ("sampling_masks",), 1)
    return [{"": ticket.to_bytes()} for ticket in made]


def sign_ticket(name: str, data: bytearray, rng: random.Random) -> None:
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))


def read_ticket(parts: Parts) -> Any:
    """Read once more from what is written of it."""
    ticket = Ticket.from_bytes(parts[""])
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket
    assert [sample.tokens for sample in ticket.samples] == list(ticket.plan.lengths)


SEAL = {"run": "r", "step": 3, "seal": 0}
LATE = rows.values_of(errors.StepError("late", samples=["a"], engines=["e"], ranks=[(0, 1, 2)], step=4))
SAID = {"READY": SEAL | {"group": False}, "DONE": SEAL, "DAMAGED": SEAL, "ERROR": LATE, "GROUP": {"gpu": ""}}
MESSAGES = [{name: rows.pack(**values)} for name, values in SAID.items()]


def read_message(parts: Parts) -> Any:
    ((name, body),) = parts.items()
    kind = rows._NAMES.index(name)
    return rows.seal_in(rows.unpack(kind, body, expected=kind, names=rows.SEAL))


def read_table(parts: Parts) -> Any:
    try:
        return [(part, tuple(box)) for part, box in rank_link.read_table(parts[""], PARTS)]
    except (ValueError, IndexError) as error:  # what a link's thread takes for a peer out of step
        raise errors.WeightsCorrupt(repr(error)) from error


def table_told(parts: Parts) -> Any:
    values, found = np.frombuffer(parts[""], "<i8").tolist(), []
    while values:
        part, axes, *values = values
        found.append((part, (tuple(values[:axes]), tuple(values[axes : 2 * axes]))))
        values = values[2 * axes :]
    return found


# -- folders and archives --------------------------------------------------------------------------------------------------


def zipped(parts: Parts) -> bytes:
    """An archive whose own checks are true, of these members; as it is where it was changed as a whole."""
    with zipfile.ZipFile(buffer := BytesIO(), "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return parts.get("zip") or buffer.getvalue()


def archives(data: bytes) -> list[Parts]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return [{name: archive.read(name) for name in archive.namelist()}] * 6 + [{"zip": data}]


def dumps() -> list[Parts]:
    """As slime and miles save them: arrays and tensors."""
    ids, found = np.repeat(random_ids(8), 2, axis=1)[:, :4].astype(np.int32), list[Parts]()
    for value in (ids, torch.from_numpy(ids)):
        sample = {"tokens": list(range(9)), "rollout_routed_experts": value, "weight_versions": ["1"]}
        samples = [sample, {**sample, "tokens": list(range(9))}]
        torch.save({"rollout_id": 3, "samples": samples}, buffer := BytesIO())
        found += archives(buffer.getvalue())
    return found


def sign_segment(name: str, data: bytearray, rng: random.Random) -> None:
    """The heads of the records of a segment, its ticket and its frames."""
    at = 0
    while name.endswith(".r3s") and at + 32 <= len(data):
        kind, (size,) = data[at + 4], struct.unpack_from("<Q", data, at + 16)
        data[at + 24 : at + 32] = xxhash.xxh3_64_digest(bytes(data[at : at + 24]))[::-1]
        inner = data[at + 32 : at + 32 + size]
        if kind == 1:
            sign_ticket("", inner, rng)
        elif kind == 3:
            rehash(inner)
        data[at + 32 : at + 32 + size] = inner
        at += 32 + -(-size // 16) * 16


def rows_told(parts: Parts) -> Any:
    return tuple(oracle_rows(*parts.values()))


FRAMES = [(1, frame_of(ROWS + 1)), (2, frame_of(1)), (3, b"abc")]
KINDS = {
    "frame": Kind(40, frames(), read_frame, rows_told, sign_frame),
    "parcel": Kind(8, [{"": b"".join(parcel.pack_parcel(7, FRAMES))}], read_parcel, parcel_told, sign_parcel),
    "hello": Kind(8, [{"": hello_of().to_bytes() + b"R3F"}], read_hello, hello_told, sign_hello),
    "reference": Kind(
        1, [{"": parcel.FrameReference(4, 8, 7, 1, 2).to_bytes()}],
        lambda p: tuple(parcel.FrameReference.from_bytes(p[""])), lambda p: struct.unpack("<8xIIQQQ", p[""]),
    ),
    "ticket": Kind(14, tickets(), read_ticket, None, sign_ticket),
    "row message": Kind(10, MESSAGES, read_message, lambda p: tuple(json.loads(*p.values())[n] for n in rows.SEAL)),
    "tensors": Kind(8, [{"": tensor_frames()}], read_tensors, tensors_told, sign_tensors),
    "weight table": Kind(4, [{"": rank_link.table_bytes(rank_link.Entry(*one) for one in BOXES)}], read_table, table_told),
}  # fmt: skip
