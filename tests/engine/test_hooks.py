"""The names of SGLang that the plug-in needs are there; when one goes, it is said by name and the engine does not start."""

from __future__ import annotations

from typing import Any

import pytest

from examples.embedded.sglang import environment
from r3channel.weights.loader_map import _POST_LOAD
from r3channel.weights.receiver import RELEASED
from r3channel.weights.refusals import ANY_WAY, STAGED
from tests.support.children import facts_of

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return facts_of("from tests.engine.hook_facts import main\nmain()", **environment())


SAID = {
    "plugin_with_a_name_gone": "TopkCaptureOutput.finalize is gone",
    "plugin_with_unknown_codec": "brotli",
}
"""By the plug-in as it ends the process. Each name and parameter that a release lacks: tests/upstream/test_patch.py."""


@pytest.mark.parametrize("case", SAID)
def test_what_is_gone_or_unknown_is_named(facts: dict[str, Any], case: str) -> None:
    assert SAID[case] in facts[case]


EQUAL: dict[str, Any] = {
    "plugin_off": {
        "same_class": True,
        "engine_modules": ["r3channel.engine", "r3channel.engine.sglang_plugin"],
    },
    "plugin_on": {"ended": "", "capturer_of_model_runner": "FrameCapturer", "collect_is_wrapped": True},
    # a router whose choices never reach the capturer is found
    "routers_of_a_model": [
        *([0, ""], [1, "TRITON_KERNEL"], [2, "BYPASSED"], [3, "BYPASSED"], [4, ""], [5, "BYPASSED"]),
        *([6, "its capture is switched off"], [7, "HashTopK, a table by token"]),
    ],
    "routing_past_the_weights": ["combine_weights: sglang.srt.models.llada2, hardware_backend.npu"],
    # masks are kept and framed while the log-probs of what was chosen are streamed; those of the support lie beside the masks
    "kept_masks": {
        "streamed": [[[], [-0.5]], [[], [-0.5]], [[], []], [[], []]],
        "rows": [[3, [3, 1], [[5], [6], [7], [8]]], [3, [], []], [3, [2], [[5, -0.5], [6, -1.5]]]],
        "refused": "sampling_masks is made of requests with return_sampling_mask; this one asked for something else",
    },
}


@pytest.mark.parametrize("case", EQUAL)
def test_the_plug_in_and_sglangs_classes_are_as_they_should(facts: dict[str, Any], case: str) -> None:
    assert facts[case] == EQUAL[case]


def test_the_forward_thread_makes_no_blocking_copy_and_one_would_be_noticed(facts: dict[str, Any]) -> None:
    ours, stock = facts["our_forward_end"], facts["stock_forward_end_without_overlap"]
    assert (ours["blocking"], ours["error"]) == ([], "")
    assert "copy_" in ours["seen"], "the watch sees the work that is done"
    assert stock["blocking"] == ["_to_copy"] and "meta" in stock["error"]
    assert facts["forward_end_of_a_rank_that_does_not_reply"]["seen"] == []


# -- weight updates ----------------------------------------------------------------------------------------------------


def test_every_setting_of_the_table_of_refusals_is_one_of_sglangs(facts: dict[str, Any]) -> None:
    names = {one.name for one in (*ANY_WAY, *STAGED)} - {"version", "torchao_config"}
    assert names <= set(facts["weight_update"]["settings"]), names - set(facts["weight_update"]["settings"])


def test_the_schedulers_fields_that_an_order_without_a_bracket_reads_are_there(facts: dict[str, Any]) -> None:
    found = facts["weight_update"]
    assert {"_session", "offload_tags", "tp_worker"} <= set(found["manager"]) and found["answer"]
    assert found["released"] == RELEASED and found["derives"] and _POST_LOAD == "post_load_weights"


def test_online_float8_is_refused_by_what_sglangs_own_layer_says(facts: dict[str, Any]) -> None:
    (why,) = facts["weight_update"]["online"]
    assert why.startswith("online quantisation (Fp8Config)") and facts["weight_update"]["serialised"] == []


def test_sglangs_own_dequantisation_gives_float8_weights_back(facts: dict[str, Any]) -> None:
    """No float8 engine runs on a CPU: its kernels are for GPUs."""
    assert max(facts["float8_error"]) < 0.03
