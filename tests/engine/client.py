"""Real servers, and what the engine tests ask them, over plain HTTP: no client code of ours in between."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.embedded.sglang import EngineOptions, EngineServer
from r3channel.model.spec import RoutingSpec
from r3channel.relay.relay import Relay
from r3channel.wire.frame import Frame, parse_frame
from tests.engine.reference import reference_ids
from tests.support.direct import rows_here
from tests.support.samples import SPEC
from tests.support.waits import ENGINE_S

PROMPT = list(range(5, 25))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    prompt: list[int]
    output: list[int]
    meta: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def raw(self) -> bytes:
        """The bytes of meta_info["routed_experts"], before anybody looks at it."""
        return base64.b64decode(self.meta["routed_experts"])

    @property
    def as_json(self) -> dict[str, Any]:
        return {"meta_info": self.meta}

    def frame(self, spec: RoutingSpec = SPEC) -> Frame:
        return parse_frame(self.raw, spec=spec, sample_id="test", engine="test")


def post(url: str, body: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(_request(url, body), timeout=ENGINE_S) as reply:
        return reply.read()


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)


def generate(url: str, prompt: list[int], *, new_tokens: int, routing: bool = True, **extra: Any) -> Reply:
    raw = post(url + "/generate", _body(prompt, new_tokens, return_routed_experts=routing, **extra))
    return _reply(prompt, raw)


def stream(
    url: str, prompt: list[int], *, new_tokens: int, routing: bool = True, **extra: Any
) -> Iterator[Reply]:
    """One reply per chunk, as they come; each holds all tokens so far, and the last one the routing."""
    body = _body(prompt, new_tokens, return_routed_experts=routing, stream=True, **extra)
    with urllib.request.urlopen(_request(url + "/generate", body), timeout=ENGINE_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield _reply(prompt, line.removeprefix(b"data: "))


def _body(prompt: list[int], new_tokens: int, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
    return {"input_ids": prompt, "sampling_params": sampling, **extra}


def _reply(prompt: list[int], raw: bytes) -> Reply:
    values = json.loads(raw)
    return Reply(prompt=prompt, output=values["output_ids"], meta=values["meta_info"])


def generate_together(url: str, prompts: list[list[int]], *, new_tokens: int) -> list[Reply]:
    """All at once, so that the engine batches them."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(url, prompt, new_tokens=new_tokens), prompts))


def set_weight_version(url: str, version: str) -> None:
    # abort_all_requests is true by default (SGLang 0.5.23, io_struct.py)
    post(url + "/update_weight_version", {"new_version": version, "abort_all_requests": False})


@contextmanager
def weight_version(url: str, version: str) -> Iterator[None]:
    """The engine's in the block; afterwards it is 0 again."""
    set_weight_version(url, version)
    try:
        yield
    finally:
        set_weight_version(url, "0")


@contextmanager
def serving(model: Path, log_path: Path | None = None, **options: Any) -> Iterator[EngineServer]:
    """A server that is ready; prompts above 128 tokens are prefilled in chunks."""
    with EngineServer(
        EngineOptions(model=model, **{"chunked_prefill_size": 128, **options}), log_path=log_path
    ) as server:
        server.wait_ready(ENGINE_S)
        yield server


def direct_to(relay: Relay, folder: Path) -> dict[str, str]:
    """The environment of an engine that delivers to it."""
    return {
        "R3CHANNEL_DELIVERY": "direct",
        "R3CHANNEL_RELAY_URL": relay.serve(token_file=folder / "token"),
        "R3CHANNEL_TOKEN_FILE": str(folder / "token"),
    }


def delivered(relay: Relay, replies: Sequence[Reply], *, engine: str) -> dict[str, list[int]]:
    """The replies are samples of the relay now, and their frames are there: name -> tokens."""
    samples = {f"s{number}": reply.tokens for number, reply in enumerate(replies)}
    for name, reply in zip(samples, replies, strict=True):
        relay.add(name, reply.as_json, reply.tokens, engine=engine)
    relay.samples.await_frames(list(samples), timeout_s=ENGINE_S, step=0)
    return samples


def check_relay(relay: Relay, samples: Mapping[str, list[int]], *, model: Path) -> None:
    """Every row of every sample equals transformers', order included."""
    expected = reference_ids(model, list(samples.values()))
    for name, wanted in zip(samples, expected, strict=True):
        assert wanted.differing_rows(rows_here(relay, name)) == [], name


def check_replies(replies: Sequence[Reply], *, model: Path, spec: RoutingSpec = SPEC) -> None:
    """Every reply has a row for each token but the last, and each equals transformers', order included."""
    expected = reference_ids(model, [reply.tokens for reply in replies])
    for reply, wanted in zip(replies, expected, strict=True):
        frame = reply.frame(spec)
        assert frame.rows == len(reply.tokens) - 1 and frame.valid_T.all()
        assert wanted.differing_rows(frame.verify()) == [], f"prompt of {len(reply.prompt)}"


def random_prompt(length: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 512, length).tolist()


def prompts_of(lengths: Iterable[int], *, seed: int = 0) -> list[list[int]]:
    return [random_prompt(length, seed=seed + length) for length in lengths]


def greedy(url: str) -> tuple[list[int], str]:
    """Tokens and weight version of an answer that hardly any other weights would give."""
    reply = generate(url, PROMPT, new_tokens=8, routing=False)
    return reply.output, reply.meta["weight_version"]
