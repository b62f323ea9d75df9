"""Weights of real engines whose models do more than copy them: what they join, derive, and move while they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.client import generate, greedy, post, random_prompt, serving
from tests.engine.conftest import Weights
from tests.engine.families import ON_CPU, write_families
from tests.support.waits import UPDATE_S
from tests.support.weights import checksums, connected

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

PLUGIN: dict[str, Any] = {"capture": False, "r3channel": False, "env": ON_CPU | {"R3CHANNEL_WEIGHTS": "1"}}
EPLB = ("--ep-size", "2", "--enable-eplb", "--eplb-rebalance-num-iterations", "20")


def checksums_from_disk(url: str, model: Path) -> Any:
    """Where SGLang has loaded it itself."""
    post(f"{url}/update_weights_from_disk", {"model_path": str(model), "load_format": "auto"})
    return checksums(url)


MLA = [pytest.param("deepseek_v3", 2, marks=pytest.mark.long), ("glm4_moe_lite", 1)]


@pytest.mark.parametrize(("family", "tp"), MLA)
def test_mla_is_staged_in_parts_and_serves_as_loaded_from_disk(family: str, tp: int, tmp_path: Path) -> None:
    write_families(tmp_path, family)
    weights = load_file(tmp_path / family / "model.safetensors")
    with serving(tmp_path / family, tp=tp, extra_args=("--load-format", "dummy"), **PLUGIN) as server:

        def logprobs() -> Any:
            """They tell what is derived from parameters, too."""
            asked = {"return_logprob": True, "logprob_start_len": 0, "routing": False}
            meta = generate(server.url, random_prompt(40, seed=4), new_tokens=8, **asked).meta
            return meta["input_token_logprobs"], meta["output_token_logprobs"]

        with connected([server.url], staged=True) as sync:
            report = sync.update(weights.items(), version=1, timeout_s=UPDATE_S)
        updated = checksums(server.url), logprobs()
        assert (checksums_from_disk(server.url, tmp_path / family), logprobs()) == updated
        assert report.loaded == "" and report.verified == sum(map(len, updated[0][0]))


def test_experts_that_eplb_moves_are_learned(model_dir: Path, original: Weights, changed: Weights) -> None:
    """And they stay while an update is on its way."""
    with serving(model_dir, tp=2, extra_args=EPLB, **PLUGIN) as server:

        def moved() -> bool:
            """Whether experts moved within passes in which they should have, twice."""
            before = checksums(server.url)
            generate(server.url, random_prompt(9, seed=1), new_tokens=50, routing=False)
            return checksums(server.url) != before

        def meanwhile() -> Any:
            for number, named in enumerate(changed.items(), start=1):
                assert number < len(changed) or not moved()
                yield named

        tokens, _ = greedy(server.url)
        with connected([server.url], staged=True, bucket_bytes=1 << 20) as sync:
            sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
            assert moved() and greedy(server.url)[0] != tokens
            sync.update(original.items(), version=2, timeout_s=UPDATE_S)
            placed = checksums(server.url)
            assert checksums_from_disk(server.url, model_dir) == placed
            assert greedy(server.url) == (tokens, "2")
            sync.update(meanwhile(), version=3, timeout_s=UPDATE_S)
            assert moved()
