"""Broadcasts of four pipeline stages to two real engines of two ranks each: ours, and slime's own updater, in turn.

    R3TEST_UPSTREAM=FOLDER python -m tests.upstream.broadcasts --work DIR [--rounds 9] [--hidden 64] [--bucket-mb 1]

slime's part is its `UpdateWeightFromDistributed` with its engine class and the buckets' size of ours. Changed: its accelerator is
a CPU's (slime's extension point), SGLang 0.5.23 gets the begin and end that it waits for, tensors come converted as ours do, and
calls to actors are calls in threads and the lock a file, which is faster than Ray's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from r3channel.weights.engine import EngineHandle
from r3channel.weights.group import WeightGroup
from r3channel.weights.session import WeightSync
from tests.dist.ranks import megatron_world, run_ranks
from tests.upstream.slime_cpu.patches import setup
from tests.upstream.wheels import sources

_STAGES, _TIMEOUT_S = 4, 300
Named = list[tuple[str, torch.Tensor]]


def stage_of(name: str) -> int:
    """The pipeline stage that has a tensor of the four layers, embeddings or head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else 0 if "embed" in name else _STAGES - 1


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One stage: rounds of both, then what engines hold after the same weights came each way."""
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    setup()
    named = [(name, t) for name, t in load_file(job["tensors"]).items() if stage_of(name) == job["rank"]]
    seconds: dict[str, list[float]] = {"slime": [], "r3channel": []}
    sums, sent = dict[str, Any](), {"slime": 0, "r3channel": 0}

    def scaled(factor: float) -> Named:
        return [(name, tensor * factor) for name, tensor in named]

    with megatron_world(job), theirs(job, named, sent) as slime, ours(job, named, sent) as mine:
        ways = {"slime": slime, "r3channel": mine}
        for number in range(job["rounds"] + 1):  # the first one is not kept
            for way in (list(ways), list(ways)[::-1])[number % 2]:
                sent[way] = 0
                given = scaled(1.0 + 2 * number + (way == "slime"))
                dist.barrier()
                begun_s = time.monotonic()
                ways[way](given, 2 * number + (way == "slime"))
                dist.barrier()
                seconds[way] += [time.monotonic() - begun_s] if number else []
        counts = dict(sent)
        for way, factor in (("r3channel", 0.5), ("slime", 0.25), ("slime", 0.5)):
            ways[way](scaled(factor), 2 * job["rounds"] + 2)
            dist.barrier()
            sums[way] = [EngineHandle(url).weight_checksums(timeout_s=60) for url in job["engines"]]
            dist.barrier()
    return {"seconds": seconds, "sent": counts, "sums": sums, "bytes": sum(t.nbytes for _, t in named)}


Update = Callable[[Named, int], object]


class ours:
    """A session of all stages."""

    def __init__(self, job: dict[str, Any], _named: Named, sent: dict[str, int]) -> None:
        broadcast = WeightGroup.broadcast

        def counted(self: WeightGroup, payload: torch.Tensor, *, timeout_s: float) -> None:
            sent["r3channel"] += 1
            broadcast(self, payload, timeout_s=timeout_s)

        WeightGroup.broadcast = counted
        options = {"group": dist.group.WORLD, "staged": False, "bucket_bytes": job["bucket_bytes"]}
        self._sync = WeightSync.whole(job["engines"], **options)

    def __enter__(self) -> Update:
        self._sync.connect(timeout_s=_TIMEOUT_S)
        return lambda given, version: self._sync.update(given, version=version, timeout_s=_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self._sync.close()


class theirs:
    """slime's updater on this stage."""

    def __init__(self, job: dict[str, Any], _named: Named, sent: dict[str, int]) -> None:
        import ray

        module: Any = import_module(
            "slime.backends.megatron_utils.update_weight.update_weight_from_distributed"
        )
        actors = import_module("slime.backends.sglang_utils.sglang_engine")

        pool = ThreadPoolExecutor(16)
        ray.get = lambda refs: [ref.result() for ref in refs] if isinstance(refs, list) else refs.result()
        ray._private.services.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
        broadcast = dist.broadcast

        def counted(*args: Any, **options: Any) -> Any:
            sent["slime"] += 1
            return broadcast(*args, **options)

        module.dist = SimpleNamespace(**{**vars(dist), "broadcast": counted})
        import_module("slime.utils.distributed_utils").init_gloo_group()
        self._engines = [Actor(engine_at(actors.SGLangEngine, url), pool) for url in job["engines"]]
        self._urls, self._lock = job["engines"], Actor(FileLock(Path(job["out"], "lock")), pool)

        class Updater(module.UpdateWeightFromDistributed):
            def _send_weights(self, pbar: Any) -> None:
                handles = [EngineHandle(url) for url in job["engines"]] if job["rank"] == 0 else []
                for handle in handles:
                    handle.begin(timeout_s=60)
                dist.barrier()
                super()._send_weights(pbar)
                for handle in handles:
                    handle.end(timeout_s=60)

            def _iter_non_expert_chunks(self) -> Iterator[Named]:
                return chunks([one for one in self.given if ".experts." not in one[0]], job["bucket_bytes"])

            def _iter_expert_chunks(self) -> Iterator[Named]:
                return chunks([one for one in self.given if ".experts." in one[0]], job["bucket_bytes"])

        args = SimpleNamespace(rollout_num_gpus_per_engine=2)
        self._updater = Updater(args, [], dict, model_name="qwen3moe", quantization_config=None)

    def __enter__(self) -> Update:
        for stage in range(_STAGES):  # engines join one group at a time
            if stage == dist.get_rank():
                self._updater.connect_rollout_engines(self._engines, self._lock)
            dist.barrier()

        def update(given: Named, _version: int) -> None:
            self._updater.given = given
            self._updater.update_weights()

        return update

    def __exit__(self, *_: object) -> None:
        self._updater.disconnect_rollout_engines()


def chunks(named: Named, most: int) -> Iterator[Named]:
    chunk, nbytes = Named(), 0
    for name, tensor in named:
        if chunk and nbytes + tensor.nbytes > most:
            yield chunk
            chunk, nbytes = Named(), 0
        chunk.append((name, tensor))
        nbytes += tensor.nbytes
    if chunk:
        yield chunk


def engine_at(kind: Any, url: str) -> Any:
    """slime's engine actor without Ray, of an engine that runs."""
    engine = object.__new__(kind)
    host, port = url.removeprefix("http://").split(":")
    engine.server_host, engine.server_port, engine.node_rank = host, port, 0
    return engine


class Actor:
    """What `actor.method.remote()` gives, by threads."""

    def __init__(self, inner: object, pool: ThreadPoolExecutor) -> None:
        self._inner, self._pool = inner, pool

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._pool.submit, getattr(self._inner, name)))


class FileLock:
    """slime's lock: one that is taken is asked for again after 0.1 s."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def release(self) -> None:
        self._path.unlink()


def main(argv: list[str]) -> int:
    from examples.embedded.model import write_model
    from examples.embedded.sglang import EngineOptions, engines

    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    for name, default in (("rounds", 9), ("hidden", 64), ("bucket-mb", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(argv)
    model = write_model(asked.work / "model", hidden=asked.hidden)
    options = EngineOptions(
        model=model,
        r3channel=False,
        extra_args=("--tp-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with engines(options, 2, timeout_s=_TIMEOUT_S) as urls:
        job = {"engines": list(urls), "layout": f"pp={_STAGES}", "tensors": str(model / "model.safetensors")}
        job |= {"rounds": asked.rounds, "bucket_bytes": asked.bucket_mb << 20}
        overlay = [sources("slime-624b824a")]
        ranks = run_ranks(
            "tests.upstream.broadcasts", asked.work / "ranks", job=job, timeout_s=900, overlay=overlay
        )
    sums = ranks[0]["sums"]
    assert sums["slime"] == sums["r3channel"] and len(sums["slime"]) == 2, (
        "engines hold other weights than slime gave them"
    )
    each = [len(rank) for engine in sums["slime"] for rank in engine]
    print(
        f"{sum(rank['bytes'] for rank in ranks) / 1e6:.1f} MB, {asked.rounds} rounds in turn; {each} parameters equal slime's"
    )
    walls = {
        way: [max(at) for at in zip(*(rank["seconds"][way] for rank in ranks), strict=True)]
        for way in ranks[0]["sent"]
    }
    for way, wall_s in walls.items():
        sent = sum(rank["sent"][way] for rank in ranks)
        print(
            f"{way:10} {sent:5} broadcasts an update, wall {median(wall_s):.2f} s ({min(wall_s):.2f} .. {max(wall_s):.2f})"
        )
    shares = [mine / other for mine, other in zip(walls["r3channel"], walls["slime"], strict=True)]
    print(f"r3channel of slime, pair by pair: {median(shares):.2f} ({min(shares):.2f} .. {max(shares):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
