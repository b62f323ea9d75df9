"""Other MoE families than the embedded one: real SGLang servers with tiny random weights against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.embedded.sglang import EngineOptions, EngineServer
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from tests.conftest import READY_TIMEOUT_S
from tests.engine.client import Reply, generate_together
from tests.engine.families import FAMILIES, write_families
from tests.engine.reference import reference_ids
from tests.engine.test_semantics import ids_in, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(300)]

PROMPTS = (5, 40, 200)
"""Tokens; the last is prefilled in two chunks."""
UNORDERED = {"glm4_moe"}
"""Both sides take the best k unsorted here (`topk(..., sorted=False)`), so that a row is a set."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_families(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_rows_are_what_transformers_routes(family: str, checkpoints: Path, tmp_path: Path) -> None:
    model = checkpoints / family
    replies = _served(model)
    expected = reference_ids(model, [reply.tokens for reply in replies], folder=tmp_path)
    for ids_TLK, wanted in zip(_rows(RoutingSpec.from_hf_config(model), replies), expected, strict=True):
        if family in UNORDERED:
            ids_TLK, wanted = np.sort(ids_TLK), wanted._replace(ids_TLK=np.sort(wanted.ids_TLK))
        assert wanted.differing_rows(ids_TLK) == []


def _served(model: Path) -> list[Reply]:
    with EngineServer(EngineOptions(model=model, chunked_prefill_size=128)) as server:
        server.wait_ready(READY_TIMEOUT_S)
        prompts = [random_prompt(length, seed=length) for length in PROMPTS]
        return generate_together(server.url, prompts, new_tokens=24)


def _rows(spec: RoutingSpec, replies: list[Reply]) -> list[Ids]:
    """Through a relay, which holds each frame against the spec that the checkpoint's own config.json gives."""
    relay = Relay(spec, TrainerLayout(), ChannelConfig())
    try:
        for index, reply in enumerate(replies):
            relay.add(str(index), {"meta_info": reply.meta}, reply.tokens)
        return [ids_in(relay, str(index)) for index in range(len(replies))]
    finally:
        relay.close()
