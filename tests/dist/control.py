"""A relay's control channel for workers in other processes: JSON lines over a loopback socket."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from typing import Any

from r3channel import errors
from r3channel.relay.relay import Relay


class ControlServer:
    """Serves hello, ready and ack of a relay; `with` closes it."""

    def __init__(self, relay: Relay) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write((json.dumps(answer(relay, json.loads(line))) + "\n").encode())

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(relay: Relay, request: dict[str, Any]) -> dict[str, Any]:
    assert request["call"] in ("hello", "ready", "ack")
    try:
        return {"result": getattr(relay, request["call"])(**request["arguments"])}
    except errors.R3Error as error:
        return {"error": type(error).__name__, "text": str(error)}


class TcpControl:
    """`trainer.receiver.Control` over that socket; one call at a time."""

    def __init__(self, port: int) -> None:
        self._file = socket.create_connection(("127.0.0.1", port), timeout=60).makefile("rw")

    def hello(self, **arguments: Any) -> dict[str, Any] | None:
        return self._call("hello", arguments)

    def ready(self, **arguments: Any) -> bool:
        return self._call("ready", arguments)

    def ack(self, **arguments: Any) -> None:
        self._call("ack", arguments)

    def mail(self, **arguments: Any) -> Any:
        raise errors.TransportError("lines of JSON carry no buckets")

    def _call(self, call: str, arguments: dict[str, Any]) -> Any:
        self._file.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
        self._file.flush()
        reply = json.loads(self._file.readline())
        if "error" in reply:
            raise getattr(errors, reply["error"])(reply["text"])
        return reply["result"]
