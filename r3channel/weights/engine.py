"""One SGLang engine as a session sees it: its HTTP routes, what is known of it, and our links to its ranks; and a set of them.

Read against SGLang 0.5.23 (`srt/entrypoints/http_server.py`, `srt/managers/io_struct.py`, `srt/utils/weight_checker.py`), and
the only place that knows its routes and field names. SGLang itself is not imported. `transaction` decides what is called, and
which state an answer, or none, leaves.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from http.client import HTTPException
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request

from r3channel import errors
from r3channel.transport.http import urlopen
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.weights import rank_link
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import CONTROL_S, GRACE_S, REPAIR_S, background
from r3channel.weights.refusals import ANY_WAY, OLD, STAGED, refused
from r3channel.weights.transaction import Engine, EngineState
from r3channel.wire.hello import Hello, probe_body

PauseMode = Literal["retract", "in_place", "abort"]
Body = Mapping[str, Any]

_NO_PLUGIN = ("must run between", "init_weights_update_group", "does not exist")
"""What SGLang itself says to our order: that begin comes first, or, inside of it, that it knows no group of this name; or has
none to leave."""
_LEAVE = "/destroy_weights_update_group"
"""Harmless with any name, so an engine before 0.5.23 is asked here, with our half or without."""
_UNTOLD = errors.DeadlineExceeded, errors.EngineRefused, errors.FrameCorrupt
"""What an engine without a plug-in makes of our question, or one that stands still."""
_MAX_REPLY_BYTES = 64 << 20
_SHOWN_CHARS = 500


class EngineHandle:
    """One engine, by its base URL. Every call opens a connection; one thread at a time makes calls that change the engine, any
    thread may ask.

    Each call ends within about its `timeout_s` and raises EngineUnavailable (no connection, connection lost),
    DeadlineExceeded (no answer in time) or EngineRefused (an answer that says no), naming engine and route.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port
            fits = False
        if not fits:
            raise errors.ConfigError(f"engine address {url!r}: expected http://host:port")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            # http.client would show it
            raise errors.ConfigError(f"engine {url}: no HTTP header takes its api_key; has it a line break?")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.size = 1
        """Its tensor-parallel size, once the engine was asked (`meet`), or a trainer rank that does not ask itself was told."""
        self.unstaged, self.takes_orders = "", True
        """Why it takes no staged bytes, and whether it may be given orders, as far as its settings tell (`meet`)."""
        self.torch = self.nccl = ""
        """The versions that it runs; empty is unknown. SGLang 0.5.23 tells neither over HTTP, our plug-in both."""
        self.now = Engine(self.url)
        """What the last update left."""
        self.found: EngineState | None = None
        """What the last answer said of its weights, where it did: FENCED or PAUSED, as an event's `found`."""
        self.begun = False
        """Whether a bracket of ours may be open."""
        self.groups: list[str] = []
        """Names of the groups of broadcasts that it may be in."""
        self.ranks: list[rank_link.RankLink] = []
        """The links of staged updates, by rank."""
        self.metas: tuple[TensorMeta, ...] = ()
        """The tensors that its ranks were told when they linked; what they need refers to these by index."""
        self.gives: int | None = None
        """The version that was committed over these links, and can be read back; rank 0 knows."""
        self.boot_id = ""
        """The engine's life that was met; empty before, and where another one is known to have begun."""
        self.names: frozenset[str] = frozenset()
        """The tensor names that this life of the engine was told of by a broadcast, and takes."""
        self.unheld = False
        """Whether the engine has no plug-in of ours that keeps other sessions out."""

    # -- what it is, holds and takes -----------------------------------------------------------------------------------

    def learn_versions(self, *, timeout_s: float) -> None:
        """Ask the engine's plug-in which torch and NCCL it runs, by a request of two tokens. Both stay unknown without a plug-in,
        and where no answer comes within `timeout_s`: a session that died in its change-over has left the engine paused.
        Call it before the handshake (`WeightSync.connect`), because the requests of a paused engine wait."""
        try:
            reply = self._call("/generate", probe_body(), timeout_s=timeout_s)
            hello, _ = Hello.split(base64.b64decode(reply["meta_info"]["routed_experts"], validate=True))
        except (*_UNTOLD, KeyError, TypeError, ValueError):
            return  # silent; or without a plug-in: it refuses the question, or answers it with something else
        if hello is not None:
            self.torch, self.nccl = hello.torch, hello.nccl

    def meet(self, timeout_s: float) -> None:
        """Ask the engine whether it is there, for its ranks and for its boot id. What was known of another life is forgotten.

        ConfigError where it was started with what an update would leave old (`refusals`)."""
        self.unlink()
        info = self._call("/server_info", timeout_s=timeout_s)
        if why := refused(info, ANY_WAY):
            raise errors.ConfigError(f"engine {self.url} was started with {why}")
        self.unstaged, self.takes_orders = refused(info, STAGED), not refused(info, (OLD,))
        if type(size := info.get("tp_size") or 1) is not int:
            raise self._refusal("/server_info", f"has tp_size {_shown(size)}")
        self.size = size
        self.boot_id, self.begun = _boot_id(info), False

    def lives(self, timeout_s: float) -> str:
        """Names this life of the engine: a digest of what `/server_info` says of its start, which took its own time.

        SGLang has no such name itself. Of the stages' seconds (`startup_time`) and the random seed at least one differs
        after a restart, unless somebody fixed the seed and every stage took as many microseconds as before.
        """
        return _boot_id(self._call("/server_info", timeout_s=timeout_s))

    def healthy(self, *, timeout_s: float) -> bool:
        """Whether the engine answers its health route with 200."""
        try:
            with urlopen(Request(f"{self.url}/health", headers=self._headers), timeout_s=timeout_s) as reply:
                return reply.status == 200
        except (OSError, HTTPException):
            return False

    def weight_version(self, *, timeout_s: float) -> str:
        """The version that the engine puts into replies, as its own text."""
        version = self._call("/model_info", timeout_s=timeout_s).get("weight_version")
        if not isinstance(version, str):
            raise self._refusal("/model_info", "has no weight_version; is it SGLang 0.5.23?")
        return version

    def version_now(self) -> str:
        """The version that the engine serves, asked just now, for an error."""
        try:
            return f"version {self.weight_version(timeout_s=1.0)}"
        except errors.R3Error as error:
            return f"unknown ({type(error).__name__})"

    def weight_checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """By rank the engine's own checksum of each of its parameters, by its own names (fused ones included).

        On a CPU engine it equals `checksums.tensor_checksum` of the bytes; on CUDA the engine uses another hash.
        """
        reply = self._command("/weights_checker", timeout_s, action="checksum")
        try:
            ranks = [rank["checksums"] for rank in reply["ranks"]]
            return [{str(name): str(checksum) for name, checksum in sums.items()} for sums in ranks]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._refusal("/weights_checker:", f"no checksums in {_shown(reply)}") from error

    def staged(self, metas: tuple[TensorMeta, ...]) -> bool:
        """Whether links to all of its ranks stand, for these tensors."""
        return self.metas == metas and bool(self.ranks) and all(rank.link.alive for rank in self.ranks)

    # -- SGLang's own loading ------------------------------------------------------------------------------------------

    def init_group(self, where: Body, *, rank_offset: int = 1, timeout_s: float) -> None:
        """Join a weight group (`WeightGroup.where`) with ranks from `rank_offset` on; returns when all members have joined."""
        self.groups.append(where["group_name"])
        self._command("/init_weights_update_group", timeout_s, **where, rank_offset=rank_offset)

    def leave_groups(self, timeout_s: float) -> None:
        """Leave all weight groups, also when the engine does not answer; the engine's sockets close, which ends broadcasts that
        its peers wait in."""
        names, self.groups = self.groups, []
        for name in names:
            with contextlib.suppress(errors.R3Error):  # it has not joined, or does not answer
                self._command(_LEAVE, timeout_s / len(names), group_name=name)

    def begin(self, timeout_s: float) -> None:
        """Open the bracket in which buckets are accepted, on a paused engine. If it is open already, somebody failed in it, and
        these weights are unknown (`found`): that bracket is closed, and one of ours opened."""
        if not self.takes_orders:  # nor has it a begin
            return
        self.begun = True
        try:
            self._command("/begin_weight_update", timeout_s)
        except errors.EngineRefused:
            self.found = EngineState.FENCED
            with contextlib.suppress(errors.EngineRefused):
                self.end(timeout_s)
            self._command("/begin_weight_update", timeout_s)

    def update_tensors(self, tensors: Sequence[TensorMeta], timeout_s: float, **how: Any) -> None:
        """Receive one broadcast of the flat bytes of a bucket's tensors from rank 0 and load them; returns when they are loaded.

        No version travels here: SGLang would record it as soon as this bucket is in. `how`: `group_name`; `flush_cache`, which
        drops the KV cache of the old weights; `load_format`: with None a broadcast for each tensor is expected.
        """
        rows = [(meta.name, meta.dtype_name, list(meta.shape)) for meta in tensors]
        body = dict(zip(("names", "dtypes", "shapes"), zip(*rows, strict=True), strict=True))
        self._put_in({"load_format": "flattened_bucket", **body, **how}, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Close the bracket. Refused when none is open."""
        if self.takes_orders:
            self._command("/end_weight_update", timeout_s)

    def commit(self, version: int, timeout_s: float) -> None:
        """Name the weights that SGLang has loaded; running requests go on (SGLang's default would abort them)."""
        self._command("/update_weight_version", timeout_s, new_version=str(version), abort_all_requests=False)

    # -- our half in the engine ----------------------------------------------------------------------------------------

    def open(self, order: Body, timeout_s: float) -> None:
        """Have its ranks connect to us, under a short pause that keeps every request's cache. CannotStage without our half, and
        where bytes beside its parameters would leave something old. An update that is found begun was left by somebody who failed
        or died, or belongs to another session (`found`): then the engine stays paused."""
        if self.unstaged:
            raise errors.CannotStage(f"engine {self.url} takes no staged bytes: {self.unstaged}")
        self.unlink()
        control_s = min(CONTROL_S, timeout_s)  # one that hangs is found here, not by the order
        self.pause("in_place", control_s)
        could, failure = False, None
        try:
            could = self.hold(order, timeout_s)
        except errors.R3Error as error:
            failure = error
            if not isinstance(error, errors.EngineRefused):  # that order had no answer
                self._look(self.order({"op": "look"}, control_s))
        if EngineState.FENCED not in (self.found, self.now.state):
            self.resume(control_s)
        if failure is not None:
            raise failure
        if not could:
            raise errors.CannotStage(f"engine {self.url} runs without our half; set R3CHANNEL_WEIGHTS=1")

    def hold(self, order: Body, timeout_s: float) -> bool:
        """Keep other sessions from this engine, and return whether our half could. Raises EngineRefused while another session
        holds it, and where an update would leave something old."""
        try:
            self._look(self.order(order, timeout_s))
        except errors.EngineRefused as error:
            self._look(str(error))
            if any(word in str(error) for word in _NO_PLUGIN):
                return False
            raise
        return True

    def change_over(self, order: Body, version: int, flush_cache: bool, timeout_s: float) -> None:
        """Let the parameters become what is staged, under the new version. There is no way back. `found` tells of a refusal
        whether a parameter changed."""
        try:
            answer = self.order(order, timeout_s, flush_cache=flush_cache, weight_version=str(version))
            if rank_link.FLUSH_REFUSED in answer:  # then SGLang has not told its front of the version
                self.commit(version, timeout_s)
        except errors.EngineRefused as error:
            self.found = EngineState.PAUSED if rank_link.UNTOUCHED in str(error) else None
            raise
        self.gives = version

    def order(self, order: Body, timeout_s: float, **served: Any) -> str:
        """Send an order to our half in the engine and return the answer. `served`: `flush_cache`, and `weight_version`, which
        names the weights that are served once it is carried out."""
        if not self.takes_orders:
            return str(self._command(_LEAVE, timeout_s, group_name=json.dumps(order)))
        form = rank_link.COMMIT_FORMAT if order["op"] == "commit" else rank_link.OPEN_FORMAT
        body = {"names": [json.dumps(order)], "dtypes": [], "shapes": [], "flush_cache": False}
        body |= {"group_name": rank_link.ORDERS_GROUP, "load_format": form, "weight_version": None, **served}
        return self._put_in(body, timeout_s)

    def _put_in(self, body: Body, timeout_s: float) -> str:
        """Returns the answer. SGLang may refuse to flush while requests wait for their grammar: the weights are in."""
        try:
            reply = self._command("/update_weights_from_distributed", timeout_s, **body)
        except errors.EngineRefused as error:
            if rank_link.FLUSH_REFUSED not in str(error):
                raise
            return str(error)
        return str(reply.get("message", ""))

    def _look(self, answer: str) -> None:
        self.found = EngineState.FENCED if rank_link.FOUND_OPEN in answer else None

    # -- what it does --------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop generating; new requests wait. `retract` recomputes running ones later, `in_place` keeps their KV cache.

        Pausing a paused engine is harmless.
        """
        self._command("/pause_generation", timeout_s, mode=mode)

    def resume(self, timeout_s: float) -> None:
        self._command("/continue_generation", timeout_s)
        self.begun = False

    def undo(self, timeout_s: float) -> None:
        """Serve again, with the weights untouched."""
        if self.begun:
            with contextlib.suppress(errors.EngineRefused):  # none is open: it never got our begin
                self.end(timeout_s)
        self.resume(timeout_s)

    def unlink(self) -> None:
        """Forget the links and the groups, without a call to the engine."""
        ranks, self.names, self.unheld = self.ranks, frozenset(), False
        self.ranks, self.metas, self.gives, self.groups = [], (), None, []  # at once: closing takes its time
        for rank in ranks:
            rank.close()

    def leave(self, timeout_s: float = 2 * REPAIR_S) -> None:
        """End our hold on both sides, also when the engine is stuck in a broadcast; nothing else changes there."""
        self.leave_groups(timeout_s)
        self.forget()

    def forget(self) -> None:
        """Know nothing of it until it is met again."""
        self.boot_id = ""
        self.unlink()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _command(self, route: str, timeout_s: float, **body: Any) -> dict[str, Any]:
        """Make a call whose answer must not say `success: false`."""
        reply = self._call(route, body, timeout_s=timeout_s)
        if reply.get("success", True) is not True:
            raise self._refusal(route, f"answered {_shown(reply)}")
        return reply

    def _call(self, route: str, body: Body | None = None, *, timeout_s: float) -> dict[str, Any]:
        """The answer to a GET, or with a body to a POST."""
        payload = None if body is None else json.dumps(body).encode()
        request, where = Request(self.url + route, payload, self._headers), f"engine {self.url} {route}"
        try:
            with urlopen(request, timeout_s=timeout_s) as answer:
                status, data = answer.status, answer.read(_MAX_REPLY_BYTES)
                if answer.read(1):
                    raise self._refusal(route, f"answered more than {len(data)} bytes")
        except HTTPError as error:
            status, data = error.code, b""
            with contextlib.suppress(OSError, HTTPException):
                data = error.read(_MAX_REPLY_BYTES)
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise errors.DeadlineExceeded(f"{where}: no answer within {timeout_s:.1f} s") from error
            why = f"{type(error).__name__}: {error}; is it up, and is this its address?"
            raise errors.EngineUnavailable(f"{where}: {why}") from error
        text = data.decode("utf-8", "replace")
        if status != 200:
            raise self._refusal(route, f"answered HTTP {status}: {_shown(text)}")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refusal(route, f"answered no JSON: {_shown(text)}") from error
        if not isinstance(reply, dict):
            raise self._refusal(route, f"answered {_shown(reply)}; expected a JSON object")
        return reply

    def _refusal(self, route: str, why: str) -> errors.EngineRefused:
        return errors.EngineRefused(f"engine {self.url} {route} {why}")


def _boot_id(server_info: Mapping[str, Any]) -> str:
    start = [server_info.get(key) for key in ("startup_time", "random_seed")]
    return hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16]


def _shown(reply: Any) -> str:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


class Engines:
    """The engines of a session: who belongs, in which versions of torch and NCCL, and who may serve. One thread calls."""

    def __init__(self, engines: Sequence[EngineHandle | str], backend: str) -> None:
        """Raises ConfigError for no engine, or for one given twice."""
        if isinstance(engines, str):  # whose letters would be taken for engines
            raise errors.ConfigError(f"engines is {engines!r}, one address; expected a list of them")
        self.all = _distinct([handle_of(engine) for engine in engines])
        self.version: int | None = None
        """The newest version that any of them has committed."""
        self._ours = {"torch": torch_version(), "nccl": nccl_version() if backend == "nccl" else ""}

    def at(self, url: str) -> EngineHandle:
        """The engine of this address. Raises ConfigError for one that is not in the session."""
        for engine in self.all:
            if engine.url == url.rstrip("/"):
                return engine
        raise errors.ConfigError(f"engine {url} is not one of {[engine.url for engine in self.all]}")

    def add(self, engine: EngineHandle) -> None:
        self.all = _distinct([*self.all, engine])

    def drop(self, engine: EngineHandle) -> None:
        """Leave this engine and forget it. ConfigError for the last one."""
        rest = _distinct([other for other in self.all if other is not engine])
        engine.leave()
        self.all = rest

    def meet(self, engine: EngineHandle, timeout_s: float) -> None:
        """Let it join. RegistryRefused, with both values, if it runs other versions: NCCL hangs or fails between them, and
        torch's wire formats follow its own. One that is not known is not compared."""
        engine.meet(timeout_s)
        for name, ours in self._ours.items():
            theirs = getattr(engine, name)
            if theirs and ours and theirs != ours:
                engine.forget()
                raise errors.RegistryRefused(f"engine {engine.url} runs {name} {theirs}, the trainer {ours}")

    def routable(self, timeout_s: float) -> tuple[str, ...]:
        """Engines that serve the newest version, of those that answer within `timeout_s`; 0 asks none. One that was restarted
        has unknown weights, and is met anew by the next update. Any thread."""
        version = self.version
        able = [engine for engine in self.all if engine.boot_id and engine.now.serves(version)]
        if timeout_s:
            calls = {engine: background(partial(engine.lives, timeout_s)) for engine in able}
            wait(calls.values(), timeout=timeout_s + GRACE_S)
            lives = {e: call.result() for e, call in calls.items() if call.done() and not call.exception()}
            for engine in [engine for engine in lives if lives[engine] != engine.boot_id]:
                engine.boot_id = ""
            able = [engine for engine in lives if engine.boot_id and engine in self.all]
        return tuple(sorted(engine.url for engine in able))


def handle_of(engine: EngineHandle | str) -> EngineHandle:
    return EngineHandle(engine) if isinstance(engine, str) else engine


def _distinct(engines: list[EngineHandle]) -> list[EngineHandle]:
    urls = [engine.url for engine in engines]
    if not engines or len(set(urls)) != len(urls):
        raise errors.ConfigError(f"engines {urls}: expected at least one, each once")
    return engines
