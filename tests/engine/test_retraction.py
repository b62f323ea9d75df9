"""A retracted request's rows are those of the passes that made its tokens: against a tap of the model's own routers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded.sglang import EngineServer
from r3channel.wire.hello import Hello, probe_body
from r3channel.wire.routing import Ids, RowKind
from tests.engine.client import Reply, generate, generate_together, post, prompts_of, serving
from tests.support.samples import SPEC
from tests.support.waits import meanwhile

pytestmark = [pytest.mark.engine, pytest.mark.full]

NEW_TOKENS = 40
LENGTHS = (9, 33, 50, 70)


@contextmanager
def tapped(model: Path, folder: Path, **options: Any) -> Iterator[EngineServer]:
    env = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",  # so that some tokens are decoded in between
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engine.tapped",
        "R3TEST_TAP": str(folder),
        **options.pop("env", {}),
    }
    with serving(model, env=env, **options) as server:
        yield server


def paused(url: str) -> AbstractContextManager[None]:
    """Meanwhile the engine is stopped again and again, also in mid prefill, and drops what runs."""

    def pause() -> None:
        post(url + "/pause_generation", {"mode": "retract"})
        post(url + "/continue_generation", {})

    return meanwhile(pause, every_s=0.04)


def passes_of(folder: Path) -> dict[str, list[tuple[int, bool, Ids]]]:
    """By request: (first position, whether the last row makes a token, ids) of each pass, in order."""
    found = dict[str, list[tuple[int, bool, Ids]]]()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            rid, start, makes, ids = json.loads(line)
            found.setdefault(rid, []).append((start, makes, np.array(ids, np.uint8)))
    return found


def wanted_of(passes: list[tuple[int, bool, Ids]], reply: Reply) -> tuple[Ids, Ids]:
    """For each answered token the row of the pass that made it, and the row that was computed last."""
    first, end = len(reply.prompt) - 1, len(reply.tokens) - 1
    made, last = dict[int, Ids](), dict[int, Ids]()
    for start, makes, ids_TLK in passes:
        last.update(enumerate(ids_TLK, start))
        if makes:
            made[start + len(ids_TLK) - 1] = ids_TLK[-1]
    made_TLK, last_TLK = (np.stack([of[row] for row in range(first, end)]) for of in (made, last))
    return made_TLK, last_TLK


def answered(reply: Reply) -> Ids:
    """The rows that made the answered tokens."""
    return reply.frame().ids()[len(reply.prompt) - 1 :]


def differing(found: Ids, wanted: Ids) -> int:
    return int((found != wanted).any((1, 2)).sum())


CASES: dict[str, dict[str, Any]] = {
    "overlap": {"chunked_prefill_size": 1024},
    "chunks, no overlap": {"chunked_prefill_size": 16, "overlap": False},
    "chunks": {"chunked_prefill_size": 16},
    "little memory": {"max_total_tokens": 420, "max_running_requests": 4},
    "paused at any moment": {"chunked_prefill_size": 16, "env": {"SGLANG_TEST_RETRACT": "0"}},
    "two replicas": {"extra_args": ["--dp-size", "2"], "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}},
}


LONG = ("overlap", "paused at any moment")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES]
)
def test_rows_are_of_the_pass_that_made_the_token(model_dir: Path, tmp_path: Path, case: str) -> None:
    with tapped(model_dir, tmp_path, **CASES[case]) as server:
        with paused(server.url) if "paused" in case else nullcontext():
            replies = generate_together(server.url, prompts_of(LENGTHS), new_tokens=NEW_TOKENS)
        turns = [generate(server.url, [*reply.tokens, 7], new_tokens=2) for reply in replies]
    passes = passes_of(tmp_path)
    lost = 0
    for reply, turn in zip(replies, turns, strict=True):
        made_TLK, last_TLK = wanted_of(passes[reply.meta["id"]], reply)
        assert differing(answered(reply), made_TLK) == 0
        lost += differing(last_TLK, made_TLK)
        # What a next turn finds in the prefix cache are the same rows; what it has prefilled itself is noted as its own.
        hit = turn.meta["cached_tokens"]
        found = turn.frame().ids()[: min(hit, len(reply.tokens) - 1)]
        assert differing(found, reply.frame().ids()[: len(found)]) == 0, hit
    assert sum(reply.meta["num_retractions"] for reply in replies) > 1
    assert lost > 0, "a second prefill chose the same experts, so nothing was tried"
    assert any(reply.frame().kept_rows for reply in replies)


@pytest.mark.parametrize(("room_rows", "arguments"), [(0, []), (50, ["--disable-radix-cache"])])
def test_rows_that_found_no_room_are_those_of_the_second_prefill_and_say_so(
    model_dir: Path, tmp_path: Path, room_rows: int, arguments: list[str]
) -> None:
    """Without the prefix cache a request is prefilled again from its first token on, those before what was kept, too."""
    kept_bytes = max(1, room_rows * SPEC.bytes_per_token)
    env = {"R3CHANNEL_KEPT_BYTES": str(kept_bytes)}
    with tapped(model_dir, tmp_path, env=env, chunked_prefill_size=1024, extra_args=arguments) as server:
        probe = json.loads(post(server.url + "/generate", probe_body()))
        hello, _ = Hello.split(base64.b64decode(probe["meta_info"]["routed_experts"]))
        replies = generate_together(server.url, prompts_of(LENGTHS), new_tokens=NEW_TOKENS)
    assert hello is not None and hello.kept_bytes == kept_bytes
    lost = 0
    for reply in replies:
        passes, first = passes_of(tmp_path)[reply.meta["id"]], len(reply.prompt) - 1
        made_TLK, last_TLK = wanted_of(passes, reply)
        spans = reply.frame().provenance
        kinds = [[span.kind is RowKind.DECODED] * (span.end - span.start) for span in spans]
        decoded_T = np.concatenate(kinds)
        assert not decoded_T[: first + 1].any()
        wanted_TLK = np.where(decoded_T[first:, None, None], made_TLK, last_TLK)
        # A row that a prefill made (the first answered one, the last one before a retraction) says so, kept or not.
        rows_of_makers = {start + len(ids) - 1: len(ids) for start, makes, ids in passes if makes}
        told_T = np.array([rows_of_makers[row] == 1 for row in range(first, len(reply.tokens) - 1)])
        assert differing(answered(reply)[told_T], wanted_TLK[told_T]) == 0
        lost += differing(wanted_TLK[told_T], made_TLK[told_T])
    assert lost > 0
    assert any(reply.frame().kept_rows for reply in replies) == (room_rows > 0)
