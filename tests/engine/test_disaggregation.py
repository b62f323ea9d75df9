"""A real prefill engine and a real decode engine, keys and values transferred between them; their rows put together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.sglang import EngineServer, free_port
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.pd_merge import merged_frame
from r3channel.relay.relay import Relay
from r3channel.wire.frame import parse_frame
from r3channel.wire.routing import RowKind
from tests.engine.client import Reply, generate, random_prompt, serving
from tests.engine.reference import reference_ids
from tests.support.samples import SPEC

pytestmark = [pytest.mark.engine, pytest.mark.full]

LENGTHS, NEW_TOKENS = (3, 40, 200, 130, 17), 12
SLOTS, EARLIER_TOKENS, ROUNDS = 1024, 60, 3
"""Slots of the decode engine; tokens of the rounds before the last; rounds: the last takes slots that others decoded in."""


@pytest.fixture(scope="module")
def bootstrap_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def urls(model_dir: Path, bootstrap_port: int) -> Iterator[tuple[str, str]]:
    """(prefill, decode); long prompts are prefilled in chunks."""
    env = {"R3CHANNEL_ALLOW": "disaggregation", "UCX_TLS": "tcp,shm,self", "SGLANG_HOST_IP": "127.0.0.1"}
    common = [
        "--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(bootstrap_port),
        "--disaggregation-decode-retraction-backup", "cpu_tensor",  # a host pool wants 10 GiB free beside itself
    ]  # fmt: skip

    def start(mode: str, **options: Any) -> AbstractContextManager[EngineServer]:
        return serving(model_dir, env=env, extra_args=["--disaggregation-mode", mode, *common], **options)

    # without overlap: else a chunk's transfer waits for an event of a GPU
    with (
        start("prefill", max_total_tokens=16384, overlap=False) as prefill,
        start("decode", max_total_tokens=SLOTS) as decode,
    ):
        yield prefill.url, decode.url


@pytest.fixture(scope="module")
def halves(urls: tuple[str, str], bootstrap_port: int) -> list[tuple[Reply, Reply]]:
    """The replies of both engines to requests of several lengths at once, as a router of SGLang sends them, in the last round."""

    def ask(url: str, room: int, length: int, new_tokens: int) -> Reply:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": room}
        return generate(url, random_prompt(length, seed=room), new_tokens=new_tokens, **where)

    def a_round(first_room: int, new_tokens: int) -> list[tuple[Reply, Reply]]:
        both = [
            tuple(pool.submit(ask, url, room, length, new_tokens) for url in urls)
            for room, length in enumerate(LENGTHS, first_room)
        ]
        return [(prefill.result(), decode.result()) for prefill, decode in both]

    with ThreadPoolExecutor(2 * len(LENGTHS)) as pool:
        for earlier in range(1, ROUNDS):
            a_round(100 * earlier, EARLIER_TOKENS)
        return a_round(100 * ROUNDS, NEW_TOKENS)


def test_neither_engine_has_all_rows_and_says_so(halves: list[tuple[Reply, Reply]]) -> None:
    for prefill, decode in halves:
        early, late = (parse_frame(reply.raw, spec=SPEC) for reply in (prefill, decode))
        assert early.rows == len(prefill.prompt) and early.valid_T.all()
        assert late.rows == len(prefill.prompt) + NEW_TOKENS - 1
        assert late.valid_T.tolist() == [False] * early.rows + [True] * (NEW_TOKENS - 1)
        assert [span.kind for span in late.provenance] == [RowKind.MISSING, RowKind.DECODED]


def test_together_they_are_transformers_rows(halves: list[tuple[Reply, Reply]], model_dir: Path) -> None:
    names = [f"s{length}" for length in LENGTHS]
    expected = reference_ids(model_dir, [decode.tokens for _, decode in halves])
    with Relay(SPEC, TrainerLayout()) as relay:
        for name, (prefill, decode), wanted in zip(names, halves, expected, strict=True):
            replies = [reply.as_json for reply in (prefill, decode)]
            data = merged_frame(*replies, spec=SPEC, sample_id=name)
            frame = parse_frame(data, spec=SPEC)
            assert frame.valid_T.all() and wanted.differing_rows(frame.verify()) == []
            assert [span.kind for span in frame.provenance] == [RowKind.PREFILLED, RowKind.DECODED]
            relay.add_frame(name, data, decode.tokens)
        ticket = relay.seal(0, Assignment.round_robin(names, dp=1, microbatch_size=len(names)))
        assert [sample.invalid for sample in ticket.samples] == [()] * len(names)
        relay.abandon(0)
