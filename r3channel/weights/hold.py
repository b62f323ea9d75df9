"""One trainer session's hold on an engine's rank: its links, the staged copy, and how copy and parameters change places.

Each link has a thread of its own, which writes staged memory only; the scheduler's thread alone writes parameters. The parameters
decide how much is allocated, never what a trainer says.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from r3channel.errors import R3Error, TransportError, WeightsCorrupt, WeightsError
from r3channel.transport.connection import Connection
from r3channel.transport.listener import connect
from r3channel.weights.checksums import host_bytes, tensor_checksum, tensor_digest
from r3channel.weights.dryrun import Learned, Needs
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.wires import (
    ASK,
    DATA,
    END,
    GIVE,
    HEAD,
    NEEDS,
    PARAM,
    PLACED,
    TABLE,
    VERIFY,
    Entry,
    Run,
    read_table,
    receive_blob,
    runs_of,
    send_blob,
    session_token,
    shared_memory,
    staged_bytes,
    staged_views,
)

_CONNECT_S = 10.0
_BLOCK_BYTES = 256 << 10
"""Two of them and a third for the exchange fit a core's second cache."""
_DEVICE_BLOCK_BYTES = 64 << 20
_THREADS = 2
"""Threads that go over all of a rank's memory: one core does not use all of a host's bandwidth."""
WORD_BYTES = 1024
"""Bytes of a reason at most, when it is sent to the trainer."""


_Runs = dict[tuple[int, int], list[Run]]
"""Where each record of a trainer's table lies (by first entry and number of them): the same at every update."""


@dataclass(slots=True)
class _Stage:
    """One version on its way, over all links."""

    version: int = -1
    digests: dict[str, str] = field(default_factory=dict)
    """By parameter, once everything has come."""
    came: dict[int, int] = field(default_factory=dict)
    """By link: items placed."""
    changing: bool = False
    """True from the first parameter that is touched to the last."""
    committed: bool = False


@dataclass(frozen=True, slots=True)
class _Committed:
    """A version that this rank's parameters hold."""

    version: int
    digests: Mapping[str, str]
    params: Sequence[torch.Tensor]
    """Flat."""


class Hold:
    """One trainer's hold on this rank: its links, and the staged copy."""

    def __init__(
        self,
        model: torch.nn.Module,
        order: Mapping[str, Any],
        learned: Learned | None,
        *,
        rank: int,
        run_token: str,
    ) -> None:
        """Allocates the staged copy and opens the links. It reports a model that cannot be replayed over the first link.

        Without `learned` the links only keep other sessions out.
        """
        self.name: str = order["session"]
        self._learned = learned or Learned((), {}, Needs((), ()), "")
        self._needs, self._whole = self._learned.needs, bool(self._learned.refused)
        self._lock = threading.Lock()
        self._stage = _Stage()
        self._path = ""
        """The shared memory's path, until every trainer has mapped it."""
        self._mapped = set[int]()
        self._ready: list[torch.Tensor] = []
        """Parameters that were looked at just before they change."""
        self._serving: _Committed | None = None
        """What a trainer may read back; None: nothing was committed over these links."""
        self._served: _Committed | None = None
        """What `undo` brings back."""
        self._items = sum(part.box.numel for part in self._needs.parts)
        told = self._allocate(model, order["staged"], order["wire"]) if learned else {"held": True}
        token = session_token(run_token, order["nonce"])
        hello = json.dumps({key: order[key] for key in ("engine", "attempt")} | {"rank": rank}).encode()
        self._links: list[Connection] = []
        try:
            for host, port in order["trainers"]:
                self._links.append(connect(host, port, token, timeout_s=_CONNECT_S, hello=hello))
        except BaseException:
            self.close()
            raise
        for number, link in enumerate(self._links):
            name = f"r3channel-stage-{number}"
            threading.Thread(target=self._serve, args=(number, link, told), name=name, daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the trainers are gone, so that nobody holds the engine."""
        return not any(link.alive for link in self._links)

    def close(self) -> None:
        self._unlink()
        for link in self._links:
            link.close()

    def _unlink(self) -> None:
        """Remove the path of the shared memory, so that a crash leaves nothing behind."""
        with self._lock:
            if self._path:
                os.unlink(self._path)
                self._path = ""

    def _allocate(self, model: torch.nn.Module, wanted: str, wire: str) -> dict[str, Any]:
        """Make the staged copy, and return what the trainer is told about it."""
        nbytes = staged_bytes(self._needs.params)
        if wanted == "auto" and nbytes > _spare_bytes():
            return {"error": f"{nbytes} bytes for a staged copy, {_spare_bytes()} are free"}
        if wire == "shared_memory":
            self._path, flat = shared_memory(nbytes)
        else:
            flat = torch.empty(nbytes, dtype=torch.uint8)
        self._staged = staged_views(self._needs.params, flat)
        if not self._whole:
            for view, param in zip(self._staged, dict(model.named_parameters()).values(), strict=True):
                view.copy_(param.detach().flatten())  # padding that no tensor covers keeps its values
        compared = {part.param for part in self._learned.copied} if self._whole else self._needs.params
        told = {"needs": self._needs.to_dict(), "whole": self._learned.refused, "compared": len(compared)}
        return told | {"shared": self._path}

    # -- a link's thread -----------------------------------------------------------------------------------------------

    def _serve(self, number: int, link: Connection, told: dict[str, Any]) -> None:
        """Serve the link until the trainer leaves or dies; what was staged is then never committed."""
        try:
            with suppress(TransportError):
                self._listen(number, link, told)
        finally:
            link.abort("the rank has ended it")  # also where we are at fault: no dead thread holds an engine

    def _listen(self, number: int, link: Connection, told: dict[str, Any]) -> None:
        table, runs, failure = list[Entry](), _Runs(), ""
        send_blob(link, NEEDS, told, timeout_s=None)
        while True:
            kind, body = link.recv_record(timeout_s=None)
            try:
                if kind == TABLE:
                    self._mapped.add(number)
                    if len(self._mapped) == len(self._links):
                        self._unlink()
                    table, runs = read_table(receive_blob(link, body), self._needs.parts), _Runs()
                    failure = ""
                elif kind in (DATA, PLACED):
                    self._place(number, link if kind == DATA else None, table, runs, body)
                elif kind == END:
                    word, failure = failure, ""
                    link.send_record(END, word.encode()[:WORD_BYTES], timeout_s=_CONNECT_S)
                elif kind == VERIFY:
                    send_blob(link, VERIFY, self._verify(*ASK.unpack(body)), timeout_s=_CONNECT_S)
                elif kind == GIVE:
                    answer, data = self._given(*PARAM.unpack(body))
                    send_blob(link, GIVE, answer, timeout_s=_CONNECT_S)
                    link.send(data, timeout_s=None)
            except TransportError:
                raise
            except (R3Error, ValueError, IndexError) as error:
                if not isinstance(error, WeightsCorrupt):  # no byte can be told from another any more
                    link.abort(f"{type(error).__name__}: {error}")
                    raise TransportError(str(error)) from error
                failure = failure or f"{type(error).__name__}: {error}"

    def _place(
        self, number: int, link: Connection | None, table: Sequence[Entry], runs: _Runs, body: bytes
    ) -> None:
        version, first, count, digest = HEAD.unpack(body)
        self._begin(version, number, first)
        entries, seen = table[first : first + count], xxhash.xxh3_64()
        if len(entries) != count:
            raise ValueError(f"entries {first} to {first + count} of {len(table)}")
        if (first, count) not in runs:
            runs[first, count] = runs_of(entries, self._needs, self._staged)
        for run in runs[first, count]:
            flat = run.view.is_contiguous()
            landing = run.view if flat or link is None else torch.empty(run.view.shape, dtype=run.view.dtype)
            data = host_bytes(landing.contiguous())
            if link is not None:  # else the trainer has put it there
                link.recv_into(data, timeout_s=None)
            seen.update(data)
            if landing is not run.view:
                run.view.copy_(landing)
        if seen.intdigest() != digest:
            name = self._learned.tensors[self._needs.parts[entries[0].part].tensor].name
            raise WeightsCorrupt(f"version {version}: {count} pieces from {name} on came damaged")
        with self._lock:
            self._stage.came[number] += sum(entry.box.numel for entry in entries)

    def _begin(self, version: int, number: int, first: int) -> None:
        """Begin a version at a link's first piece of it; whatever was staged before is void."""
        with self._lock:
            if self._stage.version != version or self._stage.digests:
                self._stage = _Stage(version)
                for one in self._needs.padding:  # each time: a change-over brings the parameters' own here
                    one.fill(self._staged)
            if first == 0:
                self._stage.came[number] = 0
            self._stage.came.setdefault(number, 0)

    def _verify(self, version: int, checksums: bool) -> dict[str, Any]:
        """Digests of the parameters as they will be, computed when every trainer has sent everything."""
        with self._lock:
            stage = self._stage
            came = sum(stage.came.values())
            if stage.version != version or came != self._items:
                return {
                    "error": f"{came} of {self._items} items of version {stage.version} are staged, asked for {version}"
                }
        names = [meta.name for meta in self._needs.params]
        with ThreadPoolExecutor(_THREADS) as pool:
            stage.digests = dict(zip(names, pool.map(tensor_digest, self._staged), strict=True))
            wanted = self._staged if checksums and not self._whole else []
            sums = dict(zip(names, pool.map(tensor_checksum, wanted), strict=False))
        return {"digests": stage.digests, "checksums": sums}

    def _given(self, version: int, param: int) -> tuple[dict[str, str], list[memoryview]]:
        """A parameter's bytes now and its digest at the commit; the trainer compares them."""
        serving = self._serving
        if serving is None or serving.version != version:
            found = "nothing" if serving is None else f"version {serving.version}"
            return {"error": f"version {version} is asked for, {found} was committed last"}, []
        digest = serving.digests[self._needs.params[param].name]
        return {"digest": digest}, [host_bytes(serving.params[param])]

    # -- the scheduler's thread ----------------------------------------------------------------------------------------

    def check(self, model: torch.nn.Module, version: int) -> None:
        """The version is staged and verified, and the parameters are those of the dry run. Nothing is touched yet."""
        stage = self._stage
        if stage.version != version or not stage.digests or stage.committed:
            raise WeightsError(
                f"version {version} is not staged and verified here; {stage.version} is staged"
            )
        self._ready = [] if self._whole else self._targets(model)

    def change_over(self, model: torch.nn.Module) -> None:
        """Parameters and staged copy change places, so that `undo` can bring the old version back bit for bit."""
        stage, digests = self._stage, list[str]()
        stage.changing, self._served = True, self._serving
        if self._whole:
            named = zip(self._needs.params, self._staged, strict=True)
            model.load_weights((m.name, v.view(m.shape)) for m, v in named)  # pyright: ignore[reportCallIssue]
            self._compare(model)
        else:
            digests = _swap(self._ready, self._staged)
            self._serving = _Committed(stage.version, stage.digests, self._ready)
        stage.changing, stage.committed = False, True  # `undo` takes it back, also if a digest is wrong
        for meta, digest in zip(self._needs.params, digests, strict=not self._whole):
            if digest != stage.digests[meta.name]:
                raise WeightsError(f"{meta.name} holds other bytes than were staged")

    def _compare(self, model: torch.nn.Module) -> None:
        """Check that what the model's own loader copies unchanged has arrived unchanged."""
        params, at = list(model.named_parameters()), {part.tensor: part.param for part in self._needs.parts}
        for part in self._learned.copied:
            name, param = params[part.param]
            whole = Box.whole(self._learned.tensors[part.tensor].shape)
            given = self._staged[at[part.tensor]].view(whole.shape)[part.box.within(whole)]
            found = part.view(param.detach().view(-1))
            if not torch.equal(_bytes(found), _bytes(given.to(found))):
                raise WeightsError(f"{name} holds other values than were given for it")

    def undo(self, model: torch.nn.Module, version: int) -> None:
        """The parameters as they were before the commit of `version`, which cannot be committed any more, should its order come
        late. Nothing else to do where they were not touched."""
        stage = self._stage
        if stage.version != version:
            return
        if stage.changing:
            raise WeightsError("the change-over ended half-way: parameters hold parts of both versions")
        if stage.committed and self._whole:
            raise WeightsError("the model's own loader placed these weights: the old ones are gone")
        if stage.committed:
            _swap(self._targets(model), self._staged)
            self._serving = self._served
        self._stage = _Stage()

    def _targets(self, model: torch.nn.Module) -> list[torch.Tensor]:
        params = dict(model.named_parameters())
        for meta in self._needs.params:
            if meta.name not in params or TensorMeta.of(meta.name, params[meta.name]) != meta:
                raise WeightsError(f"parameter {meta} is not what it was when the session opened")
        return [params[meta.name].detach().view(-1) for meta in self._needs.params]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _swap(targets: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> list[str]:
    """Parameters and staged copy change places; the digests of what the parameters hold then.

    By blocks that stay in a core's cache: each byte comes from memory and goes there once, for three copies and a digest. The
    cores of a paused engine are idle.
    """
    if any(target.is_cuda for target in targets):
        return [_swap_on_device(target, view) for target, view in zip(targets, staged, strict=True)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_swap_on_host, targets, staged))


@torch.no_grad()
def _swap_on_device(target: torch.Tensor, view: torch.Tensor) -> str:
    seen, items = xxhash.xxh3_64(), _DEVICE_BLOCK_BYTES // target.itemsize
    for new, kept in zip(target.split(items), view.split(items), strict=True):
        old = new.clone()
        new.copy_(kept)
        kept.copy_(old)
        seen.update(host_bytes(new))
    return seen.hexdigest()


def _swap_on_host(target: torch.Tensor, view: torch.Tensor) -> str:
    """By numpy, whose copies of blocks this small took two thirds of torch's time (AMD EPYC, torch 2.13, numpy 2.4)."""
    seen, room_N = xxhash.xxh3_64(), np.empty(_BLOCK_BYTES, dtype=np.uint8)
    new_N, kept_N = (one.view(torch.uint8).numpy() for one in (target, view))
    for at in range(0, len(new_N), _BLOCK_BYTES):
        new, kept = new_N[at : at + _BLOCK_BYTES], kept_N[at : at + _BLOCK_BYTES]
        old = room_N[: len(new)]
        np.copyto(old, new)
        np.copyto(new, kept)
        np.copyto(kept, old)
        seen.update(new.data)
    return seen.hexdigest()


def _spare_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available * 0.8)
