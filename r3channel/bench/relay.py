"""A step's routing from the manager to every trainer rank: ours, its peers and the limit; then our path part by part.

`steps`: one process tree, a manager and four ranks, Ray actors on two raylets of this machine, that run every path in turn on the
same data. The whole way begins with the bodies of engines' replies in memory (JSON and base64). It ends when every rank holds its
own rows, contiguous and writable per layer, and its routers have taken them in a dtype that Megatron's gather accepts. The timed
section ends there too, and begins with verified rows about to be sealed (peers: with decoded arrays in memory).
The other parts need no Ray and are CPU time of one process. Samples have about 4,096 tokens. A step's bodies, rows and shard are
larger than a cache:

    bodies     reply bodies in memory -> the rows of all layers placed in one receiver's shard and verified: JSON, base64, token
               ids, the frame's checks, ids checked and digested, seal, ticket there and back, each row written where its router
               will look, digests compared. Not the sending: rows are placed from where the relay keeps them
    seal       of the calling thread: `seal`, the ticket's bytes, and a receiver's own plan out of them; nobody receives
    socket     from the socket to a placed shard (`relay_socket`)
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
import torch

import r3channel
from r3channel.bench import relay_paths as paths
from r3channel.bench import relay_peers as peers
from r3channel.bench.harness import Effort, Parts, cpu_seconds_of, family_of, interleave, medians_s, time_call
from r3channel.bench.relay_paths import OWN, Case, Seconds, measure
from r3channel.bench.relay_peers import ALL, DIRECT, LIMIT, NUMPY, PEERS
from r3channel.bench.relay_socket import socket
from r3channel.bench.wire import generate
from r3channel.errors import R3Error
from r3channel.model.presets import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.transport.base import Rendezvous
from r3channel.wire.frame import encode_frame

CASE = Case("qwen3-30b-a3b", tokens=262_144, dp=4)
MANAGER_NODE, RANK_NODE = "bench_manager", "bench_rank"
_CALL_S = 180.0
"""Deadline of one call; nothing here takes a tenth of it on a quiet machine."""
_STORE_BYTES = 1 << 30
MODELS = ("qwen3-30b-a3b", "qwen3-next", "kimi-k2", "gpt-oss-120b")
"""The first model is used where only one is measured."""
SEALS = {64: "dp=4,packing=thd", 8192: "dp=64,pp=4,tp=4,packing=thd"}
"""Samples of a step -> its layout."""
_SHORT = 8
"""Tokens of a sample where only the number of samples matters."""
_AT_0 = "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness"
"""The last one, because peers are measured at their best: otherwise Ray's processes would yield to others (nice 15)."""
_RAY_ENV = dict.fromkeys(_AT_0, "0") | {"OMP_NUM_THREADS": "1"}


class EndStatesDiffer(R3Error):
    """Two paths left different rows at a rank; their times cannot be compared."""


class Round(NamedTuple):
    """One path's round, in seconds."""

    wall: float
    """The timed section: from a sealed step (ours) or arrays in memory (peers) until every rank's routers have taken their rows;
    raw gloo ends when the bytes are held."""
    cpu: float
    """CPU of every process of the tree, Ray's own included, in the timed section."""
    manager_cpu: float
    """CPU of the manager's process, in the timed section."""
    before: Seconds
    """Seconds of the manager, from the bodies of replies up to the timed section; zeros if that was left out."""


# -- processes -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes(*, store_bytes: int) -> Iterator[None]:
    """Run a Ray cluster of two nodes: the manager's and the ranks'.

    Each raylet has its own object store. So an object crosses from one raylet to the other as it would between machines, over
    loopback. Ray's own settings stay: chunks of 64 MiB instead of 5 took 1.6 to 2 times as long (262,144 tokens, int32 and
    uint8).

    Args:
        store_bytes: Size of each object store, which is reserved and not touched.
    """
    from ray.cluster_utils import Cluster

    folders = [str(Path(r3channel.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {**_RAY_ENV, "PYTHONPATH": os.pathsep.join(folders)}  # inherited by Ray's processes
    cluster = Cluster()
    try:
        for name in (MANAGER_NODE, RANK_NODE):
            cluster.add_node(num_cpus=8, resources={name: 64}, object_store_memory=store_bytes)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()  # ends the actors, too
        cluster.shutdown()


def start_actor(cls: type, *arguments: Any, node: str, threads: int = 1) -> Any:
    remote: Any = ray.remote
    options = {"num_cpus": 0, "resources": {node: 1}, "max_concurrency": threads, "max_restarts": 0}
    return remote(**options, enable_tensor_transport=True)(cls).remote(*arguments)


def call(references: Any) -> Any:
    """Wait for Ray's results, with a deadline."""
    return ray.get(references, timeout=_CALL_S)


class Manager(RelayHost):
    """A Ray actor that holds the sending half of every path. The ranks' control calls run beside it, on other threads."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self._work, self._ranks = paths.Workload(case), []
        self._own, self._raw = paths.ChannelSending(self._work), peers.RawSending(self._work)
        self._sending: dict[str, Any] = {OWN: self._own, LIMIT: self._raw}
        self._sending |= {path: peers.StoreSending(self._work, path) for path in PEERS}
        self.relay = self._own.relay
        gc.freeze()  # modules and the step's data need no collecting

    def meet(self, ranks: list[Any]) -> int:
        """Set the ranks of all paths, and return our process id."""
        self._ranks = ranks
        return os.getpid()

    def rendezvous(self, rank: int) -> dict[str, Any]:
        return asdict(self._raw.rendezvous(rank, 1))

    def join(self) -> None:
        self._raw.join()

    def prepare(self, path: str, *, whole: bool) -> Seconds:
        return self._sending[path].prepare(whole=whole)

    def deliver(self, path: str) -> tuple[float, list[tuple[float, float]]]:
        """Deliver a step's rows over a path.

        Returns:
            (time.monotonic at which the timed section began, what each `Rank.take` returned).
        """
        answers: list[Any] = []
        start_s = self._sending[path].deliver(partial(self._start, path, answers))
        return start_s, call(answers)

    def ready(self) -> tuple[float, float]:
        """Run a round of ours in which trainers come late.

        They come when the step was prepared, as they do in a loop.

        Returns:
            (CPU seconds of this process until the step is prepared, apart from sending; seconds from calling the ranks until they
            hold their rows).
        """
        _, prepared_s = self._own.prepare(whole=True)
        tickets: list[Any] = []
        _, sealed_s = measure(lambda: tickets.append(self._own.seal()))
        answers: list[Any] = []
        start_s = self._own.deliver(partial(self._start, OWN, answers), ticket=tickets[0])
        held_s = max(held_s for held_s, _ in call(answers))
        self.settle(OWN)
        return prepared_s + sealed_s, held_s - start_s

    def _start(self, path: str, answers: list[Any], rank: int, payload: Any) -> None:
        answers.append(self._ranks[rank].take.remote(path, payload))

    def settle(self, path: str) -> None:
        self._sending[path].settle()
        gc.collect()

    @ray.method(tensor_transport="gloo")
    def tensors_of(self, dp: int) -> list[torch.Tensor]:
        """Return a DP rank's samples, which are kept here.

        Ray Direct Transport sends them.
        """
        return [torch.from_numpy(self._work.narrow[name]) for name in self._work.of_rank(dp)]

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes sent per step, by path."""
        return {path: half.bytes_sent for path, half in self._sending.items()}

    def close(self) -> None:
        self.relay.close()


class Rank:
    """A Ray actor that holds a trainer rank's half of every path. It trains nothing."""

    def __init__(self, rank: int, case: Case, manager: Any, rendezvous: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        _, plan = case.plan()
        self._taking: dict[str, Any] = {LIMIT: peers.RawTaking(plan, rank, Rendezvous(**rendezvous))}
        self._taking |= {path: peers.ArraysTaking(plan, rank, path) for path in PEERS}
        self._taking[OWN] = self._own = paths.ChannelTaking(case, rank, RayRelay(manager))
        gc.freeze()

    def take(self, path: str, payload: Any) -> tuple[float, float]:
        """Take a step's rows and return two times.

        Returns:
            The time when rows were held, and the time when the routers had taken all. Both are time.monotonic, comparable on one
            machine.
        """
        return self._taking[path].take(payload), time.monotonic()

    def digest(self, path: str) -> str:
        """Return the digest of the ids that the last `take` left."""
        return paths.digest(self._taking[path].tensors())

    def settle(self) -> None:
        gc.collect()

    def close(self) -> None:
        self._own.receiver.close()


# -- rounds ----------------------------------------------------------------------------------------------------------------


class Tree:
    """The processes of a case, with every path opened. `whole` of a peer's rounds begin with its replies."""

    def __init__(self, case: Case, *, whole: int) -> None:
        from ray.experimental.collective import create_collective_group

        self.manager = start_actor(Manager, case, node=MANAGER_NODE, threads=32)
        where = call([self.manager.rendezvous.remote(rank) for rank in range(case.dp)])
        joined = self.manager.join.remote()
        self.ranks = [
            start_actor(Rank, rank, case, self.manager, meet, node=RANK_NODE)
            for rank, meet in enumerate(where)
        ]
        call([joined, *(rank.settle.remote() for rank in self.ranks)])
        create_collective_group([self.manager, *self.ranks], backend="gloo")
        self._manager_pid = call(self.manager.meet.remote(self.ranks))
        self._whole = whole
        self._rounds: dict[str, int] = dict.fromkeys(ALL, 0)

    def check_ends(self) -> None:
        """Run a warm-up round of every path and compare their ends.

        Raises:
            EndStatesDiffer: If not all paths end with the same ids.
        """
        ends = {}
        for path in ALL:
            self.round(path)
            ends[path] = call([rank.digest.remote(path) for rank in self.ranks])
            if ends[path] != ends[OWN]:
                raise EndStatesDiffer(
                    f"{path}: ranks end with ids of digests {ends[path]}, {OWN} with {ends[OWN]}; is a path's placement wrong?"
                )

    def round(self, path: str) -> Round:
        whole, self._rounds[path] = 1 <= self._rounds[path] <= self._whole, self._rounds[path] + 1
        before = call(self.manager.prepare.remote(path, whole=whole and path != DIRECT))
        pids = family_of(os.getpid())
        cpu_s, manager_s = cpu_seconds_of(pids), cpu_seconds_of([self._manager_pid])
        start_s, ends = self._direct() if path == DIRECT else call(self.manager.deliver.remote(path))
        cpu_s, manager_s = cpu_seconds_of(pids) - cpu_s, cpu_seconds_of([self._manager_pid]) - manager_s
        call([self.manager.settle.remote(path), *(rank.settle.remote() for rank in self.ranks)])
        return Round(max(end_s for _, end_s in ends) - start_s, cpu_s, manager_s, before)

    def _direct(self) -> tuple[float, Any]:
        """Let Ray move the tensors between two actor calls."""
        start_s = time.monotonic()
        kept = [self.manager.tensors_of.remote(dp) for dp in range(len(self.ranks))]
        return start_s, call([rank.take.remote(DIRECT, k) for rank, k in zip(self.ranks, kept, strict=True)])

    def close(self) -> None:
        call([actor.close.remote() for actor in (*self.ranks, self.manager)])


def steps(effort: Effort) -> dict[str, Any]:
    """Measure every path in interleaved rounds.

    Returns:
        Medians, and figures per token.
    """
    rounds = effort.rounds_of(20, 3)
    with two_nodes(store_bytes=_STORE_BYTES):
        tree = Tree(CASE, whole=effort.choose(5, 1))
        tree.check_ends()
        seen = interleave({path: partial(tree.round, path) for path in ALL}, rounds=rounds, warm_up=0)
        ready = [call(tree.manager.ready.remote()) for _ in range(max(2, rounds // 2))]
        sent = call(tree.manager.bytes_sent.remote())
        tree.close()
    found = {path: path_of(path, seen, bytes_sent=sent[path]) for path in ALL}
    prepared_s, exposed_s = (median(values) for values in zip(*ready, strict=True))
    found[OWN] |= {"exposed_wall_s": exposed_s, "manager_cpu_us_per_token": prepared_s / CASE.tokens * 1e6}
    return {"case": asdict(CASE), "rounds": rounds, "paths": found}


def path_of(path: str, seen: Mapping[str, Sequence[Round]], *, bytes_sent: int) -> dict[str, Any]:
    """Return one path's medians.

    The whole way and the manager's CPU are None for the limit, which begins with placed rows. Ray Direct Transport starts from
    the arrays that Ray's numpy path decodes.

    Args:
        path: The path.
        seen: All rounds, by path.
        bytes_sent: Bytes that the path sends per step.
    """
    wall_s, cpu_s, manager_s = (median(column) for column in list(zip(*seen[path], strict=True))[:3])
    before = [row.before for row in seen[NUMPY if path == DIRECT else path] if row.before[0]]
    before_s = [median(column) for column in zip(*before, strict=True)]
    return {
        "wall_s": wall_s, "cpu_s": cpu_s, "whole_wall_s": before_s[0] + wall_s if before_s else None,
        "whole_cpu_s": before_s[1] + cpu_s if before_s else None,
        "manager_cpu_us_per_token": (before_s[1] + manager_s) / CASE.tokens * 1e6 if before_s else None,
        "bytes_per_token": bytes_sent / CASE.tokens,
    }  # fmt: skip


# -- our path, part by part -------------------------------------------------------------------------------------------------


def _work(model: str, effort: Effort) -> paths.Workload:
    tokens = effort.choose(100_000_000 // model_named(model).spec.bytes_per_token, 65_536)
    return paths.Workload(Case(model, tokens))


def _whole_way(relay: Relay, work: paths.Workload) -> Callable[[], None]:
    step, rows_N, bodies = itertools.count(), None, work.bodies

    def run_step() -> None:
        nonlocal rows_N
        paths.add_bodies(relay, bodies)
        ticket = Ticket.from_bytes(relay.seal(next(step), work.assignment).to_bytes())
        rows_N = paths.receive(relay, ticket, rows_N)

    return run_step


def bodies(effort: Effort) -> dict[str, Any]:
    found = {}
    for model in MODELS:
        work = _work(model, effort)
        with closing(Relay(work.spec, work.case.trainer)) as relay:
            seconds = medians_s({model: _whole_way(relay, work)}, rounds=effort.rounds_of(9, 3))
        found[model] = seconds[model] / work.case.tokens * 1e6
    return {"body_to_placed_cpu_us_per_token": found}


def seal(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(9, 3)
    return {"seal_ms": {str(samples): _seal_ms(samples, layout, rounds) for samples, layout in SEALS.items()}}


def _seal_ms(samples: int, layout: str, rounds: int) -> float:
    model, trainer = model_named(MODELS[0]), TrainerLayout.parse(layout)
    frame = encode_frame(model.spec, expert_ids_TLK=generate(model, regime="Zmid", rows=_SHORT - 1))
    names, step = [f"sample-{number}" for number in range(samples)], itertools.count()
    assignment = Assignment.round_robin(names, dp=trainer.dp, microbatch_size=samples // trainer.dp)
    with closing(Relay(model.spec, trainer)) as relay:
        for name in names:
            relay.add_frame(name, frame, range(_SHORT))

        def seal_and_parse() -> None:
            data = relay.seal(next(step), assignment).to_bytes()
            Ticket.from_bytes(data).plan.shard(dp=0, pp=0).table.runs  # noqa: B018

        sealing = time_call(seal_and_parse, clock=time.thread_time)
        seen = []
        for number in range(rounds + 2):
            seen.append(sealing())
            relay.abandon(number)
    return median(seen[2:]) * 1e3


PARTS: Parts = {part.__name__: part for part in (steps, socket, bodies, seal)}
