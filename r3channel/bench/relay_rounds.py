"""CPU that a relay spends per token from the socket to a placed shard: in the reply's JSON, or directly.

The engine's end is another process (run this file as a program): an HTTP server that answers with canned replies, and the
real sender for direct delivery. Only the process that calls `measure` is timed: fetching the reply, parsing it, taking the
frame, verifying every id, sealing the samples as a step and placing its shard as a receiver does. Shape: Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.bench.relay.costs import receive
from r3channel.bench.timing import rounds_of
from r3channel.config import EngineConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import sample_key

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
WAYS = ("off", "stock", "inband", "direct")
"""A reply without routing, fetched and parsed: what every reply costs, with us or without; int32 of all layers as SGLang sends
it, read with numpy; our frame in the JSON; our frame past it."""
PLACED = ("inband", "direct")
_START_TIMEOUT_S = 60.0


def measure(*, rounds: int, samples: int, rows: int) -> dict[str, float]:
    """{way: microseconds of CPU per token}, medians of interleaved rounds."""
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        relay = Relay(SPEC, TrainerLayout())
        with contextlib.closing(relay):
            url = relay.serve(token_file=Path(folder) / "token")
            with _engine(rows, url, Path(folder) / "token") as engine:
                seen = asyncio.run(_rounds(relay, engine, rounds=rounds, samples=samples, rows=rows))
    return {way: round(statistics.median(values), 3) for way, values in seen.items()}


async def _rounds(
    relay: Relay, engine: str, *, rounds: int, samples: int, rows: int
) -> dict[str, list[float]]:
    import aiohttp

    tokens = list(range(rows + 1))
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    rows_N = None
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        for number in rounds_of(rounds + 1, "relay"):
            for way in WAYS:
                names = [f"{way}-{number}-{index}" for index in range(samples)]
                start_s = time.process_time()
                for name in names:
                    await _fetch(session, f"{engine}/{way}?rid={name}", relay, name, tokens)
                if way in PLACED:
                    assignment = Assignment.given([[[name] for name in names]])
                    ticket = relay.seal(number * len(WAYS) + WAYS.index(way), assignment)
                    rows_N = receive(relay, ticket, rows_N)
                spent_s = time.process_time() - start_s
                seen[way] += [spent_s / (samples * rows) * 1e6] if number else []
    return seen


async def _fetch(session: Any, url: str, relay: Relay, name: str, tokens: list[int]) -> None:
    async with session.get(url) as reply:
        body = await reply.read()
    if "/stock" not in url and "/off" not in url:
        relay.add_body(name, body, tokens)
        return
    values = json.loads(body)
    if "/off" in url:
        return
    raw = base64.b64decode(values["meta_info"]["routed_experts"])
    np.frombuffer(raw, np.int32).reshape(-1, SPEC.num_layers, SPEC.top_k)


# -- the engine's end ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine(rows: int, relay_url: str, token_file: Path) -> Iterator[str]:
    """A child process that answers; its address."""
    command = [sys.executable, "-m", "r3channel.bench.relay_rounds", "--rows", str(rows)]
    command += ["--relay-url", relay_url, "--token-file", str(token_file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait(_START_TIMEOUT_S)


class _Replies:
    """Canned replies of a request of `rows` rows, for any request id."""

    def __init__(self, rows: int, relay_url: str, token_file: str) -> None:
        from r3channel.bench.routing_data import generate
        from r3channel.engine.delivery import Outlet
        from r3channel.models import model_named
        from r3channel.wire.hello import Hello

        hello = Hello(
            engine="bench", boot_id=7, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="", r3channel="", hooks=(),
            delivery="direct", codec="auto",
        )  # fmt: skip
        direct = EngineConfig(delivery="direct", relay_url=relay_url, token_file=token_file)
        self.ids_TLK = generate(model_named("qwen3-30b-a3b"), regime="Zmid", rows=rows)
        self.stock = base64.b64encode(self.ids_TLK.astype(np.int32).tobytes()).decode()
        self.outlets = {"inband": Outlet(EngineConfig(), hello), "direct": Outlet(direct, hello)}

    def answer(self, way: str, request_id: str) -> bytes:
        text = "" if way == "off" else self.stock if way == "stock" else self._ours(way, request_id)
        meta = {"id": request_id, "finish_reason": {"type": "length"}, "routed_experts": text}
        return json.dumps({"output_ids": list(range(len(self.ids_TLK))), "meta_info": meta}).encode()

    def _ours(self, way: str, request_id: str) -> str:
        from r3channel.engine.capture import FrameDraft

        rows = len(self.ids_TLK)
        draft = FrameDraft(SPEC, stamps_T=np.zeros(rows, np.int16), makers=[(3, 0)])
        draft.ids_TLK[:] = self.ids_TLK
        draft.name(sample_key(request_id))
        return base64.b64encode(bytes(self.outlets[way].reply(draft, request_id=request_id))).decode()


async def _serve(replies: _Replies) -> None:
    from aiohttp import web

    async def handle(request: Any) -> Any:
        body = replies.answer(request.match_info["way"], request.query["rid"])
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{way}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--relay-url", required=True)
    parser.add_argument("--token-file", required=True)
    options = parser.parse_args()
    asyncio.run(_serve(_Replies(options.rows, options.relay_url, options.token_file)))


if __name__ == "__main__":
    main()
