"""The demo's loop on the demo's real processes, with new ones in the place of those that die, as a framework would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from examples.async_grpo import train_async
from examples.async_grpo.options import parse
from examples.async_grpo.rays import actor_class, fetch
from examples.embedded import sglang
from tests.chaos.actors import Manager, Trainer
from tests.chaos.ledger import Ledger
from tests.chaos.shim import TABLE
from tests.support import fork_server
from tests.support.forked_engines import EngineForks
from tests.support.waits import until

LIMIT_S = 200.0
"""A part of a step that takes longer hangs: the sum of the deadlines that may follow one another, and a restart."""


class Loop:
    """One thread drives, others may look."""

    def __init__(self, args: Any, cluster: train_async.Cluster, engines: list[Any], ledger: Ledger) -> None:
        self.args, self.cluster, self.engines, self.ledger = args, cluster, engines, ledger
        self.version, self.routable, self.number, self.phase = 0, tuple[str, ...](), -1, "start"
        self._linked = True
        """Whether the trainers know the engines."""
        self.restarts, self.failed, self.hung = Counter(engine=0, relay=0, trainer=0), list[str](), 0
        self.pids = {"relay": [self.relay("state")]}
        self._update()
        self._generate()

    def relay(self, method: str, *arguments: Any, timeout_s: float = LIMIT_S) -> Any:
        return fetch(getattr(self.cluster.manager, method).remote(*arguments), timeout_s=timeout_s)

    def _generate(self) -> None:
        """The next step's samples, with the relay that is there."""
        self.coming: Any = self.cluster.manager.generate.remote(self.number + 1)
        self._gone = False

    def step(self) -> bool:
        """Train what was generated, and push the weights; whether nothing failed. A step that fails is given up by name."""
        failures = len(self.failed)
        self.number, all_trainers = self.number + 1, self.cluster.all
        try:
            self.phase = "generate"
            self._await_relay()
            if self._gone:
                raise train_async.PartDied("the relay was killed, and with it the data of its last step")
            box = fetch(self.coming, timeout_s=LIMIT_S)
            self._generate()
            self.phase = "train"
            all_trainers("train", self.number, box, timeout_s=LIMIT_S)
            parts = all_trainers("consumed", self.number)
        except Exception as error:
            names = self.ledger.close(self.number, why=self._named(error))
            self._await_relay()
            self.relay("forget", self.number, names)
            self.attempt(self.renew if self.phase == "train" else self._update)
            if self.phase == "generate":
                self._generate()
        else:
            self.ledger.close(self.number, parts=[part["arrays"] for part in parts])
            self.phase = "weights"
            self.attempt(self._update)
        return failures == len(self.failed)

    def end(self) -> None:
        """No trainer takes what comes."""
        fetch(self.coming, timeout_s=LIMIT_S)
        self.relay("forget", self.number + 1, self.ledger.close(self.number + 1, why="the end"))

    def attempt(self, call: Any) -> None:
        """Until it succeeds: a weight update is tried once more, then trainers are renewed."""
        attempts = [call, self._update, self.renew, self.renew]
        while attempts:
            self._renew_engines()
            try:
                attempts.pop(0)()
                break
            except Exception as error:
                self._named(error)
                self.hung += not attempts
                self._await_relay()

    def _named(self, error: Exception) -> str:
        cause = getattr(error, "cause", None) or error
        print(f"chaos: {self.phase}: {type(cause).__name__}: {str(cause)[:400]}", flush=True)
        self.failed.append(why := f"{self.phase}: {type(cause).__name__}")
        self.hung += type(error) is TimeoutError
        return why

    def _update(self) -> None:
        """Push the weights under the next version; engines that do not hold it get no requests."""
        if not self._linked:
            self.await_engines()
            self.cluster.all("connect_engines", self.cluster.urls, timeout_s=LIMIT_S)
            self._linked = True
        self.pids |= {"trainer": self.cluster.all("state"), "engine": [engine.pid for engine in self.engines]}
        self.version += 1
        (pushed,) = filter(None, self.cluster.all("update_weights", self.version))
        self.routable = pushed.routable
        self.relay("route_to", self.version, self.routable)

    def _await_relay(self) -> None:
        """A new one, which Ray has started, asks the engines, and may route to those with the newest weights. What the one before
        it had generated, and was to generate, is gone."""
        state = self.cluster.manager.state.options(max_task_retries=-1).remote()
        pids = [fetch(state, timeout_s=LIMIT_S)]
        if pids == self.pids["relay"]:
            return
        self._gone = True
        self.restarts["relay"] += 1
        self.pids["relay"] = pids
        alive = [engine.url for engine in self.engines if engine._answers()]
        self.relay("start", alive)
        if current := tuple(url for url in self.routable if url in alive):
            self.relay("route_to", self.version, current)

    def await_engines(self) -> None:
        """The new ones, too, get the next weights."""
        for engine in self.engines:
            engine.wait_ready(LIMIT_S)

    def _renew_engines(self) -> None:
        """Those that have died, at the addresses that everybody knows."""
        for engine in self.engines:
            if engine._running().poll() is not None:
                self.restarts["engine"] += 1
                sglang.kill_family(engine._running())
                for segment in sglang.segments_of([engine.pid]):
                    segment.unlink(missing_ok=True)
                with patch.object(sglang, "free_port", lambda port=engine._port: port):
                    engine._spawn()

    def renew(self) -> None:
        """All trainers: their process group is lost with one. They begin with their first weights again."""
        import ray

        self._await_relay()
        self.restarts["trainer"] += 1
        self._linked = False
        for trainer in self.cluster.trainers:
            ray.kill(trainer)
        place = Path(self.args.r3_journal).with_name(f"meet{self.restarts['trainer']}")
        made, ranks = _actors(Trainer, num_cpus=1), range(len(self.cluster.trainers))
        self.cluster.trainers = [made.remote(self.args, rank) for rank in ranks]
        self.cluster.all("init", f"file://{place}", self.cluster.manager, timeout_s=LIMIT_S)
        self._update()


@contextmanager
def deployed(folder: Path, seed: int, **changes: Any) -> Iterator[Loop]:
    """As the demo starts it, with our manager, which Ray starts again, and our trainers."""
    given = {**TABLE["options"], **changes, "seed": seed, "r3-journal": folder / "store"}.items()
    forks = EngineForks()
    args, engines = parse(["--use-r3-channel", *(f"--{name}={value}" for name, value in given)]), list[Any]()

    class Engine(sglang.EngineServer):
        def __init__(self, options: sglang.EngineOptions) -> None:
            super().__init__(options)
            engines.append(self)

    ours = {"_sides": lambda _args: (Manager, Trainer), "actor_class": _actors}
    start = patch.multiple(train_async, **ours), patch.multiple(sglang, EngineServer=Engine, _popen=forks)
    names = [sys.executable, "-m", fork_server.__name__, _socket(), *TABLE["imports"]["trainer"]]
    subprocess.Popen(names, env=os.environ | {"OMP_NUM_THREADS": "1"})  # it ends with the family
    until(lambda: os.path.exists(_socket()), limit_s=LIMIT_S)
    with forks, start[0], start[1], train_async.start_cluster(args, folder) as cluster:
        yield Loop(args, cluster, engines, Ledger(folder, cluster.spec.moe_layers))


def _socket() -> str:
    """Where trainers are forked: they import much, and are started often."""
    return os.path.join(os.environ["R3CHAOS_FOLDER"], "fork-trainer")


def _actors(cls: type, **options: Any) -> Any:
    if cls is Manager:
        return actor_class(cls, **options, max_restarts=-1)
    python = f"{sys.executable} -SE {fork_server.__file__} {_socket()}"
    return actor_class(cls, **options, runtime_env={"py_executable": python})
