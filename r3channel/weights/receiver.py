"""The half inside an engine's rank: bytes are staged and verified beside its parameters while it serves, then changed over.

    open (dry run, links to the trainers) -> staged by version -> commit under a pause -> undo, if others could not
                                          -> dropped: nothing was touched

An order comes from the scheduler's thread and may read and write parameters; each link has a thread of its own that writes
staged memory only. A rank answers an order after all ranks of its engine have agreed, because SGLang passes on the word of
the first rank alone. What is allocated follows from the parameters and never from what a trainer says. No pickle, no port:
a rank connects to its trainers. SGLang itself is not imported here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from r3channel.errors import R3Error, TransportError, WeightsCorrupt, WeightsError
from r3channel.transport.link import Link
from r3channel.transport.listener import connect
from r3channel.weights.dryrun import Learned, Needs, learn
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.sglang import LOAD_FORMAT
from r3channel.weights.wires import (
    ASK,
    DATA,
    END,
    HEAD,
    NEEDS,
    PLACED,
    TABLE,
    VERIFY,
    Entry,
    Run,
    host_bytes,
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
_WORD_BYTES = 1024


@dataclass(slots=True)
class _Stage:
    """One version on its way, over all links."""

    version: int = -1
    digests: dict[str, str] = field(default_factory=dict)
    """By parameter, once everything has come."""
    came: dict[int, int] = field(default_factory=dict)
    """By link: items placed."""
    committed: bool = False


class _Table:
    """What a trainer sends, in order, and where each record of it lies: the same at every update."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._runs: dict[tuple[int, int], list[Run]] = {}

    def runs(self, first: int, count: int, needs: Needs, staged: Sequence[torch.Tensor]) -> list[Run]:
        """ValueError for entries that are not in the table."""
        if (first, count) not in self._runs:
            entries = self.entries[first : first + count]
            if len(entries) != count:
                raise ValueError(f"entries {first} to {first + count} of {len(self.entries)}")
            self._runs[first, count] = runs_of(entries, needs, staged)
        return self._runs[first, count]


class Receiver:
    """Of one rank. Orders come from one thread."""

    def __init__(self, *, rank: int, run_token: str, agree: Callable[[str], Sequence[str]]) -> None:
        """`agree` gathers every rank's word, which is empty where all is well."""
        self._rank, self._run_token, self._agree = rank, run_token, agree
        self._session: Session | None = None
        self._learned: Learned | None = None

    def order(self, model: torch.nn.Module, order: Mapping[str, Any]) -> None:
        """Raises WeightsError with every rank's reason unless all ranks did it."""
        version = order.get("version", -1)
        acts: dict[str, tuple[Callable[[], None], ...]] = {
            "open": (lambda: self._free_for(order["session"]), lambda: self._open(model, order)),
            "commit": (
                lambda: self._mine(order).check(model, version),
                lambda: self._mine(order).change_over(model),
            ),
            "undo": (lambda: self._mine(order).undo(model, version),),
        }
        for step in acts["open" if order["op"] == "hold" else order["op"]]:
            self._together(step)

    def holder(self) -> str:
        """Whose engine this is: the name of the session that lives, or nothing."""
        return "" if self._session is None or self._session.ended else self._session.name

    def leave(self) -> None:
        """End the session's links, as the end of this process would."""
        if self._session is not None:
            self._session.close()

    def _together(self, step: Callable[[], None]) -> None:
        """All ranks do the step, or all raise."""
        word = ""
        try:
            step()
        except Exception as error:
            word = f"{type(error).__name__}: {error}"
        found = {rank: text for rank, text in enumerate(self._agree(word)) if text}
        if found:
            raise WeightsError("; ".join(f"rank {rank}: {text}" for rank, text in found.items()))

    def _free_for(self, session: str) -> None:
        held = self.holder()
        if held and held != session:
            raise WeightsError(
                f"the engine is held by session {held}, whose trainer lives; close that one first"
            )

    def _open(self, model: torch.nn.Module, order: Mapping[str, Any]) -> None:
        self.leave()
        learned = None
        if order["op"] == "open":
            tensors = tuple(TensorMeta.from_row(row) for row in order["tensors"])
            self._learned = learned = learn(model, tensors, self._learned)
        self._session = Session(model, order, learned, rank=self._rank, run_token=self._run_token)

    def _mine(self, order: Mapping[str, Any]) -> Session:
        if self._session is None or self._session.name != order["session"]:
            raise WeightsError(f"session {order['session']} does not hold this engine; it must open it first")
        return self._session


class Session:
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
        """The memory, the links. A model that cannot be replayed is told over the first link, not raised.

        Without `learned` the links only keep other sessions out.
        """
        self.name: str = order["session"]
        self._learned = learned or Learned((), {}, Needs((), (), ()), "")
        self._lock = threading.Lock()
        self._stage = _Stage()
        self._path = ""
        """Of shared memory that not every trainer has mapped yet."""
        self._mapped = set[int]()
        self._ready: list[torch.Tensor] = []
        """Parameters that were looked at just before they change."""
        self._items = sum(part.box.numel for part in self._needs.parts)
        told = self._allocate(model, order["staged"], order["wire"]) if learned else {"held": True}
        token = session_token(run_token, order["nonce"])
        hello = json.dumps({key: order[key] for key in ("engine", "attempt")} | {"rank": rank}).encode()
        self._links: list[Link] = []
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
        """The trainers are gone: nobody holds the engine."""
        return not any(link.alive for link in self._links)

    def close(self) -> None:
        self._unlink()
        for link in self._links:
            link.close()

    def _unlink(self) -> None:
        """A path that is gone leaves nothing behind a crash."""
        with self._lock:
            if self._path:
                os.unlink(self._path)
                self._path = ""

    @property
    def _needs(self) -> Needs:
        return self._learned.needs

    @property
    def _whole(self) -> bool:
        return bool(self._learned.refused)

    def _allocate(self, model: torch.nn.Module, wanted: str, wire: str) -> dict[str, Any]:
        """The staged copy; what the trainer is told of it."""
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
        return {"needs": self._needs.to_dict(), "whole": self._learned.refused, "shared": self._path}

    # -- a link's thread -----------------------------------------------------------------------------------------------

    def _serve(self, number: int, link: Link, told: dict[str, Any]) -> None:
        """Until the trainer leaves, or dies: what was staged is never committed then."""
        try:
            with suppress(TransportError):
                self._listen(number, link, told)
        finally:
            link.abort("the rank has ended it")  # also where we are at fault: no dead thread holds an engine

    def _listen(self, number: int, link: Link, told: dict[str, Any]) -> None:
        table, failure = _Table(()), ""
        send_blob(link, NEEDS, told, timeout_s=None)
        while True:
            kind, body = link.recv_record(timeout_s=None)
            try:
                if kind == TABLE:
                    self._mapped.add(number)
                    if len(self._mapped) == len(self._links):
                        self._unlink()
                    table, failure = _Table(read_table(receive_blob(link, body), self._needs.parts)), ""
                elif kind in (DATA, PLACED):
                    self._place(number, link if kind == DATA else None, table, body)
                elif kind == END:
                    word, failure = failure, ""
                    link.send_record(END, word.encode()[:_WORD_BYTES], timeout_s=_CONNECT_S)
                elif kind == VERIFY:
                    send_blob(link, VERIFY, self._verify(*ASK.unpack(body)), timeout_s=_CONNECT_S)
            except TransportError:
                raise
            except (R3Error, ValueError, IndexError) as error:
                if not isinstance(error, WeightsCorrupt):  # no byte can be told from another any more
                    link.abort(f"{type(error).__name__}: {error}")
                    raise TransportError(str(error)) from error
                failure = failure or f"{type(error).__name__}: {error}"

    def _place(self, number: int, link: Link | None, table: _Table, body: bytes) -> None:
        version, first, count, digest = HEAD.unpack(body)
        self._begin(version, number, first)
        seen = xxhash.xxh3_64()
        for run in table.runs(first, count, self._needs, self._staged):
            flat = run.view.is_contiguous()
            landing = run.view if flat or link is None else torch.empty(run.view.shape, dtype=run.view.dtype)
            data = host_bytes(landing.contiguous())
            if link is not None:  # else the trainer has put it there
                link.recv_into(data, timeout_s=None)
            seen.update(data)
            if landing is not run.view:
                run.view.copy_(landing)
        entries = table.entries[first : first + count]
        if seen.intdigest() != digest:
            name = self._learned.tensors[self._needs.parts[entries[0].part].tensor].name
            raise WeightsCorrupt(f"version {version}: {count} pieces from {name} on came damaged")
        with self._lock:
            self._stage.came[number] += sum(entry.box.numel for entry in entries)

    def _begin(self, version: int, number: int, first: int) -> None:
        """A link's first piece of a version: whatever was staged before is void."""
        with self._lock:
            if self._stage.version != version or self._stage.digests:
                self._stage = _Stage(version)
            if first == 0:
                self._stage.came[number] = 0
            self._stage.came.setdefault(number, 0)

    def _verify(self, version: int, checksums: bool) -> dict[str, Any]:
        """Digests of the parameters as they will be; asked when every trainer has sent everything."""
        with self._lock:
            stage = self._stage
            came = sum(stage.came.values())
            if stage.version != version or came != self._items:
                return {
                    "error": f"{came} of {self._items} items of version {stage.version} are staged, asked for {version}"
                }
        named = list(zip(self._needs.params, self._staged, strict=True))
        stage.digests = {meta.name: _digest(view) for meta, view in named}
        wanted = named if checksums and not self._whole else []
        sums = {meta.name: _checksum(view) for meta, view in wanted}
        return {"digests": stage.digests, "checksums": sums}

    # -- the scheduler's thread ----------------------------------------------------------------------------------------

    def check(self, model: torch.nn.Module, version: int) -> None:
        """The version is staged and verified, and the parameters are those of the dry run. Nothing is touched yet."""
        stage = self._stage
        if stage.version != version or not stage.digests or stage.committed:
            raise WeightsError(
                f"version {version} is not staged and verified here; staged is {stage.version}"
            )
        self._ready = [] if self._whole else self._targets(model)

    def change_over(self, model: torch.nn.Module) -> None:
        """Parameters and staged copy change places, so that `undo` can bring the old version back bit for bit."""
        if self._whole:
            named = zip(self._learned.tensors, self._staged, strict=True)
            model.load_weights((m.name, v.view(m.shape)) for m, v in named)  # pyright: ignore[reportCallIssue]
        else:
            digests = _swap(self._ready, self._staged)
            for meta, digest in zip(self._needs.params, digests, strict=True):
                if digest != self._stage.digests[meta.name]:
                    raise WeightsError(f"{meta.name} holds other bytes than were staged")
        self._ready = []
        self._stage.committed = True

    def undo(self, model: torch.nn.Module, version: int) -> None:
        """The parameters as they were before the commit of `version`; nothing to do where it was not committed."""
        if self._stage.version != version or not self._stage.committed:
            return
        if self._whole:
            raise WeightsError("the model's own loader placed these weights: the old ones are gone")
        _swap(self._targets(model), self._staged)
        self._stage = _Stage()

    def _targets(self, model: torch.nn.Module) -> list[torch.Tensor]:
        params = dict(model.named_parameters())
        for meta in self._needs.params:
            if meta.name not in params or TensorMeta.of(meta.name, params[meta.name]) != meta:
                raise WeightsError(f"parameter {meta} is not what it was when the session opened")
        return [params[meta.name].detach().view(-1) for meta in self._needs.params]


def gathered_words(word: str, group: Any, size: int) -> list[str]:
    """Every rank's word, on every rank; fixed sizes, no pickle."""
    if size == 1:
        return [word]
    mine = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    raw = word.encode()[:_WORD_BYTES]
    mine[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
    words = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(words, mine, group=group)
    return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in words]


def _swap(targets: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> list[str]:
    """Parameters and staged copy change places; the digests of what the parameters hold then.

    By blocks that stay in a core's cache: each byte comes from memory and goes there once, for three copies and a digest.
    """
    found = []
    with torch.no_grad():
        for target, view in zip(targets, staged, strict=True):
            seen = xxhash.xxh3_64()
            if target.is_cuda:
                items = _DEVICE_BLOCK_BYTES // target.itemsize
                for new, kept in zip(target.split(items), view.split(items), strict=True):
                    old = new.clone()
                    new.copy_(kept)
                    kept.copy_(old)
                    seen.update(host_bytes(new))
            else:
                _swap_on_host(target.view(torch.uint8).numpy(), view.view(torch.uint8).numpy(), seen)
            found.append(seen.hexdigest())
    return found


def _swap_on_host(new_N: np.ndarray, kept_N: np.ndarray, seen: xxhash.xxh3_64) -> None:
    """By numpy, whose copies of blocks this small took two thirds of torch's time (AMD EPYC, torch 2.13, numpy 2.4)."""
    room_N = np.empty(_BLOCK_BYTES, dtype=np.uint8)
    for at in range(0, len(new_N), _BLOCK_BYTES):
        new, kept = new_N[at : at + _BLOCK_BYTES], kept_N[at : at + _BLOCK_BYTES]
        old = room_N[: len(new)]
        np.copyto(old, new)
        np.copyto(new, kept)
        np.copyto(kept, old)
        seen.update(new.data)


def _digest(flat: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(host_bytes(flat))


def _checksum(flat: torch.Tensor) -> str:
    """As SGLang's own `/weights_checker` computes it on a CPU."""
    return hashlib.sha256(host_bytes(flat)).hexdigest()[:16]


def _spare_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available * 0.8)


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_RECEIVE = "WeightUpdater.receive_weights_from_distributed"
_PARAMETERS = {"names", "dtypes", "shapes", "group_name", "load_format"}

_run_token = ""
_receiver: Receiver | None = None


def available() -> bool:
    """Whether this SGLang has what is hooked; 0.5.15.post1 has not."""
    try:
        updater: Any = importlib.import_module(_UPDATER)
        receive = updater.WeightUpdater.receive_weights_from_distributed
    except (ImportError, AttributeError):
        return False
    return set(inspect.signature(receive).parameters) >= _PARAMETERS


def apply(run_token: str) -> None:
    """Register the hook. `run_token`: the run's secret, which a trainer must know too; empty: the session's own is enough."""
    global _run_token
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _run_token = run_token
    HookRegistry.register(f"{_UPDATER}.{_RECEIVE}", receive, HookType.AROUND)


def receive(
    original: Any, updater: Any, *, names: Any, group_name: str, load_format: Any = None, **rest: Any
) -> Any:
    """An order of ours is carried out; other updates pass, unless a session holds this engine."""
    receiver = _own()
    if load_format != LOAD_FORMAT:
        holder = receiver.holder()
        if holder and not group_name.startswith(holder):
            raise WeightsError(f"the engine is held by weight session {holder}, whose trainer lives")
        return original(updater, names=names, group_name=group_name, load_format=load_format, **rest)
    receiver.order(updater.get_model(), json.loads(names[0]))
    return []


def _own() -> Receiver:
    global _receiver
    if _receiver is None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()

        def agree(word: str) -> list[str]:
            return gathered_words(word, parallel.tp_group.cpu_group, parallel.tp_size)

        _receiver = Receiver(rank=parallel.tp_rank, run_token=_run_token, agree=agree)
    return _receiver
