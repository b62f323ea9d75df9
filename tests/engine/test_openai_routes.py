"""SGLang's OpenAI routes with the plug-in: a frame is found in every form of reply, and its rows are those of `/generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.errors import UsageError
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.engine.client import generate, post, random_prompt
from tests.support.direct import rows_here
from tests.support.samples import SPEC
from tests.unit.test_documents import SNIPPETS

pytestmark = pytest.mark.engine

PROMPT = random_prompt(30, seed=45)
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
    wanted = generate(engine_url, PROMPT, new_tokens=6)
    with Relay(SPEC, TrainerLayout(), ChannelConfig(on_missing="live")) as relay:
        relay.add_body("s", post(url, ask), wanted.tokens, engine=engine_url)
        assert np.array_equal(rows_here(relay, "s"), wanted.frame().ids())
        with pytest.raises(UsageError, match=r"sample two from engine .* one sample\. Was n above 1"):
            relay.add_body("two", post(url, ask | TWO), wanted.tokens, engine=engine_url)


def test_prompts_of_one_request_are_samples_of_their_own(engine_url: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in (30, 17)]
    ask = {"input_ids": prompts, "sampling_params": SAMPLING, "return_routed_experts": True}
    alone = [generate(engine_url, prompt, new_tokens=6) for prompt in prompts]
    own: dict[str, list[int]] = dict(zip(("a", "b"), prompts, strict=True))
    with Relay(SPEC, TrainerLayout(), ChannelConfig()) as relay:
        body = post(engine_url + "/generate", ask)
        relay.add_bodies([*own], body, lambda name, reply: own[name] + reply["output_ids"], engine=engine_url)
        for name, wanted in zip(own, alone, strict=True):
            assert np.array_equal(rows_here(relay, name), wanted.frame().ids())


def test_a_chat_runs_as_the_relays_page_has_it(engine_url: str) -> None:
    (text,) = [text for _, text in SNIPPETS if "return_token_ids" in text]
    with Relay(SPEC, TrainerLayout()) as relay:
        names: dict[str, Any] = {"relay": relay, "url": engine_url, "messages": MESSAGES}
        names["post"] = lambda url, ask: post(url, ask | MORE)
        exec(text, names)  # noqa: S102  our own page
        assert len(rows_here(relay, "chat12")) == 35
