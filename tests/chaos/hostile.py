"""Hostile input, from a seed: `python -m tests.chaos.hostile --seed N --count M [--json]`.

Changed inputs of every kind (`mutations`) are read in this process, or sent to the real servers on loopback. Each is read as an
oracle reads it, or gives a typed error, in bounded time and memory; no thread ends, no HTTP answer is a 500, and an audit hook
sees nothing unpickled, compiled or evaluated. Last a crowd: silent and slow connections, wrong tokens, what was heard before.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import random
import resource
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
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
from r3channel.relay.relay import Relay
from r3channel.transport.auth import create_token
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener, _proof
from r3channel.weights import rank_link, send_planner
from r3channel.weights.checksums import tensor_digest
from r3channel.weights.geometry import Needs, PartTable
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import Deadline
from r3channel.weights.receiver import Receiver, handle_order
from r3channel.wire.parcel import pack_parcel
from r3channel.wire.row_protocol import _NAMES, pack
from tests.chaos import mutations as change
from tests.chaos.mutations import KINDS, Kind, Parts
from tests.chaos.oracle import read as oracle_rows
from tests.support.direct import hello_of, said_hello, turns_here
from tests.support.fake_engine import Model
from tests.support.memory import resident
from tests.support.misaligned import engine_step
from tests.support.samples import SPEC, frame_of
from tests.support.waits import SOON_S

LIMIT_S, MOST_CPU_S, MOST_BYTES, CROWD = SOON_S, 10.0, 48 << 20, 2000
"""How long a peer is waited for; what an input of some kilobytes takes at most, of all threads; connections at once."""
FORBIDDEN = ("exec", "compile", "pickle.", "marshal.", "os.system", "subprocess.", "import", "ctypes.dlopen")
WIDE = [f"encodings.utf_{bits}_{end}" for bits in (16, 32) for end in ("be", "le")]
IMPORTED = "encodings.punycode", *WIDE, "torch._dynamo"
"""What the standard library and torch import when they first meet some bytes."""
SHAPES = {"w": (4, 6), "s": ()}
METAS = [TensorMeta(name=name, dtype=torch.float32, shape=shape) for name, shape in SHAPES.items()]
MODEL = Model({"w": torch.arange(24.0).view(4, 6), "s": torch.ones(())})
WEIGHTS = MODEL.held["w"].numpy().tobytes()


class TooSlow(BaseException):
    """An input took more than `MOST_CPU_S`."""


class Place:
    """A folder, the real servers of this process, and how inputs reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder, token_file = folder, folder / "token"
        token = create_token(token_file)
        options: dict[str, Any] = {"unclaimed_timeout_s": 0.001, "store_bytes": 64 << 20, "send_timeout_s": 5}
        self.relay = Relay(SPEC, TrainerLayout(), ChannelConfig(token_file=str(token_file), **options))
        url = self.relay.serve()
        self.rows, self.at = self.relay.hello(dp=0, pp=0, cp=0), ("127.0.0.1", urlsplit(url).port or 0)
        head = f"POST /v1/frames HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        self.greeting = lambda: f"{head}R3-Session: {said_hello(url, token_file)}\r\n".encode()
        self.head = self.greeting()
        self.listener = Listener("127.0.0.1", token=rank_link.session_token("", "n"))
        self.rank = Receiver(rank=0, run_token="", agree=lambda word: [word])

    def close(self) -> None:
        self.rank.leave()
        self.listener.close()
        self.relay.close()

    def kinds(self) -> dict[str, Kind]:
        told = json.dumps({"meta_info": {"id": "r0", "routed_experts": "FRAME"}})
        replies = [{"json": told.encode(), "small": frame_of(13)}]
        step, at = engine_step(lengths=(9, 7)), np.arange(3)
        write_step(self.folder / "rec", step)
        logprobs = {"sample": at * 0, "position": at, "trainer": at, "engine": at}
        write_logprobs(self.folder / "rec", step.number, 0, logprobs)
        recorded = [{path.name: path.read_bytes() for path in (self.folder / "rec").iterdir()}]
        (npz,) = export_npz(Recording.open(self.folder / "rec"), self.folder / "npz")
        boot_id, hello = hello_of().boot_id, hello_of(boot_id=12).to_bytes()
        frames = b"".join(pack_parcel(boot_id, [(1, frame_of(13)), (2, frame_of(1))]))
        parcels = {"head": self.head, "parcel": frames}
        hellos = {"head": self.head.replace(b"frames", b"hello"), "hello": hello}
        orders = [{"": json.dumps(self.order()).encode()}]
        signs = {"small": change.sign_frame, "parcel": change.sign_parcel, "hello": change.sign_hello}

        def sign(name: str, data: bytearray, rng: random.Random) -> None:
            signs.get(name, lambda *_: None)(name, data, rng)

        return KINDS | {
            "reply": Kind(4, replies, self.read_reply, reply_told, sign),
            "recording": Kind(2, recorded, self.read_recording, None, change.sign_segment),
            "npz": Kind(2, change.archives(npz.read_bytes()), self.read_npz),
            "dump": Kind(2, change.dumps(), lambda parts: self.read_npz(parts, import_dumps, spec=SPEC)),
            "ingest": Kind(4, [parcels, parcels, hellos], self.ask, None, sign),
            "link": Kind(4, links(), self.greet, None, sign_link),
            "rank": Kind(1, session_of_rank(), self.read_rank),
            "order": Kind(1, orders, self.read_order),
            "needs": Kind(3, needs(), read_needs),
        }

    # -- read here -------------------------------------------------------------------------------------------------

    def read_reply(self, parts: Parts) -> Any:
        try:
            self.relay.add_body("m", reply_of(parts), range(change.ROWS + 1))
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
        for step in map(found.step, found.steps):
            for name in (sample.sample_id for sample in step.samples):
                frame, *more = step.frames[name]
                if not more and step.ids(name)[1].all():
                    assert step.rows(name).tolist() == oracle_rows(bytes(frame)).ids

    def read_npz(self, parts: Parts, read: Callable[..., Any] = import_npz, **options: Any) -> None:
        """What was written reads whole."""
        path = self.written({"0.npz": change.zipped(parts)}) / "0.npz"
        read([path], path.parent / "out", **options)
        found = Recording.open(path.parent / "out")
        for step in map(found.step, found.steps):
            lengths = [len(step.rows(one.sample_id)) for one in step.samples]
            assert not step.cut and lengths == [one.tokens - 1 for one in step.samples]

    # -- sent to servers -------------------------------------------------------------------------------------------

    def ask(self, parts: Parts) -> None:
        head, body = parts.values()
        with socket.create_connection(self.at, LIMIT_S) as peer:
            statuses = said(peer, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert statuses <= {100, 200, *range(400, 500)}

    def greet(self, parts: Parts, proof: bytes = b"") -> bytes:
        """A receiver's greeting by hand, its hello, and a record -> what is answered. `proof`: in place of the right one."""
        opening, hello = parts["opening"].ljust(40)[:40], parts["hello"].ljust(258)[:258]
        where = self.rows["host"], self.rows["port"]
        with socket.create_connection(where, LIMIT_S) as peer, suppress(OSError):
            peer.sendall(opening)
            nonces = opening[8:] + peer.recv(32, socket.MSG_WAITALL)
            proof = proof or _proof(bytes.fromhex(self.rows["token"]), b"connects", nonces, hello)
            peer.sendall(proof + hello + parts["record"])
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(4096, socket.MSG_WAITALL)
        return b""

    def order(self) -> dict[str, Any]:
        told: dict[str, Any] = dict(op="open", session="s", nonce="n", engine="e", attempt=1, staged="yes")  # noqa: C408
        where = [[self.listener.host, self.listener.port]]
        return told | {"wire": "tcp", "trainers": where, "tensors": [meta.row() for meta in METAS]}

    def read_order(self, parts: Parts) -> None:
        """Carried out by an engine's rank, or refused in words: what is raised in the scheduler's thread ends the engine."""
        manager = SimpleNamespace(_session=None, offload_tags=set())
        done, answer = handle_order(self.rank, manager, MODEL, [parts[""].decode("latin-1")])
        assert done or answer

    def read_rank(self, parts: Parts) -> None:
        """A trainer's records to an engine's rank, which answers or ends the link."""
        self.rank.order(MODEL, self.order())
        with closing(self.listener.accept(LIMIT_S)) as link, suppress(errors.TransportError, OSError):
            rank_link.expect_json(link, rank_link.NEEDS, timeout_s=LIMIT_S)
            for kind, name, data in (
                (rank_link.TABLE, "size", "table"), (rank_link.DATA, "head", "data"), (rank_link.END, "", ""),
                (rank_link.VERIFY, "ask", ""), (rank_link.GIVE, "give", ""),
            ):  # fmt: skip
                seal = xxhash.xxh3_64_intdigest(parts.get(data, b"")).to_bytes(8, "little") * (name == "size")
                link.send_record(kind, parts.get(name, b"") + seal, timeout_s=LIMIT_S)
                link.send([parts.get(data, b"")], timeout_s=LIMIT_S)
            link._socket.shutdown(socket.SHUT_WR)
            while True:
                link.recv_into(memoryview(bytearray(1)), timeout_s=LIMIT_S)

    def meet_the_crowd(self) -> dict[str, int]:
        """2,000 connections stay silent or send a byte now and then; the token is wrong, a greeting and a parcel come again."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * CROWD), hard))
        parcel = b"".join(pack_parcel(hello_of().boot_id, [(7, frame_of(13))]))
        head = self.greeting()  # changed hellos have begun other sessions
        good = head + b"Content-Length: %d\r\n\r\n" % len(parcel) + parcel
        answers = Counter[str]()
        with ExitStack() as stack:
            for number in range(CROWD):
                where = self.at if number % 4 else (self.rows["host"], self.rows["port"])
                stack.enter_context(peer := socket.create_connection(where, LIMIT_S))
                with suppress(OSError):
                    peer.sendall(self.head[: number % 40])
                if number % 20 == 0:
                    wrong = good.replace(b"Bearer ", b"Bearer x")
                    for name, data in {"taken": good, "wrong token": wrong}.items():
                        with socket.create_connection(self.at, LIMIT_S) as engine:
                            answers.update(f"{name} {status}" for status in said(engine, data))
        answers["greeted"] += len(self.greet(links()[1])) >= 32
        answers["greeted with a wrong proof"] += len(self.greet(links()[1], proof=bytes(32))) > 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return dict(answers)


def said(peer: socket.socket, data: bytes) -> set[int]:
    """The statuses of all answers to these bytes, after which we say no more."""
    answer = b""
    with suppress(ConnectionError):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        while part := peer.recv(1 << 16):
            answer += part
    return {int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]}


def reply_of(parts: Parts) -> bytes:
    return parts["json"].replace(b"FRAME", base64.b64encode(parts["small"]))


def reply_told(parts: Parts) -> Any:
    data = base64.b64decode(json.loads(reply_of(parts))["meta_info"]["routed_experts"])
    return None if data[:3] == b"R3T" else oracle_rows(data)[:2]


def record_of(kind: int, body: bytes) -> bytes:
    check = xxhash.xxh3_64_intdigest(body, kind) & 0xFFFFFFFF
    return struct.pack("<4sB3xII", b"R3L\x01", kind, len(body), check) + body


def links() -> Sequence[Parts]:
    hello = pack(dp=0, pp=0, cp=0)
    start = {"opening": b"r3link\x00\x01" + b"n" * 32, "hello": struct.pack("<H256s", len(hello), hello)}
    named = [(_NAMES.index(name), body) for said in change.MESSAGES for name, body in said.items()]
    return [start | {"record": record_of(*record)} for record in named]


def sign_link(name: str, data: bytearray, rng: random.Random) -> None:
    if name == "hello":
        text = bytes(data[2:]).rstrip(b"\0")[:256]
        data[:] = struct.pack("<H256s", len(text), text)
    elif name == "record" and len(data) >= 16:
        data[:] = record_of(data[4], bytes(data[16:]))


def session_of_rank() -> Sequence[Parts]:
    table = rank_link.table_bytes(rank_link.Entry(at, part.box) for at, part in enumerate(change.PARTS))
    data = WEIGHTS + bytes(4)
    head = rank_link.HEAD.pack(1, 0, 2, xxhash.xxh3_64_intdigest(data))
    told = {"size": len(table).to_bytes(8, "little"), "table": table, "head": head, "data": data}
    return [told | {"ask": rank_link.ASK.pack(1, True), "give": rank_link.PARAM.pack(0, 0)}]


def needs() -> Sequence[Parts]:
    told = {"needs": Needs(tuple(METAS), PartTable.of(change.PARTS)).to_dict(), "whole": ""}
    told |= {"compared": 2, "shared": ""}
    verified, given = {"digests": {"w": "0", "s": "0"}, "checksums": {}}, {"digest": tensor_digest(MODEL.held["w"])}  # fmt: skip
    hello = {"engine": "e", "rank": 0, "attempt": 1}
    texts = {"hello": hello, "needs": told, "verify": verified, "give": given}
    return [{name: json.dumps(value).encode() for name, value in texts.items()} | {"data": WEIGHTS}]


def read_needs(parts: Parts) -> None:
    """What an engine's rank says to a trainer: its hello, its needs, its digests, and a parameter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = Connection(socket.create_connection(server.getsockname()), "trainer")
        ours = Connection(server.accept()[0], "rank")
    come, config = [ours], SimpleNamespace(staged="", wire="", backend="gloo")
    trainer = send_planner.SendPlanner(SimpleNamespace(), config)  # pyright: ignore
    trainer.attempts, ours.hello = {"e": 1}, parts["hello"]

    def accept(timeout_s: float) -> Connection:
        if not come:
            raise errors.DeadlineExceeded("nobody else connects")
        return come.pop()

    trainer.ranks.listener = SimpleNamespace(accept=accept)  # pyright: ignore
    with closing(ours), closing(theirs):
        for name in ("needs", "verify", "give"):
            rank_link.send_blob(theirs, getattr(rank_link, name.upper()), parts[name], timeout_s=LIMIT_S)
        theirs.send([parts["data"]], timeout_s=LIMIT_S)
        theirs._socket.shutdown(socket.SHUT_WR)
        (rank,) = trainer.accept({"e": 1}, Deadline(LIMIT_S, "accept"), METAS)["e"]
        send_planner.check_complete([rank], METAS, names=True)
        send_planner._target_map(METAS, [rank], first=1)
        rank.verify(1, checksums=True, timeout_s=LIMIT_S)
        if rank.needs.params:
            rank.fetch(1, 0, timeout_s=LIMIT_S)


# -- the run ---------------------------------------------------------------------------------------------------------------


class Run:
    """What became of all inputs."""

    def __init__(self, kinds: dict[str, Kind]) -> None:
        self.kinds, self.armed = kinds, False
        self.outcomes = {name: Counter[str]() for name in kinds}
        self.signed, self.peak_bytes, self.slowest_s = 0, 0, 0.0
        self.failures: dict[str, str] = {}
        """Each once, with an input that shows it."""

    def fail(self, what: str, of: object) -> None:
        self.failures.setdefault(what, f"{of!s:.2500}")

    def audit(self, event: str, arguments: Any) -> None:
        if self.armed and event.startswith(FORBIDDEN):
            self.fail(f"audit {event}", arguments)

    def thread_ended(self, told: threading.ExceptHookArgs) -> None:
        self.fail(f"thread {told.thread and told.thread.name}", repr(told.exc_value))

    def one(self, name: str, parts: Parts) -> str:
        """The outcome: an error's name, or "read"."""
        kind, begun_s = self.kinds[name], time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S * self.armed)
            try:
                value = kind.read(parts)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        except errors.R3Error as error:
            return type(error).__name__
        except (Exception, TooSlow) as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
            self.fail(f"{name}: {type(error).__name__} at {where}", (error, parts))
            return "untyped"
        told = kind.told(parts) if kind.told else None
        if kind.told and value != told and repr(value) != repr(told):  # NaN equals nothing
            self.fail(f"{name}: the oracle differs", (value, told, parts))
        return "read"

    def arm(self) -> None:
        """Forbid events and limit times from here on, once what is imported and compiled at first use is there."""
        for name, kind in self.kinds.items():
            for good in kind.corpus:
                self.one(name, good)
        self.armed, self.slowest_s = True, 0.0

    def many(self, count: int, *, seed: int) -> None:
        rng, names = random.Random(seed), list(self.kinds)
        self.arm()
        shares = [kind.share for kind in self.kinds.values()]
        for number, name in enumerate(rng.choices(names, shares, k=count)):
            parts, signed = change.mutated(self.kinds[name], rng.choice(self.kinds[name].corpus), rng)
            if measured := number % 50 == 0:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = resident("VmRSS") if measured else 0
            self.outcomes[name][self.one(name, parts)] += 1
            self.signed += signed
            if measured:
                self.peak_bytes = max(self.peak_bytes, peak := resident("VmHWM") - before)
                if peak > MOST_BYTES:
                    self.fail(f"{name}: memory", (peak, parts))
        self.armed = False


def stop(*_: object) -> None:
    raise TooSlow


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--only", default="", help="kinds, with commas")
    parser.add_argument("--json", action="store_true", help="on one line")
    args, begun_s = parser.parse_args(arguments), time.monotonic()
    logging.getLogger("r3channel").setLevel(logging.ERROR)
    signal.signal(signal.SIGPROF, stop)
    for module in IMPORTED:
        import_module(module)
    with tempfile.TemporaryDirectory() as folder, closing(Place(Path(folder))) as place:
        kinds = place.kinds()
        run = Run({name: kinds[name] for name in (args.only.split(",") if args.only else kinds)})
        threading.excepthook = run.thread_ended
        sys.addaudithook(run.audit)
        run.many(args.count, seed=args.seed)
        crowd = place.meet_the_crowd()
    told = {
        "seed": args.seed, "inputs": args.count, "signed": run.signed, "outcomes": run.outcomes, "peak_bytes": run.peak_bytes,
        "slowest_s": round(run.slowest_s, 3), "crowd": crowd, "seconds": round(time.monotonic() - begun_s),
        "failures": run.failures,
    }  # fmt: skip
    print(json.dumps(told, indent=None if args.json else 1))
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
