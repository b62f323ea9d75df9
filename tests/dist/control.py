"""A relay's control channel for workers in other processes: JSON lines over a loopback socket. One call: hello."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from typing import Any

from r3channel.errors import R3Error, TransportError
from r3channel.relay.relay import Relay
from r3channel.wire.row_protocol import error_of, values_of
from tests.support.waits import ENGINE_S


class ControlServer:
    """Serves `hello` of a relay; `with` closes it."""

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


def answer(relay: Relay, arguments: dict[str, int]) -> dict[str, Any]:
    try:
        return {"result": relay.hello(**arguments)}
    except R3Error as error:
        return {"error": values_of(error)}


class TcpControl:
    """`trainer.relay_connection.Control` over that socket: a connection for each call, as there is one call in a life. The port
    may be changed, for a relay that has started again."""

    def __init__(self, port: int) -> None:
        self.port = port

    def hello(self, *, dp: int, pp: int, cp: int) -> dict[str, Any]:
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=ENGINE_S) as link,
                link.makefile("rw") as file,
            ):
                file.write(json.dumps({"dp": dp, "pp": pp, "cp": cp}) + "\n")
                file.flush()
                reply = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise TransportError(f"the relay's control channel is gone: {error}") from error
        if "error" in reply:
            raise error_of(reply["error"])
        return reply["result"]
