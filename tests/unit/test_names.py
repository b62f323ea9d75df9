"""No module, class, option or page bears a name that was given up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OLD_MODULES = """
bare bearer clock compiled distinct engine.delivery engine.hooks engine.settings hf_config
integrations.engine_variables integrations.slime integrations.slime_launch
integrations.slime_trainer integrations.slime_weights metric_table metrics mixing models plan.place
plan.rows plugin ranks recordings.alone recordings.catalogue recordings.finding recordings.replayed
recordings.sides relay.samples relay.sealed relay.steps report.check report.commands report.dashboard report.doctor
report.engine report.extras report.layouts report.metrics_page report.network report.page
report.pages report.patch report.planner report.preflight report.record report.recordings
report.replay_rank report.run_page report.screen report.seams report.slime_arguments report.stages
report.top report.trace report.weights routing slot spec tokens trainer.ahead trainer.handed
trainer.landing trainer.megatron trainer.member trainer.refusals trainer.schedule trainer.shard
transport.joining transport.link transport.tensor_parallel unproxied versions wire.delivery
wire.receipt wire.received
"""
MODULES = set(_OLD_MODULES.split())
"""Below `r3channel`. `integrations.slime` is a package now."""
CLASSES = {"Ahead", "ConsumptionTap", "HandedRows", "LandedShard", "RelayActor", "FarRelay", "PrefixCache"}
CLASSES |= {"FrameDraft", "Receipt", "ReceiptInvalid", "Sides"}
FUNCTIONS = {"authorises", "handed"}
WORDS = ("room_timeout_s", "ROOM_TIMEOUT_S", "r3-room-timeout-s", "pad_policy=native")
FOLDERS = ("r3channel", "examples", "tests")


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 200
    return [path for path in found if path != Path(__file__)]


def imported(tree: ast.AST) -> set[str]:
    """Modules below r3channel that a file imports, by both forms; names that are no modules do no harm."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("r3channel.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("r3channel."):
            below = f"{node.module}.".removeprefix("r3channel.")
            found |= {below.rstrip("."), *(below + alias.name for alias in node.names)}
    return found


def old_names(path: Path) -> list[str]:
    text = path.read_text()
    tree = ast.parse(text)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} & CLASSES
    if path.is_relative_to(ROOT / "r3channel"):
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} & FUNCTIONS
    modules = imported(tree) & MODULES - {"integrations.slime"}
    return sorted(defined | modules | {word for word in WORDS if word in text})


def test_no_module_has_an_old_path() -> None:
    old = {f"r3channel/{module.replace('.', '/')}.py" for module in MODULES}
    assert sorted(path for path in old if (ROOT / path).exists()) == []


def test_no_old_name_is_defined_or_imported() -> None:
    assert {str(path): names for path in sources() if (names := old_names(path))} == {}


def test_no_page_names_an_old_module() -> None:
    slashed = sorted((module.replace(".", "/") for module in MODULES - {"integrations.slime"}), key=len)
    pattern = re.compile(
        rf"r3channel[/.](?:{'|'.join(map(re.escape, [*slashed, *MODULES - {'integrations.slime'}]))})\b(?![/.-])"
    )
    pages = [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    assert {str(page): found for page in pages if (found := pattern.findall(page.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from r3channel.spec import RoutingSpec", ["spec"]),
        ("from r3channel import errors, slot", ["slot"]),
        ("import r3channel.report.doctor", ["report.doctor"]),
        ("class Ahead: ...", ["Ahead"]),
        ("layout = 'pad_policy=native'", ["pad_policy=native"]),
        ("from r3channel.model.spec import RoutingSpec", []),
    ],
)
def test_an_old_name_is_noticed(text: str, found: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "file.py").write_text(text)
    assert old_names(file) == found
