"""A receiver without a model: SGLang's weight routes, a real gloo group, bytes received and hashed, nothing loaded.

python -m r3channel.bench.weight_receiver       prints its port, serves until its standard input closes

What an update costs without the engine's own loading is measured against it. Buffers are reused, as an engine's would not be.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from r3channel.weights.buckets import Bucket, TensorMeta, new_buffer
from r3channel.weights.digests import payload_digest

_TIMEOUT = timedelta(seconds=120)


class Receiver:
    """What the routes do. Calls come one at a time per group."""

    def __init__(self) -> None:
        self.version = "0"
        self.digests: list[int] = []
        self._groups: dict[str, Any] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "/init_weights_update_group":
            self._groups[body["group_name"]] = _joined(body)
        elif route == "/destroy_weights_update_group":
            self._groups.pop(body["group_name"], None)
        elif route == "/begin_weight_update":
            self.digests = []
        elif route == "/update_weights_from_distributed":
            metas = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
            tensors = [TensorMeta(name=n, dtype=getattr(torch, d), shape=tuple(s)) for n, d, s in metas]
            payload = self._receive(body["group_name"], Bucket.of(tensors).payload_bytes)
            self.digests.append(payload_digest(payload))
        elif route == "/raw":  # the limit: the same bytes, nothing else
            for size in body["sizes"]:
                self._receive(body["group_name"], size)
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        return {"success": True, "weight_version": self.version, "digests": self.digests}

    def _receive(self, group_name: str, size: int) -> torch.Tensor:
        if len(self._buffer) < size:
            self._buffer = new_buffer(size, torch.device("cpu")).zero_()
        payload = self._buffer[:size]
        self._groups[group_name].broadcast([payload], dist.BroadcastOptions()).wait()
        return payload


def _joined(body: dict[str, Any]) -> Any:
    """As SGLang 0.5.23 joins; see weights/group.py."""
    address = (body["master_address"], body["master_port"])
    store: Store = TCPStore(*address, body["world_size"], False, timeout=_TIMEOUT)
    name = body["group_name"]
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = _TIMEOUT
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], options)


class _Handler(BaseHTTPRequestHandler):
    receiver = Receiver()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        data = json.dumps(self.receiver.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
