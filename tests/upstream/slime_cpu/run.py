"""slime's train_async.py on a CPU, with the channel or as it is: a checkpoint, real SGLang servers, prompts, then the driver.

    R3TEST_UPSTREAM=FOLDER python -m tests.upstream.slime_cpu.run --work DIR [--tp 2] ... [--stock] [-- slime's arguments]

Prints one JSON object: what routers used beside what engines said, bytes, seconds, memory, and slime's own numbers of each step.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from examples.embedded import sglang
from examples.embedded.model import VOCAB_SIZE, write_model
from examples.embedded.sglang import EngineOptions, EngineServer, environment, free_port, kill_family
from r3channel.model.spec import RoutingSpec
from r3channel.tools.report_page import write_page
from r3channel.transport.auth import create_token, read_token
from tests.support.children import ROOT
from tests.support.prometheus import answer, prometheus
from tests.upstream.slime_cpu.process_use import ProcessUse
from tests.upstream.slime_cpu.router import Router
from tests.upstream.slime_cpu.sources import Sources, ready
from tests.upstream.slime_cpu.witness import compare, said_by_dump, said_by_recording

_HERE = "tests.upstream.slime_cpu"
_LOG_TAIL = 3000
_TIMES = {"m": 6, "h": 360}
"""The alerts' units in seconds: a minute is six, because a job is short."""
_FIRED = 'max by (alertname, reason, instance) (max_over_time(ALERTS{alertstate="firing"}[1d]))'
WARM_STEPS = 2
"""In a run's first steps processes warm up: what is measured counts from behind them."""


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m {_HERE}.run", description=about)
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--sources", type=lambda text: Path(text).resolve(), help="default: in --work")
    parser.add_argument("--steps", type=int, default=2)
    for name in ("tp", "dp", "cp", "ep", "pp", "engines"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--response-length", type=int, default=24)
    parser.add_argument("--delivery", choices=("inband", "direct"), default="inband")
    parser.add_argument("--live", action="store_true", help="no replay at all")
    parser.add_argument("--bare", action="store_true", help="for timing: no witness, recording or dump")
    parser.add_argument("--samples", type=int, default=8, help="of a step, in groups of four")
    parser.add_argument("--stock", action="store_true", help="slime's --use-rollout-routing-replay instead")
    parser.add_argument("--slimes-router", action="store_true", help="slime starts sglang-router, unused")
    parser.add_argument("--script", default="train_async.py")
    parser.add_argument("--corrupt", action="store_true", help="a wrong id in a trainer's memory")
    parser.add_argument("--own-engines", action="store_true", help="slime starts the servers itself")
    parser.add_argument("--no-engine", action="store_true", help="for -- --load-debug-rollout-data")
    parser.add_argument("--dropping-router", action="store_true", help="requests lose return_routed_experts")
    parser.add_argument("--faults", default="", help="stop=ROLLOUT,kill=ROLLOUT; the store may be tiny")
    parser.add_argument("--kill", action="store_true", help="the rollout manager, while rows travel")
    parser.add_argument("--timeout-s", type=float, default=420)
    parser.add_argument("more", nargs="*", help="after --: further arguments of slime")
    options = parser.parse_args(argv)
    options.world = options.tp * options.dp * options.cp * options.pp
    return options


def main(argv: list[str] | None = None) -> int:
    result = run(options_of(argv))
    print(json.dumps(result, indent=1))
    return int(result["exit"])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One job from nothing; `exit` is that of the process that ran slime's script."""
    sources = ready(options.sources or options.work / "sources")
    for name in ("routers", "rollouts", "recording", "weights", "told", "prometheus"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    shape = {"layers": options.layers, "experts": options.experts, "top_k": options.top_k}
    model = write_model(options.work / "model", dtype="bfloat16", **shape)
    prompts = _write_prompts(options.work / "prompts.jsonl")
    _write_prompts(options.work / "held.jsonl", count=4)
    started = time.monotonic()
    with ExitStack() as stack:
        drops = "return_routed_experts" if options.dropping_router else ""
        router = stack.enter_context(Router(drops=drops))
        # short: sockets lie below it
        ray_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="r3-"))
        alerts = stack.enter_context(watched(options.work)) if options.faults else {}
        options.port, options.token = free_port(), Path(ray_dir, "token")
        create_token(options.token)
        Path(ray_dir, "tmp").mkdir()
        servers = [
            stack.enter_context(
                EngineServer(_engine(options, model), log_path=options.work / f"engine-{index}.log")
            )
            for index in range(0 if options.no_engine or options.own_engines else options.engines)
        ]
        for server in servers:
            server.wait_ready()
        arguments = _slime_arguments(options, model, prompts, [server.url for server in servers], router.port)
        command = [sys.executable, "-m", f"{_HERE}.driver", str(sources.slime / options.script), *arguments]
        with open(log := options.work / "driver.log", "w") as out:
            child = subprocess.Popen(
                command, env=_environment(options, sources, ray_dir, router.port), cwd=options.work, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            use = stack.enter_context(
                ProcessUse(Path(ray_dir), lambda: f"perf {WARM_STEPS - 1}: " in log.read_text())
            )
            try:
                code = child.wait(options.timeout_s)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                ended_s = time.time()
                kill_family(child)
        token_in = _holding(read_token(options.token), Path(ray_dir), options.work) - {options.token}
    told, trace = options.work / "routers", options.work / "trace"
    return {
        "exit": code,
        "token_in": sorted(map(str, token_in)),
        "told": sorted(
            path.name for kind in ("told/*.txt", "wandb/**/*.wandb") for path in options.work.glob(kind)
        ),
        "said": re.findall("r3channel: (.*)", log.read_text(errors="replace")),
        "pages": " ".join(path.read_text() for path in options.work.glob("told/page-*.txt")),
        "page": write_page(trace).read_text() if trace.is_dir() else "",
        "logged": sum(file.read_bytes().count(b"r3channel/wait_s") for file in options.work.rglob("*.wandb")),
        "seconds": round(time.monotonic() - started, 1),
        "use": use.found(),
        "killed_s": ended_s - float((options.work / "told/killed").read_text()) if options.kill else None,
        "rows": _compared(options, model) if told.is_dir() and not options.live else {},
        "perf": _numbers(r"perf \d+: (\{.*perf/step_time.*\})", log),
        "alerts": alerts,
        "processes": {path.stem: json.loads(path.read_text()) for path in sorted(told.glob("*.json"))},
        "steps": _numbers(r"step \d+: (\{'train/[^}]*\})", log),
        "tail": "" if code == 0 else log.read_text(errors="replace")[-_LOG_TAIL:],
    }


@contextmanager
def watched(work: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Alert of the project's own -> the labels with which it has fired, filled at the end; empty where there is no Prometheus."""
    fired: dict[str, list[dict[str, str]]] = {}
    rules = (ROOT / "dashboards/alerts.yml").read_text()
    rules = re.sub(r"(\d+)([mh])\b", lambda time: f"{int(time[1]) * _TIMES[time[2]]}s", rules)
    with prometheus(work, work / "told", every="2s", rules=rules) as api:
        yield fired
        if not api:
            return
        time.sleep(2.0)  # the last evaluation
        for one in answer(api, f"query?query={quote(_FIRED)}"):
            fired.setdefault(one["metric"].pop("alertname"), []).append(one["metric"])


def _engine(options: argparse.Namespace, model: Path) -> EngineOptions:
    direct = {
        "R3CHANNEL_DELIVERY": "direct",
        "R3CHANNEL_RELAY_URL": f"http://127.0.0.1:{options.port}",
        "R3CHANNEL_TOKEN_FILE": str(options.token),
    }
    env = direct if options.delivery == "direct" else {}
    ours = not (options.stock or options.live)
    return EngineOptions(model=model, r3channel=ours, dtype="bfloat16", env=env)


def _slime_arguments(
    options: argparse.Namespace, model: Path, prompts: Path, engines: list[str], router_port: int
) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    dense = set(config["mlp_only_layers"])
    pattern = [int(layer not in dense) for layer in range(config["num_hidden_layers"])]
    trainer = {"SLIME_CPU_TRAINER": "1"}
    text = f"""
    --hf-checkpoint {model} --load {model}
    --num-layers {config["num_hidden_layers"]} --hidden-size {config["hidden_size"]}
    --ffn-hidden-size {config["intermediate_size"]} --num-attention-heads {config["num_attention_heads"]}
    --group-query-attention --num-query-groups {config["num_key_value_heads"]} --kv-channels {config["head_dim"]}
    --qk-layernorm --normalization RMSNorm --norm-epsilon {config["rms_norm_eps"]} --swiglu --disable-bias-linear
    --position-embedding-type rope --use-rotary-position-embeddings --rotary-base {int(config["rope_theta"])}
    --untie-embeddings-and-output-weights --vocab-size {config["vocab_size"]} --make-vocab-size-divisible-by 1
    --max-position-embeddings {config["max_position_embeddings"]} --seq-length 256
    --num-experts {config["num_experts"]} --moe-router-topk {config["num_experts_per_tok"]}
    --moe-ffn-hidden-size {config["moe_intermediate_size"]} --moe-layer-freq {json.dumps(pattern).replace(" ", "")}
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function softmax
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --attention-dropout 0 --hidden-dropout 0
    --spec {_HERE}.functions layers --transformer-impl local --use-cpu-initialization --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused
    --accumulate-allreduce-grads-in-fp32
    --tensor-model-parallel-size {options.tp} --pipeline-model-parallel-size {options.pp}
    --context-parallel-size {options.cp} --expert-model-parallel-size {options.ep} --expert-tensor-parallel-size 1
    --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0
    --actor-num-nodes 1 --actor-num-gpus-per-node {options.world}
    --num-gpus-per-node {max(options.world, options.engines)}
    --train-env-vars {json.dumps(trainer, separators=(",", ":"))}
    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir {options.work / "weights"}
    --prompt-data {prompts} --input-key text --label-key label --custom-rm-path {_HERE}.functions.reward
    --num-rollout {options.steps} --rollout-batch-size {options.samples // 4} --n-samples-per-prompt 4
    --global-batch-size {options.samples}
    --micro-batch-size 1 --rollout-max-response-len {options.response_length} --rollout-temperature 1.0
    --advantage-estimator grpo --eps-clip 0.2
    --use-dynamic-batch-size --max-tokens-per-gpu {max(256, options.response_length + 32)}
    """
    router = ["--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(router_port)]
    arguments = text.split() + ([] if options.slimes_router else router)
    arguments += ["--rollout-external-engine-addrs", *engines] if engines else []
    if options.own_engines:
        arguments += ["--rollout-num-gpus", str(options.engines), "--rollout-num-gpus-per-engine", "1"]
        arguments += _engine_arguments(_engine(options, model))
    if not options.bare:
        arguments += ["--save-debug-rollout-data", f"{options.work}/rollouts/{{rollout_id}}.pt"]
    arguments += ["--sequence-parallel"] if options.tp > 1 else []
    # what Megatron allows without Transformer Engine
    arguments += ["--cp-comm-type", "all_gather"] if options.cp > 1 else []
    if options.stock:
        arguments.append("--use-rollout-routing-replay")
    elif not options.live:
        arguments += ["--use-r3-channel", "--r3-delivery", options.delivery]
        arguments += [] if options.bare else ["--r3-record", str(options.work / "recording")]
    if options.delivery == "direct":
        arguments += ["--r3-ingest-port", str(options.port), "--r3-token-file", str(options.token)]
    return [*arguments, *options.more]


_SLIMES_OWN = {
    "--model-path", "--host", "--port", "--random-seed", "--enable-return-routed-experts", "--skip-server-warmup",
}  # fmt: skip


def _engine_arguments(engine: EngineOptions) -> list[str]:
    """A CPU server's arguments as slime takes them, but for those that it gives its servers itself."""
    found: list[str] = []
    kept = True
    for word in engine.arguments(port=0):
        kept = word not in _SLIMES_OWN if word.startswith("--") else kept
        found += [word.replace("--", "--sglang-", 1) if word.startswith("--") else word] if kept else []
    return found


def _environment(options: argparse.Namespace, sources: Sources, ray_dir: str, router: int) -> dict[str, str]:
    env = environment()
    if options.own_engines:
        # slime numbers its engines behind the trainers, and SGLang takes the number for a NUMA node's
        env["SGLANG_CPU_OMP_THREADS_BIND"] = sglang.cores_of_ranks(options.world + options.engines)
    names = (
        "R3DEMO_EMBEDDED", "SGLANG_USE_CPU_ENGINE", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    )  # fmt: skip
    megatron, slime, extra = sources.path
    inherited = {
        "SLIME_ACCELERATOR": "cpu", "SLIME_HOST_IP": "127.0.0.1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": os.pathsep.join([str(ROOT), megatron, slime, env["PYTHONPATH"], extra]),
        "SLIME_CPU_WITNESS": "" if options.bare else str(options.work / "routers"), "SLIME_CPU_TOLD": str(options.work / "told"),
        "R3CHANNEL_METRICS_PORT": "0", "R3CHANNEL_METRICS_DIR": str(options.work / "told"),
        "TMPDIR": f"{ray_dir}/tmp", "SLIME_CPU_FAULTS": options.faults, "SLIME_CPU_CORRUPT": str(int(options.corrupt)),
        "SLIME_CPU_KILL": str(int(options.kill)),
        "OMP_NUM_THREADS": env["OMP_NUM_THREADS"], "SLIME_CPU_ROUTER": str(router),
        **{name: value for name, value in env.items() if name.startswith("SGLANG_") or name in names},
    }  # fmt: skip
    return {
        **env, **inherited, "SLIME_CPU_WORKER_ENV": json.dumps(inherited),
        "SLIME_CPU_GPUS": str(options.world + (options.engines if options.own_engines else 0)),
        "SLIME_CPU_RAY_DIR": ray_dir, "RAY_USAGE_STATS_ENABLED": "0", "RAY_debug_dump_period_milliseconds": "1000",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }  # fmt: skip


def _holding(token: str, *folders: Path) -> set[Path]:
    """Files in which the token stands: logs, recordings, pages, Ray's session, and what a process left in its TMPDIR."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path for path in files if token.encode() in path.read_bytes()}


def _compared(options: argparse.Namespace, model: Path) -> dict[str, int]:
    spec = RoutingSpec.from_hf_config(json.loads((model / "config.json").read_text()))
    if options.stock:
        said = said_by_dump(options.work / "rollouts", spec.moe_layers)
    else:
        said = said_by_recording(options.work / "recording")
    return compare(options.work / "routers", said, spec.moe_layers)


def _numbers(pattern: str, log: Path) -> list[dict[str, float]]:
    """What slime itself says in lines of its log: of each optimizer step, and of each rollout's seconds."""
    lines = re.findall(pattern, log.read_text(errors="replace"))
    return [
        {name: value for name, value in ast.literal_eval(line).items() if isinstance(value, int | float)}
        for line in lines
    ]


def _write_prompts(path: Path, *, count: int = 64) -> Path:
    lines: list[str] = []
    for row in range(count):
        words = [f"t{4 + (7 * row + 13 * word) % (VOCAB_SIZE - 4)}" for word in range(6 + row % 5)]
        lines.append(json.dumps({"text": " ".join(words), "label": ""}) + "\n")
    path.write_text("".join(lines))
    return path


if __name__ == "__main__":
    sys.exit(main())
