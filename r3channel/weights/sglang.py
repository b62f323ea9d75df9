"""The HTTP contract of one SGLang engine for weight updates; the only place that knows its routes and field names.

Read against SGLang 0.5.23 (`srt/entrypoints/http_server.py`, `srt/managers/io_struct.py`, `srt/utils/weight_checker.py`).
SGLang itself is not imported. Nothing here knows about several engines, groups or transactions.

What the contract demands of a caller: init_group while rank 0 joins; then pause, begin, update_tensors beside the
broadcast of exactly these bytes, end, set_version, resume. A refused bucket leaves begin open, and the engine then holds
neither the old nor the new weights.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from r3channel.errors import ConfigError, DeadlineExceeded, EngineRefused, EngineUnavailable, FrameCorrupt
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.refusals import ANY_WAY, OLD, STAGED, refused
from r3channel.wire.hello import Hello, probe_body

PauseMode = Literal["retract", "in_place", "abort"]

LOAD_FORMAT = "r3channel"
"""The `load_format` of `/update_weights_from_distributed` whose one name is an order in JSON for our half in the engine."""
COMMIT_FORMAT = "r3channel-commit"
"""The `load_format` of an order without begin and end around it: our half makes both."""
OPEN_FORMAT = "r3channel-open"
"""The `load_format` of an order that loads nothing and has no begin and end, which would process old weights again."""
FOUND_OPEN = "an update was begun and not ended: "
"""The beginning of an answer to an order that loads nothing, where a begin is without its end."""
UNTOUCHED = "nothing was touched: "
"""The beginning of the reason why all ranks refused a commit before a parameter changed; without it any may have changed."""
FLUSH_REFUSED = "cache was not flushed"
"""SGLang's words when requests wait for their grammar; the weights are in nevertheless."""
_FORMATS = {"commit": COMMIT_FORMAT, "undo": LOAD_FORMAT}
_MAX_REPLY_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_SHOWN_CHARS = 500


class EngineClient:
    """One engine, by its base URL. Stateless: every call opens a connection, so any thread may call at any time.

    Every call ends within about its `timeout_s` and raises EngineUnavailable (no connection, connection lost),
    DeadlineExceeded (no answer in time) or EngineRefused (an answer that says no), naming engine and route.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
    ) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"engine address {url!r}: expected http://host:port ({error})") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"engine address {url!r}: expected http://host:port")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(  # http.client would show it
                f"engine {url}: api_key has a character that no HTTP header takes; has it a line break at its end?"
            )
        self.url = url.rstrip("/")
        self.ranks = 1
        """Its tensor-parallel size, once the engine was asked (`meet`), or a trainer rank that does not ask itself was told."""
        self.unstaged, self.takes_orders = "", False
        """Why it takes no staged bytes, and whether it may be given orders, as far as its settings tell (`meet`)."""
        self.torch = self.nccl = ""
        """The versions that it runs; empty is unknown. SGLang 0.5.23 tells neither over HTTP, our plug-in both."""
        # Plain http.client: unlike requests it takes no proxy from the environment.
        https = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if https else http.client.HTTPConnection
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def __repr__(self) -> str:
        return f"EngineClient({self.url!r}, ranks={self.ranks})"

    def learn_versions(self, *, timeout_s: float) -> None:
        """Ask the engine's plug-in which torch and NCCL it runs, by a request of two tokens; without a plug-in both stay unknown.
        Call it before the handshake (`WeightSync.connect`), because the requests of a paused engine wait."""
        try:
            reply = self._call("POST", "/generate", probe_body(), timeout_s=timeout_s)
            hello, _ = Hello.split(base64.b64decode(reply["meta_info"]["routed_experts"], validate=True))
        except (EngineRefused, FrameCorrupt, KeyError, TypeError, ValueError):
            return  # no plug-in: it refuses the question, or answers it with something else
        if hello is not None:
            self.torch, self.nccl = hello.torch, hello.nccl

    def init_group(
        self,
        *,
        host: str,
        port: int,
        group_name: str,
        backend: str,
        world_size: int,
        timeout_s: float,
    ) -> None:
        """Join the weight group as ranks 1 and following; returns when all members have joined."""
        body = {"master_address": host, "master_port": port, "group_name": group_name, "backend": backend}
        body |= {"rank_offset": 1, "world_size": world_size}
        self._command("/init_weights_update_group", body, timeout_s=timeout_s)

    def destroy_group(self, group_name: str, *, timeout_s: float) -> None:
        """Leave the group; the engine's sockets close, which ends a broadcast that its peers wait in."""
        self._command("/destroy_weights_update_group", {"group_name": group_name}, timeout_s=timeout_s)

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Stop generating; new requests wait. `retract` recomputes running ones later, `in_place` keeps their KV cache.

        Pausing a paused engine is harmless.
        """
        self._command("/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self._command("/continue_generation", {}, timeout_s=timeout_s)

    def begin(self, *, timeout_s: float) -> None:
        """Open the bracket in which buckets are accepted. Refused when one is open."""
        self._command("/begin_weight_update", {}, timeout_s=timeout_s)

    def end(self, *, timeout_s: float) -> None:
        """Close the bracket. Refused when none is open."""
        self._command("/end_weight_update", {}, timeout_s=timeout_s)

    def update_tensors(
        self,
        tensors: Sequence[TensorMeta],
        *,
        group_name: str,
        flush_cache: bool,
        timeout_s: float,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Receive one broadcast of the flat bytes of a bucket's tensors from rank 0 and load them; returns when they are loaded.

        No version travels here: SGLang would record it as soon as this bucket is in. `flush_cache` drops the KV cache of
        the old weights and is refused, with the weights already changed, while requests run. Without `load_format` one
        broadcast per tensor is expected, each in its dtype.
        """
        body: dict[str, Any] = {
            "names": [meta.name for meta in tensors],
            "dtypes": [meta.dtype_name for meta in tensors],
            "shapes": [list(meta.shape) for meta in tensors],
            "group_name": group_name,
            "flush_cache": flush_cache,
        }
        body |= {} if load_format is None else {"load_format": load_format}
        self._command("/update_weights_from_distributed", body, timeout_s=timeout_s)

    def set_version(self, version: int | str, *, timeout_s: float) -> None:
        """Name the weights that are now served; running requests go on (SGLang's default would abort them)."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._command("/update_weight_version", body, timeout_s=timeout_s)

    def weight_version(self, *, timeout_s: float) -> str:
        """The version that the engine puts into replies, as its own text."""
        version = self._call("GET", "/model_info", None, timeout_s=timeout_s).get("weight_version")
        if not isinstance(version, str):
            raise EngineRefused(f"engine {self.url} /model_info has no weight_version; is it SGLang 0.5.23?")
        return version

    def meet(self, *, timeout_s: float) -> str:
        """Learn the engine's ranks and its `boot_id`. ConfigError where it was started with what an update would leave old
        (`refusals`)."""
        told = self._call("GET", "/server_info", None, timeout_s=timeout_s)
        if why := refused(told, ANY_WAY):
            raise ConfigError(f"engine {self.url} was started with {why}")
        self.unstaged, self.takes_orders = refused(told, STAGED), not refused(told, (OLD,))
        self.ranks = int(told.get("tp_size") or 1)
        return _boot_id(told)

    def order(
        self,
        order: Mapping[str, Any],
        *,
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float,
    ) -> str:
        """Send an order to our half in the engine and return the answer; only an undo needs begin and end. Raises EngineRefused.

        `weight_version` names the weights that are served once it is carried out, as `set_version` would."""
        form = _FORMATS.get(order["op"], OPEN_FORMAT)
        body = {"names": [json.dumps(order)], "dtypes": [], "shapes": [], "group_name": LOAD_FORMAT}
        body |= {"load_format": form, "flush_cache": flush_cache, "weight_version": weight_version}
        reply = self._command("/update_weights_from_distributed", body, timeout_s=timeout_s)
        return str(reply.get("message", ""))

    def boot_id(self, *, timeout_s: float) -> str:
        """Names this life of the engine: a digest of what `/server_info` says of its start, which took its own time.

        SGLang has no such name itself. Of the stages' seconds (`startup_time`) and the random seed at least one differs
        after a restart, unless somebody fixed the seed and every stage took as many microseconds as before.
        """
        return _boot_id(self._call("GET", "/server_info", None, timeout_s=timeout_s))

    def weight_checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """By rank the engine's own checksum of each of its parameters, by its own names (fused ones included).

        On a CPU engine it equals `checksums.tensor_checksum` of the bytes; on CUDA the engine uses another hash.
        """
        reply = self._command("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
        try:
            ranks = [rank["checksums"] for rank in reply["ranks"]]
            return [{str(name): str(checksum) for name, checksum in sums.items()} for sums in ranks]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineRefused(
                f"engine {self.url} /weights_checker: no checksums in {_shown(reply)}"
            ) from error

    def healthy(self, *, timeout_s: float) -> bool:
        """Whether the engine answers its health route with 200."""
        try:
            status, _ = self._exchange("GET", "/health", None, timeout_s=timeout_s)
        except (EngineUnavailable, DeadlineExceeded):
            return False
        return status == 200

    def _command(self, route: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Make a call whose answer must not say `success: false`."""
        reply = self._call("POST", route, body, timeout_s=timeout_s)
        if reply.get("success", True) is not True:
            raise EngineRefused(f"engine {self.url} {route} answered {_shown(reply)}")
        return reply

    def _call(
        self, method: str, route: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> dict[str, Any]:
        status, data = self._exchange(method, route, body, timeout_s=timeout_s)
        text = data.decode("utf-8", "replace")
        if status != 200:
            raise EngineRefused(f"engine {self.url} {route} answered HTTP {status}: {_shown(text)}")
        try:
            reply = json.loads(text)
        except ValueError as error:
            raise EngineRefused(f"engine {self.url} {route} answered no JSON: {_shown(text)}") from error
        if not isinstance(reply, dict):
            raise EngineRefused(f"engine {self.url} {route} answered {_shown(reply)}; expected a JSON object")
        return reply

    def _exchange(
        self, method: str, route: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        limit = time.monotonic() + timeout_s
        connection = self._connect(self._host, self._port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + route, body=payload, headers=self._headers)
            response = connection.getresponse()
            return response.status, self._read(response, route, limit)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine {self.url} {route}: no answer within {timeout_s:.1f} s"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailable(
                f"engine {self.url} {route}: {type(error).__name__}: {error}; is it up, and is this its address?"
            ) from error
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, route: str, limit: float) -> bytes:
        data = bytearray()
        while part := response.read(_READ_BYTES):
            data += part
            if len(data) > _MAX_REPLY_BYTES:
                raise EngineRefused(f"engine {self.url} {route} answered more than {_MAX_REPLY_BYTES} bytes")
            if time.monotonic() > limit:
                raise TimeoutError
        return bytes(data)


def _boot_id(told: Mapping[str, Any]) -> str:
    start = [told.get(key) for key in ("startup_time", "random_seed")]
    return hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16]


def _shown(reply: Any) -> str:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
