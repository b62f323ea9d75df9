"""An engine whose rows would be wrong is refused at start with every reason, each of which can be overridden by its word."""

from __future__ import annotations

from typing import Any

import pytest

from r3channel.config import REFUSALS
from r3channel.engine.refusals import (
    SETTINGS,
    TOGETHER,
    Router,
    Verdict,
    flag,
    judge,
    refusals,
    refuse,
    refused_chains,
    refused_unread,
    unread,
)
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
GOOD: dict[str, Any] = {
    "enable_return_routed_experts": True, "speculative_algorithm": None, "disaggregation_mode": "null",
    "pp_size": 1, "attn_cp_size": 1, "attn_dp_size": 1, "moe_a2a_backend": "none", "weight_version": "0",
    "tp_size": 8, "host": "127.0.0.1",
}  # fmt: skip
BAD: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"speculative_algorithm": "NGRAM"}),
    ("speculative", {"speculative_algorithm": "DFLASH"}),
    ("speculative", {"speculative_eagle_topk": 4}),
    ("disaggregation", {"disaggregation_mode": "decode"}),
    ("pp", {"pp_size": 2}),
    ("external_cache", {"enable_hierarchical_cache": True}),
    ("external_cache", {"enable_lmcache": True}),
    ("external_cache", {"enable_flexkv": True}),
    ("two_batch_overlap", {"enable_two_batch_overlap": True}),
    ("pdmux", {"enable_pdmux": True}),
    ("a2a", {"moe_a2a_backend": "mooncake"}),
    ("prefill_cp", {"attn_cp_size": 2}),
    ("prefill_cp", {"enable_prefill_cp": True}),
    ("prefill_cp", {"enable_nsa_prefill_context_parallel": True}),
    ("swa_replay", {"enable_decoder_swa_bounded_replay": True}),
]


def routers(*layers: int) -> list[Router]:
    return [Router(layer) for layer in layers]


def test_an_ordinary_engine_is_not_refused() -> None:
    assert list(refusals(GOOD, spec=SPEC, routers=routers(3, 1, 2))) == []


@pytest.mark.parametrize(("word", "change"), BAD, ids=lambda value: str(value))
def test_a_setting_that_makes_rows_wrong_is_refused_under_its_word(word: str, change: dict[str, Any]) -> None:
    ((found, reason),) = refusals(GOOD | change, spec=SPEC)
    assert found == word
    assert [flag(*item) for item in change.items()] == [reason.split(": ")[0]]


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("attention", [{"enable_dp_attention": True}, {"attn_dp_size": 2}])
def test_what_is_taken_by_itself_and_not_with_dp_attention(algorithm: str, attention: dict[str, Any]) -> None:
    change = {"speculative_algorithm": algorithm, "speculative_eagle_topk": 1}
    change |= {"moe_runner_backend": "flashinfer_cutlass"}
    for taken in (GOOD | change, GOOD | attention):
        assert [*refusals(taken, spec=SPEC), *refused_chains(taken)] == []
    together = GOOD | change | attention
    reasons = [*refusals(together, spec=SPEC), *refused_chains(together)]
    assert [word for word, reason in reasons if "with DP attention" in reason] == ["a2a", "speculative"]


def test_every_word_that_can_be_allowed_is_one_that_is_refused() -> None:
    assert {word for word, _ in BAD} | {"routers", "kernel_routing", "unread"} == set(REFUSALS)


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (1, 2), ()])
def test_routers_in_other_layers_than_the_configuration_says_are_refused(layers: tuple[int, ...]) -> None:
    ((word, reason),) = refusals(GOOD, spec=SPEC, routers=routers(*layers))
    assert word == "routers"
    assert f"layers {list(layers)}" in reason


def test_a_router_whose_choices_stay_in_a_kernel_is_refused_with_its_layer() -> None:
    built = [Router(1), Router(2, "BYPASSED"), Router(3)]
    ((word, reason),) = refusals(GOOD, spec=SPEC, routers=built)
    assert word == "kernel_routing"
    assert "layer 2: BYPASSED" in reason


def test_what_was_neither_tested_nor_read_is_refused_by_name() -> None:
    asked = {"enable_hisparse": True, "host": "::", "dllm_algorithm": "x", "dcp_size": 2}
    ((word, reason),) = refused_unread(unread(asked))
    assert word == "unread"
    assert reason.startswith("--enable-hisparse --dllm-algorithm x --dcp-size 2: ")
    assert list(refused_unread(unread({"host": "::"}))) == []


def test_every_refusal_of_the_table_has_a_reason_and_comes_before_what_is_taken() -> None:
    kinds = [setting.verdict is Verdict.REFUSED for setting in SETTINGS]
    assert kinds == sorted(kinds, reverse=True)
    words = {setting.why for setting in SETTINGS if setting.verdict is Verdict.REFUSED}
    assert words | {TOGETHER[1]} <= set(REFUSALS)


def test_a_value_is_judged_by_the_first_line_that_is_about_it() -> None:
    seen = [judge("tp_size", size) for size in (1, 2, 8)]
    assert [setting and setting.verdict for setting in seen] == [Verdict.TESTED, Verdict.TESTED, Verdict.READ]


def test_all_reasons_are_given_at_once_but_of_what_is_allowed() -> None:
    values = GOOD | {"pp_size": 2, "enable_pdmux": True, "weight_version": "nightly"}
    with pytest.raises(ConfigError, match=r"--enable-pdmux.*--pp-size 2.*weight version 'nightly'"):
        refuse(refusals(values, spec=SPEC), allowed=frozenset())
    with pytest.raises(ConfigError, match="engine: weight version 'nightly'"):
        refuse(refusals(values, spec=SPEC), allowed=frozenset({"pp", "pdmux"}))


def test_what_cannot_be_represented_has_no_override() -> None:
    top1 = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=256, top_k=1)
    with pytest.raises(ConfigError, match="top-1"):
        refuse(refusals(GOOD, spec=top1), allowed=frozenset(REFUSALS))
