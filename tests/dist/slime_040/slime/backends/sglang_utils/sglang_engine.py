"""An engine's plug-in as it delivers, and a server that answers a probe; started before there is a relay."""

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

from tests.direct import Engine, hello_of, until
from tests.samples import frame_of, reply_of


class _Probed(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.dumps(reply_of(frame_of(3))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class SGLangEngine:
    def __init__(self, args):
        self.args = args

    def init(
        self,
        dist_init_addr,
        port,
        nccl_port,
        host=None,
        disaggregation_bootstrap_port=None,
        router_ip=None,
        router_port=None,
    ):
        self.server = HTTPServer(("127.0.0.1", 0), _Probed)
        Thread(target=self.server.serve_forever, daemon=True).start()
        told = {name: os.environ[f"R3CHANNEL_{name}"] for name in ("RELAY_URL", "TOKEN_FILE")}
        self.plugin = Engine(told["RELAY_URL"], Path(told["TOKEN_FILE"]), hello=hello_of(boot_id=os.getpid()))
        return self.server.server_port

    def get_url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def finish(self, request, tokens, first_row):
        return self.plugin.finish(request, tokens, first_row=first_row)

    def direct(self):
        """How many frames went straight to the relay."""
        until(lambda: self.plugin.frames("direct"), "a frame went directly")
        return self.plugin.frames("direct")
