"""Engines of several ranks: whichever rank ran a token, and wherever its row lay, the reply has the routers' ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.embedded.sglang import EngineServer
from r3channel.config import ChannelConfig
from r3channel.errors import EngineUnavailable
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.engine import client
from tests.support.samples import SPEC

pytestmark = [pytest.mark.engine, pytest.mark.full]

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
    with client.serving(model_dir, extra_args=SETTINGS[request.param], env=env) as server:
        yield server


def answers(server: EngineServer) -> list[client.Reply]:
    return client.generate_together(server.url, client.prompts_of((5, 40, 90, 200, 17, 33)), new_tokens=20)


def test_a_requests_rows_are_own_on_any_rank(engine: EngineServer, model_dir: Path) -> None:
    client.check_replies(replies := answers(engine), model=model_dir)
    ranks = {reply.meta.get("dp_rank") for reply in replies}
    assert ranks == ({0, 1} if "--dp-size" in engine.options.extra_args else {None})


def test_one_of_two_tensor_ranks_sends_each_frame_and_keeps_the_rows(model_dir: Path, tmp_path: Path) -> None:
    with Relay(SPEC, TrainerLayout(), ChannelConfig(frame_timeout_s=30.0)) as relay:
        info, env = ["--log-level", "info"], client.direct_to(relay, tmp_path)
        with client.serving(model_dir, tmp_path / "log", tp=2, env=env, extra_args=info) as server:
            samples = client.delivered(relay, answers(server), engine=server.url)
        client.check_relay(relay, samples, model=model_dir)
        assert relay.status()["store"]["frames"] == len(samples)
    assert len(re.findall(r"r3channel: .* GB of host memory for", (tmp_path / "log").read_text())) == 1


def test_context_parallel_prefill_and_masks_too_long_to_frame_are_refused_by_name(model_dir: Path) -> None:
    arguments = "--tp-size 2 --attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag --sampling-mask-max-tokens 70000"
    env = {**TWO_CORES, "R3CHANNEL_TOKEN_TENSORS": "sampling_masks"}
    with pytest.raises(EngineUnavailable) as refused:
        client.serving(model_dir, extra_args=arguments.split(), env=env).__enter__()
    assert "r3channel refuses this engine: --attn-cp-size 2: " in str(refused.value)
    assert "--enable-prefill-cp: " in str(refused.value)
    assert "--sampling-mask-max-tokens 70000; expected at most 65535" in str(refused.value)
