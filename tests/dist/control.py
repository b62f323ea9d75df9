"""A relay's control channel for workers in other processes: HTTP over loopback. One call: hello."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.request import Request

from r3channel.errors import R3Error, TransportError
from r3channel.relay.relay import Relay
from r3channel.transport.network import urlopen
from r3channel.wire.row_protocol import error_of, values_of
from tests.support.http_answers import Answering
from tests.support.waits import ENGINE_S


class ControlServer(Answering):
    """Serves `hello` of a relay; `with` closes it."""

    def __init__(self, relay: Relay) -> None:
        def answer(_path: str, body: bytes) -> tuple[int, bytes]:
            try:
                told = {"result": relay.hello(**json.loads(body))}
            except R3Error as error:
                told = {"error": values_of(error)}
            return 200, json.dumps(told).encode()

        super().__init__(answer)
        self.port = self.server_port


class TcpControl:
    """`trainer.relay_connection.Control` over that server. The port may be changed, for a relay that has started again."""

    def __init__(self, port: int) -> None:
        self.port = port

    def hello(self, **at: int) -> dict[str, Any]:
        asked = Request(f"http://127.0.0.1:{self.port}/", json.dumps(at).encode())
        try:
            with urlopen(asked, timeout_s=ENGINE_S) as page:
                reply = json.load(page)
        except (OSError, HTTPException, ValueError) as error:
            raise TransportError(f"the relay's control channel is gone: {error}") from error
        if "error" in reply:
            raise error_of(reply["error"])
        return reply["result"]
