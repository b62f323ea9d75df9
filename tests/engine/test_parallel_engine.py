"""Engines of several ranks: whichever rank ran a token, and wherever its row lay, the reply has the routers' ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.embedded.sglang import EngineOptions, EngineServer
from r3channel.config import ChannelConfig
from r3channel.errors import EngineUnavailable
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.arrival.rows import HeldRows
from r3channel.relay.relay import Relay
from r3channel.wire.frame import parse_frame
from tests.conftest import READY_TIMEOUT_S
from tests.engine.client import Reply, generate_together
from tests.engine.reference import Expected, reference_ids

pytestmark = [pytest.mark.engine, pytest.mark.full]

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
DP_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
SETTINGS = {
    "DP attention, eager prefill": DP_ATTENTION,
    "DP attention, prefill graph": DP_ATTENTION,
    "data parallel": ("--dp-size", "2"),
    "expert parallel, two experts on both ranks": (
        *("--tp-size", "2", "--ep-size", "2"),
        *("--ep-num-redundant-experts", "2", "--ep-dispatch-algorithm", "dynamic"),
    ),
}


@pytest.fixture(scope="module", params=SETTINGS)
def engine(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    env = dict(TWO_CORES)
    if request.param.endswith("prefill graph"):
        env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "tests.engine.as_prefill_graph"
    extra_args = SETTINGS[request.param]
    options = EngineOptions(model=model_dir, chunked_prefill_size=128, extra_args=extra_args, env=env)
    with EngineServer(options) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


def answers(server: EngineServer, *, model: Path, folder: Path) -> Iterator[tuple[Reply, Expected]]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, 500, length).tolist() for length in (5, 40, 90, 200, 17, 33)]
    replies = generate_together(server.url, prompts, new_tokens=20)
    yield from zip(
        replies, reference_ids(model, [reply.tokens for reply in replies], folder=folder), strict=True
    )


def test_whichever_rank_ran_a_request_its_rows_are_its_own(
    engine: EngineServer, model_dir: Path, tmp_path: Path
) -> None:
    ranks = set()
    for reply, expected in answers(engine, model=model_dir, folder=tmp_path):
        frame = parse_frame(reply.raw, spec=SPEC)
        assert expected.differing_rows(frame.routing(sample_id="s").expert_ids_TLK) == []
        ranks.add(reply.meta.get("dp_rank"))
    assert ranks == ({0, 1} if "--dp-size" in engine.options.extra_args else {None})


def test_of_two_tensor_parallel_ranks_one_sends_each_requests_frame_and_keeps_the_rows(
    model_dir: Path, tmp_path: Path
) -> None:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(frame_timeout_s=30.0))
    env = {
        "R3CHANNEL_DELIVERY": "direct",
        "R3CHANNEL_RELAY_URL": relay.serve(token_file=tmp_path / "token"),
        "R3CHANNEL_TOKEN_FILE": str(tmp_path / "token"),
    }
    options = EngineOptions(
        model=model_dir, chunked_prefill_size=128, tp=2, env=env, extra_args=["--log-level", "info"]
    )
    with EngineServer(options, log_path=tmp_path / "log") as server:
        server.wait_ready(READY_TIMEOUT_S)
        wanted = dict(enumerate(answers(server, model=model_dir, folder=tmp_path)))
    for number, (reply, _) in wanted.items():
        relay.add(str(number), {"meta_info": reply.meta}, reply.tokens, engine=server.url)
    relay.intake.await_frames([str(number) for number in wanted], timeout_s=30, step=0)
    for number, (_, expected) in wanted.items():
        (turn,) = relay.intake.entries.samples[str(number)].turns
        assert isinstance(turn.rows, HeldRows)
        assert expected.differing_rows(turn.rows.ids_TLK) == []
    assert relay.status()["store"]["frames"] == len(wanted)
    relay.close()
    caches = re.findall(
        r"HostCache\[r3channel\] allocated: shape=\((\d+), 3, 8\)", (tmp_path / "log").read_text()
    )
    assert sorted(map(int, caches))[0] == 1 and len(caches) == 2


def test_context_parallel_prefill_and_masks_too_long_to_frame_are_refused_by_name(model_dir: Path) -> None:
    arguments = ["--tp-size", "2", "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "zigzag"]
    arguments += ["--sampling-mask-max-tokens", "70000"]
    env = {**TWO_CORES, "R3CHANNEL_SAMPLING_MASKS": "1"}
    options = EngineOptions(model=model_dir, extra_args=arguments, env=env)
    with EngineServer(options) as server, pytest.raises(EngineUnavailable) as refused:
        server.wait_ready(READY_TIMEOUT_S)
    assert "r3channel refuses this engine: --attn-cp-size 2: " in str(refused.value)
    assert "--enable-prefill-cp: " in str(refused.value)
    assert "--sampling-mask-max-tokens 70000; expected null and at most 65535" in str(refused.value)
