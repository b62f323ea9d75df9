"""What directly delivered routing costs a relay at least, part by part: each alone, on as much memory as a step of samples has.

    socket   recv of the frames' bytes from another process into memory that was touched before
    head     one HTTP head per frame, judged by h11
    verify   hashes, shape, every id
    keep     a frame that came in a reply, copied into memory that was touched before
    reply    the JSON of a reply with a receipt (its token ids are most of it), and its tokens as int32
    place    one DP rank's shard of all layers, from verified frames into memory that was touched before

    python -m r3channel.bench.relay_floor [--rows 4096] [--samples 8] [--rounds 20]

The relay pays these and what lies between them; `relay_rounds` measures the whole. `sum` is direct delivery, which receives a
frame where it stays; `step` is verify, keep and place: from a frame in memory to a placed shard. No cache holds a step of 64
samples.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import h11
import numpy as np

from r3channel.bench.relay_rounds import SPEC
from r3channel.bench.routing_data import generate
from r3channel.bench.timing import cpu_seconds_each
from r3channel.models import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples
from r3channel.plan.shards import plan_shards
from r3channel.relay.ingest import frame_bytes_of, receipt_in, verify_arrival
from r3channel.relay.intake import frozen
from r3channel.relay.reply import split_reply
from r3channel.wire.frame import encode_frame
from r3channel.wire.receipt import Receipt

_HEAD = (
    b"POST /v1/frames HTTP/1.1\r\nHost: 127.0.0.1:40000\r\nAccept-Encoding: identity\r\nAuthorization: Bearer "
    + b"a" * 64
    + b"\r\nContent-Type: application/octet-stream\r\nContent-Length: 1573000\r\n\r\n"
)
_TIMEOUT_S = 60.0
_DIRECT = ("socket", "head", "verify", "reply", "place")
_STEP = ("verify", "keep", "place")


def measure(*, rows: int, samples: int, rounds: int) -> dict[str, float]:
    """{part: microseconds of CPU of this process per token}."""
    ids_TLK = generate(model_named("qwen3-30b-a3b"), regime="Zmid", rows=rows)
    frames = [bytes(encode_frame(SPEC, expert_ids_TLK=ids_TLK, sample_key=n)) for n in range(samples)]
    with _sender(sum(map(len, frames))) as receive:
        calls = {
            "socket": receive,
            "head": lambda: [_head() for _ in frames],
            "verify": lambda: [_verify(frame) for frame in frames],
            "keep": _keep(frames),
            "reply": _reply(rows, samples),
            "place": _place(frames, rows),
        }
        seen = cpu_seconds_each(calls, rounds=rounds)
    parts = {name: round(value / (rows * samples) * 1e6, 4) for name, value in seen.items()}
    direct, step = (sum(parts[name] for name in names) for names in (_DIRECT, _STEP))
    return parts | {"sum": round(direct, 4), "step": round(step, 4)}


def _head() -> None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(_HEAD)
    assert isinstance(connection.next_event(), h11.Request)


def _verify(frame: bytes) -> None:
    verify_arrival(
        memoryview(frame), spec=SPEC, engine="e", serial=1, invalid_rows="error", lookup=lambda _: None
    )


def _keep(frames: list[bytes]) -> Callable[[], object]:
    sources = [np.frombuffer(frame, np.uint8) for frame in frames]
    targets = [np.zeros_like(source) for source in sources]

    def keep() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    return keep


def _reply(rows: int, samples: int) -> Callable[[], object]:
    receipt = Receipt(sample_key=1, boot_id=2, serial=3, first_row=0, rows=rows)
    text = base64.b64encode(receipt.to_bytes()).decode()
    reply = {"output_ids": list(range(rows)), "meta_info": {"id": "a", "routed_experts": text}}
    body = json.dumps(reply).encode()

    def read() -> None:
        for _ in range(samples):
            parsed, data = split_reply(body)
            assert receipt_in(data or frame_bytes_of(parsed, sample_id="", engine="")) is not None
            frozen(parsed["output_ids"])

    return read


def _place(frames: list[bytes], rows: int) -> Callable[[], object]:
    names = [str(n) for n in range(len(frames))]
    assignment, tokens = Assignment.given([[[name] for name in names]]), dict.fromkeys(names, rows + 1)
    planned = plan_shards(assignment, tokens=tokens, spec=SPEC, layout=TrainerLayout())
    frame_of = dict(zip(names, frames, strict=True))
    buffer = np.zeros(planned.shard(dp=0, pp=0, cp=0).nbytes, np.uint8)

    def ids_of(name: str) -> np.ndarray:
        start = len(frame_of[name]) - rows * SPEC.bytes_per_token
        shape = (rows, SPEC.num_moe_layers, SPEC.top_k)
        return np.frombuffer(frame_of[name], SPEC.id_dtype, offset=start).reshape(shape)

    return lambda: place_samples(planned, dp=0, ids_of=ids_of, buffer_of=lambda _: buffer)


@contextmanager
def _sender(nbytes: int) -> Iterator[Callable[[], object]]:
    """A child that sends so many bytes whenever it is told to; the call that tells it to and takes them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        command = [sys.executable, "-c", _SENDER, str(listener.getsockname()[1]), str(nbytes)]
        child = subprocess.Popen(command)
        try:
            ours, _ = listener.accept()
            ours.settimeout(_TIMEOUT_S)
            with ours:
                yield partial(_receive, ours, memory=memoryview(bytearray(nbytes)))
        finally:
            child.kill()
            child.wait(_TIMEOUT_S)


_SENDER = """
import socket, sys
data = bytes(int(sys.argv[2]))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    while peer.recv(1):
        peer.sendall(data)
"""


def _receive(sock: socket.socket, *, memory: memoryview) -> None:
    sock.sendall(b"x")
    at = 0
    while at < len(memory):
        at += sock.recv_into(memory[at:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
