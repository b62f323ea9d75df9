"""An engine that fails where it is told to: SGLang's weight routes over real HTTP, its end of the group over real gloo.

For failures that the real engine cannot be made to have at a given call. What it answers otherwise, tests/engine shows.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from r3channel.weights.checksums import tensor_checksum
from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.rank_link import COMMIT_FORMAT, OPEN_FORMAT
from r3channel.weights.receiver import Receiver, handle_order, update
from tests.support.http_answers import Answering

Answer = dict[str, Any]
UPDATE = "/update_weights_from_distributed"
_lives = itertools.count(1)


class Model(torch.nn.Module):
    """Parameters by checkpoint name, loaded as they come."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.held = tensors

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.held.items())

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in self.held:
                self.held[name].copy_(tensor)


class FakeEngine:
    """One engine. `script[route, n]` says what the n-th call (from 0) of a route does: refuse, die, hang, or be dropped
    (the connection ends, the engine never saw the call)."""

    started: ClassVar[list[FakeEngine]] = []
    """All of this process, for who ends them."""

    def __init__(self, *, port: int = 0, receives: dict[str, torch.Tensor] | None = None) -> None:
        """`receives`: with our half in it, and these parameters."""
        self.script: dict[tuple[str, int], str] = {}
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = receives or {}
        self.receiver = None
        if receives is not None:
            self.receiver = Receiver(rank=0, run_token="", agree=lambda word: [word])
        self.version, self.paused, self.open, self.flushed = "0", False, False, 0
        self.settings: Answer = {"version": "0.5.23"}
        """What it was started with, as `/server_info` shows it."""
        self.offload_tags: set[str] = set()
        self.processed = 0
        """How often an end has processed the weights that were loaded."""
        self.life = next(_lives)
        self.dead = threading.Event()
        self._groups: dict[str, list[Any]] = {}
        """By name, what each of its ranks (`tp_size` of the settings) has."""
        self.received: list[str] = []
        """The first tensor of each bucket, as they came."""
        self._counts: dict[str, int] = {}
        self._server = Answering(self._served, port=port)
        self.port, self.url = self._server.server_port, self._server.url
        FakeEngine.started.append(self)

    def die(self) -> None:
        """As a killed process: connections and group sockets close, nothing answers."""
        if not self.dead.is_set():
            self.dead.set()
            self._groups.clear()
            if self.receiver is not None:
                self.receiver.leave()
            self._server.server_close()
            threading.Thread(target=self._server.shutdown, daemon=True).start()

    def restarted(self) -> FakeEngine:
        """A new life at the same address, with other weights."""
        self.die()
        self._server.serving.join(10)  # its poll keeps the port for a moment
        blank = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        return FakeEngine(port=self.port, receives=None if self.receiver is None else blank)

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}

    def _served(self, route: str, data: bytes) -> tuple[int, bytes] | None:
        answer = self.answer(route, json.loads(data) if data else {})
        if answer is None:
            return None  # died: no answer at all
        return 200 if answer.get("success", True) else 400, json.dumps(answer).encode()

    # -- routes --------------------------------------------------------------------------------------------------------

    def answer(self, route: str, body: Answer) -> Answer | None:
        if self.dead.is_set():
            return None
        if body.get("load_format") in (COMMIT_FORMAT, OPEN_FORMAT):
            route = "order/" + json.loads(body["names"][0])["op"]
        count = self._counts[route] = self._counts.get(route, -1) + 1
        self.calls.append(route)
        what = self.script.pop((route, count), "")
        if what == "refuse":
            return {"success": False, "message": f"{route} refused"}
        if what == "die":
            self.die()
        if what == "hang":
            self.dead.wait(60)
        if what:
            return None
        if route.startswith("order/"):
            answer = self._ordered(SimpleNamespace(**body))
            if answer["success"] and body["weight_version"] is not None:
                self.version = body["weight_version"]
            return answer
        return self._routes().get(route, lambda _: {"success": True})(body)

    def _routes(self) -> dict[str, Callable[[Answer], Answer | None]]:
        return {
            "/server_info": lambda _: {"startup_time": {"total": self.life}, **self.settings},
            "/model_info": lambda _: {"weight_version": self.version},
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/pause_generation": lambda _: self._set(paused=True),
            "/continue_generation": lambda _: self._set(paused=False),
            "/begin_weight_update": lambda _: self._bracket(True),
            "/end_weight_update": lambda _: self._bracket(False),
            UPDATE: self._update,
            "/weights_checker": lambda _: {"success": True, "ranks": [{"checksums": self.checksums()}]},
            "/update_weight_version": lambda body: self._set(version=body["new_version"]),
        }

    def _join(self, body: Answer) -> Answer:
        with ThreadPoolExecutor() as pool:
            members = pool.map(partial(self._member, body), range(self.settings.get("tp_size", 1)))
            self._groups[body["group_name"]] = list(members)
        return {"success": True}

    def _member(self, body: Answer, rank: int) -> Any:
        store: Store = TCPStore(
            body["master_address"], body["master_port"], body["world_size"], False, timeout=timedelta(seconds=20),
        )  # fmt: skip
        name = body["group_name"]
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=20)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, body["rank_offset"] + rank, body["world_size"], options)

    @property
    def _session(self) -> object | None:
        """As SGLang's scheduler has it between begin and end."""
        return self if self.open else None

    def _ordered(self, request: SimpleNamespace) -> Answer:
        """As our hook answers, or SGLang without it."""
        if self.receiver is None:
            return vars(self._order(request))
        if request.load_format != OPEN_FORMAT:
            return vars(update(FakeEngine._order, self, request))
        done, told = handle_order(self.receiver, self, self.model(), request.names)
        return {"success": done, "message": told}

    def model(self) -> Model:
        return Model(self.tensors)

    def _order(self, request: SimpleNamespace) -> SimpleNamespace:
        """As SGLang's scheduler answers an update, which our hook is around."""
        if not self.open:
            message = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            return SimpleNamespace(success=False, message=message)
        if self.receiver is None:
            message = "Group r3channel not in []. Please call `init_weights_update_group` first."
            return SimpleNamespace(success=False, message=message)
        try:
            self.receiver.order(self.model(), json.loads(request.names[0]))
        except Exception as error:
            return SimpleNamespace(success=False, message=f"Failed to receive weights: {error}")
        return SimpleNamespace(success=True, message="")

    def begin_weight_update(self, _request: object) -> SimpleNamespace:
        return SimpleNamespace(**self._bracket(True))

    def end_weight_update(self, _request: object) -> SimpleNamespace:
        return SimpleNamespace(**self._bracket(False))

    def _leave(self, body: Answer) -> Answer:
        there = self._groups.pop(body["group_name"], None) is not None
        return {"success": there, "message": "" if there else "The group to be destroyed does not exist."}

    def _set(self, **values: Any) -> Answer:
        vars(self).update(values)
        return {"success": True}

    def _bracket(self, opening: bool) -> Answer:
        if self.open == opening:
            return {"success": False, "message": f"the bracket is {'open' if opening else 'closed'} already"}
        self.open = opening
        self.processed += not opening
        return {"success": True}

    def _update(self, body: Answer) -> Answer | None:
        told = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        metas = [
            TensorMeta(name=n, dtype=getattr(torch, kind), shape=tuple(shape)) for n, kind, shape in told
        ]
        bucket = Bucket.of(metas)
        try:
            groups = self._groups[body["group_name"]]
            flats = [torch.empty(bucket.payload_bytes, dtype=torch.uint8) for _ in groups]
            works = [g.broadcast([f], dist.BroadcastOptions()) for g, f in zip(groups, flats, strict=True)]
            while works:
                works.pop().wait()
            assert all(torch.equal(flats[0], other) for other in flats)
        except (KeyError, RuntimeError) as error:
            return {"success": False, "message": f"Failed to receive weights: {error}"}
        for meta, at in zip(bucket.tensors, bucket.offsets, strict=True):
            part = flats[0][at : at + meta.nbytes].view(meta.dtype).view(meta.shape)
            self.tensors[meta.name] = part.clone()
        self.received.append(body["names"][0])
        self.flushed += bool(body["flush_cache"])
        return None if self.dead.is_set() else {"success": True}
