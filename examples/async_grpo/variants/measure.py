"""The demo's loop with nothing in it but the loop, for `r3channel bench e2e`: no taps at either end, no comparison.

    python examples/async_grpo/variants/measure.py --mode channel|default|off --steps N

`channel`: routing over r3channel; `default`: int32 through Ray; `off`: engines capture nothing and the routers choose.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.async_grpo.options import parse
from examples.async_grpo.rays import fetch
from examples.async_grpo.train_async import (
    GENERATE_TIMEOUT_S,
    Cluster,
    Parts,
    prefetch,
    start_cluster,
    update_weights,
)
from examples.async_grpo.variants import measured as sides


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("channel", "default", "off"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed; one more is run before them")
    parser.add_argument("--layout", default="dp=2,tp=2,pp=1,cp=1")
    options = parser.parse_args(argv)
    args = parse([
        "--steps", str(options.steps + 1), "--layout", options.layout,
        *(["--use-r3-channel"] if options.mode == "channel" else []),
    ])  # fmt: skip
    args.mode = options.mode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every part is ended on the way out
    parts = Parts(sides.MeasuredManager, sides.MeasuredTrainer, sides.engine_options)
    with (
        tempfile.TemporaryDirectory(prefix="r3channel-e2e-") as folder,
        start_cluster(args, Path(folder), parts) as cluster,
    ):
        result = _loop(args, cluster)
    print(json.dumps(result))
    return 0


def _loop(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """generate / async_train / update_weights, as in train_async.py. The first step warms up and is not counted."""
    reports: list[Any] = []
    update_weights(cluster, 0, reports)
    coming = cluster.manager.generate.remote(0)
    cluster.all("begin")
    step_s, trained = [], []
    for step in range(args.steps):
        begin_s = time.monotonic()
        box = fetch(coming, timeout_s=GENERATE_TIMEOUT_S)
        coming = cluster.manager.generate.remote(step + 1)  # generated while this step trains
        trained.append(cluster.all("timed_train", step, box))
        prefetch(args, cluster, step + 1, coming)
        update_weights(cluster, step + 1, reports)
        step_s.append(time.monotonic() - begin_s)
    # the last rollout is trained on, too, so that nothing is left undelivered; it is not counted
    cluster.all("timed_train", args.steps, fetch(coming, timeout_s=GENERATE_TIMEOUT_S))
    rollout = fetch(cluster.manager.rollouts.remote())
    return _result(args, step_s[1:], trained[1:], rollout[1 : args.steps])


def _result(
    args: argparse.Namespace, step_s: list[float], trained: list[Any], rollout: list[tuple[float, int]]
) -> dict[str, Any]:
    def slowest(name: str) -> list[float]:
        return [max(rank[name] for rank in ranks) for ranks in trained]

    return {
        "mode": args.mode,
        "steps": len(step_s),
        "step_s": statistics.median(step_s),
        "train_wait_s": statistics.median(slowest("wait_s")),
        "train_s": statistics.median(slowest("train_s")),
        "trainer_cpu_s": statistics.median(slowest("cpu_s")),
        "rollout_tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in rollout),
    }


if __name__ == "__main__":
    sys.exit(main())
