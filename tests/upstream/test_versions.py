"""Each supported SGLang release has every name that its hooks need, read from the published wheel."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from r3channel.engine.sglang_hooks import TABLES
from r3channel.engine.sglang_settings import SETTINGS
from tests.upstream.syntax import Tree
from tests.upstream.wheels import slimes_sglang, unpacked

OWN = pytest.mark.parametrize("version", list(TABLES))


def problems(version: str, tree: Tree) -> list[str]:
    return [problem for name in TABLES[version] if (problem := tree.problem(name)) is not None]


@OWN
def test_every_name_of_its_table_is_in_the_wheel(version: str) -> None:
    assert problems(version, Tree(unpacked(f"sglang=={version}"))) == []


@OWN
def test_another_release_does_not_pass_for_it(version: str) -> None:
    (other,) = set(TABLES) - {version}
    found = "\n".join(problems(version, Tree(unpacked(f"sglang=={other}"))))
    older, newer = ("ServerArgs.weight_version", "enable, "), ("BaseHostCache.destroy", "model")
    gone, parameter = {"0.5.15.post1": older, "0.5.23": newer}[version]
    assert f"{gone} is gone" in found and f"RoutedExpertsCapturer.create no longer takes {parameter}" in found


WRITTEN_AS_ASKED = {
    "debug_cuda_graph",  # its default
    "enable_page_major_kv_layout",  # with enable_unified_memory, itself unread
    *("limit_mm_data_per_request", "lora_target_modules", "mooncake_ib_device"),  # in another form
}


@pytest.mark.parametrize("tree", [unpacked, slimes_sglang])
def test_each_setting_that_a_release_without_the_requested_values_resolves_by_itself_is_judged(
    tree: Callable[[str], Path],
) -> None:
    root = tree("sglang==0.5.15.post1") / "sglang/srt"
    declared = (root / "server_args.py").read_text()
    elsewhere = "\n".join(path.read_text() for path in root.rglob("*.py"))
    passes = "\n".join(path.read_text() for path in root.glob("arg_groups/*.py"))
    writes = {
        declared: r"self\.(\w+) = ",
        elsewhere: r"server_args\.(\w+) = ",
        passes: r'"(\w+)"(?:: |\] = )',
    }
    written = {name for text, write in writes.items() for name in re.findall(write, text)}
    written &= set(re.findall(r"^    (\w+): A\[", declared, re.MULTILINE))
    patterns = [pattern for setting in SETTINGS for pattern in setting.names.split()]
    judged = {name for name in written if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert len(judged) > 90 and written - judged == WRITTEN_AS_ASKED
