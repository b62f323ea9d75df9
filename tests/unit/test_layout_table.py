"""Every row of the table of supported layouts is proven by a test on real Megatron."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from r3channel.plan.layout import TrainerLayout
from r3channel.tools.layouts import LAYOUTS, PROVEN, WHEN

ROOT = Path(__file__).parents[2]
ASKED = (
    "dp=1", "tp=2", "dp=2,ep=2", "pp=2", "pp=2,vpp=2", "cp=2", "cp=2,packing=thd", "tp=2,cp=2,packing=thd", "dp=2,tp=2",
)  # fmt: skip


def test_the_tests_on_real_megatron_take_their_layouts_from_the_table() -> None:
    tree = ast.parse((ROOT / "tests" / "dist" / "test_layouts.py").read_text())
    parametrised = {
        ast.unparse(decorator.args[1])
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_ids_gradients_and_bytes")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    }
    assert parametrised == {"QUICK", "SLOW"} and set(WHEN.values()) == {"make test", "make test-full"}


def test_every_layout_that_was_asked_for_is_proven() -> None:
    assert set(ASKED) <= set(PROVEN) and len(set(PROVEN)) == len(LAYOUTS)


@pytest.mark.parametrize("text", PROVEN)
def test_every_row_is_a_layout_that_fits_four_processes(text: str) -> None:
    assert TrainerLayout.parse(text).world_size <= 4
