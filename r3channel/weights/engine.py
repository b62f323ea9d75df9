"""SGLang engines as a session sees them: HTTP routes, what is known of each engine, and our links to its ranks.

Written against SGLang 0.5.23 (`srt/entrypoints/http_server.py`, `srt/managers/io_struct.py`, `srt/utils/weight_checker.py`).
No other module knows SGLang's routes and field names, and SGLang itself is not imported. `transaction` decides what is called,
and which state an answer or a missing answer leaves.
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
from r3channel.transport.network import urlopen
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.weights import rank_link
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import CONTROL_S, GRACE_S, REPAIR_S, background
from r3channel.weights.refusals import ANY_WAY, OLD, STAGED, find_refusal
from r3channel.weights.transaction import Engine, EngineState
from r3channel.wire.hello import Hello, probe_body

PauseMode = Literal["retract", "in_place", "abort"]
Body = Mapping[str, Any]

_NO_PLUGIN = ("must run between", "init_weights_update_group", "does not exist")
"""How SGLang itself answers our order: an update must begin first; in a begun update, no group has this name; or there is no
group to leave."""
_LEAVE = "/destroy_weights_update_group"
"""This route is harmless with any name, so orders to an engine before 0.5.23 go here, with our half or without."""
_UNTOLD = errors.DeadlineExceeded, errors.EngineRefused, errors.FrameCorrupt
"""Errors of a question to an engine without our plug-in, or to one that hangs."""
_MAX_REPLY_BYTES = 64 << 20
_SHOWN_CHARS = 500


class EngineHandle:
    """One engine, by its base URL.

    Every call opens a connection. One thread at a time makes calls that change the engine; any thread may make calls that read.

    Each call ends within about its `timeout_s` and raises EngineUnavailable (no connection, connection lost),
    DeadlineExceeded (no answer in time) or EngineRefused (an answer that says no), naming engine and route.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        fits = False
        with contextlib.suppress(ValueError):  # the port is not a number
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if not fits:
            raise errors.ConfigError(f"engine address {url!r}: expected http://host:port")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            # http.client would show it
            raise errors.ConfigError(f"engine {url}: no HTTP header takes its api_key; has it a line break?")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.size = 1
        """Its tensor-parallel size, once the engine was asked (`meet`), or once rank 0 has told this trainer rank."""
        self.unstaged, self.takes_orders = "", True
        """Why it takes no staged bytes, and whether orders may be sent to it, as far as its settings tell (`meet`)."""
        self.torch = self.nccl = ""
        """The versions that it runs; empty if unknown. Our plug-in tells both; SGLang 0.5.23 tells neither over HTTP."""
        self.now = Engine(self.url)
        """Its state after the last update."""
        self.found: EngineState | None = None
        """The state of its weights that the last answer told: FENCED or PAUSED, as an event's `found`; else None."""
        self.begun = False
        """Whether our `begin` may still be open there."""
        self.groups: list[str] = []
        """Names of the groups of broadcasts that it may be in."""
        self.ranks: list[rank_link.RankLink] = []
        """The links of staged updates, by rank."""
        self.metas: tuple[TensorMeta, ...] = ()
        """The tensors that its ranks were told when they linked; the ranks' needs refer to these by index."""
        self.gives: int | None = None
        """The version that was committed over these links and can be read back; known at rank 0."""
        self.boot_id = ""
        """Which life of the engine was met; empty before that, and once the engine is known to have restarted."""
        self.names: frozenset[str] = frozenset()
        """The tensor names that a broadcast told this life of the engine, and that the engine takes."""
        self.unheld = False
        """Whether the engine runs without our plug-in, which keeps other sessions out."""

    # -- what it is, holds and takes -----------------------------------------------------------------------------------

    def learn_versions(self, *, timeout_s: float) -> None:
        """Ask the engine's plug-in which torch and NCCL it runs.

        The question is a request of two tokens. Both versions stay unknown without a plug-in, and if no answer comes in time: a
        session that died in its change-over has left the engine paused. Call it before the handshake (`WeightSync.connect`),
        because the requests of a paused engine wait.

        Args:
            timeout_s: Seconds to wait for the answer.
        """
        try:
            reply = self._call("/generate", probe_body(), timeout_s=timeout_s)
            hello, _ = Hello.split(base64.b64decode(reply["meta_info"]["routed_experts"], validate=True))
        except (*_UNTOLD, KeyError, TypeError, ValueError):
            return  # no answer; or no plug-in: the engine refuses the question, or answers something else
        if hello is not None:
            self.torch, self.nccl = hello.torch, hello.nccl

    def meet(self, timeout_s: float) -> None:
        """Check that the engine is there; fetch its ranks and boot id.

        What was known of another life of the engine is forgotten.

        Args:
            timeout_s: Seconds for the call.

        Raises:
            ConfigError: The engine was started with a setting with which an update would leave something old (`refusals`).
            EngineRefused: Its `tp_size` is not a number.
        """
        self.unlink()
        info = self._call("/server_info", timeout_s=timeout_s)
        if why := find_refusal(info, ANY_WAY):
            raise errors.ConfigError(f"engine {self.url} was started with {why}")
        self.unstaged, self.takes_orders = find_refusal(info, STAGED), not find_refusal(info, (OLD,))
        if type(size := info.get("tp_size") or 1) is not int:
            raise self._refusal("/server_info", f"has tp_size {_shorten(size)}")
        self.size = size
        self.boot_id, self.begun = _boot_id(info), False

    def lives(self, timeout_s: float) -> str:
        """Return a name of this life of the engine.

        SGLang has no such name itself. The name is a digest of what `/server_info` says of the start: the seconds that its
        stages took (`startup_time`), and the random seed. At least one of them differs after a restart, unless somebody fixed
        the seed and every stage took as many microseconds as before.
        """
        return _boot_id(self._call("/server_info", timeout_s=timeout_s))

    def healthy(self, *, timeout_s: float) -> bool:
        """Return whether the engine answers its health route with 200."""
        try:
            with urlopen(Request(f"{self.url}/health", headers=self._headers), timeout_s=timeout_s) as reply:
                return reply.status == 200
        except (OSError, HTTPException):
            return False

    def weight_version(self, *, timeout_s: float) -> str:
        """Return the version that the engine puts into replies.

        Returns:
            The version as the engine's own text.

        Raises:
            EngineRefused: The engine tells no version.
        """
        version = self._call("/model_info", timeout_s=timeout_s).get("weight_version")
        if not isinstance(version, str):
            raise self._refusal("/model_info", "has no weight_version; is it SGLang 0.5.23?")
        return version

    def version_now(self) -> str:
        """Return the version that the engine serves now, for an error text.

        The engine is asked just now and has one second; the text is "unknown" with the error's name where it does not tell.
        """
        try:
            return f"version {self.weight_version(timeout_s=1.0)}"
        except errors.R3Error as error:
            return f"unknown ({type(error).__name__})"

    def weight_checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """Return the engine's own checksums of its parameters, by rank.

        Names are the engine's own (fused parameters included). On a CPU engine a checksum equals `checksums.tensor_checksum` of
        the bytes; on CUDA the engine uses another hash.

        Raises:
            EngineRefused: The answer holds no checksums.
        """
        reply = self._command("/weights_checker", timeout_s, action="checksum")
        try:
            ranks = [rank["checksums"] for rank in reply["ranks"]]
            return [{str(name): str(checksum) for name, checksum in sums.items()} for sums in ranks]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._refusal("/weights_checker:", f"no checksums in {_shorten(reply)}") from error

    def is_linked_for(self, metas: tuple[TensorMeta, ...]) -> bool:
        """Return whether all of its ranks are linked for these tensors."""
        return self.metas == metas and bool(self.ranks) and all(rank.link.alive for rank in self.ranks)

    # -- SGLang's own loading ------------------------------------------------------------------------------------------

    def init_group(self, where: Body, *, rank_offset: int = 1, timeout_s: float) -> None:
        """Join a weight group; return when all members have joined.

        Args:
            where: The group, as `WeightGroup.where`.
            rank_offset: The number of the engine's first rank in the group.
            timeout_s: Seconds for the call.
        """
        self.groups.append(where["group_name"])
        self._command("/init_weights_update_group", timeout_s, **where, rank_offset=rank_offset)

    def leave_groups(self, timeout_s: float) -> None:
        """Leave all weight groups, even if the engine does not answer.

        The engine's sockets close, which ends broadcasts that its peers wait in.
        """
        names, self.groups = self.groups, []
        for name in names:
            with contextlib.suppress(errors.R3Error):  # it has not joined, or does not answer
                self._command(_LEAVE, timeout_s / len(names), group_name=name)

    def begin(self, timeout_s: float) -> None:
        """Begin an update in which the engine accepts buckets.

        The engine must be paused. If an update is open already, somebody failed in it, and these weights are unknown (`found`):
        the open one is ended, and ours begins. An engine that takes no orders has no begin either: nothing is sent.
        """
        if not self.takes_orders:
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
        """Load one broadcast bucket; return when it is loaded.

        The engine receives the flat bytes of the bucket's tensors from rank 0 of the group. No version travels here: SGLang
        would record it as soon as this bucket is in.

        Args:
            tensors: The tensors of the bucket.
            timeout_s: Seconds for the call.
            **how: `group_name`; `flush_cache`, which drops the KV cache of the old weights; `load_format`: with None the engine
                expects a broadcast for each tensor.
        """
        rows = [meta.row() for meta in tensors]
        body = dict(zip(("names", "dtypes", "shapes"), zip(*rows, strict=True), strict=True))
        self._put_in({"load_format": "flattened_bucket", **body, **how}, timeout_s)

    def end(self, timeout_s: float) -> None:
        """End the update that `begin` opened.

        The engine refuses when none is open.
        """
        if self.takes_orders:
            self._command("/end_weight_update", timeout_s)

    def commit(self, version: int, timeout_s: float) -> None:
        """Name the version of the weights that SGLang has loaded.

        Running requests go on (SGLang's default would abort them).
        """
        self._command("/update_weight_version", timeout_s, new_version=str(version), abort_all_requests=False)

    # -- our half in the engine ----------------------------------------------------------------------------------------

    def open(self, order: Body, timeout_s: float) -> None:
        """Make the engine's ranks connect to us, under a short pause.

        The pause keeps every request's cache. An update that is found begun was left by somebody who failed or died, or belongs
        to another session (`found`): then the engine stays paused.

        Args:
            order: The order to open, for our half in the engine.
            timeout_s: Seconds for the order.

        Raises:
            CannotStage: The engine runs without our half, or bytes beside its parameters would leave something old.
        """
        if self.unstaged:
            raise errors.CannotStage(f"engine {self.url} takes no staged bytes: {self.unstaged}")
        self.unlink()
        control_s = min(CONTROL_S, timeout_s)  # an engine that hangs is found here, not by the order
        self.pause("in_place", control_s)
        could, failure = False, None
        try:
            could = self.hold(order, timeout_s)
        except errors.R3Error as error:
            failure = error
            if not isinstance(error, errors.EngineRefused):  # the order had no answer
                with contextlib.suppress(errors.EngineRefused):  # what it found is known then, too
                    self.hold({"op": "look"}, control_s)
        if EngineState.FENCED not in (self.found, self.now.state):
            self.resume(control_s)
        if failure is not None:
            raise failure
        if not could:
            raise errors.CannotStage(f"engine {self.url} runs without our half; set R3CHANNEL_WEIGHTS=1")

    def hold(self, order: Body, timeout_s: float) -> bool:
        """Keep other sessions from this engine.

        Returns:
            Whether our half in the engine could do it.

        Raises:
            EngineRefused: Another session holds the engine, or an update would leave something old.
        """
        try:
            self._look(self.order(order, timeout_s))
        except errors.EngineRefused as error:
            self._look(str(error))
            if any(word in str(error) for word in _NO_PLUGIN):
                return False
            raise
        return True

    def change_over(self, order: Body, version: int, flush_cache: bool, timeout_s: float) -> None:
        """Make the staged bytes the engine's parameters, under the new version.

        There is no way back.

        Args:
            order: The commit order.
            version: The new version.
            flush_cache: Whether the engine drops the KV cache of the old weights.
            timeout_s: Seconds for the order.

        Raises:
            EngineRefused: The engine refused; `found` tells whether a parameter changed.
        """
        try:
            answer = self.order(order, timeout_s, flush_cache=flush_cache, weight_version=str(version))
            if rank_link.FLUSH_REFUSED in answer:  # then SGLang has not told its front of the version
                self.commit(version, timeout_s)
        except errors.EngineRefused as error:
            self.found = EngineState.PAUSED if rank_link.UNTOUCHED in str(error) else None
            raise
        self.gives = version

    def order(self, order: Body, timeout_s: float, **served: Any) -> str:
        """Send an order to our half in the engine.

        Args:
            order: The order, as plain JSON.
            timeout_s: Seconds for the call.
            **served: `flush_cache`; `weight_version`, which names the weights that are served once the order is carried out.

        Returns:
            The answer's text.
        """
        if not self.takes_orders:
            return str(self._command(_LEAVE, timeout_s, group_name=json.dumps(order)))
        form = rank_link.COMMIT_FORMAT if order["op"] == "commit" else rank_link.OPEN_FORMAT
        body = {"names": [json.dumps(order)], "dtypes": [], "shapes": [], "flush_cache": False}
        body |= {"group_name": rank_link.ORDERS_GROUP, "load_format": form, "weight_version": None, **served}
        return self._put_in(body, timeout_s)

    def _put_in(self, body: Body, timeout_s: float) -> str:
        try:
            reply = self._command("/update_weights_from_distributed", timeout_s, **body)
        except errors.EngineRefused as error:
            if rank_link.FLUSH_REFUSED not in str(error):
                raise
            return str(error)  # the weights are in
        return str(reply.get("message", ""))

    def _look(self, answer: str) -> None:
        self.found = EngineState.FENCED if rank_link.FOUND_OPEN in answer else None

    # -- what it does --------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop generating; new requests wait.

        Pausing a paused engine is harmless.

        Args:
            mode: `retract` recomputes running requests later; `in_place` keeps their KV cache.
            timeout_s: Seconds for the call.
        """
        self._command("/pause_generation", timeout_s, mode=mode)

    def resume(self, timeout_s: float) -> None:
        self._command("/continue_generation", timeout_s)
        self.begun = False

    def undo(self, timeout_s: float) -> None:
        """Resume the engine with its weights untouched.

        An update that `begin` may have opened is ended first.
        """
        if self.begun:
            with contextlib.suppress(errors.EngineRefused):  # no update is open: it never got our begin
                self.end(timeout_s)
        self.resume(timeout_s)

    def unlink(self) -> None:
        """Forget the links and the groups, without calling the engine."""
        ranks, self.names, self.unheld = self.ranks, frozenset(), False
        self.ranks, self.metas, self.gives, self.groups = [], (), None, []  # first: closing takes its time
        for rank in ranks:
            rank.close()

    def leave(self, timeout_s: float = 2 * REPAIR_S) -> None:
        """End our hold on both sides; nothing else changes there.

        It also works while the engine is stuck in a broadcast.
        """
        self.leave_groups(timeout_s)
        self.forget()

    def forget(self) -> None:
        """Forget the engine until it is met again."""
        self.boot_id = ""
        self.unlink()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _command(self, route: str, timeout_s: float, **body: Any) -> dict[str, Any]:
        reply = self._call(route, body, timeout_s=timeout_s)
        if reply.get("success", True) is not True:
            raise self._refusal(route, f"answered {_shorten(reply)}")
        return reply

    def _call(self, route: str, body: Body | None = None, *, timeout_s: float) -> dict[str, Any]:
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
            raise self._refusal(route, f"answered HTTP {status}: {_shorten(text)}")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refusal(route, f"answered no JSON: {_shorten(text)}") from error
        if not isinstance(reply, dict):
            raise self._refusal(route, f"answered {_shorten(reply)}; expected a JSON object")
        return reply

    def _refusal(self, route: str, why: str) -> errors.EngineRefused:
        return errors.EngineRefused(f"engine {self.url} {route} {why}")


def _boot_id(server_info: Mapping[str, Any]) -> str:
    start = [server_info.get(key) for key in ("startup_time", "random_seed")]
    return hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16]


def _shorten(reply: Any) -> str:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


class Engines:
    """The engines of a session: the members, their versions of torch and NCCL, and who may serve. One thread calls."""

    def __init__(self, engines: Sequence[EngineHandle | str], backend: str) -> None:
        """Make the set of engines of a session.

        Raises:
            ConfigError: No engine is given, or one is given twice.
        """
        if isinstance(engines, str):  # its letters would be taken for engines
            raise errors.ConfigError(f"engines is {engines!r}, one address; expected a list of them")
        self.all = _distinct([handle_of(engine) for engine in engines])
        self.version: int | None = None
        """The newest version that any engine has committed."""
        self._ours = {"torch": torch_version(), "nccl": nccl_version() if backend == "nccl" else ""}

    def find(self, url: str) -> EngineHandle:
        """Return the engine of this address.

        Raises:
            ConfigError: The engine is not in the session.
        """
        for engine in self.all:
            if engine.url == url.rstrip("/"):
                return engine
        raise errors.ConfigError(f"engine {url} is not one of {[engine.url for engine in self.all]}")

    def add(self, engine: EngineHandle) -> None:
        self.all = _distinct([*self.all, engine])

    def drop(self, engine: EngineHandle) -> None:
        """Leave this engine and forget it.

        Raises:
            ConfigError: It is the last engine.
        """
        rest = _distinct([other for other in self.all if other is not engine])
        engine.leave()
        self.all = rest

    def meet(self, engine: EngineHandle, timeout_s: float) -> None:
        """Let one engine join.

        A version that is not known is not compared.

        Raises:
            RegistryRefused: The engine runs another version of torch or NCCL; names both values. NCCL hangs or fails between
                versions, and torch's wire formats follow its version.
        """
        engine.meet(timeout_s)
        for name, ours in self._ours.items():
            theirs = getattr(engine, name)
            if theirs and ours and theirs != ours:
                engine.forget()
                raise errors.RegistryRefused(f"engine {engine.url} runs {name} {theirs}, the trainer {ours}")

    def routable(self, timeout_s: float) -> tuple[str, ...]:
        """Return the URLs of engines that serve the newest version.

        An engine that was restarted has unknown weights, and the next update meets it anew. Any thread may call.

        Args:
            timeout_s: Seconds that an engine has for an answer; engines that do not answer are left out. 0 asks none.
        """
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
