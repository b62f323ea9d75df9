"""What our path costs, part by part, without Ray: CPU time of one process.

    bodies     reply bodies in memory -> the rows of all layers placed in one receiver's shard and verified: JSON, base64, token
               ids, the frame's checks, ids checked and digested, seal, ticket there and back, each row written where its router
               will look, digests compared. Not the sending: rows are placed from where the relay keeps them
    recording  what a recorder adds to that, in interleaved pairs; what the disk does later is not in it
    seal       of the calling thread: `seal`, the ticket's bytes, and a receiver's own plan out of them; nobody receives
    memory     what relay and receiver hold of a step that was sealed and received: rows in the store, buckets, the shard; and
               what engine, relay, placing and routers pay for the digest, each kernel alone (in a shared pass it is less)
    socket     from the socket to a placed shard: frames in the reply's JSON or past it, and SGLang's int32 read with numpy. The
               engine's end is another process (this file run as a program): canned replies, and the real sender

Samples have about 4,096 tokens. A step's bodies, rows and shard are larger than a cache.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from r3channel.bench.harness import Effort, Parts, interleaved, medians_s, timed
from r3channel.bench.relay_paths import Case, Workload, add_bodies
from r3channel.bench.routing_data import generate
from r3channel.config import EngineConfig
from r3channel.model.presets import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder, segment_name
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame, sample_key

MODELS = ("qwen3-30b-a3b", "qwen3-next", "kimi-k2", "gpt-oss-120b")
"""The first is the one of what is measured for one model."""
SEALS = {64: "dp=4,packing=thd", 8192: "dp=64,pp=4,tp=4,packing=thd"}
"""Samples of a step -> its layout."""
_ROWS = 4096
"""Of a reply from the socket."""
_SHORT = 8
"""Tokens of a sample where only the number of samples matters."""


def _work(model: str, effort: Effort) -> Workload:
    """As many tokens as have 100 MB of ids."""
    tokens = effort.of(100_000_000 // model_named(model).spec.bytes_per_token, 65_536)
    return Workload(Case(model, tokens))


def _us(seconds: float, work: Workload) -> float:
    return seconds / sum(work.lengths.values()) * 1e6


def receive(relay: Relay, ticket: Ticket, rows_N: Any = None) -> Any:
    """What the only receiver of a step does, without a connection; returns the memory of its rows, to be used again."""
    shard = ticket.plan.shard(dp=0, pp=0)
    rows_N = np.zeros(shard.nbytes, np.uint8) if rows_N is None else rows_N
    outgoing = relay.steps.outgoing(ticket.step, shard.key, ticket.run)
    landed, begin = ShardBuffer(ticket, shard, rows_N), 0
    sink = landed.sink()
    for ids_TLK in outgoing.pieces():
        sink.rows(ids_TLK, begin=begin)
        begin += len(ids_TLK)
    assert not sink.verify(outgoing.digests), "rows were damaged"
    relay.steps.acknowledge(ticket.step, shard.key)
    return rows_N


def _whole_way(relay: Relay, work: Workload) -> Callable[[], int]:
    """A call that takes the next step's bodies and receives it; returns its number."""
    step, rows_N, bodies = itertools.count(), None, work.bodies

    def once() -> int:
        nonlocal rows_N
        add_bodies(relay, bodies)
        ticket = Ticket.from_bytes(relay.seal(next(step), work.assignment).to_bytes())
        rows_N = receive(relay, ticket, rows_N)
        return ticket.step

    return once


def bodies(effort: Effort) -> dict[str, Any]:
    found = {}
    for model in MODELS:
        work = _work(model, effort)
        with closing(Relay(work.spec, work.case.trainer)) as relay:
            seconds = medians_s({model: _whole_way(relay, work)}, rounds=effort.rounds_of(9, 3))
        found[model] = _us(seconds[model], work)
    return {"body_to_placed_cpu_us_per_token": found}


def recording(effort: Effort) -> dict[str, Any]:
    """Median and quartiles of (with - without a recorder)."""
    work, rounds = _work(MODELS[0], effort), effort.rounds_of(20, 3)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def way(recorder: Recorder | None) -> Callable[[], float]:
            relay = stack.enter_context(closing(Relay(work.spec, work.case.trainer, recorder=recorder)))
            once = _whole_way(relay, work)
            step = -1

            def spent() -> float:
                nonlocal step
                (Path(folder) / segment_name(step)).unlink(
                    missing_ok=True
                )  # who prunes pays, not who records
                begin_s = time.process_time()
                step = once()
                return time.process_time() - begin_s

            return spent

        seen = interleaved({"off": way(None), "on": way(Recorder(Path(folder)))}, rounds=max(2, rounds))
    added = [_us(on - off, work) for on, off in zip(seen["on"], seen["off"], strict=True)]
    low, middle, high = quantiles(added, n=4)
    return {"recording_cpu_us_per_token": {"low": low, "median": middle, "high": high, "pairs": len(added)}}


def seal(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(9, 3)
    return {"seal_ms": {str(samples): _seal_ms(samples, layout, rounds) for samples, layout in SEALS.items()}}


def _seal_ms(samples: int, layout: str, rounds: int) -> float:
    model, trainer = model_named(MODELS[0]), TrainerLayout.parse(layout)
    frame = encode_frame(model.spec, expert_ids_TLK=generate(model, regime="Zmid", rows=_SHORT - 1))
    names, step = [f"sample-{number}" for number in range(samples)], itertools.count()
    assignment = Assignment.round_robin(names, dp=trainer.dp, microbatch_size=samples // trainer.dp)
    with closing(Relay(model.spec, trainer)) as relay:
        for name in names:
            relay.add_frame(name, frame, range(_SHORT))

        def sealed() -> None:
            data = relay.seal(next(step), assignment).to_bytes()
            Ticket.from_bytes(data).plan.shard(dp=0, pp=0)

        sealing = timed(sealed, clock=time.thread_time)
        seen = []
        for number in range(rounds + 2):
            seen.append(sealing())
            relay.abandon(number)
    return median(seen[2:]) * 1e3


def memory(effort: Effort) -> dict[str, Any]:
    work = _work(MODELS[0], effort)
    layout = work.case.trainer
    with closing(Relay(work.spec, layout)) as relay:
        receiver = Receiver(relay, spec=work.spec, layout=layout, coords=RankCoords(dp=0, pp=0, cp=0, tp=0))
        with closing(receiver):
            add_bodies(relay, work.bodies)
            ticket = relay.seal(0, work.assignment)
            store_bytes = relay.status()["store"]["bytes"]
            shard = receiver.receive(ticket)
            relay.join_previous()
            held_bytes = store_bytes + relay.peak_staging_bytes + _bytes_of(receiver)
    ids, layers = list(work.narrow.values()), shard.shard.layers
    each = [(n, layer, shard.layer_ids(n, layer)) for n in range(shard.num_microbatches) for layer in layers]
    calls = {
        "rows": lambda: [layer_digests(ids_TLK, first_row=0) for ids_TLK in ids],
        "handed": lambda: [shard.check_digest(*one) for one in each],
    }
    seen = medians_s(calls, rounds=effort.rounds_of(9, 3))
    return {
        "step_memory_bytes": held_bytes,
        "step_ids_bytes": sum(ids_TLK.nbytes for ids_TLK in ids),
        "digest_cpu_us_per_token": _us(3 * seen["rows"] + seen["handed"], work),  # engine, relay, placing
    }


def _bytes_of(receiver: Receiver) -> int:
    return sum(len(data_N) for data_N in (*receiver._buffers.values(), *receiver._member._buckets))


# -- from the socket -------------------------------------------------------------------------------------------------------


def socket(effort: Effort) -> dict[str, Any]:
    samples, tokens, spec = effort.of(16, 4), list(range(_ROWS + 1)), model_named(MODELS[0]).spec
    with tempfile.TemporaryDirectory() as folder, closing(Relay(spec, TrainerLayout())) as relay:
        steps, rows_N, token_file = itertools.count(), None, Path(folder) / "token"

        def take(way: str) -> None:
            """A step's replies; for our ways it is sealed, and its shard is placed as a receiver does."""
            nonlocal rows_N
            step = next(steps)
            names = [f"{way}-{step}-{number}" for number in range(samples)]
            for name in names:
                connection.request("GET", f"/{way}/{name}")
                body = connection.getresponse().read()
                if way == "stock":
                    np.frombuffer(base64.b64decode(json.loads(body)["meta_info"]["routed_experts"]), np.int32)
                else:
                    relay.add_body(name, body, tokens)
            if way != "stock":
                rows_N = receive(relay, relay.seal(step, Assignment.given([[[n] for n in names]])), rows_N)

        with _engine(relay.serve(token_file=token_file), token_file) as port:
            connection = HTTPConnection("127.0.0.1", port)
            calls = {way: lambda way=way: take(way) for way in ("in_band", "direct", "stock")}
            seconds = medians_s(calls, rounds=effort.rounds_of(12, 2))
            connection.close()
    return {"socket_cpu_us_per_token": {way: s / (samples * _ROWS) * 1e6 for way, s in seconds.items()}}


@contextlib.contextmanager
def _engine(relay_url: str, token_file: Path) -> Iterator[int]:
    """A child process that answers; its port."""
    command = [sys.executable, "-m", "r3channel.bench.relay_parts", relay_url, str(token_file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


class _Replies:
    """Canned replies, for any request id."""

    def __init__(self, relay_url: str, token_file: str) -> None:
        from r3channel.engine.frame_sender import Outlet
        from r3channel.wire.hello import Hello

        model = model_named(MODELS[0])
        self.ids_TLK, self._spec = generate(model, regime="Zmid", rows=_ROWS), model.spec
        hello = Hello(
            engine="bench", boot_id=7, spec_digest=self._spec.digest, spec=self._spec.to_dict(), sglang="", r3channel="",
            hooks=(), delivery="direct", codec="auto",
        )  # fmt: skip
        direct = EngineConfig(delivery="direct", relay_url=relay_url, token_file=token_file)
        self._outlets = {"in_band": Outlet(EngineConfig(), hello), "direct": Outlet(direct, hello)}

    def answer(self, way: str, request_id: str) -> bytes:
        routing = self.ids_TLK.astype(np.int32) if way == "stock" else self._frame(way, request_id)
        meta = {"id": request_id, "finish_reason": {"type": "length"}}
        meta["routed_experts"] = base64.b64encode(bytes(routing)).decode()
        return json.dumps({"output_ids": list(range(len(self.ids_TLK))), "meta_info": meta}).encode()

    def _frame(self, way: str, request_id: str) -> Any:
        from r3channel.engine.capture import FrameDraft

        stamps_T = np.zeros(len(self.ids_TLK), np.int16)
        draft = FrameDraft(self._spec, stamps_T=stamps_T, makers=[(3, 0)])
        draft.ids_TLK[:] = self.ids_TLK
        draft.name(sample_key(request_id))
        return self._outlets[way].reply(draft, request_id=request_id)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for all requests
    replies: _Replies

    def do_GET(self) -> None:
        body = self.replies.answer(*self.path[1:].split("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


PARTS: Parts = {part.__name__: part for part in (socket, bodies, seal, memory, recording)}

if __name__ == "__main__":
    _Handler.replies = _Replies(*sys.argv[1:])
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.handle_request()  # ends with its connection, whichever way the relay's process ends
