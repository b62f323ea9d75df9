"""The names of SGLang that the plug-in needs are there; when one goes, it is said by name and the engine does not start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.sglang import environment

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hook_facts.py"))],
        env=environment(r3channel=False),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


def test_every_name_is_there_in_the_installed_sglang(facts: dict[str, Any]) -> None:
    assert facts["installed"] == []


def test_a_hooked_method_that_is_gone_is_named(facts: dict[str, Any]) -> None:
    (problem,) = facts["collect_renamed"]
    assert "_maybe_collect_routed_experts is gone" in problem


def test_a_parameter_that_is_gone_is_named(facts: dict[str, Any]) -> None:
    (problem,) = facts["parameter_renamed"]
    assert "get_topk no longer takes req_pool_idx" in problem


def test_the_plugin_ends_the_process_when_a_name_is_gone(facts: dict[str, Any]) -> None:
    assert "TopkCaptureOutput.finalize is gone" in facts["plugin_with_a_name_gone"]


def test_the_plugin_ends_the_process_on_an_unknown_codec(facts: dict[str, Any]) -> None:
    assert "brotli" in facts["plugin_with_unknown_codec"]


def test_plugin_off_leaves_sglang_untouched(facts: dict[str, Any]) -> None:
    assert facts["plugin_off"] == {"same_class": True, "engine_modules": []}


def test_plugin_on_replaces_the_capturer_where_the_model_runner_finds_it(facts: dict[str, Any]) -> None:
    assert facts["plugin_on"] == {
        "ended": "",
        "capturer_of_model_runner": "FrameCapturer",
        "collect_is_wrapped": True,
    }


def test_a_router_whose_choices_never_reach_the_capturer_is_found(facts: dict[str, Any]) -> None:
    assert facts["routers_of_a_model"] == [
        [0, ""],
        [1, "TRITON_KERNEL"],
        [2, "BYPASSED"],
        [3, "BYPASSED"],
        [4, ""],
        [5, "BYPASSED"],
        [6, "its capture is switched off"],
        [7, "HashTopK, a table by token"],
    ]


def test_the_forward_thread_makes_no_blocking_copy(facts: dict[str, Any]) -> None:
    ours = facts["our_forward_end"]
    assert (ours["blocking"], ours["error"]) == ([], "")
    assert {"clone", "_to_copy"} <= set(ours["seen"]), "the watch sees the work that is done"


def test_a_rank_that_does_not_reply_copies_nothing(facts: dict[str, Any]) -> None:
    assert facts["forward_end_of_a_rank_that_does_not_reply"]["seen"] == []


def test_a_blocking_copy_would_be_noticed(facts: dict[str, Any]) -> None:
    stock = facts["stock_forward_end_without_overlap"]
    assert stock["blocking"] == ["_to_copy"]
    assert "meta" in stock["error"]


def test_masks_are_kept_and_framed_while_their_log_probabilities_are_streamed(facts: dict[str, Any]) -> None:
    assert facts["kept_masks"] == {
        "streamed": [[[], [-0.5]], [[], [-0.5]], [[], []]],
        "rows": [[3, [3, 1], [5, 6, 7, 8]], [3, [], []]],
    }


def test_the_host_cache_is_not_unregistered_as_pinned_memory_is(facts: dict[str, Any]) -> None:
    assert facts["plain_cache"]
