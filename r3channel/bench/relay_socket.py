"""From the socket to a placed shard: frames in the reply's JSON or past it, and SGLang's int32 read with numpy.

The engine is another process, this file run as a program. It has canned replies and the real sender.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.bench.harness import Effort, medians_s
from r3channel.bench.relay_paths import receive, reply
from r3channel.bench.wire import generate
from r3channel.config import EngineConfig
from r3channel.model.presets import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.frame import sample_key
from r3channel.wire.hello import Hello

MODEL = model_named("qwen3-30b-a3b")
_ROWS = 4096
"""Rows of a reply that is read from the socket."""


def socket(effort: Effort) -> dict[str, Any]:
    samples, tokens, spec = effort.choose(16, 4), list(range(_ROWS + 1)), MODEL.spec
    with tempfile.TemporaryDirectory() as folder, closing(Relay(spec, TrainerLayout())) as relay:
        steps, rows_N, token_file = itertools.count(), None, Path(folder) / "token"

        def take(way: str) -> None:
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
    command = [sys.executable, "-m", "r3channel.bench.relay_socket", relay_url, str(token_file)]
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

        self.ids_TLK, self._spec = generate(MODEL, regime="Zmid", rows=_ROWS), MODEL.spec
        hello = Hello(
            engine="bench", boot_id=1, spec_digest=self._spec.digest, spec=self._spec.to_dict(), sglang="", r3channel="",
            hooks=(), delivery="direct", codec="auto",
        )  # fmt: skip
        direct = EngineConfig(delivery="direct", relay_url=relay_url, token_file=token_file)
        self._outlets = {"in_band": Outlet(EngineConfig(), hello), "direct": Outlet(direct, hello)}

    def answer(self, way: str, request_id: str) -> bytes:
        routing = self.ids_TLK.astype(np.int32) if way == "stock" else self._frame(way, request_id)
        return reply(request_id, routing, tokens=len(self.ids_TLK))

    def _frame(self, way: str, request_id: str) -> Any:
        from r3channel.engine.capture import UnfinishedFrame

        rows, key = len(self.ids_TLK), sample_key(request_id)
        unfinished = UnfinishedFrame(self._spec, rows=rows, first_row=0, sample_key=key)
        unfinished.runs = [(0, rows, 3, 0)]
        unfinished.ids_TLK[:] = self.ids_TLK
        return self._outlets[way].reply(unfinished, request_id=request_id)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for all requests
    replies: _Replies

    def do_GET(self) -> None:
        body = self.replies.answer(*self.path[1:].split("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    _Handler.replies = _Replies(*sys.argv[1:])
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.handle_request()  # ends with its connection, however the relay's process ends
