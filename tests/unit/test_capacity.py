"""The planner's sums: the issue's figures, the published table, and what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from r3channel.bench.harness import Effort
from r3channel.bench.plan import measure
from r3channel.cli import main
from r3channel.config import ChannelConfig
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.capacity import Capacity, Machines, add_up, plan_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import TicketSample
from tests.support.samples import sparse

QWEN = model_named("qwen3-30b-a3b").spec


def capacity(lengths: Sequence[int], layout: TrainerLayout, *, spec: RoutingSpec = QWEN) -> Capacity:
    return add_up(plan_of(lengths, spec=spec, layout=layout), machines=Machines())


def uneven(*, samples: int, tokens: int) -> list[int]:
    """Lengths of at least 2 that sum to `tokens`."""
    weights = np.random.default_rng(0).lognormal(0.0, 0.6, samples)
    shares = np.floor(weights / weights.sum() * (tokens - 2 * samples)).astype(np.int64) + 2
    shares[: tokens - int(shares.sum())] += 1
    return shares.tolist()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_process_keeps_a_128th_of_the_default_path(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--model", "qwen3-30b-a3b", "--layout", "dp=4,tp=4,cp=2,pp=4", "--tokens", "16777216")
    tokens_of_dp = 16777216 // 4
    assert found["ratio"] == 1 / 128
    assert found["default_bytes_per_rank"] == tokens_of_dp * 48 * 8 * 4
    assert found["landed_bytes_per_rank"] == tokens_of_dp // 2 // 4 * 12 * 8
    assert found["placed_bytes_tp0"] == 4 * found["landed_bytes_per_rank"] == found["held_bytes_tp0"] / 2
    assert found["default_bytes_per_rank"] // found["placed_bytes_tp0"] == 32
    rows = (16384 - 1) * 1024  # no padding and no last tokens travel
    assert found["wire_bytes"] == rows * 48 * 8 < 32 * found["placed_bytes_tp0"]
    assert found["received_bytes_tp0"] <= found["placed_bytes_tp0"]


def _sent(shard: Shard) -> int:
    pairs = chain(*(zip(batch.sample_ids, batch.tokens, strict=True) for batch in shard.microbatches))
    return Stream(shard, [TicketSample(*pair, 0, 0, ()) for pair in pairs]).nbytes


@pytest.mark.parametrize("text", ["dp=2,tp=2,sp=0", "dp=2,pp=2,cp=2,packing=thd", "tp=4,cp=2"])
def test_sums_are_those_of_the_shards(text: str) -> None:
    layout, lengths = TrainerLayout.parse(text), uneven(samples=16, tokens=16000)
    plan = plan_of(lengths, spec=QWEN, layout=layout, microbatch_size=2)
    found = add_up(plan, machines=Machines())
    assert found.tokens == 16000 and found.samples == 16
    assert sum(shard.nbytes for shard in plan.shards) == found.padded_tokens * 384
    assert found.frame_bytes == found.wire_bytes == (16000 - 16) * 384
    assert found.received_bytes_tp0 == max(_sent(shard) for shard in plan.shards)
    copies = 1 if layout.sequence_parallel or layout.tp == 1 else layout.tp
    assert found.landed_bytes_all_ranks == copies * found.padded_tokens * 384
    assert found.relay_staging_bytes == 2 * ChannelConfig().bucket_bytes


def test_an_mtp_layer_is_kept_and_costs_nothing_on_the_wire() -> None:
    plain, mapped = (capacity([100] * 4, TrainerLayout.parse(text)) for text in ("pp=2", "pp=2,mtp=47"))
    assert mapped.wire_bytes == plain.wire_bytes
    assert mapped.landed_bytes_per_rank == plain.landed_bytes_per_rank * 25 // 24


STEP = ["--model", "qwen3-30b-a3b", "--layout", "dp=4,tp=4", "--tokens", "1638400"]


@pytest.mark.parametrize(
    ("argv", "fits", "said"),
    [
        ((), True, "need 1.26 GB of the relay's memory; store_bytes allows 17.18 GB\n"),
        (("--store-bytes", "1000000000"), False, "store_bytes allows 1.00 GB. Raise store_bytes"),
        (("--step-s", "0.5", "--node-bytes", "1e9"), True, "has too little memory and network in\n"),
    ],
)
def test_one_step_off_needs_the_rows_of_two_steps_in_the_store(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], fits: bool, said: str
) -> None:
    found = run(capsys, *STEP, *argv)
    assert found["store_needed_bytes"] == 2 * (found["frame_bytes"] + 100 * (1400 + 48 * 8 + 2 * 200))
    assert found["frame_bytes"] == (16384 - 1) * 100 * 384
    assert found["store_fits"] == fits
    assert main(["plan", *STEP, *argv]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "samples", "million_tokens", "payload_gb", "transfer_s"),
    [
        (48, 1024, 16, 12.3, 0.25),  # Qwen3-30B-A3B, 16k tokens a sample
        (60, 1024, 16, 15.4, 0.3),  # DeepSeek-R1, of whose 61 layers 58 are MoE layers: the table counts 60
        (60, 512, 16, 15.4, 0.3),
        (60, 512, 64, 61.4, 1.2),
        (60, 1024, 128, 122.9, 2.5),
    ],
)
def test_the_published_scaling_table_is_reproduced(
    layers: int, samples: int, million_tokens: int, payload_gb: float, transfer_s: float
) -> None:
    """The table in "The Infrastructure Cost of MoE Routing Replay": int16 ids, M = 10**6, GB = 10**9 bytes, NCCL at 50 GB/s."""
    wide = sparse(layers, experts=512, top_k=8)
    lengths = [million_tokens * 10**6 // samples] * samples
    found = capacity(lengths, TrainerLayout(dp=4), spec=wide)
    assert found.frame_bytes == found.wire_bytes
    assert round(found.wire_bytes / 1e9, 1) == payload_gb
    assert round(found.wire_s, 1 if transfer_s == round(transfer_s, 1) else 2) == transfer_s


def test_a_step_of_128m_tokens_on_512_ranks_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "lengths.json").write_text(json.dumps(uneven(samples=8192, tokens=128 * 10**6)))
    layout = "dp=16,tp=4,cp=2,pp=4,first_layers=14,last_layers=15,packing=thd"
    asked = ("--model", "deepseek-r1", "--layout", layout, "--max-tokens", "131072")
    found = run(capsys, *asked, "--lengths", str(file))
    assert found["ranks"] == 512 and found["tokens"] == 128 * 10**6 and found["samples"] == 8192
    assert found["plan_s"] > 0 and found["node_lacks"] == []
    layout, step = "dp=16,tp=4,cp=2,pp=4,packing=thd", ("--tokens", "128000000", "--step-s", "300")
    memory, *needs = run(capsys, "--model", "qwen3-30b-a3b", "--layout", layout, *step)[
        "relay_needs"
    ].values()
    row = "| {:.0f} GB | {:.2f} | {:.2f} Gbit/s | {:.2f} Gbit/s |\n".format(memory / 1e9, *needs)
    assert row in (Path(__file__).parents[2] / "r3channel/plan/README.md").read_text()


@pytest.mark.parametrize("name", ["config.json", ""])
def test_a_checkpoint_is_a_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "mixtral", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[10, 20]")
    found = run(capsys, "--model", str(tmp_path / name), "--layout", "dp=2", "--lengths", str(lengths))
    assert found["bytes_per_token"] == 8 and found["padded_tokens"] == 30


def test_the_benchmark_of_planning_has_a_figure_for_every_target() -> None:
    found = measure(Effort(rounds=1))
    assert min(*found["cut_ms_by_case"].values(), found["assign_ms"]) > 0
