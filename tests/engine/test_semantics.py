"""What routing means when a request is not simply run to its end: each case on the real engine, against transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.embedded.sglang import EngineServer
from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.hello import probe_body
from r3channel.wire.parcel import REFERENCE_MAGIC
from r3channel.wire.routing import RowKind
from tests.engine import client
from tests.support.direct import turns_here
from tests.support.samples import SPEC
from tests.support.waits import ENGINE_S

pytestmark = pytest.mark.engine

NEW_TOKENS = 24


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay(SPEC, TrainerLayout(), ChannelConfig()) as relay:
        yield relay


# -- requests that are cut, continued, multiplied ------------------------------------------------------------------------


def test_an_aborted_request_goes_on_with_its_rows(engine_url: str, relay: Relay, model_dir: Path) -> None:
    prompt = client.random_prompt(50, seed=1000 + 1)
    chunks = client.stream(engine_url, prompt, new_tokens=2000, rid="abort-me")
    for _ in range(20):
        next(chunks)
    client.post(engine_url + "/abort_request", {"rid": "abort-me"})
    *_, first = chunks
    assert first.meta["finish_reason"]["type"] == "abort"
    relay.add("s", first.as_json, first.tokens)
    held = relay.rows_held("s")
    with client.weight_version(engine_url, "2"):
        rest = client.generate(engine_url, first.tokens, new_tokens=10, routed_experts_start_len=held)
    relay.add("s", rest.as_json, rest.tokens, append=True)
    client.check_relay(relay, {"s": rest.tokens}, model=model_dir)
    first_span, *spans = [span for rows in turns_here(relay, "s") for span in rows.provenance]
    assert (first_span.start, first_span.end, first_span.weight_version) == (0, 50, 0)
    decoded = [span for span in spans if span.kind is RowKind.DECODED]
    assert decoded[0].weight_version == 0
    assert decoded[0].end - decoded[0].start > 10
    assert decoded[-1].weight_version == 2
    assert len(rest.raw) < len(first.raw)


def test_a_chat_sends_each_row_once(engine_url: str, relay: Relay, model_dir: Path) -> None:
    tokens, rows_sent = [], 0
    for turn in range(4):
        asked = [*tokens, *client.random_prompt(15, seed=1000 + 20 + turn)]  # the user's next words
        held = relay.rows_held("s")
        reply = client.generate(engine_url, asked, new_tokens=12, routed_experts_start_len=held)
        relay.add("s", reply.as_json, reply.tokens, append=turn > 0)
        rows_sent += reply.frame().rows
        tokens = reply.tokens
    assert rows_sent == len(tokens) - 1
    client.check_relay(relay, {"s": tokens}, model=model_dir)


def test_each_of_n_samples_has_its_own_rows(engine_url: str, relay: Relay, model_dir: Path) -> None:
    prompt = client.random_prompt(30, seed=1000 + 4)
    sampling = {"n": 3, "temperature": 1.0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    replies = json.loads(client.post(engine_url + "/generate", body))
    samples = {}
    for number, reply in enumerate(replies):
        samples[f"s{number}"] = prompt + reply["output_ids"]
        relay.add(f"s{number}", reply, samples[f"s{number}"])
    assert len({tuple(tokens) for tokens in samples.values()}) == 3
    client.check_relay(relay, samples, model=model_dir)


def test_a_streamed_reply_carries_its_frame_in_the_last_chunk_only(engine_url: str) -> None:
    *before, last = client.stream(engine_url, client.random_prompt(25, seed=1000 + 5), new_tokens=NEW_TOKENS)
    assert len(before) > 5
    assert not any(chunk.meta.get("routed_experts") for chunk in before)
    assert last.frame().rows == len(last.tokens) - 1


# -- direct delivery, forced retraction under the overlap scheduler, no tokenizer in the engine ----------------------------


@dataclass
class Direct:
    relay: Relay
    server: EngineServer


@pytest.fixture(scope="module")
def direct(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    with Relay(SPEC, TrainerLayout(), ChannelConfig(frame_timeout_s=30.0)) as relay:
        env = {"SGLANG_TEST_RETRACT": "1", **client.direct_to(relay, tmp_path_factory.mktemp("token"))}
        with client.serving(model_dir, extra_args=["--skip-tokenizer-init"], env=env) as server:
            relay.expect_engines([server.url], timeout_s=ENGINE_S)
            yield Direct(relay, server)


@pytest.mark.long
def test_direct_frames_are_exact_under_retraction_and_replies_small(direct: Direct, model_dir: Path) -> None:
    prompts = client.prompts_of((3, 40, 90, 130, 300), seed=1060)
    replies = client.generate_together(direct.server.url, prompts, new_tokens=NEW_TOKENS)
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    for reply in replies:
        assert len(reply.meta["routed_experts"]) <= 64 and reply.raw[:4] == REFERENCE_MAGIC
    assert direct.relay.status()["engines"][direct.server.url].startswith("SGLang 0.5.23")
    samples = client.delivered(direct.relay, replies, engine=direct.server.url)
    client.check_relay(direct.relay, samples, model=model_dir)


@pytest.mark.long
def test_a_probe_is_answered_with_hello_and_frame_whatever_the_delivery(direct: Direct) -> None:
    reply = json.loads(client.post(direct.server.url + "/generate", probe_body()))
    assert base64.b64decode(reply["meta_info"]["routed_experts"])[:4] == b"R3H\x01"
    direct.relay.check_engine(reply, engine=direct.server.url, tokens=3)


@pytest.mark.long
def test_the_doctor_shows_what_an_engine_says(direct: Direct, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--engine", direct.server.url]) == 0
    text = capsys.readouterr().out
    assert "SGLang 0.5.23" in text
    assert "direct, codec auto" in text
    assert "_maybe_collect_routed_experts" in text
    assert "3 MoE layers of 4, top-8 of 128; a frame of 2 rows" in text
    found = {line[6:28].strip(): line[29:] for line in text.splitlines()}
    assert "--device cpu" in found["settings tested"]
    assert "--page-size 1" in found["settings by reading"]
    assert (found["settings refused"], found["settings not read"]) == ("none", "none")
