"""Each supported SGLang release has every name that its hooks need, read from the published wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3channel.engine.sglang_hooks import TABLES, Name
from tests.upstream.syntax import Tree
from tests.upstream.wheels import unpacked

OWN = pytest.mark.parametrize("version", list(TABLES))


def problems(version: str, tree: Tree) -> list[str]:
    return [problem for name in TABLES[version] if (problem := tree.problem(name)) is not None]


@OWN
def test_every_name_of_its_table_is_in_the_wheel(version: str) -> None:
    assert problems(version, Tree(unpacked(f"sglang=={version}"))) == []


@OWN
def test_another_release_does_not_pass_for_it(version: str) -> None:
    (other,) = set(TABLES) - {version}
    assert problems(version, Tree(unpacked(f"sglang=={other}")))


@OWN
def test_a_name_that_goes_is_named(version: str, tmp_path: Path) -> None:
    source = unpacked(f"sglang=={version}") / "sglang/srt/state_capturer/base.py"
    copy = tmp_path / "sglang/srt/state_capturer/base.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(source.read_text().replace("def finalize(", "def finish("))
    name = Name("sglang.srt.state_capturer.base.TopkCaptureOutput.finalize")
    assert Tree(tmp_path).problem(name) == f"{name.path} is gone"
    kept = Name("sglang.srt.state_capturer.base.TopkCaptureOutput.map_device_tensors", ("fn",))
    assert Tree(tmp_path).problem(kept) is None


@OWN
def test_a_parameter_that_goes_is_named(version: str) -> None:
    name = Name("sglang.srt.state_capturer.base.BaseTopkCapturer.get_topk", ("seqlen", "request_index"))
    problem = Tree(unpacked(f"sglang=={version}")).problem(name)
    assert problem == f"{name.path} no longer takes request_index"
