"""Newer releases of megatron-core, each laid over the installed one: every fact of the replay driver on one rank.

The layouts run on the newest of them in tests/dist/test_layouts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3channel.trainer.adapters.megatron import READ_AGAINST
from tests.dist import megatron_features, megatron_traps
from tests.dist.ranks import facts_of, run_ranks
from tests.upstream.wheels import unpacked

pytestmark = [pytest.mark.dist, pytest.mark.full]

# 0.18.2's own MTP block does not run with full recompute: _checkpointed_forward(padding_mask=...)
LEFT_OUT = {"0.18.2": "mtp"}


def held(worker: str, folder: Path, version: str, **job: Any) -> list[str]:
    """The facts that hold."""
    overlay = [unpacked(f"megatron-core=={version}")]
    (result,) = run_ranks(worker, folder, job={"layout": "dp=1", **job}, overlay=overlay)
    return result["passed"]


def test_every_misuse_is_refused_by_the_newest_as_by_the_installed_release(tmp_path: Path) -> None:
    found = held(megatron_traps.__name__, tmp_path, READ_AGAINST[-1])
    assert found == list(facts_of(megatron_traps.__name__))


@pytest.mark.parametrize("version", READ_AGAINST[1:])
def test_every_feature_works_as_on_the_installed_release(version: str, tmp_path: Path) -> None:
    left_out = LEFT_OUT.get(version, "nothing")
    found = held(megatron_features.__name__, tmp_path, version, left_out=left_out)
    assert found == [name for name in facts_of(megatron_features.__name__) if left_out not in name]
