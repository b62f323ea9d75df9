"""What the engine tests ask a server, over plain HTTP: no client code of ours in between."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    prompt: list[int]
    output: list[int]
    meta: dict[str, Any]
    json_bytes: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def raw(self) -> bytes:
        """The bytes of meta_info["routed_experts"], before anybody looks at it."""
        return base64.b64decode(self.meta["routed_experts"])


def post(url: str, body: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(_request(url, body), timeout=TIMEOUT_S) as reply:
        return reply.read()


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)


def generate(url: str, prompt: list[int], *, new_tokens: int, routing: bool = True, **extra: Any) -> Reply:
    raw = post(url + "/generate", _body(prompt, new_tokens, return_routed_experts=routing, **extra))
    return _reply(prompt, raw)


def stream(url: str, prompt: list[int], *, new_tokens: int, **extra: Any) -> Iterator[Reply]:
    """One reply per chunk, as they come; each holds all tokens so far, and the last one the routing."""
    body = _body(prompt, new_tokens, return_routed_experts=True, stream=True, **extra)
    with urllib.request.urlopen(_request(url + "/generate", body), timeout=TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield _reply(prompt, line.removeprefix(b"data: "))


def _body(prompt: list[int], new_tokens: int, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
    return {"input_ids": prompt, "sampling_params": sampling, **extra}


def _reply(prompt: list[int], raw: bytes) -> Reply:
    values = json.loads(raw)
    return Reply(prompt=prompt, output=values["output_ids"], meta=values["meta_info"], json_bytes=len(raw))


def generate_together(url: str, prompts: list[list[int]], *, new_tokens: int) -> list[Reply]:
    """All at once, so that the engine batches them."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(url, prompt, new_tokens=new_tokens), prompts))


def set_weight_version(url: str, version: str) -> None:
    # abort_all_requests is true by default (SGLang 0.5.23, io_struct.py)
    post(url + "/update_weight_version", {"new_version": version, "abort_all_requests": False})
