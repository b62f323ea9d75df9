"""Hostile input, from a seed: `python -m tests.chaos.hostile --seed N --count M [--json]`.

Changed inputs of every kind (`mutations`) are read in this process, and sent to the real servers on loopback. Each is read as an
oracle reads it, or gives a typed error, in bounded time and memory; no thread ends, no HTTP answer is a 500, and an audit hook
sees nothing unpickled, compiled or evaluated. Then a crowd: 2,000 silent connections, wrong tokens, what was overheard, lies.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import xxhash

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.importers import export_npz, import_dumps, import_npz
from r3channel.recordings.logprobs import write_logprobs
from r3channel.recordings.recorder import write_step
from r3channel.recordings.recording import Recording
from r3channel.relay.journal import Journal, take_over
from r3channel.relay.relay import Relay
from r3channel.transport.auth import create_token, read_token
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener, _proof
from r3channel.weights import wires
from r3channel.weights.checksums import tensor_digest
from r3channel.weights.dryrun import Needs, Part
from r3channel.weights.engine import EngineHandle
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import Deadline
from r3channel.weights.receiver import Receiver, opened
from r3channel.weights.stages import Stages, _target_map, check_complete
from r3channel.wire import row_protocol
from r3channel.wire.parcel import pack_parcel
from tests.chaos import mutations as change
from tests.chaos.mutations import KINDS, Kind, Parts
from tests.direct import hello_of, said_hello, turns_here
from tests.fake_engine import Model
from tests.http_answers import Answering
from tests.memory import resident
from tests.misaligned import engine_step
from tests.oracle import read as oracle_rows
from tests.samples import SPEC, frame_of

LIMIT_S = 10.0
MOST_BYTES = 48 << 20
"""Above what was resident, for an input of some kilobytes."""
FORBIDDEN = ("exec", "compile", "pickle.", "marshal.", "os.system", "subprocess.", "import", "ctypes.dlopen")
IMPORTED = ("encodings.punycode", *(f"encodings.utf_{n}_{end}" for n in (16, 32) for end in ("be", "le")), "torch._dynamo")
"""What the standard library and torch import when they first meet some bytes."""
TOKENS = list(range(change.ROWS + 1))


class TooSlow(BaseException):
    """An input took longer than `LIMIT_S`."""


class Place:
    """A folder, the real servers of this process, and how inputs reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token_file = folder, folder / "token"
        create_token(self.token_file)
        options: dict[str, Any] = {"token_file": str(self.token_file), "unclaimed_timeout_s": 0.001}
        self.relay = Relay(SPEC, TrainerLayout(), ChannelConfig(store_bytes=64 << 20, send_timeout_s=5, **options))
        self.url = self.relay.serve()
        self.session = said_hello(self.url, self.token_file)
        self.rows = self.relay.hello(dp=0, pp=0, cp=0)
        self.at = ("127.0.0.1", urlsplit(self.url).port or 0)
        self.listener = Listener("127.0.0.1", token=wires.session_token("", "n"))
        self.rank = Receiver(rank=0, run_token="", agree=lambda word: [word])
        self.answers: Parts = {}
        self.engine = Answering(lambda route, _: (200, self.answers[route]))

    def close(self) -> None:
        self.rank.leave()
        self.listener.close()
        self.engine.__exit__()
        self.relay.close()

    def kinds(self) -> dict[str, Kind]:
        reply = json.dumps({"meta_info": {"id": "r0", "routed_experts": "FRAME"}, "output_ids": [1, 2]}).encode()
        replies = [{"json": reply, "small": frame_of(change.ROWS + 1)}]
        step, at = engine_step(lengths=(9, 7)), np.arange(3)
        write_step(self.folder / "rec", step)
        columns = {"sample": at * 0, "position": at, "trainer": at, "engine": at}
        write_logprobs(self.folder / "rec", step.number, 0, columns)
        recorded = {path.name: path.read_bytes() for path in (self.folder / "rec").iterdir()}
        (npz,) = export_npz(Recording.open(self.folder / "rec"), self.folder / "npz")
        return KINDS | {
            "reply": Kind(lambda: replies, self.read_reply, reply_told, sign_reply, 4),
            "recording": Kind(lambda: [recorded], self.read_recording, None, change.sign_segment, 2),
            "npz": Kind(lambda: change.archives(npz.read_bytes()), self.read_npz, None, None, 2),
            "dump": Kind(change.dumps, self.read_dump, None, None, 4),
            "journal": Kind(self.journals, self.read_journal, None, change.sign_note, 2),
            "ingest": Kind(self.requests, self.ask, None, change.sign_request, 4),
            "link": Kind(links, self.greet, None, sign_link, 4),
            "rank": Kind(self.session_of_rank, self.read_rank, None, sign_rank, 1),
            "order": Kind(lambda: [{"": json.dumps(self.order()).encode()}], self.read_order),
            "needs": Kind(needs, read_needs, None, None, 3),
            "engine": Kind(answers, self.read_engine, None, None, 1),
        }

    # -- read here -------------------------------------------------------------------------------------------------

    def read_reply(self, parts: Parts) -> Any:
        try:
            self.relay.add_body("m", reply_of(parts), TOKENS)
            (rows,) = turns_here(self.relay, "m") or [None]
            return rows and (rows.first_row, rows.ids_TLK.tolist())
        finally:
            self.relay.discard(["m"])

    def written(self, parts: Parts) -> Path:
        shutil.rmtree(folder := self.folder / "input", ignore_errors=True)
        folder.mkdir()
        for name, data in parts.items():
            (folder / name).write_bytes(data)
        return folder

    def read_recording(self, parts: Parts) -> None:
        found = Recording.open(self.written(parts))
        for number in found.steps:
            step = found.step(number)
            for sample in step.samples:
                name, (frame, *more) = sample.sample_id, step.frames[sample.sample_id]
                ids_TLK, valid_T = step.rows(name), step.ids(name)[1]
                if not more and valid_T.all():
                    assert ids_TLK.tolist() == oracle_rows(bytes(frame)).ids

    def read_npz(self, parts: Parts, read: Callable[..., Any] = import_npz, **options: Any) -> None:
        """What was written reads whole."""
        path = self.written({"0.npz": change.zipped(parts)}) / "0.npz"
        read([path], path.parent / "out", **options)
        found = Recording.open(path.parent / "out")
        for number in found.steps:
            step = found.step(number)
            assert not step.cut and all(len(step.rows(one.sample_id)) == one.tokens - 1 for one in step.samples)

    def read_dump(self, parts: Parts) -> None:
        self.read_npz(parts, import_dumps, spec=SPEC)

    def journals(self) -> Sequence[Parts]:
        with closing(Journal(str(self.folder / "journal"))) as journal:
            for ref in (1, 2):
                journal.frame(ref, [frame_of(9)])
                told = {"turn": 0, "key": None, "tokens_hash": 5, "prefix_hash": 6}
                journal.note(ref, sample_id=f"s{ref}", **told)
            journal.sealed(3, change.tickets()[0][""])
            journal.acked(3, (0, 0, 0))
            return [{path.name: path.read_bytes() for path in journal.folder.iterdir()}]

    def read_journal(self, parts: Parts) -> None:
        shutil.rmtree(root := self.folder / "dead", ignore_errors=True)
        root.mkdir()
        self.written(parts).rename(root / "relay-1")
        kept, _ = take_over(root, but=root, keep=self.relay.restore, keep_step=lambda *_: None)
        self.relay.discard(kept.pending)

    # -- sent to servers -------------------------------------------------------------------------------------------

    def requests(self) -> Sequence[Parts]:
        head = f"POST /v1/frames HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {read_token(self.token_file)}\r\n"
        head += f"R3-Session: {self.session}\r\n"
        parcel = b"".join(pack_parcel(hello_of().boot_id, [(1, frame_of(13)), (2, frame_of(1))]))
        hello = {"head": head.replace("frames", "hello").encode(), "hello": hello_of(boot_id=12).to_bytes()}
        return [{"head": head.encode(), "parcel": parcel}] * 3 + [hello]

    def ask(self, parts: Parts) -> None:
        head, body = parts.values()
        answer = exchange(self.at, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        statuses = {int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]}
        assert statuses <= {100, 200, *range(400, 500)}, answer

    def greet(self, parts: Parts) -> None:
        """A receiver's greeting by hand, its hello, and a record."""
        opening, hello = parts["opening"].ljust(40)[:40], parts["hello"].ljust(258)[:258]
        with socket.create_connection((self.rows["host"], self.rows["port"]), LIMIT_S) as peer:
            with suppress(OSError):  # it is turned away
                peer.sendall(opening)
                nonces = opening[8:] + peer.recv(32, socket.MSG_WAITALL)
                proof = _proof(bytes.fromhex(self.rows["token"]), b"connects", nonces, hello)
                peer.sendall((proof if parts["signed"] else nonces[:32]) + hello + parts["record"])
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass

    def order(self) -> dict[str, Any]:
        where = [[self.listener.host, self.listener.port]]
        told = {"op": "open", "session": "s", "nonce": "n", "trainers": where, "engine": "e", "attempt": 1}
        return told | {"staged": "yes", "wire": "tcp", "tensors": [meta.row() for meta in METAS]}

    def read_order(self, parts: Parts) -> None:
        """Carried out by an engine's rank, or refused in words; nothing else is raised in the scheduler's thread."""
        done, said = opened(self.rank, MANAGER, MODEL, [parts[""].decode("latin-1")])
        assert done or said

    def session_of_rank(self) -> Sequence[Parts]:
        data = bytes(MODEL.held["w"].numpy().data) + bytes(4)
        entries = [wires.Entry(0, Box((0, 0), (4, 6))), wires.Entry(1, Box((), ()))]
        head = wires.HEAD.pack(1, 0, 2, xxhash.xxh3_64_intdigest(data))
        table = wires.table_bytes(entries)
        told = {"size": len(table).to_bytes(8, "little"), "table": table, "head": head, "data": data}
        return [told | {"ask": wires.ASK.pack(1, True), "give": wires.PARAM.pack(0, 0)}]

    def read_rank(self, parts: Parts) -> None:
        """A trainer's records to an engine's rank, which answers or ends the link."""
        self.rank.order(MODEL, self.order())
        with closing(self.listener.accept(LIMIT_S)) as link, suppress(errors.TransportError, OSError):
            wires.expect_json(link, wires.NEEDS, timeout_s=LIMIT_S)
            for kind, name, data in (
                (wires.TABLE, "size", "table"), (wires.DATA, "head", "data"), (wires.END, "", ""),
                (wires.VERIFY, "ask", ""), (wires.GIVE, "give", ""),
            ):  # fmt: skip
                link.send_record(kind, parts.get(name, b""), timeout_s=LIMIT_S)
                link.send([parts.get(data, b"")], timeout_s=LIMIT_S)
            link._socket.shutdown(socket.SHUT_WR)
            while True:
                link.recv_into(memoryview(bytearray(1)), timeout_s=LIMIT_S)

    def read_engine(self, parts: Parts) -> None:
        self.answers = parts
        engine = EngineHandle(self.engine.url)
        engine.meet(LIMIT_S)
        engine.learn_versions(timeout_s=LIMIT_S)
        engine.weight_version(timeout_s=LIMIT_S)
        engine.weight_checksums(timeout_s=LIMIT_S)


METAS = [TensorMeta(name="w", dtype=torch.float32, shape=(4, 6)), TensorMeta(name="s", dtype=torch.float32, shape=())]
MODEL = Model({"w": torch.arange(24.0).view(4, 6), "s": torch.ones(())})
MANAGER = SimpleNamespace(_session=None, offload_tags=set())


def exchange(where: tuple[str, int], data: bytes) -> bytes:
    answer = b""
    with socket.create_connection(where, LIMIT_S) as peer, suppress(ConnectionError):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        while part := peer.recv(1 << 16):
            answer += part
    return answer


def record_of(kind: int, body: bytes) -> bytes:
    digest = xxhash.xxh3_64_intdigest(body, kind) & 0xFFFFFFFF
    return struct.pack("<4sB3xII", b"R3L\x01", kind, len(body), digest) + body


def links() -> Sequence[Parts]:
    said = row_protocol.pack(dp=0, pp=0, cp=0)
    start = {"opening": b"r3link\x00\x01" + b"n" * 32, "hello": struct.pack("<H256s", len(said), said), "signed": b"1"}
    return [
        start | {"record": record_of(row_protocol._NAMES.index(name), body)}
        for name, body in (one for message in change.MESSAGES for one in message.items())
    ]


def sign_link(name: str, data: bytearray, rng: random.Random) -> None:
    if name == "hello":
        text = bytes(data[2:]).rstrip(b"\0")[:256]
        data[:] = struct.pack("<H256s", len(text), text)
    elif name == "record" and len(data) >= 16:
        data[:] = record_of(data[4], bytes(data[16:]))


def sign_rank(name: str, data: bytearray, rng: random.Random) -> None:
    if name == "table":
        del data[176:]


def needs() -> Sequence[Parts]:
    parts = [Part(0, Box((0, 0), (4, 6)), 0, 0, (6, 1)), Part(1, Box((), ()), 1, 0, ())]
    told = {"needs": Needs(tuple(METAS), parts).to_dict(), "whole": "", "compared": 2, "shared": ""}
    flat = MODEL.held["w"].view(-1)
    given = {"digest": tensor_digest(flat)}
    verified = {"digests": {"w": "0", "s": "0"}, "checksums": {}}
    texts = {"hello": {"engine": "e", "rank": 0, "attempt": 1}, "needs": told, "verify": verified, "give": given}
    return [{name: json.dumps(value).encode() for name, value in texts.items()} | {"data": bytes(flat.numpy().data)}]


def read_needs(parts: Parts) -> None:
    """What an engine's rank says to a trainer: its hello, its needs, its digests, and a parameter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = Connection(socket.create_connection(server.getsockname()), "trainer")
        ours = Connection(server.accept()[0], "rank")
    stages = Stages(SimpleNamespace(), SimpleNamespace(staged="yes", wire="tcp"))  # pyright: ignore
    links = [ours]

    def accept(timeout_s: float) -> Connection:
        if not links:
            raise errors.DeadlineExceeded("nobody else connects")
        return links.pop()

    stages._listener = SimpleNamespace(accept=accept)  # pyright: ignore
    stages.attempts, stages.metas = {"e": 1}, tuple(METAS)
    ours.hello = parts["hello"]
    with closing(ours), closing(theirs):
        for kind, name in ((wires.NEEDS, "needs"), (wires.VERIFY, "verify"), (wires.GIVE, "give")):
            theirs.send_record(kind, len(parts[name]).to_bytes(8, "little"), timeout_s=LIMIT_S)
            theirs.send([parts[name]], timeout_s=LIMIT_S)
        theirs.send([parts["data"]], timeout_s=LIMIT_S)
        theirs._socket.shutdown(socket.SHUT_WR)
        (rank,) = stages.accept({"e": 1}, Deadline(LIMIT_S, "accept"))["e"]
        check_complete([rank], METAS, names=True)
        _target_map(METAS, [rank], first=1)
        rank.verify(1, checksums=True, timeout_s=LIMIT_S)
        rank.fetch(1, 0, timeout_s=LIMIT_S)


def answers() -> Sequence[Parts]:
    """An engine's, by route."""
    told = {"/server_info": {"tp_size": 1, "startup_time": {"total": 1}, "random_seed": 4, "dp_size": 1}}
    told |= {"/model_info": {"weight_version": "3"}, "/weights_checker": {"success": True, "ranks": [{"checksums": {"w": "0"}}]}}
    told |= {"/generate": {"meta_info": {"routed_experts": base64.b64encode(hello_of().to_bytes()).decode()}}}
    return [{route: json.dumps(value).encode() for route, value in told.items()}]


def reply_of(parts: Parts) -> bytes:
    return parts["json"].replace(b"FRAME", base64.b64encode(parts["small"]))


def reply_told(parts: Parts) -> Any:
    data = base64.b64decode(json.loads(reply_of(parts))["meta_info"]["routed_experts"])
    return None if data[:3] == b"R3T" else oracle_rows(data)[:2]


def sign_reply(name: str, data: bytearray, rng: random.Random) -> None:
    if name == "small":
        change.sign_frame(name, data, rng)


# -- the run ---------------------------------------------------------------------------------------------------------------


class Found:
    """What became of all inputs."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.signed, self.count, self.peak_bytes, self.slowest_s = 0, 0, 0, 0.0
        self.failures: dict[str, str] = {}
        self.audited: Counter[str] = Counter()
        self.armed = False

    def fail(self, what: str, *, of: object = "") -> None:
        """Each kind of failure once."""
        self.failures.setdefault(what, f"{what}: {of}")

    def audit(self, event: str, arguments: Any) -> None:
        if self.armed and event.startswith(FORBIDDEN):
            self.audited[f"{event} {str(arguments)[:60]}"] += 1


def one(name: str, kind: Kind, parts: Parts, found: Found) -> str:
    """The outcome: an error's name, or "read"."""
    try:
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            value = kind.read(parts)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except errors.R3Error as error:
        return type(error).__name__
    except (Exception, TooSlow) as error:
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-4:]
        found.fail(f"{name}: {type(error).__name__} at {where}", of=f"{error!r:.200}, of {short(parts)}")
        return "untyped"
    told = value if kind.told is None else kind.told(parts)
    if repr(value) != repr(told) and value != told:
        found.fail(f"{name}: the oracle differs", of=f"{value!r:.300} and {told!r:.300} of {short(parts)}")
        return "wrong"
    return "read"


def short(parts: Parts) -> str:
    return str({name: data[:600] for name, data in parts.items()})[:2400]


def run(kinds: dict[str, Kind], count: int, *, seed: int, found: Found) -> None:
    rng, names = random.Random(seed), list(kinds)
    shares, corpora = [kinds[name].share for name in names], {name: kinds[name].corpus() for name in names}
    for name in names:  # warms up: what is imported and compiled once comes before the hook is armed
        found.outcomes[name] = Counter()
        for good in corpora[name]:
            one(name, kinds[name], good, found)
    found.armed = True
    for number, name in enumerate(rng.choices(names, shares, k=count)):
        parts, signed = change.mutated(kinds[name], rng.choice(corpora[name]), rng)
        begun_s, before = time.monotonic(), 0
        if number % 50 == 0:
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
        found.outcomes[name][one(name, kinds[name], parts, found)] += 1
        found.slowest_s = max(found.slowest_s, time.monotonic() - begun_s)
        if before and (peak := resident("VmHWM") - before) > found.peak_bytes:
            found.peak_bytes = peak
            if peak > MOST_BYTES:
                found.fail(f"{name}: memory", of=f"{peak} bytes for {short(parts)}")
        found.signed += signed and "zip" not in parts
        found.count += 1
    found.armed = False


def stop(*_: object) -> None:
    raise TooSlow


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--only", default="", help="kinds, with commas")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    logging.getLogger("r3channel").setLevel(logging.ERROR)
    found, begun_s = Found(), time.monotonic()
    signal.signal(signal.SIGALRM, stop)
    for module in IMPORTED:
        import_module(module)
    sys.addaudithook(found.audit)
    threading.excepthook = lambda told: found.fail(f"thread {told.thread and told.thread.name}", of=repr(told.exc_value))
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        kinds = {name: kind for name, kind in place.kinds().items() if name in (args.only or name).split(",")}
        run(kinds, args.count, seed=args.seed, found=found)
        place.close()
    told = {
        "seed": args.seed, "inputs": found.count, "signed": round(found.signed / max(found.count, 1), 3),
        "outcomes": {name: dict(one) for name, one in found.outcomes.items()}, "peak_bytes": found.peak_bytes,
        "slowest_s": round(found.slowest_s, 3), "seconds": round(time.monotonic() - begun_s, 1),
        "audited": dict(found.audited), "failures": list(found.failures.values()),
    }  # fmt: skip
    print(json.dumps(told, indent=None if args.json else 1))
    return int(bool(found.failures or found.audited))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
