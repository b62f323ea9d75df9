"""The real SGLang server with the plug-in: exact ids, provenance, and what its replies look like from outside, by every route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.errors import EngineReported, EngineUnavailable, FrameMagicMismatch, UsageError
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.routing import RowKind
from tests.engine import client
from tests.support.direct import rows_here
from tests.support.samples import SPEC
from tests.unit.test_documents import SNIPPETS

pytestmark = pytest.mark.engine

NEW_TOKENS = 24
LENGTHS = (3, 17, 40, 90, 130, 200, 300)


@pytest.fixture(scope="module")
def batch(engine_url: str) -> list[client.Reply]:
    """Prompts of many lengths at once; the longest are prefilled in three chunks."""
    return client.generate_together(engine_url, client.prompts_of(LENGTHS), new_tokens=NEW_TOKENS)


def test_ids_are_those_and_in_order(engine_url: str, batch: list[client.Reply], model_dir: Path) -> None:
    """The longest prompt is asked a second time: its KV cache is hit."""
    again = client.generate(engine_url, batch[-1].prompt, new_tokens=NEW_TOKENS)
    assert again.meta["cached_tokens"] > 200
    client.check_replies([*batch, again], model=model_dir)
    ids_TLK = batch[-1].frame().ids()
    assert len(np.unique(ids_TLK.reshape(len(ids_TLK), -1), axis=0)) > 200, "they vary from token to token"


def test_prompt_rows_are_prefilled_and_the_others_decoded(batch: list[client.Reply]) -> None:
    for reply in batch:
        spans = [(span.start, span.end, span.kind) for span in reply.frame().provenance]
        prompt = len(reply.prompt)
        assert spans == [(0, prompt, RowKind.PREFILLED), (prompt, prompt + NEW_TOKENS - 1, RowKind.DECODED)]


def test_an_offset_of_the_whole_prompt_and_one_token_give_no_rows_and_who_did_not_ask_gets_no_frame(
    engine_url: str,
) -> None:
    prompt = client.random_prompt(20, seed=1)
    reply = client.generate(engine_url, prompt, new_tokens=1, routed_experts_start_len=20)
    assert (reply.frame().rows, reply.frame().first_row) == (0, 20)
    assert "routed_experts" not in client.generate(engine_url, [5, 6], new_tokens=2, routing=False).meta


def test_rows_carry_the_weight_version_that_made_them(engine_url: str) -> None:
    prompt = client.random_prompt(60, seed=60)
    client.generate(engine_url, prompt, new_tokens=2)
    with client.weight_version(engine_url, "7"):
        reply = client.generate(engine_url, prompt, new_tokens=8)
    assert reply.meta["cached_tokens"] == 59
    spans = [(span.start, span.end, span.weight_version) for span in reply.frame().provenance]
    # The prompt's rows are an older request's; the reply's own version spans cannot tell. Row 59 was computed again, but
    # SGLang then gave its slot back for the cached one, and that is the row (and the KV) the request went on with.
    assert spans == [(0, 60, 0), (60, 67, 7)]


def test_a_version_that_changes_in_mid_generation_splits_the_decoded_rows(engine_url: str) -> None:
    chunks = client.stream(engine_url, client.random_prompt(30, seed=30), new_tokens=200)
    for _ in range(10):
        next(chunks)
    with client.weight_version(engine_url, "3"):
        *_, last = chunks
    decoded = [span for span in last.frame().provenance if span.kind is RowKind.DECODED]
    assert [span.weight_version for span in decoded] == [0, 3]
    # SGLang counts output tokens when the update arrives; with overlap up to two forward passes are under way then.
    assert abs(decoded[1].start - (30 - 1 + last.meta["weight_versions"][0]["end"])) <= 2


def test_what_cannot_be_framed_is_reported_and_the_engine_goes_on(engine_url: str) -> None:
    prompt = client.random_prompt(25, seed=25)
    with client.weight_version(engine_url, "nightly"):
        reply = client.generate(engine_url, prompt, new_tokens=4)
    with pytest.raises(EngineReported, match="weight version was not a number"):
        reply.frame()
    assert client.generate(engine_url, client.random_prompt(25, seed=26), new_tokens=4).frame().rows == 28


# -- SGLang's OpenAI routes: a frame is found in every form of reply, and its rows are those of `/generate` ------------

PROMPT = client.random_prompt(30, seed=45)
MESSAGES = [{"role": "user", "content": " ".join(f"t{token}" for token in PROMPT)}]
MORE = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
TWO = {"n": 2, "sampling_params": SAMPLING | {"n": 2}}
ROUTES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions with meta_info": {"messages": MESSAGES, "return_meta_info": True},
    "/v1/completions in a stream": {"prompt": PROMPT, "stream": True},
    "/v1/chat/completions in a stream": {"messages": MESSAGES, "stream": True},
    "/generate in a stream": {"input_ids": PROMPT, "stream": True, "sampling_params": SAMPLING},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_rows_of_every_route_are_those_of_generate(engine_url: str, route: str) -> None:
    url, ask = engine_url + route.split()[0], MORE | ROUTES[route]
    wanted = client.generate(engine_url, PROMPT, new_tokens=6)
    with Relay(SPEC, TrainerLayout(), ChannelConfig(on_missing="live")) as relay:
        relay.add_body("s", client.post(url, ask), wanted.tokens, engine=engine_url)
        assert np.array_equal(rows_here(relay, "s"), wanted.frame().ids())
        with pytest.raises(UsageError, match=r"sample two from engine .* one sample\. Was n above 1"):
            relay.add_body("two", client.post(url, ask | TWO), wanted.tokens, engine=engine_url)


def test_prompts_of_one_request_are_samples_of_their_own(engine_url: str) -> None:
    prompts = [client.random_prompt(length, seed=length) for length in (30, 17)]
    ask = {"input_ids": prompts, "sampling_params": SAMPLING, "return_routed_experts": True}
    alone = [client.generate(engine_url, prompt, new_tokens=6) for prompt in prompts]
    own: dict[str, list[int]] = dict(zip(("a", "b"), prompts, strict=True))
    with Relay(SPEC, TrainerLayout(), ChannelConfig()) as relay:
        body = client.post(engine_url + "/generate", ask)
        relay.add_bodies([*own], body, lambda name, reply: own[name] + reply["output_ids"], engine=engine_url)
        for name, wanted in zip(own, alone, strict=True):
            assert np.array_equal(rows_here(relay, name), wanted.frame().ids())


def test_a_chat_runs_as_the_relays_page_has_it(engine_url: str) -> None:
    (text,) = [text for _, text in SNIPPETS if "return_token_ids" in text]
    with Relay(SPEC, TrainerLayout()) as relay:
        names: dict[str, Any] = {"relay": relay, "url": engine_url, "messages": MESSAGES}
        names["post"] = lambda url, ask: client.post(url, ask | MORE)
        exec(text, names)  # noqa: S102  our own page
        assert len(rows_here(relay, "chat12")) == 35


# -- servers of their own ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stock_server_has_the_same_ids_and_is_told_apart(
    model_dir: Path, batch: list[client.Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    with client.serving(model_dir, r3channel=False) as server:
        stock = client.generate(server.url, batch[3].prompt, new_tokens=NEW_TOKENS)
        assert cli.main(["doctor", "--engine", server.url]) == 1
    assert "answers with stock int32 routing; install r3channel" in capsys.readouterr().out
    with pytest.raises(FrameMagicMismatch):
        stock.frame()
    int32_TAK = np.frombuffer(stock.raw, np.int32).reshape(-1, SPEC.num_layers, SPEC.top_k)
    assert np.array_equal(int32_TAK[:, 1:], batch[3].frame().ids())
    assert len(stock.raw) > 4.5 * batch[3].frame().nbytes


@pytest.mark.long
def test_an_engine_whose_rows_would_be_wrong_does_not_start(model_dir: Path) -> None:
    arguments = (
        "--disaggregation-mode decode --disaggregation-transfer-backend nixl --enable-streaming-session"
    )
    with pytest.raises(EngineUnavailable) as refused:
        client.serving(model_dir, weight_version="nightly", extra_args=arguments.split()).__enter__()
    assert "r3channel refuses this engine" in str(refused.value)
    assert "--disaggregation-mode decode" in str(refused.value)
    assert "--enable-streaming-session: these settings were neither tested nor read" in str(refused.value)
    assert "weight version 'nightly'" in str(refused.value)


@pytest.mark.full
def test_rows_of_mixed_passes_are_exact_and_of_unknown_kind(model_dir: Path) -> None:
    with client.serving(model_dir, extra_args=["--enable-mixed-chunk"]) as server:
        replies = client.generate_together(server.url, client.prompts_of(LENGTHS), new_tokens=NEW_TOKENS)
    client.check_replies(replies, model=model_dir)
    prompt_kinds, new_kinds = set[RowKind](), set[RowKind]()
    for reply in replies:
        for span in reply.frame().provenance:
            prompt_kinds |= {span.kind} if span.start < len(reply.prompt) else set()
            new_kinds |= {span.kind} if span.end > len(reply.prompt) else set()
    assert prompt_kinds == {RowKind.PREFILLED, RowKind.UNKNOWN}
    assert new_kinds == {RowKind.DECODED, RowKind.UNKNOWN}


@pytest.mark.full
def test_the_plugin_loads_in_spawned_processes_as_on_a_machine_with_a_gpu(model_dir: Path) -> None:
    with client.serving(model_dir, env={"R3DEMO_EMBEDDED_SPAWN": "1"}) as server:
        assert client.generate(server.url, [5, 6], new_tokens=1).frame().rows == 2
        shared = [*Path("/dev/shm").glob(f"sgl*_{server.pid}_*")]
    assert shared and not any(path.exists() for path in shared)
