"""Speculative decoding with one candidate a step, on the real SGLang: rows are those of the tokens that were accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.embedded.model import write_model
from examples.embedded.sglang import EngineServer
from r3channel.config import ChannelConfig
from r3channel.errors import CannotStage, WeightUpdateFailed
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.weights.engine import EngineHandle
from r3channel.wire.routing import RowKind
from tests.engine import client
from tests.support.waits import ENGINE_S, UPDATE_S
from tests.support.weights import connected

pytestmark = [pytest.mark.engine, pytest.mark.full]

LAYERS = 3
REST = 0.1
"""What the rest of the target adds to hidden states, of what it would: it sets how often its drafts agree with it. Measured
without a draft: at 0.02 both agree in 0.94, at 0.1 in 0.55, at 0.3 in 0.13."""
_WEIGHTS = "model.safetensors"
SPEC = RoutingSpec(num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), num_experts=128, top_k=8)
DRAFTED = 3
NEW_TOKENS = 23
LENGTHS = (3, 17, 40, 41, 90, 130, 131, 200)
RUNNING = 8
CHUNK = 16
"""A prefill pass has fewer rows than one that verifies for all running requests."""


class Models(NamedTuple):
    """Folders of checkpoints: a tiny target, and two drafts that agree with it now and then.

    So chains are accepted in part. Both drafts are the target cut after its first attention: same embeddings, same attention,
    same output.
    """

    target: Path
    """Every layer routes."""
    head: Path
    """A draft head (MTP) that goes on from the target's hidden states; its layer routes, too."""
    standalone: Path
    """A dense draft model that sees tokens only."""


def write_models(folder: Path) -> Models:
    target = write_model(folder / "target", layers=LAYERS, dense_layers=())
    weights = load_file(target / _WEIGHTS)
    for name in weights:
        if "down_proj" in name or ("o_proj" in name and ".layers.0." not in name):
            weights[name] *= REST
    save_file(weights, target / _WEIGHTS, metadata={"format": "pt"})
    models = Models(target, folder / "head", folder / "standalone")
    _write(models.head, head_weights(weights), target=target)
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    _write(models.standalone, standalone_weights(weights), target=target, **dense)
    return models


def _write(folder: Path, weights: dict[str, Any], *, target: Path, **changes: Any) -> None:
    folder.mkdir()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, **changes}))


def head_weights(target: dict[str, Any]) -> dict[str, Any]:
    """The head takes (embedding, hidden state), both normed, and gives its layer the embedding at its old size."""
    embedding = target["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    size = float(embedding.square().mean().sqrt())
    weights = {
        name.replace("model.", "mtp.", 1): values.clone()
        for name, values in target.items()
        if name.startswith(("model.layers.0.", "model.norm."))
    }
    weights["mtp.fc.weight"] = torch.cat([size * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    for name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
        weights[name] = torch.ones(hidden)
    return weights


def standalone_weights(target: dict[str, Any]) -> dict[str, Any]:
    """The target's first layer without its experts."""
    weights = {
        name: values.clone()
        for name, values in target.items()
        if ".mlp." not in name and not name.startswith(tuple(f"model.layers.{n}." for n in range(1, LAYERS)))
    }
    hidden = weights["model.embed_tokens.weight"].shape[1]
    wide = 2 * hidden
    for name, shape in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
        weights[f"model.layers.0.mlp.{name}_proj.weight"] = torch.zeros(shape)
    return weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("models"))


def speculating(
    models: Models, *more: str, algorithm: str = "EAGLE", **changes: Any
) -> AbstractContextManager[EngineServer]:
    draft = models.head if algorithm == "EAGLE" else models.standalone
    speculation = {
        "algorithm": algorithm, "draft-model-path": draft, "num-steps": DRAFTED,
        "eagle-topk": 1, "num-draft-tokens": DRAFTED + 1,
    }  # fmt: skip
    arguments = [f"--speculative-{name}={value}" for name, value in speculation.items()]
    limits = {"chunked_prefill_size": CHUNK, "max_running_requests": RUNNING}
    return client.serving(models.target, extra_args=[*arguments, *more], **limits, **changes)


@pytest.fixture(scope="module")
def engine_url(models: Models) -> Iterator[str]:
    """With the overlap scheduler: a request's next pass runs already when its last one is looked at."""
    with speculating(models, max_total_tokens=2048) as server:
        yield server.url


@pytest.fixture(scope="module")
def batch(engine_url: str) -> list[client.Reply]:
    """Three times as many requests as run at once: slots that one gives back are another's while passes are under way."""
    prompts = [client.random_prompt(n, seed=1000 * turn + n) for turn in range(3) for n in LENGTHS]
    assert len(prompts) > RUNNING and RUNNING * (DRAFTED + 1) > CHUNK
    return client.generate_together(engine_url, prompts, new_tokens=NEW_TOKENS)


def test_an_update_that_would_leave_the_draft_old_is_refused(engine_url: str, models: Models) -> None:
    engine, weights = EngineHandle(engine_url), load_file(models.target / "model.safetensors")
    before = engine.weight_checksums(timeout_s=UPDATE_S), engine.weight_version(timeout_s=UPDATE_S)
    assert any(name.startswith("draft.") for name in before[0][0]), "the engine holds a draft's weights"
    with connected([engine], staged=True) as sync:
        said = "speculative_algorithm=EAGLE: the draft would stay old.*without or with NGRAM"
        with pytest.raises(WeightUpdateFailed, match=f"(?s){said}") as failure:
            sync.update(weights.items(), version=7, timeout_s=UPDATE_S)
        assert isinstance(failure.value.__cause__, CannotStage)
    assert (engine.weight_checksums(timeout_s=UPDATE_S), engine.weight_version(timeout_s=UPDATE_S)) == before
    assert client.generate(engine_url, client.random_prompt(9, seed=9), new_tokens=2).output, "it serves on"


def passes_by_accepted(replies: list[client.Reply]) -> list[int]:
    """How many passes accepted none of the drafted tokens, one of them, and so on."""
    passes = np.zeros(DRAFTED + 1, int)
    for reply in replies:
        histogram = reply.meta["spec_correct_drafts_histogram"]
        passes[: len(histogram)] += histogram
    return passes.tolist()


def test_accepted_tokens_have_transformers_rows(batch: list[client.Reply], models: Models) -> None:
    """Chains were accepted whole, in part and not at all; what was verified is decoded, and the prompt prefilled."""
    client.check_replies(batch, model=models.target, spec=SPEC)
    assert min(passes_by_accepted(batch)) >= 10
    for reply in batch:
        spans = [(span.start, span.end, span.kind) for span in reply.frame(SPEC).provenance]
        prompt = len(reply.prompt)
        assert spans == [(0, prompt, RowKind.PREFILLED), (prompt, len(reply.tokens) - 1, RowKind.DECODED)]


def test_a_request_that_ends_inside_a_chain_has_no_later_row(engine_url: str, models: Models) -> None:
    """Each time it is asked it ends after another token inside a chain that was accepted."""
    prompt = client.random_prompt(60, seed=60)
    ends = [len(chunk.output) for chunk in client.stream(engine_url, prompt, new_tokens=40)]
    inside = sorted(set(range(1, 40)) - set(ends))
    assert len(inside) >= 5, f"passes ended after {ends} tokens"
    cut = [client.generate(engine_url, prompt, new_tokens=length) for length in inside]
    client.check_replies(cut, model=models.target, spec=SPEC)


def test_a_turn_that_finds_accepted_tokens_cached_has_their_rows(engine_url: str, models: Models) -> None:
    first = client.generate_together(engine_url, client.prompts_of(LENGTHS, seed=5000), new_tokens=NEW_TOKENS)
    prompts = [[*reply.tokens, *client.random_prompt(9, seed=len(reply.prompt))] for reply in first]
    turns = client.generate_together(engine_url, prompts, new_tokens=NEW_TOKENS)
    for turn, before in zip(turns, first, strict=True):
        assert turn.meta["cached_tokens"] > len(before.prompt) + NEW_TOKENS // 2
    client.check_replies(turns, model=models.target, spec=SPEC)


def test_direct_rows_without_overlap_are_exact_under_retraction(models: Models, tmp_path: Path) -> None:
    with Relay(SPEC, TrainerLayout(), ChannelConfig(frame_timeout_s=30.0)) as relay:
        env = {"SGLANG_TEST_RETRACT": "1", **client.direct_to(relay, tmp_path)}
        with speculating(models, algorithm="STANDALONE", overlap=False, env=env) as server:
            relay.expect_engines([server.url], timeout_s=ENGINE_S)
            replies = client.generate_together(server.url, client.prompts_of(LENGTHS), new_tokens=NEW_TOKENS)
            samples = client.delivered(relay, replies, engine=server.url)
        client.check_relay(relay, samples, model=models.target)
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    assert min(passes_by_accepted(replies)) > 0
