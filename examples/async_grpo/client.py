"""Asks SGLang over HTTP. Knows the request's fields; a reply is bytes."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from examples.async_grpo.grpo import Request
from r3channel.errors import EngineUnavailable

REQUEST_TIMEOUT_S = 120.0


async def ask(
    requests: list[Request], urls: list[str], times: dict[str, tuple[float, float]] | None = None
) -> list[bytes | BaseException]:
    """Send all at once; for each the body of its reply, or what went wrong. `times` gets begin and end of what was answered."""
    times = {} if times is None else times
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asked = [_post(session, url, request, times) for request, url in zip(requests, urls, strict=True)]
        return await asyncio.gather(*asked, return_exceptions=True)


async def _post(
    session: aiohttp.ClientSession, url: str, request: Request, times: dict[str, tuple[float, float]]
) -> bytes:
    body = {
        "input_ids": request.prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": request.new_tokens, "ignore_eos": True},
        "return_routed_experts": True,
        "rid": request.rid,
        "return_logprob": True,
    }
    begin = time.monotonic()
    try:
        async with session.post(url + "/generate", json=body) as response:
            raw, status = await response.read(), response.status
    except aiohttp.ClientError as error:
        raise EngineUnavailable(f"{url}: {type(error).__name__}: {error}", engines=[url]) from error
    if status != 200:
        waited = time.monotonic() - begin
        raise RuntimeError(
            f"{url} answered {status} after {waited:.1f} s for {request.sample_id}: {raw[:300]!r}"
        )
    times[request.sample_id] = begin, time.monotonic()
    return raw
