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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import xxhash

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.importers import export_npz, import_dumps, import_npz
from r3channel.recordings.recording import Recording
from r3channel.relay.journal import Journal, take_over
from r3channel.relay.relay import Relay
from r3channel.transport.auth import create_token
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener, _proof, connect
from r3channel.weights import wires
from r3channel.weights.receiver import Receiver, opened
from r3channel.wire import row_protocol
from tests.chaos import mutations as change
from tests.chaos.mutations import KINDS, Kind, Parts
from tests.direct import hello_of, said_hello, turns_here
from tests.fake_engine import Model
from tests.memory import resident
from tests.oracle import read as oracle_rows
from tests.samples import SPEC, frame_of

GOLDEN = Path(__file__).parents[1] / "golden" / "recording"
LIMIT_S = 10.0
MOST_BYTES = 48 << 20
"""Above what was resident, for an input of some kilobytes."""
FORBIDDEN = ("exec", "compile", "pickle.", "marshal.", "os.system", "subprocess.", "import", "ctypes.dlopen")
TOKENS = list(range(change.ROWS + 1))


class TooSlow(BaseException):
    """An input took longer than `LIMIT_S`."""


class Place:
    """A folder, the real servers of this process, and how inputs reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token_file = folder, folder / "token"
        self.token = create_token(self.token_file)
        options: dict[str, Any] = {"token_file": str(self.token_file), "unclaimed_timeout_s": 0.001}
        self.relay = Relay(SPEC, TrainerLayout(), ChannelConfig(store_bytes=64 << 20, send_timeout_s=5, **options))
        self.url = self.relay.serve()
        self.session = said_hello(self.url, self.token_file)
        self.rows = self.relay.hello(dp=0, pp=0, cp=0)

    def kinds(self) -> dict[str, Kind]:
        reply = json.dumps({"meta_info": {"id": "r0", "routed_experts": "FRAME"}, "output_ids": [1, 2]}).encode()
        replies = [{"json": reply, "small": frame_of(change.ROWS + 1)}]
        recorded = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
        export_npz(Recording.open(GOLDEN), self.folder / "npz")
        (npz,) = (self.folder / "npz").iterdir()
        return KINDS | {
            "reply": Kind(lambda: replies, self.read_reply, reply_told, sign_reply, 4),
            "recording": Kind(lambda: [recorded], self.read_recording, None, change.sign_segment, 2),
            "npz": Kind(lambda: change.archives(npz.read_bytes()), self.read_npz, None, None, 2),
            "dump": Kind(change.dumps, self.read_dump, None, None, 4),
            "journal": Kind(self.journals, self.read_journal, None, change.sign_note, 2),
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
        self.failures: list[str] = []
        self.audited: Counter[str] = Counter()
        self.armed = False

    def fail(self, what: str) -> None:
        if len(self.failures) < 20:
            self.failures.append(what)

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
        found.fail(f"{name}: {error!r:.200} at {where}, of {short(parts)}")
        return "untyped"
    told = value if kind.told is None else kind.told(parts)
    if repr(value) != repr(told) and value != told:
        found.fail(f"{name}: read {value!r:.300}, the oracle {told!r:.300}, of {short(parts)}")
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
                found.fail(f"{name}: {peak} bytes for {sum(map(len, parts.values()))}, of {short(parts)}")
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
    sys.addaudithook(found.audit)
    threading.excepthook = lambda told: found.fail(f"thread {told.thread and told.thread.name}: {told.exc_value!r}")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        kinds = {name: kind for name, kind in place.kinds().items() if name in (args.only or name).split(",")}
        run(kinds, args.count, seed=args.seed, found=found)
        place.relay.close()
    told = {
        "seed": args.seed, "inputs": found.count, "signed": round(found.signed / max(found.count, 1), 3),
        "outcomes": {name: dict(one) for name, one in found.outcomes.items()}, "peak_bytes": found.peak_bytes,
        "slowest_s": round(found.slowest_s, 3), "seconds": round(time.monotonic() - begun_s, 1),
        "audited": dict(found.audited), "failures": found.failures,
    }  # fmt: skip
    print(json.dumps(told, indent=None if args.json else 1))
    return int(bool(found.failures or found.audited))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
