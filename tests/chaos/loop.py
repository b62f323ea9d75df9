"""The demo's loop on the demo's real processes, with new ones in the place of those that die, as a framework would."""

from __future__ import annotations

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

LIMIT_S = 200.0
"""A part of a step that takes longer hangs: the sum of the deadlines that may follow one another, and a restart."""


class Loop:
    """One thread drives, others may look."""

    def __init__(self, args: Any, cluster: train_async.Cluster, engines: list[Any], ledger: Ledger) -> None:
        self.args, self.cluster, self.engines, self.ledger = args, cluster, engines, ledger
        self.version, self.routable, self.number, self.phase = 0, tuple[str, ...](), -1, "start"
        self.restarts, self.failed, self.hung = Counter(engine=0, relay=0, trainer=0), Counter[str](), 0
        self.pids = {"relay": [self.relay("state")[0]]}
        self._update()
        self.coming: Any = cluster.manager.generate.remote(0)

    def relay(self, method: str, *arguments: Any, timeout_s: float = LIMIT_S) -> Any:
        return fetch(getattr(self.cluster.manager, method).remote(*arguments), timeout_s=timeout_s)

    def step(self) -> None:
        """Train what was generated, and push the weights; a step that fails is given up by name."""
        self.number, all_trainers = self.number + 1, self.cluster.all
        try:
            self.phase = "generate"
            if self._await_relay():
                raise train_async.PartDied("the relay was killed, and with it the data of its last step")
            box = fetch(self.coming, timeout_s=LIMIT_S)
            self.coming = self.cluster.manager.generate.remote(self.number + 1)
            self.phase = "train"
            all_trainers("train", self.number, box, timeout_s=LIMIT_S)
            parts = all_trainers("consumed", self.number)
        except Exception as error:
            names = self.ledger.close(self.number, why=self._named(error))
            self._await_relay()
            self.relay("forget", self.number, names)
            self.attempt(self.renew if self.phase == "train" else self._update)
            if self.phase == "generate":
                self.coming = self.cluster.manager.generate.remote(self.number + 1)
        else:
            self.ledger.close(self.number, parts=[part["arrays"] for part in parts])
            self.phase = "weights"
            self.attempt(self._update)

    def end(self) -> None:
        """No trainer takes what comes."""
        fetch(self.coming, timeout_s=LIMIT_S)
        self.relay("forget", self.number + 1, self.ledger.close(self.number + 1, why="the end"))

    def attempt(self, call: Any) -> None:
        """Until it succeeds: a weight update is tried once more, then trainers are renewed."""
        attempts = [call, self._update, self.renew, self.renew]
        while attempts:
            for engine in self.engines:
                if engine._running().poll() is not None:
                    self._renew_engine(engine)
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
        self.failed[why := f"{self.phase}: {type(cause).__name__}"] += 1
        self.hung += type(error) is TimeoutError
        return why

    def _update(self) -> None:
        """Push the weights under the next version; engines that do not hold it get no requests."""
        self.pids |= {"trainer": self.cluster.all("state"), "engine": [engine.pid for engine in self.engines]}
        self.version += 1
        (pushed,) = filter(None, self.cluster.all("update_weights", self.version))
        self.routable = pushed.routable
        self.relay("route_to", self.version, self.routable)

    def _await_relay(self) -> bool:
        """Whether it is a new one, which Ray has started: it asks the engines, and may route to those with the newest weights."""
        state = self.cluster.manager.state.options(max_task_retries=-1).remote()
        pids = [fetch(state, timeout_s=LIMIT_S)[0]]
        if pids == self.pids["relay"]:
            return False
        self.restarts["relay"] += 1
        self.pids["relay"] = pids
        alive = [engine.url for engine in self.engines if engine._answers()]
        self.relay("start", alive)
        if current := tuple(url for url in self.routable if url in alive):
            self.relay("route_to", self.version, current)
        return True

    def _renew_engine(self, engine: Any) -> None:
        """At the address that everybody knows."""
        self.restarts["engine"] += 1
        sglang.kill_family(engine._running())
        with patch.object(sglang, "free_port", lambda: engine._port):
            engine._spawn()

    def renew(self) -> None:
        """All trainers: their process group is lost with one. They begin with their first weights again."""
        import ray

        self._await_relay()
        self.restarts["trainer"] += 1
        for trainer in self.cluster.trainers:
            ray.kill(trainer)
        place = Path(self.args.r3_journal).with_name(f"meet{self.restarts['trainer']}")
        made, ranks = actor_class(Trainer, num_cpus=1), range(len(self.cluster.trainers))
        self.cluster.trainers = [made.remote(self.args, rank) for rank in ranks]
        self.cluster.all("init", f"file://{place}", self.cluster.manager, timeout_s=LIMIT_S)
        for engine in self.engines:
            engine.wait_ready(LIMIT_S)
        self.cluster.all("connect_engines", self.cluster.urls, timeout_s=LIMIT_S)
        self._update()


@contextmanager
def deployed(folder: Path, seed: int, **changes: Any) -> Iterator[Loop]:
    """As the demo starts it, with our manager, which Ray starts again, and our trainers."""
    given = {**TABLE["options"], **changes, "seed": seed, "r3-journal": folder / "store"}.items()
    args, engines = parse(["--use-r3-channel", *(f"--{name}={value}" for name, value in given)]), list[Any]()

    class Engine(sglang.EngineServer):
        def __init__(self, options: sglang.EngineOptions) -> None:
            super().__init__(options)
            engines.append(self)

    def actors(cls: type, **options: Any) -> Any:
        return actor_class(cls, **options, max_restarts=-1 if cls is Manager else 0)

    ours = {"_sides": lambda _args: (Manager, Trainer), "actor_class": actors}
    start = patch.multiple(train_async, **ours), patch.object(sglang, "EngineServer", Engine)
    with start[0], start[1], train_async.start_cluster(args, folder) as cluster:
        yield Loop(args, cluster, engines, Ledger(folder, cluster.spec.moe_layers))
