"""patches/slime-624b824a.patch on slime's own sources: its three hooks, and r3channel's classes in them. No GPU; a real Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.slime.cpu import sources
from r3channel.cli import main
from r3channel.embedded.sglang import environment
from r3channel.report import seams
from tests.samples import SPEC

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sources.upstream() is None,
        reason=f"R3CHANNEL_UPSTREAM is not set: a folder with {sources.SLIME} and {sources.MEGATRON}",
    ),
]
ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": SPEC.num_layers,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "num_experts": SPEC.num_experts,
    "num_experts_per_tok": SPEC.top_k,
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> sources.Sources:
    made = sources.ready(tmp_path_factory.mktemp("slime"))
    assert main(["patch", "apply", "--target", str(made.slime)]) == 0
    return made


@pytest.fixture(scope="module")
def facts(patched: sources.Sources, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    env = environment()
    megatron, slime, extra = patched.path
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), megatron, slime, env["PYTHONPATH"], extra])
    env |= {"SLIME_ACCELERATOR": "cpu", "SLIME_CPU_TRAINER": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.upstream.drive_slime_hooks", str(model)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{(child.stdout + child.stderr)[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


def test_the_launchers_seams_are_where_they_were(patched: sources.Sources) -> None:
    assert seams.moved(patched.slime) == []


def test_a_transport_is_a_known_name_or_a_path(facts: dict[str, Any]) -> None:
    assert facts["names"] == ["nixl", "object-store"]
    assert "path of a class" in facts["refused"] and "nixel" in facts["refused"]


def test_the_transport_is_built_before_the_engines_and_gets_every_ranks_data(facts: dict[str, Any]) -> None:
    assert facts["built"] == ["transport", "engines", "source"]
    rollout_id, samples, partitions = facts["put"]
    assert (rollout_id, samples) == (7, len(facts["tokens"]))
    assert len(partitions) == 2
    assert sorted(place for rank in partitions for place in rank) == list(range(samples))


def test_a_decoder_reads_another_encoding_and_without_one_int32_is_read(facts: dict[str, Any]) -> None:
    assert facts["decoders"] == {"stock": True, "another encoding": True}


def test_the_actor_class_is_taken_by_path_unless_the_caller_gives_one(facts: dict[str, Any]) -> None:
    assert facts["actors"] == {
        "without": "None", "by path": "PatchedActor", "is ours": True, "the call wins": True,
    }  # fmt: skip


def test_the_channel_seals_slimes_own_split_and_no_rows_are_in_its_data(facts: dict[str, Any]) -> None:
    found = facts["channel"]
    assert found["asks engines for routing"] is True and found["engine"] == "ChannelEngine"
    assert found["fields"] == ["tokens"]
    by_index = {int(name.partition(".")[0]): tokens for name, tokens in found["tokens"].items()}
    assert by_index == dict(enumerate(facts["tokens"]))
    sealed = [[int(name.partition(".")[0]) for name in rank] for rank in found["ranks"]]
    assert [sorted(rank) for rank in sealed] == [sorted(rank) for rank in found["partition"]]


def test_engines_are_told_where_the_token_is_and_the_relays_actor_has_read_it(facts: dict[str, Any]) -> None:
    assert "R3CHANNEL_RELAY_URL" in facts["channel"]["told"] and not facts["channel"]["token told"]


def test_trainers_reach_the_relay_in_its_actor(facts: dict[str, Any]) -> None:
    assert facts["channel"]["hello"] and facts["channel"]["recorded"]
