"""Asynchronous GRPO, one step off, on real parts: SGLang engines, a Ray rollout manager, Megatron-core trainers.

    python examples/async_grpo/train_async.py --use-r3-channel      (or: make demo)
    python examples/async_grpo/train_async.py                       the same loop, routing as int32 through Ray

The rollout of step n+1 is generated while step n trains. `generate` returns before routing was sent; the next `generate`
joins that send. After each step the weights go to the engines, and the rows they make carry the new version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from examples.async_grpo.compare import Comparison, compare_step, dump, engine_rows, join
from examples.async_grpo.options import model_layers, parse
from examples.async_grpo.progress import await_parts, say
from examples.async_grpo.rays import actor_class, fetch, is_done, start, the_dead
from examples.embedded.nodes import TOKEN, address, enter, start_raylet
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.trace import read, spans_of
from r3channel.plan.layout import TrainerLayout
from r3channel.tools.report_page import write_page
from r3channel.tools.run_model import Between, Look, faults_of, urls_of
from r3channel.transport.auth import obtain_token

GENERATE_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 300.0
START_TIMEOUT_S = 450.0
OBJECT_STORE_BYTES = 256 << 20
_AT_0 = (
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED",
    "RAY_worker_niceness",  # nice by 15 as Ray has them, trainers stand still beside whatever else runs here
)  # fmt: skip
_QUIET = {**dict.fromkeys(_AT_0, "0"), "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "ignore"}
"""Where the user has not said otherwise; ray has read RAY_AUTH_MODE when it was imported."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every part is ended on the way out
    begin = time.monotonic()
    say("a model is written and Ray starts")  # a loaded machine takes most of a minute
    try:
        with tempfile.TemporaryDirectory(prefix="r3channel-demo-") as folder:
            args.r3_trace = args.r3_trace or folder
            for old in Path(args.r3_trace).glob("*.trace"):  # an earlier run's, for the same --report
                old.unlink()
            with start_cluster(args, Path(folder)) as cluster:
                result, text = _train(args, cluster, begin)
    except PartDied as died:  # here, where nothing is left that could print after it
        if args.report:
            say(f"the run until then: {write_page(Path(args.report))}")
        say(f"r3channel: {died}")
        return 2
    print(text)
    if args.report:
        Path(args.report, "report.json").write_text(json.dumps(result, indent=1))
        Path(args.report, "table.txt").write_text(text + "\n")
        if args.use_r3_channel:
            say(f"the run as a page: {write_page(Path(args.report).absolute())}")
    if args.json:
        print(json.dumps(result))
    compared = result["digests_checked" if args.delivery == "direct" else "ids_compared"]
    nothing = args.use_r3_channel and not compared  # then nothing was shown
    return 1 if nothing or result["ids_different"] or result["digests_different"] else 0


class PartDied(RuntimeError):
    """The process of the rollout manager or of a trainer has ended."""


class Cluster:
    """The running parts."""

    def __init__(self, spec: RoutingSpec, manager: Any, trainers: list[Any], urls: list[str]) -> None:
        self.spec, self.manager, self.trainers, self.urls = spec, manager, trainers, urls
        self.done = 0
        """Steps that were trained."""

    def all(self, method: str, *arguments: Any, timeout_s: float = STEP_TIMEOUT_S) -> list[Any]:
        """Call a method on every trainer and wait for all."""
        return fetch([getattr(t, method).remote(*arguments) for t in self.trainers], timeout_s=timeout_s)


def _train(args: argparse.Namespace, cluster: Cluster, begin: float) -> tuple[dict[str, Any], str]:
    """The loop itself: generate / async_train / update_weights."""
    import ray

    from examples.async_grpo import summary

    where = ray.get_runtime_context().gcs_address
    say(f"all parts are up after {time.monotonic() - begin:.0f} s; Ray is at {where}")
    total, steps, reports = Comparison(), [], []
    update_weights(cluster, 0, reports)
    begin_s = time.time()  # what was compiled before is no part of the run
    coming = cluster.manager.generate.remote(0)
    cluster.all("begin")
    for step in range(args.steps):
        box = fetch(coming, timeout_s=GENERATE_TIMEOUT_S)
        if step + 1 < args.steps:
            coming = cluster.manager.generate.remote(step + 1)  # generated while this step trains
        steps.append(_merge(cluster.all("train", step, box)))
        compared, mismatch = _audit(args, cluster, step, total)
        steps[-1]["routing_mismatch"], cluster.done = mismatch, step + 1
        ids = f", {compared[0]:,} ids compared, {compared[1]} different" if args.delivery == "inband" else ""
        say(f"step {step}: loss {np.mean(steps[-1]['loss'] or 0.0):+.4f}{ids}")
        if step + 1 < args.steps:  # no weights change in the middle of a generation
            prefetch(args, cluster, step + 1, coming)
        update_weights(cluster, step + 1, reports)
    if args.export:
        _export(Path(args.export).absolute(), cluster)
    trainers = cluster.all("end")
    manager = fetch(cluster.manager.report.remote())
    result = summary.summarise(
        args=args, spec=cluster.spec, manager=manager, trainers=trainers, steps=steps, total=total, reports=reports,
        wall_s=time.monotonic() - begin, spans=spans_of(read(Path(args.r3_trace))[0]), begin_s=begin_s,
        faults=_page_faults(manager["metrics_url"]),
    )  # fmt: skip
    if args.dump:
        dump(Path(args.dump), total)
        Path(args.dump, "bytes.json").write_text(
            json.dumps(summary.bytes_by_leg(manager, trainers), indent=1)
        )
    return result, summary.table(result, trainers)


def prefetch(args: argparse.Namespace, cluster: Cluster, step: int, coming: Any) -> None:
    """Wait for a rollout. Its routing travels from then on, beside the weights; on the default path it came with the data."""
    box = fetch(coming, timeout_s=GENERATE_TIMEOUT_S)
    if args.use_r3_channel:
        cluster.all("prefetch", step, box)


def update_weights(cluster: Cluster, version: int, reports: list[Any]) -> None:
    """Push; the next rollout asks only engines that hold this version."""
    (pushed,) = [found for found in cluster.all("update_weights", version) if found is not None]
    reports.append(pushed.report)
    for url, why in pushed.report.evicted.items():
        say(
            f"weight version {version} went without {url}, which gets no requests until an update reaches it: {why}"
        )
    fetch(cluster.manager.route_to.remote(version, pushed.routable))


def _export(folder: Path, cluster: Cluster) -> None:
    from examples.async_grpo.weights_side import ask_engines

    cluster.all("export_weights", str(folder))
    (folder / "engines.json").write_text(json.dumps(ask_engines(cluster.urls)))


def _audit(
    args: argparse.Namespace, cluster: Cluster, step: int, total: Comparison
) -> tuple[tuple[int, int], list[dict[str, Any]]]:
    """Fetch both ends of a step and compare them. These bytes are the demo's own, not the channel's."""
    if not args.use_r3_channel:
        return (0, 0), []
    layers, layout = cluster.spec.moe_layers, TrainerLayout.parse(args.layout)
    copies = 1 if layout.sequence_parallel else layout.tp
    replied = fetch(cluster.manager.r3channel_control.remote("replied", {"step": step}))
    parts = cluster.all("consumed", step)
    router = join(
        [_with_rank(part["arrays"], rank, step) for rank, part in enumerate(parts) if part["arrays"]]
    )
    audits = [part["mismatch"].to_dict() for part in parts if part["mismatch"] is not None]
    if not replied:  # delivered to the relay alone: the routers' digests are the verdict
        return (0, 0), audits
    passes = ("natural",) if args.no_replay else ("forward", "recompute", "logprob")
    engine = engine_rows(replied, layers)
    return compare_step(total, engine=engine, router=router, copies=copies, passes=passes), audits


def _with_rank(arrays: dict[str, Any], rank: int, step: int) -> dict[str, Any]:
    count = len(arrays["sample"])
    return arrays | {"rank": np.full(count, rank), "step": np.full(count, step)}


def _merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-prob differences are summed over DP; one TP rank of the last stage speaks for its group."""
    return {
        "loss": [loss for result in results for loss in result["loss"]],
        "replay_on": [result["replay_on"] for result in results],
        "replay_off": [result["replay_off"] for result in results],
        "logprobs": [token for result in results for token in result["logprobs"]],
    }


# -- starting and ending the parts -------------------------------------------------------------------------------------


def _sides(args: argparse.Namespace) -> tuple[type, type]:
    """The classes of the rollout manager and of the trainers."""
    if args.use_r3_channel:  # both ends are compared
        from examples.async_grpo.variants.audited import AuditedManager as Manager
        from examples.async_grpo.variants.audited import AuditedTrainer as Trainer
    else:
        from examples.async_grpo.rollout import RolloutManager as Manager
        from examples.async_grpo.trainer import Trainer

    return Manager, Trainer


@contextlib.contextmanager
def start_cluster(args: argparse.Namespace, folder: Path) -> Iterator[Cluster]:
    """Engines, Ray, manager and trainers, started beside one another; all gone at the end."""
    from examples.embedded.model import write_model

    layout = TrainerLayout.parse(args.layout)
    # SGLang's own Qwen3-MoE has no dense layers; the embedded one on a CPU has
    dense = (0,) if args.device == "cpu" else ()
    model = write_model(folder / "model", seed=args.seed, layers=model_layers(layout), dense_layers=dense)
    spec = RoutingSpec.from_hf_config(model)
    if args.use_r3_channel and args.r3_journal is None:
        args.r3_journal = str(folder / "store")
    args.model, args.vocab = str(model), json.loads((model / "config.json").read_text())["vocab_size"]
    if args.use_r3_channel and args.r3_metrics_dir is None:
        args.r3_metrics_dir = str(folder / "targets")
    if args.delivery == "direct":
        from examples.embedded.sglang import free_port

        args.r3_ingest_port = args.r3_ingest_port or free_port()
        args.r3_token_file = args.r3_token_file or (TOKEN if args.nodes > 1 else str(folder / "token"))
        obtain_token(Path(args.r3_token_file))
    with _engines(args, model) as engines, _ray():
        say(f"Ray is up; engines and trainers start: {args.engines} and {layout.world_size}")
        manager, trainers = _actors(args, spec, folder, engines)
        cluster = Cluster(spec, manager, trainers, [engine.url for engine in engines])
        try:
            yield cluster
            cluster.all("close")
            fetch(cluster.manager.close.remote(), timeout_s=STEP_TIMEOUT_S)
        except Exception as error:
            if text := _obituary(cluster, channel=args.use_r3_channel):
                raise PartDied(text) from error
            raise
        finally:
            _kill([manager, *trainers])


def _obituary(cluster: Cluster, *, channel: bool) -> str:
    """Who has died, what was not delivered and what to do, if somebody has: the error at hand may be a survivor's."""
    manager = "the rollout manager, with the relay in it,"
    names = {manager: cluster.manager} | {
        f"trainer rank {rank}": each for rank, each in enumerate(cluster.trainers)
    }
    if not (dead := the_dead(names)):
        return ""
    text = (
        f"{' and '.join(dead)} ended by itself: {'; '.join(dead.values())}. {cluster.done} steps are trained"
    )
    if channel and manager not in dead:
        from r3channel.relay.ray_host import RayRelay

        status = RayRelay(cluster.manager, timeout_s=5.0).status()["steps"]
        text += f"; undelivered: {({step: each['missing'] for step, each in status.items() if each['missing']}) or 'none'}"
    return text + ". Killed? `dmesg` knows whether for memory. Start again from your last checkpoint"


def _engine_options(args: argparse.Namespace, model: Path) -> Any:
    from examples.embedded.sglang import EngineOptions

    env = {}
    if args.use_r3_channel:  # each engine takes a free port: those of one machine share an environment
        config = ChannelConfig.from_args(args)
        own = {name: getattr(config, name) for name in ("interface", "run_name", "trace", "metrics_dir")}
        if args.delivery == "direct":  # engines start before there is a relay
            url, token_file = f"http://{address('manager')}:{args.r3_ingest_port}", args.r3_token_file
            own |= {"delivery": "direct", "relay_url": url, "token_file": token_file}
        env = {f"R3CHANNEL_{name.upper()}": value for name, value in own.items()} | {
            "R3CHANNEL_METRICS_PORT": "0"
        }
    return EngineOptions(
        model=model, r3channel=args.use_r3_channel, random_seed=args.seed, tp=args.engine_tp, env=env,
        device=args.device, dtype={"cpu": "float32", "cuda": "bfloat16"}[args.device], host=address("engine"),
        before=enter("engine"),
    )  # fmt: skip


@contextlib.contextmanager
def _engines(args: argparse.Namespace, model: Path) -> Iterator[list[Any]]:
    from examples.embedded.sglang import EngineServer

    options = _engine_options(args, model)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(EngineServer(options)) for _ in range(args.engines)]


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """A Ray of our own: `address="local"` ignores RAY_ADDRESS and whatever address an older cluster left behind."""
    os.environ.update(_QUIET | os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"})
    import ray

    start(
        address="local",
        num_cpus=16,  # processes here share the cores; Ray only counts them
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=address("manager"),
        logging_level=logging.ERROR,
        log_to_driver=True,
    )
    try:
        start_raylet(ray.get_runtime_context().gcs_address, OBJECT_STORE_BYTES)
        yield
    finally:
        ray.shutdown()


def _actors(
    args: argparse.Namespace, spec: RoutingSpec, folder: Path, engines: list[Any]
) -> tuple[Any, list[Any]]:
    """Trainers build their model while the engines start; the manager asks running engines."""
    size = TrainerLayout.parse(args.layout).world_size
    manager_class, trainer_class = _sides(args)
    # Ray names a lone node as it likes, whatever address it is given
    on, other = (
        {f"node:{address(name)}": 0.001} if args.nodes > 1 else {} for name in ("manager", "trainer")
    )
    manager_class = actor_class(manager_class, max_concurrency=64, name="r3channel-relay", resources=on)
    trainer_class = actor_class(trainer_class, num_cpus=1, resources=other)
    trainers = [trainer_class.remote(args, rank) for rank in range(size)]
    manager = manager_class.remote(args, spec.to_dict())
    building = [trainer.init.remote(f"file://{folder}/rendezvous", manager) for trainer in trainers]
    await_parts(
        {f"engine {number}": engine.is_ready for number, engine in enumerate(engines)}
        | {f"trainer {rank}": partial(is_done, built) for rank, built in enumerate(building)},
        timeout_s=START_TIMEOUT_S,
    )
    urls, built = [engine.url for engine in engines], fetch(building)
    started = fetch(manager.start.remote(urls), timeout_s=START_TIMEOUT_S)
    fetch([trainer.connect_engines.remote(urls) for trainer in trainers], timeout_s=START_TIMEOUT_S)
    _write_endpoints(args, urls, started, built)
    return manager, trainers


def _write_endpoints(
    args: argparse.Namespace, urls: list[str], manager: dict[str, Any], trainers: list[Any]
) -> None:
    """Where to look while it runs."""
    if args.report:
        Path(args.report).mkdir(parents=True, exist_ok=True)
        served = {"relay": manager["metrics_url"]} | {
            f"trainer{i}": t["metrics_url"] for i, t in enumerate(trainers)
        }
        pages = {name: url for name, url in served.items() if url}
        pages |= _engine_pages(args)
        path = Path(args.report, "endpoints.json")
        found = {"engines": urls, "metrics": pages, "rows": manager.get("rows_at")}
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").rename(path)


def _engine_pages(args: argparse.Namespace) -> dict[str, str]:
    """Engine -> its page, by what each has left in the folder of targets."""
    files = sorted(Path(args.r3_metrics_dir).glob("engine-*.json")) if args.use_r3_channel else []
    found = [json.loads(file.read_text())[0]["targets"][0] for file in files]
    return {f"engine{number}": f"http://{target}/metrics" for number, target in enumerate(found)}


def _page_faults(page: str) -> list[str]:
    """What the pages that the relay lists show at the run's end, in the words of `r3channel top`."""
    urls = urls_of(page.replace("/metrics", "/targets")) if page else []
    return [*faults_of(Between(Look(url, 0.0, []), Look.read(url, timeout_s=10.0)) for url in urls)]


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):  # already gone
            ray.kill(actor)


if __name__ == "__main__":
    sys.exit(main())
