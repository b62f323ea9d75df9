"""The demo's loop on the demo's real processes, with new ones in the place of those that die, as a framework would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from examples.async_grpo import train_async
from examples.async_grpo.options import parse
from examples.async_grpo.rays import actor_class, fetch
from examples.embedded import sglang
from examples.embedded.sglang import EngineServer, kill_family
from tests.chaos.actors import Manager, Trainer
from tests.chaos.ledger import Ledger
from tests.chaos.shim import TABLE

LIMIT_S = 200.0
"""A part of a step that takes longer hangs: the sum of the deadlines that may follow one another, and a restart."""
TRIES = 4
_free_port = sglang.free_port


class Engine(EngineServer):
    made: ClassVar[list[Engine]] = []

    def _spawn(self) -> None:
        """Each time at the address that everybody knows."""
        with patch.object(sglang, "free_port", lambda: self._port or _free_port()):
            super()._spawn()
        self.made.extend([self] if self not in self.made else [])

    def renew(self) -> bool:
        """Start it again if it has ended."""
        if dead := self._running().poll() is not None:
            kill_family(self._running())
            self._spawn()
        return dead


class Loop:
    """One thread drives, others may look."""

    def __init__(self, args: Any, cluster: train_async.Cluster, ledger: Ledger) -> None:
        self.args, self.cluster, self.ledger, self.engines = args, cluster, ledger, Engine.made
        self.version, self.routable, self.number, self.phase = 0, tuple[str, ...](), -1, "start"
        self.restarts, self.failed, self.hung = Counter(engine=0, relay=0, trainer=0), Counter[str](), 0
        self.relay_pid: int = self.relay("state")[0]
        self.coming: Any = None
        self._update()
        self._generate()

    def relay(self, method: str, *arguments: Any, timeout_s: float = LIMIT_S) -> Any:
        return fetch(getattr(self.cluster.manager, method).remote(*arguments), timeout_s=timeout_s)

    def pids(self, victim: str) -> list[int]:
        pids = {"relay": [self.relay_pid], "trainer": self.trainer_pids}
        return (pids | {"engine": [engine.pid for engine in self.engines]})[victim]

    def step(self, *, last: bool = False) -> None:
        """Train what was generated, and push the weights; a step that fails is given up by name."""
        self.number += 1
        try:
            self._await_relay()
            self.phase = "generate"
            box = fetch(self.coming, timeout_s=LIMIT_S)
            self.coming = None
            if not last:
                self._generate()
            self.phase = "train"
            self.cluster.all("train", self.number, box, timeout_s=LIMIT_S)
            parts = self.cluster.all("consumed", self.number)
        except Exception as error:
            why = self._named(error)
            self._await_relay()
            self.relay("forget", self.number, self.ledger.close(self.number, why=why))
            self._try(self._renew if self.phase == "train" else self._update)
            if self.phase == "generate":
                self._generate()
        else:
            self.ledger.close(self.number, parts=[part["arrays"] for part in parts])
            self.phase = "weights"
            self._try(self._update)

    def _generate(self) -> None:
        self.coming = self.cluster.manager.generate.remote(self.number + 1)

    def _try(self, call: Any) -> None:
        for left in reversed(range(TRIES)):
            self._renew_engines()
            try:
                call()
                break
            except Exception as error:
                self._named(error)
                call = self._renew
                if not left:
                    raise

    def _named(self, error: Exception) -> str:
        cause = getattr(error, "cause", None) or error
        print(f"chaos: {self.phase}: {type(cause).__name__}: {str(cause)[:400]}", flush=True)
        self.failed[why := f"{self.phase}: {type(cause).__name__}"] += 1
        self.hung += type(error) is TimeoutError
        return why

    def _update(self) -> None:
        """Push the weights under the next version; engines that do not hold it get no requests."""
        self.trainer_pids: list[int] = self.cluster.all("state")
        self.version += 1
        (pushed,) = filter(None, self.cluster.all("update_weights", self.version))
        self.routable = pushed.routable
        self.relay("route_to", self.version, self.routable)

    def _await_relay(self) -> None:
        """Ray starts it again; a new one asks the engines, and may route to those that hold the newest weights."""
        pid: int = fetch(self.cluster.manager.state.options(max_task_retries=-1).remote(), timeout_s=LIMIT_S)[
            0
        ]
        if pid != self.relay_pid:
            self.restarts["relay"] += 1
            alive = [engine.url for engine in self.engines if engine._answers()]
            self.relay("start", alive)
            if current := tuple(url for url in self.routable if url in alive):
                self.relay("route_to", self.version, current)
            self.relay_pid = pid

    def _renew_engines(self) -> None:
        self.restarts["engine"] += sum([engine.renew() for engine in self.engines])

    def _renew(self) -> None:
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


def _actor_class(cls: type, **options: Any) -> Any:
    return actor_class(cls, **options, max_restarts=-1 if cls is Manager else 0)


@contextmanager
def deployed(folder: Path, seed: int) -> Iterator[Loop]:
    given = {**TABLE["options"], "seed": seed, "r3-journal": folder / "store"}.items()
    args = parse(["--use-r3-channel", *(f"--{name}={value}" for name, value in given)])
    changes = {"_sides": lambda _args: (Manager, Trainer), "actor_class": _actor_class}
    with (
        patch.multiple(train_async, **changes),
        patch.object(sglang, "EngineServer", Engine),
        train_async.start_cluster(args, folder) as cluster,
    ):
        yield Loop(args, cluster, Ledger(folder, cluster.spec.moe_layers))
