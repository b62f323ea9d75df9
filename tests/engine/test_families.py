"""Other MoE families than the embedded one: real SGLang servers with tiny random weights against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from r3channel.config import ChannelConfig
from r3channel.errors import WeightUpdateFailed
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.routing import Ids
from tests.engine.client import Reply, generate, generate_together, prompts_of, random_prompt, serving
from tests.engine.families import FAMILIES, ON_CPU, write_families
from tests.engine.reference import reference_ids
from tests.support.direct import rows_here
from tests.support.waits import UPDATE_S
from tests.support.weights import checksums, connected

REFUSED = r"(has no place for|have no place there:) .*o_prj\.weight.*: (not linked|serving the committed)"
"""By a loader that refuses a name; by us, once it was asked."""
pytestmark = [pytest.mark.engine, pytest.mark.full]

PROMPTS = (5, 40, 200)
"""Tokens; the last is prefilled in two chunks, and begins a second turn."""
UNORDERED = {"glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"}
"""Both sides take the best k unsorted here (`topk(..., sorted=False)`), so that a row is a set."""
_SHARED = ("--enforce-shared-experts-fusion", "--log-level", "info")
"""Only DeepSeek-V3 fuses shared experts without a GPU, and only where it is told to."""
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"chunked_prefill_size": -1, "extra_args": ("--mem-fraction-static", "0.5")},
    "deepseek_v2": {"env": ON_CPU},
    "deepseek_v3": {"env": ON_CPU},
    "glm4_moe_lite": {"env": ON_CPU},
    "gpt_oss": {"env": ON_CPU, "extra_args": ("--attention-backend", "intel_amx")},  # on this CPU it becomes torch_native
    "llama4": {"env": ON_CPU},
    "deepseek_v3, its shared expert among the routed ones": {"env": ON_CPU, "extra_args": _SHARED},
    "deepseek_v3, that on two expert ranks": {
        "env": ON_CPU | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "extra_args": (*_SHARED, "--tp-size", "2", "--ep-size", "2"),
    },
    "qwen3_next": {
        "env": ON_CPU, "overlap": False, "extra_args": ("--mamba-radix-cache-strategy", "no_buffer"),
    },
}  # fmt: skip
"""Other options of a family's server: what it cannot start without on a CPU, and prompts that are not chunked once."""

FUSED = {"llama4": 4, "qwen3_next": 11}
"""Parameters that a loader computes: nothing that was given can be compared with them."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_families(folder)
    return folder


@pytest.mark.parametrize("case", dict.fromkeys([*FAMILIES, *OPTIONS]))
def test_a_familys_rows_are_what_transformers_routes(case: str, checkpoints: Path, tmp_path: Path) -> None:
    family = case.partition(",")[0]
    model, options = checkpoints / family, OPTIONS.get(case, {})
    replies = _served(model, options | {"log_path": tmp_path / "log"})
    assert ("experts fusion optimization enabled" in (tmp_path / "log").read_text()) == ("," in case)
    expected = reference_ids(model, [reply.tokens for reply in replies])
    for ids_TLK, wanted in zip(_rows(RoutingSpec.from_hf_config(model), replies), expected, strict=True):
        if family in UNORDERED:
            ids_TLK, wanted = np.sort(ids_TLK), wanted._replace(ids_TLK=np.sort(wanted.ids_TLK))
        assert wanted.differing_rows(ids_TLK) == []


def _served(model: Path, options: dict[str, Any]) -> list[Reply]:
    with serving(model, **options) as server:
        first = generate_together(server.url, prompts_of(PROMPTS), new_tokens=24)
        second = generate(server.url, first[-1].tokens + random_prompt(9, seed=9), new_tokens=8)
        assert second.meta["cached_tokens"] > 0
        _hold_weights_to_names(server.url, model)
        return [*first, second]


def _hold_weights_to_names(url: str, model: Path) -> None:
    """By parts or by whole tensors, as the family's loader is: a misspelt name is found, the right ones change nothing."""
    (before,) = checksums(url)
    given = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    named = next(name for name in given if name.endswith("self_attn.o_proj.weight"))
    misspelt = {name.replace("o_proj", "o_prj") if name == named else name: t for name, t in given.items()}
    for staged in (True, False):
        with connected([url], staged=staged) as sync:
            with pytest.raises(WeightUpdateFailed, match=REFUSED):
                sync.update(misspelt.items(), version=1, timeout_s=UPDATE_S)
            sync.update(((name, tensor + 1) for name, tensor in given.items()), version=1, timeout_s=UPDATE_S)
            ((other, *_),) = checksums(url)
            assert other.keys() == before[0].keys() and not other.items() & before[0].items()
            report = sync.update(given.items(), version=2, timeout_s=UPDATE_S)
        assert checksums(url) == [before]
        # no broadcast is compared
        compared = sum(map(len, before)) - FUSED.get(model.name, 0) if staged else 0
        assert report.verified == compared and report.skipped == ()


def _rows(spec: RoutingSpec, replies: list[Reply]) -> list[Ids]:
    """Through a relay, which holds each frame against the spec that the checkpoint's own config.json gives."""
    with Relay(spec, TrainerLayout(), ChannelConfig()) as relay:
        for index, reply in enumerate(replies):
            relay.add(str(index), reply.as_json, reply.tokens)
        return [rows_here(relay, str(index)) for index in range(len(replies))]
