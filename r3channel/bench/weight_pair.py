"""One trainer process (this one) and one engine process: the same weights over gloo, shared memory and one-sided writes.

Every round interleaves all ways, so that all see the same machine. Seconds run to the engine's word that the weights are
in its parameters. From the first byte packed: `gloo_depth_1`, `gloo_depth_2` (the pipeline) and `refit` (packed into shared
memory). `shared_memory`: the trainer's weights live in memory that the engine has mapped (`lending`), so nothing is packed;
the engine copies them. `gloo_raw` and `one_sided` move as many bytes from buffer to buffer, no more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from r3channel.bench.weight_peer import DONE, TIMEOUT_S
from r3channel.bench.weight_wire import weights_of
from r3channel.errors import ConfigError, EngineUnavailable, WeightsDiffer
from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.joining import join
from r3channel.transport.one_sided import check_installed
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from r3channel.weights.buckets import pack, plan_buckets
from r3channel.weights.digests import payload_digest
from r3channel.weights.geometry import Box
from r3channel.weights.group import in_background
from r3channel.weights.lending import lend
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.pipeline import BroadcastPipeline, SharedManifest
from r3channel.weights.refit import RefitSender, Share

CPU = torch.device("cpu")
REFIT_BUCKET_BYTES = 8 << 20
"""Two of them stay in the last-level cache, so that the engine's copy reads no memory that the trainer's copy wrote."""
PIPELINE_BUCKET_BYTES = 32 << 20

Named = Mapping[str, torch.Tensor]


class EngineProcess:
    """A child that runs `weight_peer`. Any thread calls, one at a time."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "r3channel.bench.weight_peer", str(theirs.fileno())]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._line = Connection(mine.detach())

    def call(self, message: bytes) -> bytes:
        """Fits `weights.refit.Call`."""
        self.tell(message)
        return self.answer()

    def do(self, what: str, **arguments: Any) -> bytes:
        return self.call(_command(what, arguments))

    def begin(self, what: str, **arguments: Any) -> None:
        """Without waiting: `answer` comes later."""
        self.tell(_command(what, arguments))

    def tell(self, message: bytes) -> None:
        try:
            self._line.send_bytes(message)
        except OSError as error:
            raise EngineUnavailable(f"the benchmark's engine process ended: {error}") from error

    def answer(self) -> bytes:
        if not self._line.poll(TIMEOUT_S):
            raise EngineUnavailable(f"the benchmark's engine process said nothing for {TIMEOUT_S:.0f} s")
        try:
            return self._line.recv_bytes()
        except (EOFError, OSError) as error:
            raise EngineUnavailable("the benchmark's engine process ended; its error is above") from error

    def close(self) -> None:
        self._line.close()
        self._child.kill()
        self._child.wait()


def _command(what: str, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"do": what, **arguments}).encode()


def measure(*, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each way over interleaved rounds, and why a way was left out."""
    named = dict(weights_of(total_bytes))
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.closing(EngineProcess()))
        store = stack.enter_context(contextlib.closing(RendezvousStore("127.0.0.1")))
        pair = stack.enter_context(contextlib.closing(_Pair(engine, named, store)))
        calls = pair.calls()
        for name, call in calls.items():
            pair.check(name, call)
        seen: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                begun_s = time.monotonic()
                call()
                seen[name].append(time.monotonic() - begun_s)
    return {
        "bytes": sum(tensor.nbytes for tensor in named.values()),
        "tensors": len(named),
        "rounds": rounds,
        "wall_s": {name: statistics.median(values) for name, values in seen.items()},
        "skipped": pair.skipped,
    }


class _Pair:
    """Both ends of every way, set up once. The first call of each way checks that its bytes arrive."""

    def __init__(self, engine: EngineProcess, named: Named, store: RendezvousStore) -> None:
        self._engine, self._named, self._store = engine, named, store
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in named.items()]
        self._whole = Bucket.aligned(self._metas)
        self._raw_N = torch.zeros(self._whole.payload_bytes, dtype=torch.uint8)
        pack(self._whole, list(named.values()), self._raw_N)
        self.skipped: dict[str, str] = {}
        manifest = manifest_of(self._metas, cap_bytes=REFIT_BUCKET_BYTES)
        engine.do("prepare", manifest=manifest.to_dict(), raw_bytes=len(self._raw_N))
        self._refit = RefitSender({"engine": Share(manifest, engine.call)}, device=CPU)
        self._shared = SharedManifest.of(((m, [0]) for m in self._metas), cap_bytes=PIPELINE_BUCKET_BYTES)
        self._gloo = self._joined("gloo")
        assert isinstance(self._gloo, ProcessGroupTransport)
        self._pipelines = {
            depth: BroadcastPipeline(self._gloo, self._shared, depth=depth) for depth in (1, 2)
        }
        engine.do("pipelines", manifest=self._shared.manifest.to_dict(), owners=self._shared.owners)
        self._lent = lend({n: [(Box.whole(t.shape), t)] for n, t in named.items()}, device=CPU)
        engine.do("borrow", card=self._lent.card)
        self._nixl = self._one_sided()

    def calls(self) -> dict[str, Callable[[], object]]:
        ways: dict[str, Callable[[], object]] = {
            "gloo_raw": self._broadcast,
            "gloo_depth_1": lambda: self._pipeline(1),
            "gloo_depth_2": lambda: self._pipeline(2),
            "shared_memory": lambda: self._engine.do("lent"),
            "refit": lambda: self._refit.update({"engine": self._named}, timeout_s=TIMEOUT_S),
        }
        nixl = self._nixl
        return ways if nixl is None else ways | {"one_sided": lambda: self._send(nixl)}

    def check(self, name: str, call: Callable[[], object]) -> None:
        """Run it once on cleared memory; WeightsDiffer unless what arrived is what was sent."""
        self._engine.do("clear")
        call()
        raw = name in ("gloo_raw", "one_sided")
        if int(self._engine.do("digest", raw=raw)) != payload_digest(self._raw_N):
            raise WeightsDiffer(f"{name}: the engine process holds other bytes than were sent")

    def close(self) -> None:
        self._refit.close()
        self._lent.close()
        self._gloo.close()
        if self._nixl is not None:
            self._nixl.close()

    def _broadcast(self) -> None:
        with self._answered("broadcast"):
            self._gloo.broadcast(0, self._raw_N, timeout_s=TIMEOUT_S)

    def _pipeline(self, depth: Literal[1, 2]) -> None:
        with self._answered("pipeline", depth=depth):
            self._pipelines[depth].run(self._fill, _keep, timeout_s=TIMEOUT_S)

    def _send(self, transport: Transport) -> None:
        with self._answered("receive", backend="nixl"):
            transport.send(1, self._raw_N, timeout_s=TIMEOUT_S)

    def _fill(self, index: int, bucket: Bucket, out_N: torch.Tensor) -> None:
        pack(bucket, [self._named[name] for name in bucket.names], out_N)

    @contextlib.contextmanager
    def _answered(self, what: str, **arguments: Any) -> Iterator[None]:
        self._engine.begin(what, **arguments)
        yield
        self._engine.answer()

    def _one_sided(self) -> Transport | None:
        try:
            check_installed()
        except ConfigError as error:
            self.skipped["one_sided"] = str(error)
            return None
        return self._joined("nixl")

    def _joined(self, backend: str) -> Any:
        where = {"backend": backend, "name": f"bench-{backend}", "epoch": 1, "world_size": 2}
        where |= {"host": self._store.host, "port": self._store.port}
        self._engine.begin("join", rendezvous={**where, "rank": 1})
        mine = in_background(lambda: join(Rendezvous(**where, rank=0), timeout_s=TIMEOUT_S), name="bench")
        assert self._engine.answer() == DONE
        return mine.result(TIMEOUT_S)


def manifest_of(metas: list[TensorMeta], *, cap_bytes: int) -> Manifest:
    """Aligned buckets, as our own receivers want them."""
    return Manifest.of([Bucket.aligned(b.tensors) for b in plan_buckets(metas, cap_bytes=cap_bytes)])


def _keep(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
    """The trainer has the values already."""
