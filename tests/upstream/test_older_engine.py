"""SGLang 0.5.15.post1, as published and with the patches of slime's image, as a real server on CPU with our hooks: its wheels
are laid over the installed ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.embedded.sglang import EngineServer, free_port
from r3channel.errors import EngineUnavailable, WeightUpdateFailed
from r3channel.relay.reply import frame_bytes_of
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import Hello, probe_body
from r3channel.wire.routing import RowKind
from tests.engine import test_speculative as speculative
from tests.engine.client import Reply, check_replies, generate, generate_together, post, prompts_of, serving
from tests.engine.test_speculative import SPEC, Models, write_models
from tests.support.waits import UPDATE_S
from tests.support.weights import connected
from tests.upstream.wheels import path_with, slimes_sglang, unpacked, without_other_models

pytestmark = [pytest.mark.engine, pytest.mark.full]

VERSION = "0.5.15.post1"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """All layers of the target are sparse: that release's Qwen3-MoE takes them so."""
    return write_models(tmp_path_factory.mktemp("models"))


def older(tree: Callable[[str], Path]) -> dict[str, str]:
    """The environment of an engine of that release; `tree` has it published or patched."""
    release = tree(f"sglang=={VERSION}")
    return without_other_models(release) | {
        "PYTHONPATH": path_with(VERSION, release),
        "SGLANG_GRPC_PORT": str(free_port()),  # by default 10,000 above the server's, which may be no port
    }


SLIMES = pytest.param((slimes_sglang, True, 2), id="slime's image, two ranks", marks=pytest.mark.long)
PUBLISHED = [pytest.param((unpacked, overlap, 1), id=f"overlap {overlap}") for overlap in (True, False)]


@pytest.fixture(scope="module", params=[*PUBLISHED, SLIMES])
def server(models: Models, request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    tree, overlap, tp = request.param
    with serving(models.target, overlap=overlap, tp=tp, weight_version="default", env=older(tree)) as server:
        yield server


def test_the_hooks_are_those_of_that_release(server: EngineServer) -> None:
    reply = json.loads(post(server.url + "/generate", probe_body()))
    hello, frame = Hello.split(frame_bytes_of(reply, where=server.url))
    assert hello is not None
    assert hello.sglang == VERSION
    assert any(hook.endswith("update_weights_from_distributed") for hook in hello.hooks)
    assert parse_frame(frame, spec=SPEC).rows == 2


def answers(url: str) -> list[Reply]:
    """To prompts of several lengths at once, and to the longest again: a prefix-cache hit."""
    prompts = prompts_of((3, 40, 130, 300))
    return [*generate_together(url, prompts, new_tokens=20), generate(url, prompts[-1], new_tokens=20)]


def check_update(url: str, model: Path) -> None:
    """A weight update that names its version stamps later rows."""
    body = {"model_path": str(model), "weight_version": "4", "flush_cache": True}
    assert json.loads(post(url + "/update_weights_from_disk", body))["success"]
    frame = generate(url, list(range(10, 30)), new_tokens=5).frame(SPEC)
    spans = [(span.end, span.weight_version, span.kind) for span in frame.provenance]
    assert spans == [(20, 4, RowKind.PREFILLED), (24, 4, RowKind.DECODED)]


def test_ids_are_transformers_and_an_update_stamps_rows(server: EngineServer, models: Models) -> None:
    check_replies(answers(server.url), model=models.target, spec=SPEC)
    check_update(server.url, models.target)


def test_a_broadcast_asks_the_loader_of_that_release_for_names(server: EngineServer, models: Models) -> None:
    given, name = load_file(models.target / "model.safetensors"), "model.layers.0.self_attn.o_proj.weight"
    misspelt = {each.replace("o_proj", "o_prj") if each == name else each: t for each, t in given.items()}
    with connected([server.url]) as sync:
        with pytest.raises(WeightUpdateFailed, match=r"o_prj\.weight"):
            sync.update(misspelt.items(), version=5, timeout_s=UPDATE_S)
        extra = given | {"rotary_emb.inv_freq": torch.ones(4)}
        report = sync.update(extra.items(), version=6, timeout_s=UPDATE_S)
    assert report.way.startswith("broadcast: ") and report.skipped == ("rotary_emb.inv_freq",)


TREES = pytest.mark.parametrize("tree", [unpacked, slimes_sglang], ids=["published", "slime's image"])


@TREES
def test_accepted_tokens_have_transformers_rows(tree: Callable[[str], Path], models: Models) -> None:
    """More rows are verified in a pass than a prefill has, so the buffer must have room for them."""
    algorithm, overlap = ("EAGLE", True) if tree is unpacked else ("STANDALONE", False)
    env = {**older(tree), "TRITON_INTERPRET": "1"}
    with speculative.speculating(models, algorithm=algorithm, overlap=overlap, env=env) as server:
        replies = generate_together(
            server.url, prompts_of(speculative.LENGTHS), new_tokens=speculative.NEW_TOKENS
        )
    assert min(speculative.passes_by_accepted(replies)) > 0
    check_replies(replies, model=models.target, spec=SPEC)


@TREES
def test_chains_with_dp_attention_are_taken_in_slimes_image_alone_and_an_unread_setting_nowhere(
    tree: Callable[[str], Path], models: Models, tmp_path: Path
) -> None:
    arguments = "--tp-size 2 --dp-size 2 --enable-dp-attention --disable-fast-image-processor"
    env = {**older(tree), "TRITON_INTERPRET": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with pytest.raises(EngineUnavailable, match="ended with exit code"):
        speculative.speculating(models, *arguments.split(), env=env, log_path=tmp_path / "log").__enter__()
    log = (tmp_path / "log").read_text()
    _, refused, said = log.partition("ConfigError: r3channel refuses this engine: ")
    assert refused, log
    said = said.splitlines()[0]
    assert "--disable-fast-image-processor: these settings were neither tested nor read" in said
    assert ("--speculative-algorithm EAGLE with DP attention: " in said) == (tree is unpacked)
