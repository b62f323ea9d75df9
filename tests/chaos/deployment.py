"""The demo's real processes, started as the demo starts them, and started again when they have died, as a framework would."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.async_grpo.options import model_layers, parse
from examples.async_grpo.rays import actor_class, fetch
from examples.async_grpo.train_async import Cluster, _engine_options, _ray
from examples.embedded import sglang
from examples.embedded.model import write_model
from examples.embedded.sglang import EngineServer, free_port, kill_family
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.transport.auth import obtain_token
from tests.chaos.actors import Manager, Trainer

START_S = 240.0
OPTIONS = (
    "--use-r3-channel --delivery direct --weights exact --engines 2 --r3-send-timeout-s 8 --r3-step-timeout-s 90 "
    "--r3-join-timeout-s 30 --r3-frame-timeout-s 15 --r3-unclaimed-timeout-s 10 --r3-store-bytes 67108864"
).split()


class Engine(EngineServer):
    def again(self) -> None:
        """Start anew at the address that everybody knows."""
        kill_family(self._running())
        port = self._port
        sglang.free_port, before = lambda: port, sglang.free_port
        try:
            self._spawn()
        finally:
            sglang.free_port = before


class Deployment(ExitStack):
    """Two engines, a relay in its actor, and trainers, under a proxy. A context manager. One thread drives, others may look."""

    def __init__(self, folder: Path, *, layout: str, seed: int) -> None:
        super().__init__()
        self.folder, self.layout = folder, TrainerLayout.parse(layout)
        self.args = parse([*OPTIONS, "--layout", layout, "--seed", str(seed)])
        self.version, self._lives, self.routable = 0, 0, tuple[str, ...]()
        self.restarts = dict.fromkeys(("engine", "relay", "trainer"), 0)

    def start(self) -> None:
        args, folder = self.args, self.folder
        model = write_model(folder / "model", seed=args.seed, layers=model_layers(self.layout))
        args.model, args.vocab = str(model), json.loads((model / "config.json").read_text())["vocab_size"]
        args.r3_journal, args.r3_metrics_dir = str(folder / "store"), str(folder / "targets")
        args.r3_ingest_port, args.r3_token_file = free_port(), str(folder / "token")
        obtain_token(folder / "token")
        self.spec = RoutingSpec.from_hf_config(model)
        self.engines = self._start_engines(args, model)
        self.enter_context(_ray())
        options: dict[str, Any] = {"num_cpus": 1, "max_concurrency": 64, "name": "r3channel-relay"}
        manager = actor_class(Manager, **options, max_restarts=-1).remote(args, self.spec.to_dict())
        self.cluster = Cluster(self.spec, manager, [], [engine.url for engine in self.engines])
        self.callback(self._kill)
        trainers = self._build_trainers()
        for engine in self.engines:
            engine.wait_ready(START_S)
        self.cluster.urls = [engine.url for engine in self.engines]
        self.relay_life = self._greet()
        self._attach(*trainers)

    def _start_engines(self, args: argparse.Namespace, model: Path) -> list[Engine]:
        (self.folder / "tap").mkdir()
        options = _engine_options(args, model)
        tap = {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.chaos.models",
            "R3TEST_TAP": str(self.folder / "tap"),
        }
        options.env.update(tap)  # pyright: ignore[reportAttributeAccessIssue]
        logs = [self.folder / f"engine{number}.log" for number in range(args.engines)]
        return [self.enter_context(Engine(options, log_path=log)) for log in logs]

    # -- trainers ----------------------------------------------------------------------------------------------------------

    def _build_trainers(self) -> tuple[list[Any], list[Any]]:
        self._lives += 1
        place = f"file://{self.folder}/rendezvous{self._lives}"
        made = actor_class(Trainer, num_cpus=1)
        self.cluster.trainers = [made.remote(self.args, rank) for rank in range(self.layout.world_size)]
        trainers = self.cluster.trainers
        return trainers, [trainer.init.remote(place, self.cluster.manager) for trainer in trainers]

    def _attach(self, trainers: list[Any], building: list[Any]) -> None:
        fetch(building, timeout_s=START_S)
        self.trainer_lives = fetch([trainer.life.remote() for trainer in trainers])
        fetch([trainer.connect_engines.remote(self.cluster.urls) for trainer in trainers], timeout_s=START_S)
        self.update()

    def renew_trainers(self) -> None:
        """All of them: their process group is lost with one."""
        import ray

        self.restarts["trainer"] += 1
        for trainer in self.cluster.trainers:
            ray.kill(trainer)
        building = self._build_trainers()
        self.await_engines()
        self._attach(*building)

    def update(self) -> None:
        """Push the weights under the next version; engines that do not hold it get no requests."""
        self.version += 1
        pushed = next(filter(None, self.cluster.all("update_weights", self.version)))
        self.routable = pushed.routable
        self.relay("route_to", self.version, self.routable)

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def await_engines(self) -> None:
        for engine in self.engines:
            if engine._running().poll() is not None:
                self.restarts["engine"] += 1
                engine.again()
        for engine in self.engines:
            engine.wait_ready(START_S)

    def relay(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        return fetch(getattr(self.cluster.manager, method).remote(*arguments), timeout_s=timeout_s)

    def await_relay(self) -> bool:
        """Whether the relay is another process than before. It is ready to be used when this returns."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                life = self.relay("life")
                break
            except Exception:  # Ray starts it again
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
        if life == self.relay_life:
            return False
        self.restarts["relay"] += 1
        self.relay_life = self._greet()
        return True

    def _greet(self) -> int:
        """A new manager asks the engines that live, and may route to those that hold the newest weights."""
        alive = [engine.url for engine in self.engines if engine._answers()]
        self.relay("start", alive, timeout_s=START_S)
        if current := tuple(url for url in self.routable if url in alive):
            self.relay("route_to", self.version, current)
        return self.relay("life")

    def _kill(self) -> None:
        import ray

        for actor in [self.cluster.manager, *self.cluster.trainers]:
            ray.kill(actor)
