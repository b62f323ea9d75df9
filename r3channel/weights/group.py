"""The process group that carries weight buckets: the trainer is rank 0, the engines' ranks follow.

The group is a raw gloo or NCCL object outside torch's global registry, so that neither the trainer's default group nor a
framework's bare `destroy_process_group()` touches it. It knows nothing of buckets or HTTP.

Read against torch 2.13.0 and SGLang 0.5.23. SGLang joins with `init_custom_process_group` (`srt/utils/common.py`), which
puts the store behind the prefixes `<group name>`, `<group name>/` and `<device>/`; ours must be the same. Relied on in
torch: `ProcessGroupGloo._Options`, `BroadcastOptions.timeout`, `TCPStore(master_listen_fd=)`. NCCL is the same code with
another constructor; it has not been run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.transport.process_group import UNLIMITED, in_background, nccl_group, wait_nccl

T = TypeVar("T")

BACKENDS = ("gloo", "nccl")
_WILDCARDS = ("", "0.0.0.0", "::")
_CLOSE_GRACE_S = 5.0  # gloo notices a closed peer within 0.1 s


@dataclass(slots=True)
class _Raw:
    """The objects that own sockets, held here alone.

    No frame keeps them in a variable, because the traceback of an error would then keep the sockets open.
    """

    store: Store | None
    polled: bool
    """Whether the host must look whether an operation has ended."""
    group: Any = None


class WeightGroup:
    """Rank 0 of one group. LISTENING -> JOINED (`join`) -> CLOSED (`close`, any number of times).

    >>> group = WeightGroup("doc-1", world_size=1, timeout_s=20.0)
    >>> group.join(timeout_s=20.0)
    >>> group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=5.0)
    >>> group.close()

    One thread at a time calls `join` and `broadcast`; any thread may close.
    """

    def __init__(
        self, name: str, *, world_size: int, timeout_s: float, host: str = "127.0.0.1", backend: str = "gloo"
    ) -> None:
        """Listen on `host` (an address of this machine that the engines reach) at a port given by the system.

        `timeout_s` bounds the life of the store's own waits. Raises ConfigError for an unknown backend or a wildcard host:
        the store and gloo have no authentication, so only the configured interface may see them.
        """
        self.device = group_device(backend)
        if host in _WILDCARDS:
            raise ConfigError(f"weight group host {host!r} listens on every interface; name one address")
        self.name = name
        self.host = host
        self.world_size = world_size
        self.backend = backend
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = listener.getsockname()[1]
        self._raw = _Raw(
            _serve(listener, host, self.port, world_size, timeout_s=timeout_s), polled=backend == "nccl"
        )
        self._joining: Future[None] | None = None
        self._sending: Future[Any] | None = None
        self._closed = False

    def join(self, *, timeout_s: float) -> None:
        """Wait until all members have joined. Raises DeadlineExceeded after `timeout_s`, TransportError if it fails."""
        if self._closed or self._joining is not None:
            raise UsageError(f"weight group {self.name}: join() came twice or after close()")
        raw = self._raw
        self._joining = joining = in_background(lambda: self._build(raw, timeout_s), name="weights-join")
        self._finish(joining, f"join of {self.world_size} members at {self.host}:{self.port}", timeout_s)

    def broadcast(self, payload: torch.Tensor, *, timeout_s: float) -> float:
        """Send `payload` (uint8, contiguous, on `self.device`) to every member; its memory may be reused on return.

        Returns the seconds that took.
        The members must expect exactly as many bytes: gloo aborts the process of a smaller receiver. After an error the
        group is dead on every side. Raises DeadlineExceeded after `timeout_s`, TransportError if a member is gone.
        """
        raw = self._raw
        if raw.group is None or self._closed:
            raise UsageError(f"weight group {self.name} is not joined, or is closed")
        if payload.dtype != torch.uint8 or not payload.is_contiguous():
            raise UsageError(
                f"payload of {payload.dtype}, contiguous {payload.is_contiguous()}: expected flat uint8"
            )
        begun_s = time.monotonic()
        self._sending = sending = in_background(
            lambda: _broadcast(raw, payload, timeout_s=timeout_s), name="weights-wire"
        )
        what = f"broadcast of {payload.numel()} bytes to {self.world_size - 1} members"
        self._finish(sending, what, timeout_s + _CLOSE_GRACE_S)  # the operation's own deadline comes first
        return time.monotonic() - begun_s

    def broadcast_each(self, tensors: Sequence[torch.Tensor], *, timeout_s: float) -> None:
        """One broadcast per tensor, in its own dtype, all posted before the first is waited for: SGLang's own format."""
        raw = self._raw
        if raw.group is None or self._closed:
            raise UsageError(f"weight group {self.name} is not joined, or is closed")
        sending = in_background(
            lambda: _broadcast_each(raw, tensors, timeout_s=timeout_s), name="weights-wire"
        )
        self._sending = sending
        self._finish(sending, f"broadcasts of {len(tensors)} tensors", timeout_s + _CLOSE_GRACE_S)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Whether no broadcast is under way, after waiting up to `timeout_s` for that."""
        return self._sending is None or bool(wait([self._sending], timeout=timeout_s).done)

    def close(self) -> None:
        """Leave the group: members that wait in a broadcast fail at once. Never blocks on a broadcast under way."""
        if self._closed:
            return
        self._closed = True
        group, store = self._raw.group, self._raw.store
        self._raw.group = self._raw.store = None
        if self.backend == "nccl" and group is not None:
            # Its kernel would wait on the device for ever for a member that is gone.
            in_background(group.abort, name="weights-abort")
        if self.wait_quiet(0.0):
            del group, store  # the sockets close with the last reference
        else:
            # Dropping the object would wait for the operation, which ends by its own deadline.
            sending = self._sending
            in_background(lambda: _outlive(sending, (group, store)), name="weights-bury")

    def _build(self, raw: _Raw, timeout_s: float) -> None:
        store = raw.store
        assert store is not None
        for prefix in (self.name, f"{self.name}/", f"{self.device.type}/"):
            store = PrefixStore(prefix, store)
        group = _raw_group(self.backend, store, self.host, self.world_size, timeout_s=timeout_s)
        if not self._closed:
            raw.group = group

    def _finish(self, future: Future[None], what: str, timeout_s: float) -> None:
        """Wait for `future`; its failure becomes ours, told as `what`."""
        if not wait([future], timeout=timeout_s).done:
            raise self._late(what, timeout_s)
        error = future.exception()
        if error is None:
            return
        if _is_timeout(error):
            raise self._late(what, timeout_s) from error
        raise TransportError(f"weight group {self.name}: {what} failed: {_first_line(error)}") from error

    def _late(self, what: str, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"weight group {self.name}: {what} did not end within {timeout_s:.1f} s; "
            "is an engine hung, or can it not reach this address?"
        )


def group_device(backend: str) -> torch.device:
    """Where a payload must lie: the current CUDA device for NCCL. ConfigError for an unknown backend."""
    if backend not in BACKENDS:
        raise ConfigError(f"weight group backend {backend!r}: expected one of {BACKENDS}")
    return torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())


def _serve(listener: socket.socket, host: str, port: int, world_size: int, *, timeout_s: float) -> TCPStore:
    """A store on our own socket: TCPStore would bind every interface."""
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _raw_group(backend: str, store: Store, host: str, world_size: int, *, timeout_s: float) -> Any:
    if backend == "nccl":
        return nccl_group(store, 0, world_size)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, 0, world_size, options)


def _options(raw: _Raw, timeout_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = UNLIMITED if raw.polled else timedelta(seconds=timeout_s)
    return options


def _broadcast_each(raw: _Raw, tensors: Sequence[torch.Tensor], *, timeout_s: float) -> None:
    limit, options = time.monotonic() + timeout_s, _options(raw, timeout_s)
    for work in [raw.group.broadcast([tensor], options) for tensor in tensors]:
        if raw.polled:
            wait_nccl(work, limit)
        else:
            work.wait()


def _broadcast(raw: _Raw, payload: torch.Tensor, *, timeout_s: float) -> None:
    """gloo keeps the deadline that it was given; of NCCL the host must find out itself that the bytes have left."""
    limit = time.monotonic() + timeout_s
    if raw.polled:
        wait_nccl(raw.group.broadcast([payload], _options(raw, timeout_s)), limit)
    else:
        raw.group.broadcast([payload], _options(raw, timeout_s)).wait()


def _outlive(sending: Future[None] | None, kept: tuple[Any, ...]) -> None:
    if sending is not None:
        sending.exception()
    del kept


def _is_timeout(error: BaseException) -> bool:
    """gloo and the store raise plain RuntimeErrors; only their text tells a timeout."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
