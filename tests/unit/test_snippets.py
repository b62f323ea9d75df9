"""The python on the pages and in docstrings runs as it stands. What needs a GPU, or a minute, says which test runs it."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import r3channel
from examples.embedded.model import ModelShape, config_of
from r3channel.errors import UsageError
from r3channel.plan.assignment import Assignment
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame, sample_key
from tests.support.children import ROOT
from tests.support.delivery import receive, receivers_of, relays
from tests.support.samples import SPEC, frame_of, random_ids, reply_for, reply_of
from tests.unit.test_documents import SNIPPETS

ELSEWHERE = {
    "TrainerChannel.attach(model_chunks": "real Megatron; the calls of examples/05_own_loop.py, which test_embedded runs",
    "return_token_ids": "a chat template and an engine; test_engine_server runs it",
    "with WeightSync.sharded(engines": "two engines and several ranks; test_weights_exact runs it",
}
"""What a snippet holds -> why it is not run here."""
Names = dict[str, Any]
LENGTHS = {f"s{i}": 9 + i for i in range(8)}


def body_of(sample_id: str, tokens: int) -> bytes:
    return json.dumps({"output_ids": [7] * (tokens - 2)} | reply_for(sample_id, tokens)).encode()


def own_loop(folder: Path) -> Names:
    (checkpoint := folder / "checkpoint").mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config_of(ModelShape())))
    args = r3channel.add_arguments(argparse.ArgumentParser()).parse_args(["--use-r3-channel"])
    first = body_of("s0", LENGTHS["s0"])
    return {
        "checkpoint": checkpoint, "args": args, "sample_id": "s0", "body": first, "tokens": range(9),
        "lengths": LENGTHS, "step": 0,
    }  # fmt: skip


def add_the_others(names: Names) -> None:
    for name, tokens in LENGTHS.items():
        if name != "s0":
            names["relay"].add_body(name, body_of(name, tokens), range(tokens))


def receive_all(names: Names) -> None:
    """Each rank's trainer is a thread."""
    shards = receive(receivers := receivers_of(names["relay"]), names["ticket"])
    assert sum(len(shard.sample_ids) for shard in shards) == 2 * len(LENGTHS)  # both TP ranks of each DP rank
    for receiver in receivers:
        receiver.close()


BEFORE: Mapping[str, Callable[[Names], None]] = {
    "assignment =": add_the_others,
    "relay.join_previous": receive_all,
}
"""What a reader's own code does before the statement that begins so."""


def run(text: str, names: Names) -> Names:
    for statement in ast.parse(text).body:
        for begins, act in BEFORE.items():
            if ast.unparse(statement).startswith(begins):
                act(names)
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)  # noqa: S102  our own pages
    return names


def snippet(holds: str) -> str:
    (found,) = [text for _, text in SNIPPETS if holds in text]
    return found


def test_the_relays_side_of_an_own_loop_runs_as_the_first_page_has_it(tmp_path: Path) -> None:
    names = run(snippet("Assignment.balanced(lengths, dp=2"), own_loop(tmp_path))
    try:
        assert names["spec"] == SPEC and names["reply"]["meta_info"]["routed_experts"] == ""
        assert names["relay"].find_undelivered(wait_s=0) == {} and names["ticket"].step == 0
    finally:
        names["relay"].close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with relays() as make:
        yield make("dp=1")


def test_a_request_and_its_reply_run_as_the_relays_page_has_them(relay: Relay) -> None:
    names = run(snippet("request = {"), {"prompt": [1, 2]})
    assert json.loads(json.dumps(names["request"]))["return_routed_experts"] is True
    names |= {"relay": relay, "body": body_of("sample12", 9), "url": "http://e"}
    run(snippet('relay.add_body("sample12"'), names)
    assert relay.asks("other") == {"return_routed_experts": True}
    assert relay.asks("sample12") == {"return_routed_experts": True, "routed_experts_start_len": 8}
    assert relay.rows_held("sample12") == 8 and names["reply"]["output_ids"] == [7] * 7


def test_the_door_opens_as_the_relays_page_has_it(relay: Relay, tmp_path: Path) -> None:
    text = snippet("relay.serve(").replace("/run/r3channel.token", str(tmp_path / "token"))
    names = run(text, {"relay": relay, "engine_urls": ["http://e"]})
    with pytest.raises(UsageError, match=f"open already, at {names['url']}"):
        relay.serve()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_prefill_and_decode_are_merged_as_the_relays_page_has_it(relay: Relay) -> None:
    ids, key = random_ids(8), sample_key("s")
    names: Names = {"relay": relay, "spec": SPEC, "sample_id": "s", "tokens": range(9)}
    names["prefill_reply"] = reply_of(frame_of(5, expert_ids_TLK=ids[:4], sample_key=key))
    names["decode_reply"] = reply_of(encode_frame(SPEC, expert_ids_TLK=ids, sample_key=key))
    run(snippet("merged_frame(prefill_reply"), names)
    relay.seal(0, Assignment.given([[["s"]]]))


def test_every_snippet_of_a_page_is_run_by_a_test() -> None:
    here = (
        "Assignment.balanced(lengths, dp=2", "request = {", 'relay.add_body("sample12"', "relay.serve(",
        "merged_frame(prefill_reply",
    )  # fmt: skip
    missed = [text for _, text in SNIPPETS if not any(mark in text for mark in (*here, *ELSEWHERE))]
    assert not missed and len(SNIPPETS) == len(here) + len(ELSEWHERE)


# -- the examples in docstrings, wherever in the package or beside the tests they stand ------------------------------------

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted([*(ROOT / "r3channel").rglob("*.py"), *(ROOT / "tests/support").glob("*.py")])
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_documentation_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
    assert {"r3channel.wire.codec", "r3channel.tools.extras", "tests.support.code_lines"} <= set(MODULES)
