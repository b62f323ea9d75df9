"""A job's command line as it is typed: what slime, Megatron and SGLang would pass over, or refuse once 64 GPUs have loaded."""

from __future__ import annotations

import pytest

from r3channel.integrations.slime import command_line

GOOD = (
    "train_async.py --use-r3-channel --r3-delivery direct --r3-store-bytes=100 --moe-router-load-balancing-type aux_loss "
    "--sglang-pp-size 1 --sglang-server-concurrency 512 --sglang-mem-fraction-static 0.8 --cuda-graph-impl none "
    "--sglang-enable-expert-distribution-metrics"
)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--r3-transpot host", "--r3-transpot is no option of r3channel; did you mean --r3-transport?"),
        ("--r3-deliver direct", "--r3-deliver is no option of r3channel; did you mean --r3-delivery?"),
        ("--r3_delivery=direct", "--r3_delivery is no option of r3channel; did you mean --r3-delivery?"),
        ("--moe-router-load-balancing-type aux_loss sinkhorn", "sinkhorn']: chooses without asking for ids"),
        ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0: drops tokens"),
        ("--moe-router-fusion", "--moe-router-fusion: the fused router returns before the replay"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local: a captured router"),
        ("--sglang-pp-size 2", "--sglang-pp-size 2: each stage holds the ids of its own layers only"),
        ("--sglang-enable-hierarchical-cache", "[R3CHANNEL_ALLOW=external_cache overrides]"),
        ("--sglang-enable-hisparse", "--sglang-enable-hisparse: these settings were neither tested nor read"),
    ],
)
def test_a_fault_of_a_command_line_is_named_and_a_good_one_has_none(words: str, said: str) -> None:
    (fault,) = command_line.faults(f"{GOOD} {words}".split())
    assert said in fault


def test_all_faults_come_at_once_but_what_is_allowed() -> None:
    words = ["--use-r3-chanel", "--sglang-pp-size", "2", "--sglang-enable-pdmux"]
    said = [*command_line.faults(words, allowed={"pdmux"})]
    assert [
        "did you mean --use-r3-channel?" in said[0],
        "without it nothing" in said[1],
        "pp-size 2" in said[2],
    ] == [True] * 3
    assert len(said) == 3 and not [*command_line.faults(GOOD.split())]
