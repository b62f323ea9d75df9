"""Bytes that a hostile peer may send: small inputs of every kind, made by the real encoders, and how they are changed.

A changed input is signed anew where its format has hashes, so that it reaches the checks behind them. What the package then reads
must be what an oracle reads: a second reader in plain Python, or, where a format has one writing only, the same after one more trip.
"""

from __future__ import annotations

import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
import xxhash

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.weights import wires
from r3channel.weights.dryrun import Part
from r3channel.weights.geometry import Box
from r3channel.wire import row_protocol as rows
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import HEADER_BYTES, encode_error, encode_frame, parse_frame
from r3channel.wire.hello import Hello
from r3channel.wire.parcel import FrameReference, _check, frames_in, open_parcel, pack_parcel
from r3channel.wire.routing import RowKind
from r3channel.wire.source import InHand
from r3channel.wire.tensor_frame import TensorRows, encode_tensor, parse_tensors
from r3channel.wire.token_tensors import tensors_of
from tests.direct import hello_of
from tests.oracle import read as oracle_rows
from tests.samples import SPEC, WIDE, frame_of, random_ids, span

Parts = dict[str, bytes]
"""An input: one part, or a part for each file of a folder or member of an archive."""
SPECS = {"small": SPEC, "wide": WIDE}
ROWS = 12
TENSORS = tensors_of("sampling_masks,sampling_support")
TABLE_PARTS = [Part(0, Box((0, 0), (4, 6)), 0, 0, (6, 1)), Part(1, Box((), ()), 1, 0, ())]


@dataclass(frozen=True)
class Kind:
    """One kind of input. `read` raises a typed error or returns what it read; `told` says what that must be."""

    corpus: Callable[[], Sequence[Parts]]
    read: Callable[[Parts], Any]
    told: Callable[[Parts], Any] | None = None
    sign: Callable[[str, bytearray, random.Random], object] | None = None
    """Makes lengths and hashes of a part true again."""
    share: int = 1


# -- changes ---------------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 63, 127, 255, 4096, 1 << 16, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, -1, -2)
LITERALS = [
    b"Infinity", b"-Infinity", b"NaN", b"1e999", b"-1", b"0", b"true", b"null", b"[]", b"{}", b'""', b'"\\ud800"', b"1.5",
    b"9" * 400, b"9" * 4301, b"18446744073709551616", b"[" * 900 + b"]" * 900, b"[" * 20_000, b'{"a":' * 500 + b"1" + b"}" * 500,
    b'"a b"', b"[[1]]", b'"\\u0000"', b"1267650600228229401496703205376",
]  # fmt: skip
_LITERAL = re.compile(rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?[0-9][0-9.]*|true|false|null|\[\]|\{\}|\[[^\[\]{}]*\]')


def place(data: bytearray, rng: random.Random) -> int:
    """Half of the places lie where heads and lengths do."""
    return rng.randrange(min(len(data), 128) if rng.random() < 0.5 else len(data))


def lie(data: bytearray, rng: random.Random) -> None:
    """A number of one to eight bytes becomes another, or one near it."""
    width = rng.choice((1, 1, 2, 4, 4, 8))
    at = place(data, rng) & -width
    old = int.from_bytes(data[at : at + width], "little")
    near = (old + 1, old - 1, 2 * old, old ^ 1 << rng.randrange(8 * width), rng.getrandbits(8 * width))
    data[at : at + width] = (rng.choice((*NUMBERS, *near)) % (1 << 8 * width)).to_bytes(width, "little")


def repeat(data: bytearray, rng: random.Random) -> None:
    """A run of bytes stands in another place, too: instead of what was there, or between."""
    size, at, to = rng.choice((1, 1, 4, 8, 16, 24)), place(data, rng), place(data, rng)
    data[to : to + size * rng.randrange(2)] = data[at : at + size]


def cut(data: bytearray, rng: random.Random) -> None:
    at = place(data, rng)
    del data[at : at + rng.choice((1, 2, 4, 8, 16, len(data)))]


def say_another(data: bytearray, rng: random.Random) -> None:
    """A literal of JSON becomes another one; of other formats a bit is flipped."""
    found = list(_LITERAL.finditer(data)) if data[:1] in b"{[" or b'":' in data else []
    if not found:
        return lie(data, rng)
    chosen = rng.choice(found)
    data[chosen.start() : chosen.end()] = rng.choice(LITERALS)
    return None


CHANGES = (lie, lie, lie, repeat, cut, say_another, say_another)


def mutated(kind: Kind, good: Parts, rng: random.Random) -> tuple[Parts, bool]:
    """(the changed input, whether its lengths and hashes were made true again)."""
    name, signed = rng.choice(list(good)), rng.random() < 0.85
    data = bytearray(good[name])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if data:
            rng.choice(CHANGES)(data, rng)
    if signed and kind.sign is not None:
        kind.sign(name, data, rng)
    return {**good, name: bytes(data)}, signed


# -- frames ----------------------------------------------------------------------------------------------------------------


def frames() -> list[Parts]:
    """Of every codec, section and kind."""
    small, wide = np.tile(random_ids(1), (ROWS, 1, 1)), np.tile(random_ids(1, spec=WIDE), (ROWS, 1, 1))
    found = [
        frame_of(ROWS + 1, codec="stored"), frame_of(ROWS + 1, valid_T=np.arange(ROWS) % 5 != 2), frame_of(ROWS + 1, codec="set"),
        encode_frame(SPEC, expert_ids_TLK=small, codec="lz4"), encode_error("no rows"), frame_of(1),
    ]  # fmt: skip
    of_wide = [frame_of(ROWS + 1, spec=WIDE), frame_of(ROWS + 1, spec=WIDE, codec="set")]
    of_wide += [encode_frame(WIDE, expert_ids_TLK=wide, codec="lz4")]
    return [{"small": data} for data in found] + [{"wide": data} for data in of_wide]


def rehash(data: bytearray) -> None:
    """Make both hashes of a frame true again, as a faulty or hostile encoder would."""
    if len(data) >= HEADER_BYTES:
        (size,) = struct.unpack_from("<I", data, 44)
        sections = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        struct.pack_into("<Q", data, HEADER_BYTES - 16, xxhash.xxh3_64_intdigest(sections))
        head = xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - 8]))
        struct.pack_into("<Q", data, HEADER_BYTES - 8, head)


def sign_frame(name: str, data: bytearray, rng: random.Random) -> None:
    """The size half of the time; the digests, too, where the frame can be decoded at all."""
    if len(data) >= HEADER_BYTES and rng.random() < 0.5:
        sections = struct.unpack_from("<I", data, 44)[0]
        struct.pack_into("<Q", data, 56, max(0, len(data) - HEADER_BYTES - sections))
    rehash(data)
    with suppress(errors.R3Error):
        frame = parse_frame(bytes(data), spec=SPECS[name], max_rows=64)
        digests_L = layer_digests(frame.ids(), first_row=frame.first_row, valid_T=frame.valid_T)
        bitmap = -(-frame.rows // 8) if data[7] & 1 else 0
        at = HEADER_BYTES + bitmap + 24 * len(frame.provenance)
        data[at : at + digests_L.nbytes] = digests_L.tobytes()
        rehash(data)


def read_frame(parts: Parts) -> Any:
    ((name, data),) = parts.items()
    found = parse_frame(data, spec=SPECS[name], max_rows=64).routing(sample_id="m")
    spans = [(one.start, one.end, one.weight_version, one.kind) for one in found.provenance]
    return found.first_row, found.expert_ids_TLK.tolist(), found.valid_T.tolist(), spans


# -- what engines send beside frames ---------------------------------------------------------------------------------------


def read_parcel(parts: Parts) -> Any:
    boot_id, count = open_parcel(source := InHand(parts[""]))
    return boot_id, [(serial, bytes(f.take(f.left))) for serial, f in frames_in(source, count, boot_id=boot_id)]


def parcel_told(parts: Parts) -> Any:
    data, at, found = parts[""], 16, []
    count, boot_id = struct.unpack_from("<IQ", data, 4)
    for _ in range(count):
        serial, size = struct.unpack_from("<QI", data, at)
        found.append((serial, data[at + 16 : at + 16 + size]))
        at += 16 + -(-size // 16) * 16
    return boot_id, found


def sign_parcel(_: str, data: bytearray, rng: random.Random) -> None:
    at, boot_id = 16, int.from_bytes(data[8:16], "little")
    while at + 16 <= len(data):
        serial, size = struct.unpack_from("<QI", data, at)
        struct.pack_into("<I", data, at + 12, _check(boot_id, serial, size))
        at += 16 + -(-size // 16) * 16


def sign_request(name: str, data: bytearray, rng: random.Random) -> None:
    """A parcel's checks, and the hashes of the frame that begins it."""
    if name == "hello":
        sign_hello(name, data, rng)
    elif name == "parcel" and len(data) > 32:
        size = int.from_bytes(data[24:28], "little")
        sign_frame("small", frame := data[32 : 32 + size], rng)
        data[32 : 32 + size] = frame
        sign_parcel(name, data, rng)


def read_hello(parts: Parts) -> Any:
    hello, rest = Hello.split(parts[""])
    return hello and {name: getattr(hello, name) for name in ("engine", "boot_id", "context")}, rest


def hello_told(parts: Parts) -> Any:
    data = parts[""]
    if data[:4] != b"R3H\x01":
        return None, data
    end = 8 + int.from_bytes(data[4:8], "little")
    values = {"context": 0} | json.loads(data[8:end])
    return {name: values[name] for name in ("engine", "boot_id", "context")}, data[end:]


def sign_hello(_: str, data: bytearray, rng: random.Random) -> None:
    data[4:8] = max(0, len(data) - 8).to_bytes(4, "little")


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


def sign_tensors(_: str, data: bytearray, rng: random.Random) -> None:
    size = HEADER_BYTES + int.from_bytes(data[44:48], "little")
    first, second = data[:size], data[size:]
    rehash(first)
    rehash(second)
    data[:] = first + second


def tensor_frames() -> list[Parts]:
    lengths_T = np.array([1, 0, 3, 2], np.uint16)
    values = [np.zeros(6, tensor.entry) for tensor in TENSORS]
    given = [TensorRows(*pair[:1], 4, lengths_T, pair[1], 7) for pair in zip(TENSORS, values, strict=True)]
    return [{"": b"".join(map(encode_tensor, given))}]


# -- tickets, messages and records -----------------------------------------------------------------------------------------


def tickets() -> list[Parts]:
    spans = (span(0, 3, 5, RowKind.PREFILLED), span(3, 8, 6))
    samples = (
        TicketSample("a", 9, 2**64 - 1, 2**63, spans),
        TicketSample("b\ud83d\ude00", 12, 0, 7, (span(0, 4, -(2**63)), span(6, 11, 9)), ((4, 6),)),
        TicketSample("", 5, 1, 0, (), ((0, 4),)),
    )
    assignment = Assignment.given([[[one.sample_id] for one in samples]])
    values: dict[str, Any] = {"run": "run", "step": 3, "spec": SPEC, "samples": samples, "assignment": assignment}
    layout = TrainerLayout(tp=2, mtp=(3,))
    told = Ticket(**values, layout=layout, bucket_bytes=1 << 20), Ticket(
        **values, layout=TrainerLayout(), bucket_bytes=1, token_tensors=("sampling_masks",), seal=1
    )
    return [{"": ticket.to_bytes()} for ticket in told]


def sign_ticket(_: str, data: bytearray, rng: random.Random) -> None:
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))


def read_ticket(parts: Parts) -> None:
    ticket = Ticket.from_bytes(parts[""])
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket
    assert [sample.tokens for sample in ticket.samples] == list(ticket.plan.lengths)


ERROR = rows.values_of(errors.StepError("late", samples=["a"], engines=["e"], ranks=[(0, 1, 2)], step=4))
MESSAGES = [
    {"READY": rows.pack(run="r", step=3, seal=0, group=False)}, {"DONE": rows.pack(run="r", step=3, seal=0)},
    {"ERROR": rows.pack(**ERROR)}, {"DAMAGED": rows.pack(run="r", step=3, seal=2)},
]  # fmt: skip


def read_message(parts: Parts) -> Any:
    ((name, body),) = parts.items()
    kind = rows._NAMES.index(name)
    return rows.seal_in(rows.unpack(kind, body, expected=kind, names=rows.SEAL))


def message_told(parts: Parts) -> Any:
    values = json.loads(next(iter(parts.values())))
    return str(values["run"]), int(values["step"]), int(values["seal"])


def read_table(parts: Parts) -> Any:
    try:
        return wires.read_table(parts[""], TABLE_PARTS)
    except (ValueError, IndexError) as error:  # what the link's thread takes for a peer out of step
        raise errors.WeightsCorrupt(repr(error)) from error


def table_told(parts: Parts) -> Any:
    values, found = [*np.frombuffer(parts[""], "<i8").tolist()], []
    while values:
        part, axes, *values = values
        found.append((part, (tuple(values[:axes]), tuple(values[axes : 2 * axes]))))
        values = values[2 * axes :]
    return found


TABLE = [wires.Entry(0, Box((0, 0), (4, 3))), wires.Entry(1, Box((), ())), wires.Entry(0, Box((1, 3), (4, 6)))]

# -- folders and archives --------------------------------------------------------------------------------------------------


def zipped(parts: Parts) -> bytes:
    """An archive whose own checks are true, of these members; as it is where it was changed as a whole."""
    if "zip" in parts:
        return parts["zip"]
    with zipfile.ZipFile(buffer := BytesIO(), "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def archives(data: bytes) -> list[Parts]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return [members] * 6 + [{"zip": data}]


def dumps(name: str = "rollout_routed_experts") -> list[Parts]:
    """As slime and miles save them: arrays and tensors."""
    tokens, found = list(range(9)), list[Parts]()
    ids = np.repeat(random_ids(8), 2, axis=1)[:, :4].astype(np.int32)
    for value in (ids, torch.from_numpy(ids)):
        samples = [{"tokens": tokens, name: value, "weight_versions": ["1"]}, {"tokens": tokens, name: value}]
        torch.save({"rollout_id": 3, "samples": samples}, buffer := BytesIO())
        found += archives(buffer.getvalue())
    return found


def sign_segment(name: str, data: bytearray, rng: random.Random) -> None:
    """The heads of the records of a segment, its ticket and its frames."""
    at = 0
    while name.endswith(".r3s") and at + 32 <= len(data):
        kind, (size,) = data[at + 4], struct.unpack_from("<Q", data, at + 16)
        data[at + 24 : at + 32] = xxhash.xxh3_64_digest(bytes(data[at : at + 24]))[::-1]
        begin, end = at + 32, min(at + 32 + size, len(data))
        if (sign := {1: lambda d: sign_ticket("", d, rng), 3: rehash}.get(kind)) is not None:
            sign(inner := data[begin:end])
            data[begin:end] = inner
        at = begin + -(-size // 16) * 16


def sign_note(name: str, data: bytearray, rng: random.Random) -> None:
    """The frame's hashes and the note's."""
    if name.endswith(".ticket"):
        sign_ticket("", data, rng)
    elif name.endswith(".frame") and len(data) > HEADER_BYTES + 12:
        rehash(data)
        end = HEADER_BYTES + sum(struct.unpack_from("<I8xQ", data, 44))
        body = bytes(data[end:-12])
        data[-12:] = struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body))




def rows_told(parts: Parts) -> Any:
    found = oracle_rows(next(iter(parts.values())))
    return found.first_row, found.ids, found.valid, found.spans


FRAMES = [(1, frame_of(ROWS + 1)), (2, frame_of(1)), (3, b"abc")]
KINDS: dict[str, Kind] = {
    "frame": Kind(frames, read_frame, rows_told, sign_frame, 40),
    "parcel": Kind(lambda: [{"": b"".join(pack_parcel(7, FRAMES))}], read_parcel, parcel_told, sign_parcel, 8),
    "hello": Kind(lambda: [{"": hello_of().to_bytes() + b"R3F"}], read_hello, hello_told, sign_hello, 8),
    "reference": Kind(
        lambda: [{"": FrameReference(4, 8, 7, 1, 2).to_bytes()}],
        lambda parts: tuple(FrameReference.from_bytes(parts[""])),
        lambda parts: struct.unpack("<8xIIQQQ", parts[""]),
    ),
    "ticket": Kind(tickets, read_ticket, None, sign_ticket, 14),
    "row message": Kind(lambda: MESSAGES, read_message, message_told, None, 10),
    "tensors": Kind(tensor_frames, read_tensors, tensors_told, sign_tensors, 8),
    "weight table": Kind(lambda: [{"": wires.table_bytes(TABLE)}], read_table, table_told, None, 4),
}
