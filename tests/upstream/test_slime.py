"""slime's own loop with the channel: its script, its actors, its Megatron, a real SGLang server; no file of theirs is edited.

Needs the sources that slime's image pins (R3CHANNEL_UPSTREAM: archives or checkouts). Jobs run one after another
beside another worker's tests, all queued by the first test that wants one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig
from r3channel.integrations.slime import api_check
from r3channel.integrations.slime.engine_variables import engine_variables
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.transport.auth import read_token
from tests.samples import SPEC
from tests.unit.test_alerts import RULES
from tests.upstream.slime_cpu import run as slime_cpu
from tests.upstream.slime_cpu.sources import SLIME, Sources, ready, unpack, upstream
from tests.upstream.wheels import sources as unpacked_sources

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("R3CHANNEL_UPSTREAM"),
        reason="R3CHANNEL_UPSTREAM names no folder with slime's sources",
    ),
    pytest.mark.timeout(1200),
]
full = [pytest.mark.full, pytest.mark.e2e]

_HERE = "tests.upstream.slime_cpu.functions"
_TWICE = "--global-batch-size 4"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_REFERENCE = "--use-kl-loss --kl-loss-coef 0.001 --ref-load {work}/model"
_SAMPLES = f"--custom-generate-function-path {_HERE}.turns --over-sampling-batch-size 3 --partial-rollout"
_SAMPLES += f" --dynamic-sampling-filter-path {_HERE}.every_third_group_goes"
_EVALUATION = (
    "--eval-prompt-data held {work}/held.jsonl --eval-interval 1 --eval-input-key text --eval-label-key label"
)
_EVALUATION += " --n-samples-per-eval-prompt 1 --eval-max-response-len 8"
_TOOLS = f"{_SAMPLES.replace('.turns', '.tool_speaks_last')} --r3-on-changed live --r3-max-live 0.4"
_TOOLS += " --r3-on-lost live --r3-frame-timeout-s 3"
_SAVE = "--save {work}/saved --save-interval 2"
# distrib_optimizer.py:648: Megatron does not load the state of torch's own Adam
_NO_OPTIMIZER = "--no-save-optim"

JOBS: dict[str, tuple[str, str]] = {
    "stock": ("--stock", ""),
    "experts": (
        "--dp 2 --ep 2 --own-engines --slimes-router --delivery direct",
        f"{_TWICE} {_RECOMPUTE} {_REFERENCE} --r3-weights broadcast --use-fault-tolerance",
    ),
    "pipeline": (
        "--tp 2 --pp 2 --ep 2 --engines 2 --delivery direct",
        "--num-layers-per-virtual-pipeline-stage 1 --r3-weights exact --r3-transport gloo",
    ),
    "samples": (
        "--steps 3 --cp 2",
        f"{_SAMPLES} {_EVALUATION} {_SAVE} {_NO_OPTIMIZER} --r3-weights colocated",
    ),
    "tools": ("--delivery direct --loses 7", _TOOLS),
    "dropped": ("--dropping-router", ""),
    "nccl": ("", "--r3-transport nccl"),
    "synchronous": ("--script train.py --corrupt --delivery direct", ""),
}
"""Name -> arguments of the run, arguments of slime."""
AFTER: dict[str, tuple[str, str, str]] = {
    "replayed": ("stock", "--no-engine", "--load-debug-rollout-data {before}/rollouts/{{rollout_id}}.pt"),
    # on one rank: Megatron's parallel loading over two allocates on CUDA
    "resumed": ("samples", "--steps 4", "--load {before}/saved --no-load-optim --no-load-rng"),
}
"""The same, of jobs that go on where another ended."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return ready(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def jobs(
    sources: Sources, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("slime")

    def start(name: str, own: str, slime: str, before: str = "") -> dict[str, Any]:
        more = slime.format(work=root / name, before=root / before).split()
        where = ["--work", str(root / name), "--sources", str(sources.slime.parent)]
        argv = [*where, "--timeout-s", "900", *own.split(), "--", *more]
        return slime_cpu.run(slime_cpu.options_of(argv))

    def follow(name: str, before: str, own: str, slime: str) -> dict[str, Any]:
        done[before].result()
        return start(name, own, slime, before)

    with ThreadPoolExecutor(1) as pool:
        done = {name: pool.submit(start, name, *job) for name, job in JOBS.items()}
        done |= {name: pool.submit(follow, name, *job) for name, job in AFTER.items()}
        yield done


def checked(result: dict[str, Any], *, steps: int, rows_at_least: int = 600) -> dict[str, Any]:
    """It ended well, and routers used in every pass what the engines said."""
    assert result["exit"] == 0, result["tail"]
    rows = result["rows"]
    assert (rows["differ"], rows["missing"], rows["steps"]) == (0, 0, steps), rows
    assert rows["rows"] >= rows_at_least, "the witness saw too little to say anything"
    return result


def same_weights(result: dict[str, Any], *, ranks: int) -> None:
    """What each rank gave of the checkpoint's tensors is what slime's own updater would have sent of them."""
    for rank in range(ranks):
        seen = result["processes"][f"weights-{rank}"]
        assert seen["differ"] == 0 and seen["compared"] >= 50, seen


def test_the_names_that_we_rely_on_are_those_of_this_slime() -> None:
    assert api_check.nearest(unpacked_sources(SLIME)) == ("0.3.1", [])


def test_what_slime_sends_to_wandb_of_arguments_that_engines_were_told_by_holds_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = upstream(), tmp_path / "slime"
    assert folder is not None
    place.mkdir()
    unpack(folder, SLIME, place)
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # the function asks nothing of it
    spec = importlib.util.spec_from_file_location("wandb_utils", place / "slime/observability/wandb_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = argparse.Namespace(r3_delivery="direct", r3_channel={"token_file": "", "interface": "auto"})
    with closing(Relay(SPEC, TrainerLayout(), ChannelConfig())) as relay:
        args.r3_engine = engine_variables(relay, args, nodes=1)
        token = read_token(args.r3_engine["R3CHANNEL_TOKEN_FILE"])
        logged = repr(module._compute_secondary_config_for_logging(args))
    assert "R3CHANNEL_TOKEN_FILE" in logged and token not in logged


class TestJobs:
    pytestmark = full

    def test_names(self, sources: Sources) -> None:
        assert api_check.nearest(sources.slime) == ("0.3.1", [])

    def test_slimes_own_way_is_seen_by_the_same_witness(self, jobs: Any) -> None:
        checked(jobs["stock"].result(), steps=2)

    def test_experts_two_optimizer_steps_more_passes_recompute_and_slimes_own_engine(self, jobs: Any) -> None:
        result = checked(jobs["experts"].result(), steps=2, rows_at_least=3000)
        assert len(result["steps"]) == 4
        manager = result["processes"]["manager"]
        assert manager["fetched"] == 0, "the schedule is known, so no rank's batch is read from Ray's store"
        slimes_router = manager["router_answers"], manager["router_sockets"]
        assert slimes_router == (200, 0), "slime's own router runs, and holds none of the relay's ports"

    def test_every_alert_has_its_series_on_the_pages_of_a_run_and_each_is_of_that_run(
        self, jobs: Any
    ) -> None:
        asked = {name for rule in RULES.values() for name in re.findall(r"r3channel_\w+", rule["expr"])}
        asked -= {"r3channel_fallback_shards_total"}  # of a run over a process group
        lines = re.findall(r"(r3channel_\w+)({[^}]*})", jobs["experts"].result()["pages"])
        assert asked <= {name for name, _ in lines}
        assert all('run="20' in labels for _, labels in lines), "the time at which it began"

    def test_no_token_in_what_slime_logs_nor_in_ray_nor_in_files(self, jobs: Any) -> None:
        for name in ("experts", "pipeline", "synchronous"):
            result = jobs[name].result()
            assert result["token_in"] == [], name
        told = " ".join(jobs["experts"].result()["told"])
        for kind in ("engine", "manager", "trainer", "page-engine", "page-relay", "page-trainer", "ray"):
            assert f"{kind}-" in told, f"nothing was looked at of the {kind}"

    def test_tensor_and_interleaved_pipeline_parallel_two_engines_direct_delivery_exact_weights_and_gloo(
        self, jobs: Any
    ) -> None:
        result = checked(jobs["pipeline"].result(), steps=2)
        assert result["processes"]["manager"]["reply_bytes"] < 16 * 130, "frame references, not frames"
        received = ["group" in result["processes"][f"trainer-{rank}"]["seconds"] for rank in range(4)]
        assert sum(received) == 2, "rows come to each stage's TP0 over a process group of it and the relay"
        same_weights(result, ranks=4)

    def test_turns_filtered_and_unfinished_samples_evaluation_and_weights_in_shared_memory_over_context_parallel(
        self, jobs: Any
    ) -> None:
        result = checked(jobs["samples"].result(), steps=3)
        same_weights(result, ranks=2)
        assert result["processes"]["manager"]["discarded"] >= 8, (
            "groups were filtered, and evaluated samples belong to no step"
        )

    def test_lost_frames_and_tool_tokens_behind_the_last_reply_are_left_to_the_live_router_and_no_other_row(
        self, jobs: Any
    ) -> None:
        rows = checked(jobs["tools"].result(), steps=2)["rows"]
        samples, layers, tool_tokens = 16, 3, 3
        assert rows["live"] > samples * layers * tool_tokens, "no frame was lost of a trained sample"

    def test_resumed(self, jobs: Any) -> None:
        checked(jobs["resumed"].result(), steps=1, rows_at_least=300)

    def test_the_same_rollouts_give_the_same_numbers_as_slimes_own_way(self, jobs: Any) -> None:
        ours = checked(jobs["replayed"].result(), steps=2)["steps"][0]
        theirs = jobs["stock"].result()["steps"][0]
        same = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "train/entropy_loss")
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}

    def test_one_wrong_id_ends_the_run_in_one_line_before_anything_is_trained(self, jobs: Any) -> None:
        result = jobs["synchronous"].result()
        assert result["exit"] == 2 and result["steps"] == []
        assert result["tail"].splitlines()[-1].startswith("r3channel: DigestMismatch: step 0")

    def test_nccl_without_a_gpu_that_slime_leaves_ends_the_run_before_the_manager(self, jobs: Any) -> None:
        result = jobs["nccl"].result()
        assert result["exit"] == 2
        assert "manager needs a GPU of its own, and slime takes 1 of 1" in result["tail"]

    def test_a_router_that_drops_the_field_ends_the_run_in_one_line_before_trainers(self, jobs: Any) -> None:
        result = jobs["dropped"].result()
        assert result["exit"] == 2 and not any(name.startswith("trainer") for name in result["processes"])
        assert "r3channel: RoutingMissing: the engines send routing, and the router at" in result["tail"]
