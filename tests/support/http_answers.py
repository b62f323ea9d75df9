"""A server of HTTP whose answers a test makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    server: Answering  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.server.answer(self.path, body)
        if answer is None:
            self.close_connection = True
            return
        status, data = answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


class Answering(ThreadingHTTPServer):
    """`answer(path, body)` gives status and data of each answer, or None: the connection ends. A context manager."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, bytes], tuple[int, bytes] | None], *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.url = answer, f"http://127.0.0.1:{self.server_port}"
        loop = {"poll_interval": 0.02}
        self.serving = threading.Thread(target=self.serve_forever, kwargs=loop, daemon=True)
        self.serving.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
