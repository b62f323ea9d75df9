"""Every layout, on real Megatron-core over gloo: a relay here, one process per trainer rank, a recorded step between them.

Layouts of one world size share their processes, which join Megatron's groups anew for each. The facts are read from what
the ranks wrote; each rank has compared every id that its routers used with the default path's way of cutting, and the weights
that it exports with the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.embedded.model import write_model
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import Recorder
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame
from tests.dist.control import ControlServer
from tests.dist.ranks import run_ranks
from tests.support.delivery import recorded
from tests.support.pages import WHEN
from tests.support.samples import random_ids
from tests.upstream.wheels import unpacked

pytestmark = pytest.mark.dist

LENGTHS = (28, 9, 17, 5, 23, 12, 30, 7)  # tokens of the step's samples
SPEC = RoutingSpec(num_layers=8, moe_layers=tuple(range(1, 8)), num_experts=32, top_k=4)
IDS = (sum(LENGTHS) - len(LENGTHS)) * SPEC.num_moe_layers * SPEC.top_k
OTHERWISE: dict[str, dict[str, Any]] = {
    "bfloat16": {"layout": "dp=1", "dtype": "bfloat16"},
    "tp=2,sp=0": {"eval": True},  # Megatron refuses to train MoE so
}
"""Runs that are no row of the table."""
QUICK, LONG, SLOW = (
    tuple(text for text in WHEN if WHEN[text] == f"make test{tier}") for tier in ("", "-long", "-full")
)
NEWEST = "0.19.2"
NEWER = (*QUICK, "pp=2,vpp=2", "cp=2,packing=thd", "dp=2,tp=2", "dp=2,ep=2", "pp=2")

Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, the first dense: two chunks of two stages."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, layers=SPEC.num_layers, experts=SPEC.num_experts, top_k=SPEC.top_k)


def sealed(layout: TrainerLayout, folder: Path) -> Relay:
    """A relay with one recorded step of the eight samples, sealed; micro-batches of one to three samples."""
    config = ChannelConfig(bucket_bytes=4096, journal=str(folder / "store"))
    relay = Relay(SPEC, layout, config, recorder=Recorder(folder / "recording"))
    rng, names = np.random.default_rng(1), {f"sample{i}": n for i, n in enumerate(LENGTHS)}
    for index, (name, count) in enumerate(names.items()):
        frame = encode_frame(SPEC, expert_ids_TLK=random_ids(count - 1, spec=SPEC, seed=index))
        relay.add_frame(name, frame, rng.integers(4, 512, count).tolist())
    # Two optimizer steps where nothing is reduced over ranks at the end of each.
    steps = 2 if layout == TrainerLayout(pp=2) else 1
    size = 2 if layout.dp == 1 else 1
    relay.seal(0, Assignment.balanced(names, dp=layout.dp, microbatch_size=size, steps=steps))
    recorded(folder / "recording")  # the ranks read their tokens there
    return relay


def layout_of(name: str) -> TrainerLayout:
    return TrainerLayout.parse(OTHERWISE.get(name, {}).get("layout", name))


def trained(
    model_dir: Path, out: Path, lanes: Sequence[tuple[str, ...]], overlay: Sequence[Path] = ()
) -> Results:
    """Trains all layouts of a lane and world size at the first use of one; gives each rank's result."""

    @cache
    def train(group: tuple[str, ...]) -> list[dict[str, Any]]:
        size = layout_of(group[0]).world_size
        folder = out / f"{size}-{len(group)}"
        with contextlib.ExitStack() as stack:
            runs = []
            for name in group:
                relay = sealed(layout_of(name), folder / name)
                stack.callback(relay.close)
                server = stack.enter_context(ControlServer(relay))
                place = {"port": server.port, "recording": str(folder / name / "recording")}
                how = {"name": name, "layout": name, "dtype": "float32", "eval": False}
                runs.append(how | place | OTHERWISE.get(name, {}))
            job = {"model": str(model_dir), "runs": runs}
            return run_ranks("tests.dist.layout_train", folder, world_size=size, job=job, overlay=overlay)

    def of(name: str) -> list[dict[str, Any]]:
        size, (lane,) = layout_of(name).world_size, [lane for lane in lanes if name in lane]
        group = tuple(other for other in lane if layout_of(other).world_size == size)
        return [rank[name] for rank in train(group)]

    return of


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return trained(model_dir, tmp_path_factory.mktemp("layouts"), (QUICK, LONG, (*SLOW, *OTHERWISE)))


@pytest.fixture(scope="module")
def newer(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    overlay = unpacked(f"megatron-core=={NEWEST}")
    return trained(model_dir, tmp_path_factory.mktemp("newer"), (NEWER,), [overlay])


def check(text: str, results: Results) -> None:
    """Ids of every pass, losses and gradients of one rank, bytes of the plan."""
    one, ranks = results("dp=1"), results(text)
    layout = TrainerLayout.parse(text)
    for name in ("logprob", "forward", "recompute"):
        assert sum(rank["ids"].get(name, 0) for rank in ranks) == IDS, name
    found, wanted = sum(sum(rank["losses"]) for rank in ranks), sum(one[0]["losses"])
    assert abs(found - wanted) < 1e-5 * wanted
    if text in (*NEWER, "tp=2"):
        assert all(abs(rank["norm"] - one[0]["norm"]) < 1e-6 * one[0]["norm"] for rank in ranks)
    ours, theirs = (load_file(rank["gradients"]) for rank in (ranks[0], one[0]))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name
    assert sum(rank["wire_received"] for rank in ranks) == IDS  # a byte each; padding does not travel
    assert layout.tp_slots == layout.tp and sum(rank["landed"] for rank in ranks) >= IDS
    assert sum(rank["pairs"] for rank in ranks) > 0


TIERS = [(QUICK, ()), (LONG, pytest.mark.long), (SLOW, pytest.mark.full)]


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=marks) for texts, marks in TIERS for text in texts]
)
def test_ids_gradients_and_bytes_are_exact(text: str, results: Results) -> None:
    check(text, results)


@pytest.mark.full
@pytest.mark.parametrize("text", NEWER)
def test_the_newest_megatron_is_as_exact(text: str, newer: Results) -> None:
    check(text, newer)
    assert {rank["megatron"] for rank in newer(text)} == {NEWEST}


@pytest.mark.full
def test_without_sequence_parallelism_every_tp_rank_replays_all_rows_in_eval(results: Results) -> None:
    assert [rank["ids"] for rank in results("tp=2,sp=0")] == [{"logprob": IDS}] * 2


@pytest.mark.full
def test_bfloat16_trainer_exports_exactly_and_learns_under_replay(results: Results) -> None:
    (one,), (narrow,) = results("dp=1"), results("bfloat16")
    assert narrow["norm"] == pytest.approx(one["norm"], rel=0.05)
