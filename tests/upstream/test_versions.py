"""Each supported SGLang release has every name that its hooks need: its published wheel, imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from examples.embedded.sglang import environment
from r3channel.engine.refusals import SETTINGS
from r3channel.engine.sglang_hooks import TABLES
from tests.support.children import facts_of
from tests.upstream.wheels import path_with, slimes_sglang, unpacked

PROBLEMS = """
import json
from r3channel.engine.sglang_hooks import TABLES, _problems, check_hooks
print("FACTS " + json.dumps([check_hooks(), {table: _problems(table) for table in TABLES}]))
"""
LACKS = {
    "0.5.15.post1": ("SamplingMaskRows.append is gone", "RoutedExpertsCapturer.create no longer takes model"),
    "0.5.23": (
        "ServerArgs.max_speculative_num_draft_tokens is gone", "RoutedExpertsCapturer.create no longer takes enable, ",
    ),
}  # fmt: skip
"""What is said in a release of the other one's names: one that is gone, and parameters."""


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("version", list(TABLES))
def test_a_release_has_every_name_of_its_table_and_does_not_pass_for_the_other(version: str) -> None:
    (other,) = set(TABLES) - {version}
    problems, by_table = facts_of(PROBLEMS, **environment({"PYTHONPATH": path_with(version)}))
    assert problems == by_table[version] == []
    assert all(any(said in line for line in by_table[other]) for said in LACKS[version]), by_table[other]


WRITTEN_AS_ASKED = {
    "debug_cuda_graph",  # its default
    "enable_page_major_kv_layout",  # with enable_unified_memory, itself unread
    *("limit_mm_data_per_request", "lora_target_modules", "mooncake_ib_device"),  # in another form
}


@pytest.mark.parametrize("tree", [unpacked, slimes_sglang])
def test_each_setting_that_a_release_resolves_itself_is_judged(tree: Callable[[str], Path]) -> None:
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
