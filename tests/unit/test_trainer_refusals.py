"""The table of refused Megatron settings: the committed one is the generated one, and every row refuses what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import r3channel.trainer
from r3channel.errors import RouterUnsupported
from r3channel.trainer.adapters.megatron_refusals import REFUSALS, put_into, refuse_unsupported

README = Path(next(iter(r3channel.trainer.__path__))) / "README.md"
GOOD = {
    "moe_enable_routing_replay": True,
    "moe_router_load_balancing_type": "aux_loss",
    "cuda_graph_impl": "none",
}


def test_the_committed_table_is_the_generated_one() -> None:
    text = README.read_text()
    assert text == put_into(text), f"run: python -m r3channel.trainer.adapters.megatron_refusals {README}"


def test_settings_that_a_release_lacks_are_passed_over() -> None:
    refuse_unsupported(SimpleNamespace(**GOOD))
    refuse_unsupported(
        SimpleNamespace(**GOOD, **{row.setting: None for row in REFUSALS if row.setting not in GOOD})
    )


def test_all_that_is_wrong_is_named_at_once() -> None:
    bad = GOOD | {
        "moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"],
        "moe_input_jitter_eps": 0.01,
    }
    with pytest.raises(RouterUnsupported) as refusal:
        refuse_unsupported(SimpleNamespace(**bad))
    assert "quantile_balancing" in str(refusal.value) and "moe_input_jitter_eps=0.01" in str(refusal.value)
    assert "cuda_graph_impl" not in str(refusal.value)
