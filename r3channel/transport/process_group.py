"""Transport over a raw gloo or NCCL process group that torch's global registry never sees.

Frameworks call a bare `destroy_process_group()` when they reload, and Megatron's own groups live there; this group must
outlive both and disturb neither. Read against torch 2.13.0: `ProcessGroupGloo`, `ProcessGroupNCCL`, `TCPStore`.
Both ends must share the versions of torch and NCCL (`torch_version`, `nccl_version`): NCCL hangs or fails between versions.
gloo ran on CPU in the tests; of NCCL, which needs a GPU for each rank, a group of one ran on an H100 (see README).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.cuda import nccl

from r3channel.errors import DeadlineExceeded, TransportError, UsageError
from r3channel.transport.base import Pending, Rendezvous, Transport
from r3channel.transport.listener import bind
from r3channel.transport.network import route_to

T = TypeVar("T")
Members = Literal["pair", "foreign", "joint"]
"""Who is in a group. `pair`: two ranks of ours. `foreign`: a rank of ours, then SGLang's own. `joint`: many ranks of ours, some
in engines that are paused while a call is under way."""

log = logging.getLogger(__name__)
_OURS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog: at a peer's death it sets a flag at which the default group's monitor aborts
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default an error of our group ends the process
}
"""Environment variables that an NCCL group reads once, when it is made."""
_ENVIRONMENT = threading.Lock()
UNLIMITED = timedelta(days=365)
"""The timeout of torch's own waits: every wait here has a deadline of its own, and calls `abort` at its end."""
_PAIR_CTAS = 4
"""The GPU's thread blocks for one pair's sends: rows need a small part of a link's speed, and the model runs beside them."""
_CLOSE_S = 5.0
_POLL_S = 0.0005
"""NCCL completion is polled: its `wait` only orders streams, so a deadline needs a host-side check."""


def in_background(call: Callable[[], T], *, name: str) -> Future[T]:
    """Run `call` in a daemon thread.

    A call that hangs keeps neither its caller nor the process's exit waiting. The thread uses the caller's current CUDA device.
    """
    future: Future[T] = Future()
    # A new thread starts on GPU 0 whatever the rank, and its first use of CUDA would allocate memory there.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    threading.Thread(target=_run, args=(future, call, device), name=f"r3channel-{name}", daemon=True).start()
    return future


def _run(future: Future[T], call: Callable[[], T], device: int | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # an error's traceback holds this frame, which would hold the error


class RendezvousStore:
    """The relay's key-value store, bound to one interface only.

    `TCPStore` by address listens on all interfaces without authentication; handing it a bound socket does not.
    """

    def __init__(self, interface: str) -> None:
        listener = bind(interface)
        self.host, self.port = interface, listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            interface, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Stop listening.

        Groups that exist go on; new ones cannot form.
        """
        self._store = None


@contextmanager
def _quiet_errors() -> Iterator[None]:
    """Let NCCL groups that are made inside leave errors to us."""
    with _ENVIRONMENT:  # one thread at a time: the environment belongs to all threads
        before = {name: os.environ.get(name) for name in _OURS}
        os.environ.update(_OURS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class ProcessGroupTransport(Transport):
    """A `transport.base.Transport` over one gloo or NCCL group.

    gloo moves host tensors. NCCL moves tensors of the CUDA device that was current when the group was joined. What is read or
    written there is ordered by the caller's current stream.
    """

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float, members: Members = "pair") -> None:
        """Join the group; return when all ranks have joined.

        Args:
            rendezvous: where and as whom to join.
            timeout_s: limit of the whole call.
            members: who is in the group. `foreign` ones join as SGLang 0.5.23 does (`init_custom_process_group`,
                `srt/utils/common.py`): behind two prefixes more, and without a byte that both ends have not asked for. Over NCCL
                they are not waited for.

        Raises:
            DeadlineExceeded: the group could not be joined; the text says why.
            UsageError: an SGLang engine's process asks for NCCL, and `members` is not `joint`.
        """
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._name, self._connection = rendezvous.name, rendezvous.connection
        self._nccl = rendezvous.backend == "nccl"
        self._dead = False
        self._started: list[_Operation] = []
        self._group: Any = None
        if self._nccl and members != "joint":
            _refuse_engine_process()
        self._members: Members = members
        self.device = device_of(rendezvous.backend)
        """The device where this transport's tensors lie."""
        limit, deadline_s = timedelta(seconds=timeout_s), time.monotonic() + timeout_s
        try:
            store = TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=limit
            )
            prefixed = PrefixStore(rendezvous.name, store)
            for prefix in (f"{rendezvous.name}/", f"{self.device.type}/") if members == "foreign" else ():
                prefixed = PrefixStore(prefix, prefixed)
            prefixed.set_timeout(limit)
            self._group = self._open(prefixed, rendezvous, limit)
            if members != "foreign":
                self._connect(deadline_s)
        except (RuntimeError, dist.DistError, TransportError) as error:
            self.abort()
            raise DeadlineExceeded(
                f"{self._name}: rank {self.rank} of {self.world_size} could not join within {timeout_s:.1f} s: {error}"
            ) from error

    def _open(self, store: Store, rendezvous: Rendezvous, limit: timedelta) -> Any:
        if self._nccl:
            group = nccl_group(store, self.rank, self.world_size, of_a_pair=self._members == "pair")
            # torch's constructor waits for nobody, so a counter in the store does
            if self._members != "foreign":
                if store.add("joined", 1) == self.world_size:
                    store.set("all", "1")
                store.wait(["all"], limit)
            return group
        gloo: Any = dist.ProcessGroupGloo  # the stubs lack its options
        options = gloo._Options()
        options._timeout = limit
        # gloo listens on the route to the relay and nowhere else
        options._devices = [gloo.create_device(hostname=route_to(rendezvous.host) or rendezvous.host)]
        return gloo(store, self.rank, self.world_size, options)

    def _connect(self, deadline_s: float) -> None:
        if not self._nccl:
            self._warm(deadline_s)
            return
        # now, and not inside a step; on another thread, because nothing can end NCCL's call
        connecting = in_background(lambda: self._connect_nccl(deadline_s), name="nccl-connect")
        if not wait([connecting], timeout=_seconds_left(deadline_s)).done:
            raise RuntimeError("timed out while NCCL connects: is a peer gone, or on this device too?")
        connecting.result()

    def _connect_nccl(self, deadline_s: float) -> None:
        self._group.eager_connect_single_device(self.device)
        self._warm(deadline_s)

    def _warm(self, deadline_s: float) -> None:
        # the lower rank's byte goes first, so that the two do not wait for each other; most ranks of a larger group never meet
        byte_N = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for peer in range(self.world_size) if self._members == "pair" else ():
            for sends in (self.rank < peer, self.rank > peer) if peer != self.rank else ():
                (self.send if sends else self.recv)(peer, byte_N, timeout_s=_seconds_left(deadline_s))

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        what = f"send {len(data_N)} bytes to rank {dst}"
        return self._start(lambda group: group.send([data_N], dst, 0), what)

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        what = f"receive {len(out_N)} bytes from rank {src}"
        return self._start(lambda group: group.recv([out_N], src, 0), what)

    def broadcast(self, root: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        """Broadcast the bytes of `root` to all ranks.

        Args:
            root: the rank that sends.
            data_N: contiguous uint8, of the same size everywhere. All ranks end with the bytes of `root`.
            timeout_s: limit of the whole call.

        Raises:
            DeadlineExceeded: as in `send`.
            TransportError: as in `send`.
        """
        self.start_broadcast(root, data_N, timeout_s=timeout_s).wait(timeout_s=timeout_s)

    def start_broadcast(self, root: int, data_N: torch.Tensor, *, timeout_s: float) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = UNLIMITED if self._nccl else timedelta(seconds=timeout_s)
        what = f"broadcast {len(data_N)} bytes of rank {root}"
        return self._start(lambda group: group.broadcast([data_N], options), what)

    def _start(self, start: Callable[[Any], Any], what: str) -> _Operation:
        group = self._group  # read once: `abort` on another thread may clear it
        if self._dead or group is None:
            raise TransportError(
                f"{self._name}: the group was abandoned; cannot {what}. Join the next connection"
            )
        try:
            work = start(group)
        except (RuntimeError, dist.DistError) as error:
            self.abort()
            raise self._failure(TransportError, what, str(error)) from error
        operation = _Operation(self, what, work)
        self._started.append(operation)
        return operation

    def finish(self, operation: _Operation, timeout_s: float) -> None:
        """Wait for an operation, as `Pending.wait` does."""
        work, begin = operation.work, time.monotonic()
        if self._dead or work is None:
            raise TransportError(f"{self._name}: the group was abandoned; cannot {operation.what}")
        try:
            if self._nccl:
                wait_nccl(work, begin + timeout_s, self.alive)
            else:
                work.wait(timedelta(seconds=timeout_s))
        except (RuntimeError, dist.DistError) as error:
            # The error's traceback holds this frame, and a work that is held keeps gloo's sockets open.
            del work
            waited = time.monotonic() - begin
            self.abort()  # after a timeout a gloo pair is dead for ever, on both sides
            kind = DeadlineExceeded if waited >= 0.9 * timeout_s else TransportError
            limits = f"within {timeout_s:.1f} s (waited {waited:.1f} s): {str(error).splitlines()[0]}"
            raise self._failure(kind, operation.what, limits) from error
        operation.work = None
        with suppress(ValueError):  # `abort` on another thread may have dropped it just now
            self._started.remove(operation)

    def _failure(self, kind: type[TransportError], what: str, why: str) -> TransportError:
        return kind(
            f"{self._name} connection {self._connection}: rank {self.rank} could not {what} {why}; the group is abandoned"
        )

    def abort(self) -> None:
        """Drop the group and all operations that were started.

        This closes gloo's sockets, so a peer that waits gets its error at once.
        """
        if not self._dead:
            self._dead = True
            group = self._group
            if self._nccl and group is not None:
                self._end(group.abort)  # whether or not it ends in time, the group is given up
            del group  # an error's traceback would keep its sockets open
            self._drop()

    def close(self) -> None:
        """Shut the group down within ten seconds.

        An NCCL group that does not shut down is aborted.
        """
        if self._nccl and not self._dead and not self._end(self._group.shutdown):
            self.abort()
        self._dead = True
        self._drop()

    def _end(self, call: Callable[[], None]) -> bool:
        """Run `call` on another thread and return whether it finished.

        It must finish without an error within `_CLOSE_S`. NCCL waits for its kernels, and for a lock that a call under way may
        hold.
        """
        ending = in_background(call, name="nccl-end")
        ended = bool(wait([ending], timeout=_CLOSE_S).done)
        error = ending.exception() if ended else f"no end within {_CLOSE_S} s"
        if error is not None:
            log.warning("%s: %s", self._name, error)
        return error is None

    def _drop(self) -> None:
        self._group = None
        for operation in list(self._started):
            operation.work = None
        self._started.clear()


@dataclass(eq=False)
class _Operation:
    """One operation of a group; see `transport.base.Pending`."""

    _transport: ProcessGroupTransport
    what: str
    work: Any

    def wait(self, *, timeout_s: float) -> None:
        self._transport.finish(self, timeout_s)


def nccl_group(store: Store, rank: int, world_size: int, *, of_a_pair: bool) -> Any:
    """Make a raw NCCL group whose errors do not end this process.

    torch's default would end it.

    Args:
        store: the group's key-value store.
        rank: this process's rank.
        world_size: number of ranks.
        of_a_pair: whether the group is a pair of ours. Then making its communicator is a call that returns at once, and the first
            operation waits for it.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = UNLIMITED
    if of_a_pair:
        options.config.blocking, options.config.max_ctas = 0, _PAIR_CTAS
    with _quiet_errors():
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


def wait_nccl(work: Any, deadline: float, alive: Callable[[], bool]) -> None:
    """Wait until the host knows that the work is done.

    The work's own wait orders streams only.

    Args:
        work: what an operation of an NCCL group returned.
        deadline: time.monotonic() seconds.
        alive: whether the peer is still there.

    Raises:
        RuntimeError: the work was not done by `deadline`, or the peer has left.
    """
    while not work.is_completed():
        if (late := time.monotonic() > deadline) or not alive():
            raise RuntimeError("timed out: not completed by the deadline" if late else "the peer has left")
        time.sleep(_POLL_S)
    work.wait()


def _refuse_engine_process() -> None:
    # a pending NCCL send in an engine's CUDA context stalls inference
    if "sglang.srt.model_executor.model_runner" in sys.modules:
        raise UsageError(
            "this process runs an SGLang engine and asked to join a routing group over NCCL; run the relay in a process (and on "
            "a device) of its own"
        )


def device_of(backend: str) -> torch.device:
    """Return the device where a backend's tensors lie.

    Each thread has a current device of its own, so this is asked once, on the thread that joins.
    """
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _seconds_left(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def torch_version() -> str:
    """Return torch's version with its build, for example `2.13.0+cpu`."""
    return str(torch.__version__)


def nccl_version() -> str:
    """Return NCCL's version, for example `2.27.5`.

    It is empty in a build of torch without NCCL, which lacks the function that tells it.
    """
    try:
        return ".".join(map(str, nccl.version()))
    except AttributeError:
        return ""
