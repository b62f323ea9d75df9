"""slime's own loop with the channel: its script, its actors, its Megatron, a real SGLang server; no file of theirs is edited.

Needs the sources that slime's image pins (R3TEST_UPSTREAM: archives or checkouts). A job runs once, when the first test asks
for it, beside another worker's tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from r3channel.integrations.slime import api_check
from tests.support.waits import JOB_S, await_memory
from tests.unit.test_alerts import RULES
from tests.upstream.slime_cpu import run as slime_cpu
from tests.upstream.slime_cpu.sources import SLIME, Sources, ready
from tests.upstream.wheels import sources as unpacked_sources

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("R3TEST_UPSTREAM"), reason="R3TEST_UPSTREAM names no folder with slime's sources"
    ),
    pytest.mark.timeout(2 * JOB_S),
]
full, long = [pytest.mark.full, pytest.mark.e2e], pytest.mark.long

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
_FAULTS = f"{_SAMPLES.replace('.turns', '.tool_speaks_last').replace(' --partial-rollout', '')} --r3-on-changed live"
_FAULTS += " --r3-on-lost live --r3-max-live 0.9 --rollout-max-prompt-len 10 --r3-store-bytes 62000"
_FAULTS += " --use-fault-tolerance --rollout-health-check-interval 1"
_FAULTS += " --use-wandb --wandb-mode offline --wandb-project p --wandb-group g --disable-wandb-random-suffix"
"""A step has up to 476 rows of 56 bytes in two frames a sample, 1,856 bytes beside each: 56.4 kB; the store has room for 1.1."""
_SAVE = "--save {work}/saved --save-interval 2"
# distrib_optimizer.py:648: Megatron does not load the state of torch's own Adam
_NO_OPTIMIZER = "--no-save-optim"

JOBS: dict[str, tuple[str, str]] = {
    "stock": ("--stock", ""),
    "experts": (
        "--dp 2 --ep 2 --own-engines --slimes-router --delivery direct",
        f"{_TWICE} {_RECOMPUTE} {_REFERENCE} --r3-weights exact --use-fault-tolerance --r3-trace {{work}}/trace",
    ),
    "pipeline": (
        "--tp 2 --pp 2 --ep 2 --engines 2 --delivery direct",
        "--num-layers-per-virtual-pipeline-stage 1 --r3-weights broadcast --r3-transport gloo",
    ),
    "samples": (
        "--steps 3 --cp 2",
        f"{_SAMPLES.replace('.turns', '.cut_short')} {_EVALUATION} {_SAVE} {_NO_OPTIMIZER} --r3-weights colocated",
    ),
    "faults": (
        "--own-engines --engines 2 --delivery direct --steps 4 --layers 8 --top-k 8 --response-length 48 "
        "--faults stop=1,kill=2",
        f"{_FAULTS} --wandb-dir {{work}}/wandb",
    ),
    "killed": ("--dp 2 --kill --slimes-router", "--r3-journal {work}/journal --r3-bucket-bytes 1024"),
    "dropped": ("--dropping-router", ""),
    "nccl": ("", "--r3-transport nccl"),
    "synchronous": ("--script train.py --corrupt --delivery direct", ""),
}
"""Name -> arguments of the run, arguments of slime."""
KINDS = {
    "experts": "engine manager trainer page-engine page-relay page-trainer ray",
    "pipeline": "manager trainer page-relay page-trainer ray", "synchronous": "trainer",
}  # fmt: skip
"""What tells of each job with a token, at least."""
AFTER: dict[str, tuple[str, str, str]] = {
    "replayed": ("stock", "--no-engine", "--load-debug-rollout-data {before}/rollouts/{{rollout_id}}.pt"),
    # on one rank: Megatron's parallel loading over two allocates on CUDA
    "resumed": ("samples", "--steps 4", "--load {before}/saved --no-load-optim --no-load-rng"),
}
"""The same, of jobs that go on where another ended."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return ready(tmp_path_factory.mktemp("sources"))


Result = dict[str, Any]
Jobs = Callable[[str], Result]


@pytest.fixture(scope="module")
def jobs(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """A job's result, by its name."""
    root = tmp_path_factory.mktemp("slime")

    @cache
    def job(name: str) -> Result:
        await_memory(8, "a job of slime")
        before, own, slime = AFTER.get(name) or ("", *JOBS[name])
        if before:
            job(before)
        more = slime.format(work=root / name, before=root / before).split()
        where = ["--work", str(root / name), "--sources", str(sources.slime.parent)]
        return slime_cpu.run(
            slime_cpu.options_of([*where, "--timeout-s", str(JOB_S), *own.split(), "--", *more])
        )

    return job


def checked(result: dict[str, Any], *, steps: int, rows_at_least: int = 600) -> dict[str, Any]:
    """It ended well, and routers used in every pass what the engines said."""
    assert result["exit"] == 0, result["tail"]
    rows = result["rows"]
    assert (rows["differ"], rows["missing"], rows["steps"]) == (0, 0, steps), rows
    assert rows["rows"] >= rows_at_least, "the witness saw too little to say anything"
    return result


def same_weights(result: dict[str, Any], *, ranks: int) -> None:
    """What each rank gave of the checkpoint's tensors is what slime's own conversion of the whole model makes of them."""
    for rank in range(ranks):
        seen = result["processes"][f"weights-{rank}"]
        assert seen["differ"] == 0 and seen["compared"] >= 50, seen


def each_row_once(result: dict[str, Any], *, turns: int) -> None:
    """Later turns brought new rows only: those before are still of the pass that made them."""
    manager = result["processes"]["manager"]
    assert manager["again"] == 0 and manager["turns"] >= turns, manager


def test_the_names_that_we_rely_on_are_those_of_this_slime() -> None:
    assert api_check.nearest(unpacked_sources(SLIME)) == ("0.3.1", [])


class TestJobs:
    pytestmark = full

    def test_slimes_own_way_is_seen_by_the_same_witness(self, jobs: Jobs) -> None:
        checked(jobs("stock"), steps=2)

    def test_experts_two_optimizer_steps_more_passes_recompute_and_slimes_engine(self, jobs: Jobs) -> None:
        result = checked(jobs("experts"), steps=2, rows_at_least=3000)
        assert len(result["steps"]) == 4
        manager = result["processes"]["manager"]
        assert manager["fetched"] == 0, "the schedule is known, so no rank's batch is read from Ray's store"
        slimes_router = manager["router_answers"], manager["router_sockets"]
        assert slimes_router == (200, 0), "slime's own router runs, and holds none of the relay's ports"
        same_weights(result, ranks=2)

    def test_every_alert_has_series_of_this_run_on_its_pages(self, jobs: Jobs) -> None:
        asked = {name for rule in RULES.values() for name in re.findall(r"r3channel_\w+", rule["expr"])}
        asked -= {"r3channel_fallback_shards_total"}  # of a run over a process group
        lines = re.findall(r"(r3channel_\w+)({[^}]*})", jobs("experts")["pages"])
        assert asked <= {name for name, _ in lines}
        assert all('run="20' in labels for _, labels in lines), "the time at which it began"

    @pytest.mark.parametrize("name", ["experts", *(pytest.param(each, marks=long) for each in [*KINDS][1:])])
    def test_no_token_in_what_slime_logs_nor_in_ray_nor_in_files(self, jobs: Jobs, name: str) -> None:
        result = jobs(name)
        assert result["token_in"] == []
        told = " ".join(result["told"])
        for kind in KINDS[name].split():
            assert f"{kind}-" in told, f"nothing was looked at of the {kind}"

    @long
    def test_tensor_and_interleaved_pipeline_parallel_two_engines_direct_delivery_a_stages_weights_and_gloo(
        self, jobs: Jobs
    ) -> None:
        result = checked(jobs("pipeline"), steps=2)
        assert result["processes"]["manager"]["reply_bytes"] < 16 * 130, "frame references, not frames"
        received = ["group" in result["processes"][f"trainer-{rank}"]["seconds"] for rank in range(4)]
        assert sum(received) == 2, "rows come to each stage's TP0 over a process group of it and the relay"
        same_weights(result, ranks=4)
        sent = [result["processes"][f"weights-{rank}"]["sent"] for rank in range(4)]
        assert sorted(map(bool, sent)) == [False, False, True, True], "one rank of each stage sends"

    def test_turns_filtered_unfinished_and_cut_samples_evaluation_and_weights_in_shared_memory_over_context_parallel(
        self, jobs: Jobs
    ) -> None:
        result = checked(jobs("samples"), steps=3)
        same_weights(result, ranks=2)
        assert result["processes"]["manager"]["discarded"] >= 8, (
            "groups were filtered, and evaluated samples belong to no step"
        )
        each_row_once(result, turns=24)
        manager = result["processes"]["manager"]
        assert manager["cut"] >= 12 and manager["others"] == 0, "three of four responses of each step are cut"

    def test_the_run_is_a_page_with_a_lane_for_each_process(self, jobs: Jobs) -> None:
        page = checked(jobs("experts"), steps=2)["page"]
        lanes = "2 steps|trainer0|trainer1|relay|engine http://|Mismatch by layer and step"
        assert [words for words in lanes.split("|") if words not in page] == []

    @long
    def test_no_fault_or_odd_sample_ends_a_run_or_changes_an_unnamed_row(self, jobs: Jobs) -> None:
        result = checked(jobs("faults"), steps=4)
        manager, live, said = result["processes"]["manager"], result["rows"]["live"], " ".join(result["said"])
        each_row_once(result, turns=16)
        assert manager["refused"] > 0, "the store had room for all"
        assert min(manager["stopped"], manager["killed"]) >= 3, "a server has as many processes"
        samples, layers, tool_tokens = 4 * 8, 7, 3
        assert live >= layers * (samples * tool_tokens + 20), "no lost frame was of a trained sample"
        assert manager["live"] == samples and manager["lost"] == 1, "one seal found frames lost"
        assert "died, or was started anew, before its frame came" in said and "'StepError': 8" in said
        assert manager["discarded"] >= 8, "groups were filtered and aborted"
        assert result["token_in"] == [] and any(name.endswith(".wandb") for name in result["told"])
        assert result["logged"] >= 3, "W&B writes on a thread of its own: the last step's may not get there"

    @long
    def test_the_alerts_that_should_fire_in_a_run_with_faults_fire(self, jobs: Jobs) -> None:
        if not (alerts := jobs("faults")["alerts"]):
            pytest.skip("needs Debian's prometheus")
        assert len(alerts["R3ChannelPageGone"]) >= 2, (
            "of the engine that stood still, and of the one that died"
        )
        assert [labels["reason"] for labels in alerts["R3ChannelRejected"]] == ["frame_missing"]
        assert "R3ChannelFallbackActive" in alerts, "rows were left to the live router"

    def test_resumed(self, jobs: Jobs) -> None:
        checked(jobs("resumed"), steps=1, rows_at_least=300)

    def test_the_same_rollouts_give_the_same_numbers_as_slimes_own_way(self, jobs: Jobs) -> None:
        ours = checked(jobs("replayed"), steps=2)["steps"][0]
        theirs = jobs("stock")["steps"][0]
        same = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "train/entropy_loss")
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}

    @long
    def test_one_wrong_id_ends_the_run_in_one_line_before_anything_is_trained(self, jobs: Jobs) -> None:
        result = jobs("synchronous")
        assert result["exit"] == 2 and result["steps"] == []
        assert result["tail"].splitlines()[-1].startswith("r3channel: DigestMismatch: step 0")

    def test_step_whose_manager_is_killed_while_rows_travel_is_trained_from_journal(self, jobs: Jobs) -> None:
        result = jobs("killed")
        checked({**result, "exit": 0}, steps=1, rows_at_least=400)
        assert result["exit"] == 2
        assert "r3channel: BackgroundFailed: the rollout manager was killed, and with it" in result["tail"]

    def test_nccl_without_an_engine_that_slime_starts_ends_the_run_before_the_manager(
        self, jobs: Jobs
    ) -> None:
        result = jobs("nccl")
        assert result["exit"] == 2
        assert (
            "--r3-relay-gpu shared: slime starts no engine whose GPU the relay could share" in result["tail"]
        )

    def test_a_router_that_drops_the_field_ends_the_run_in_one_line_before_trainers(self, jobs: Jobs) -> None:
        result = jobs("dropped")
        assert result["exit"] == 2 and not any(name.startswith("trainer") for name in result["processes"])
        assert "r3channel: RoutingMissing: the engines send routing, and the router at" in result["tail"]
