"""An engine whose rows would be wrong is refused at start with every reason, each of which can be overridden by its word."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from r3channel.config import REFUSALS
from r3channel.engine.refusals import Settings, refusals, refuse
from r3channel.errors import ConfigError
from r3channel.spec import RoutingSpec

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
GOOD = Settings(
    capture=True,
    speculative=None,
    disaggregation="null",
    pp_size=1,
    external_cache=False,
    mixed_chunk=False,
    two_batch_overlap=False,
    pdmux=False,
    a2a="",
    weight_version="0",
)
BAD = {
    "speculative": GOOD._replace(speculative="EAGLE"),
    "disaggregation": GOOD._replace(disaggregation="decode"),
    "pp": GOOD._replace(pp_size=2),
    "external_cache": GOOD._replace(external_cache=True),
    "mixed_chunk": GOOD._replace(mixed_chunk=True),
    "two_batch_overlap": GOOD._replace(two_batch_overlap=True),
    "pdmux": GOOD._replace(pdmux=True),
    "a2a": GOOD._replace(a2a="mooncake"),
}


def test_an_ordinary_engine_is_not_refused() -> None:
    assert list(refusals(GOOD, spec=SPEC, router_layers=(3, 1, 2))) == []


@pytest.mark.parametrize("word", BAD)
def test_a_setting_that_makes_rows_wrong_is_refused_under_its_word(word: str) -> None:
    assert [found for found, _ in refusals(BAD[word], spec=SPEC)] == [word]


def test_every_word_that_can_be_allowed_is_one_that_is_refused() -> None:
    assert set(BAD) | {"routers"} == set(REFUSALS)


def test_routers_in_other_layers_than_the_configuration_says_are_refused() -> None:
    ((word, reason),) = refusals(GOOD, spec=SPEC, router_layers=(0, 1, 2, 3))
    assert word == "routers"
    assert "layers [0, 1, 2, 3]" in reason


def test_all_reasons_are_given_at_once() -> None:
    settings = GOOD._replace(pp_size=2, mixed_chunk=True, weight_version="nightly")
    with pytest.raises(ConfigError, match=r"pp_size 2.*--enable-mixed-chunk.*weight version 'nightly'"):
        refuse(refusals(settings, spec=SPEC), allowed=frozenset())


def test_what_is_allowed_is_not_refused_and_the_rest_still_is() -> None:
    settings = GOOD._replace(pp_size=2, mixed_chunk=True)
    refuse(refusals(settings, spec=SPEC), allowed=frozenset({"pp", "mixed_chunk"}))
    with pytest.raises(ConfigError, match="mixed-chunk") as refused:
        refuse(refusals(settings, spec=SPEC), allowed=frozenset({"pp"}))
    assert "pp_size" not in str(refused.value)


def test_what_cannot_be_represented_has_no_override() -> None:
    top1 = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=256, top_k=1)
    with pytest.raises(ConfigError, match="top-1"):
        refuse(refusals(GOOD, spec=top1), allowed=frozenset(REFUSALS))


def test_settings_are_read_from_the_older_server_arguments() -> None:
    args = SimpleNamespace(
        enable_return_routed_experts=True, speculative_algorithm="NGRAM", disaggregation_mode="prefill", pp_size=4,
        enable_hierarchical_cache=False, enable_lmcache=True, enable_mixed_chunk=False, weight_version="default",
        enable_two_batch_overlap=True, enable_pdmux=True, moe_a2a_backend="deepep",
    )  # fmt: skip
    words = [word for word, _ in refusals(Settings.from_server_args(args), spec=SPEC)]
    assert words == [
        "speculative",
        "disaggregation",
        "pp",
        "external_cache",
        "two_batch_overlap",
        "pdmux",
        "a2a",
    ]
    gathered = Settings.from_server_args(args, gathered=frozenset({"deepep"}))
    assert gathered.a2a == "" and Settings.from_server_args(args).a2a == "deepep"
