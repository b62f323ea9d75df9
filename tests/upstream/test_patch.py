"""The releases of SGLang that we have hooks for: each has every name that they need, by its published wheel. `r3channel patch` on
them: reversed, each file has its bytes again; patched, a real server on CPU gives the ids of transformers' routers, without our
plug-in and beside it, and is stock while r3channel is off."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded.model import write_model
from examples.embedded.sglang import environment, free_port
from r3channel.cli import main
from r3channel.engine.refusals import SETTINGS
from r3channel.engine.sglang_hooks import TABLES, hooked_names
from r3channel.tools.patch import known_patches
from tests.engine.client import check_replies, serving
from tests.engine.reference import reference_ids
from tests.support.children import facts_of
from tests.upstream.test_older_engine import SPEC, VERSION, answers, check_update
from tests.upstream.wheels import path_with, slimes_sglang, unpacked, without_other_models

EACH = pytest.mark.parametrize("version", list(TABLES))
NO_PLUGIN = {"SGLANG_PLUGINS": "r3channel_embedded"}
"""SGLang loads the plug-in that it needs on a CPU, and ours not."""

# -- names and settings ----------------------------------------------------------------------------------------------------

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
@EACH
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


# -- files -----------------------------------------------------------------------------------------------------------------


def touched(version: str) -> list[str]:
    (patch,) = (patch for patch in known_patches() if patch.name == f"sglang-{version}")
    return [change.file for change in patch.changes]


def copied(folder: Path, version: str) -> Path:
    """The files that the patch touches, in a folder that may be changed."""
    for file in touched(version):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(unpacked(f"sglang=={version}") / file, folder / file)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(action: str, folder: Path) -> int:
    return main(["patch", action, "--target", str(folder)])


@EACH
def test_the_patch_is_found_applied_and_reversed_to_the_same_bytes(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(copied(tmp_path, version))
    steps = {"check": "applicable", "apply": "applied", "reverse": "applicable"}
    for action, says in steps.items():
        assert run(action, tmp_path) == 0
        assert f"sglang-{version} is {says}:" in capsys.readouterr().out
        now = content(tmp_path)
        assert now.keys() == before.keys()
        different = {file for file in now if now[file] != before[file]}
        assert different == (set(touched(version)) if says == "applied" else set())


# -- the whole release, patched --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(TABLES))
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(release, the path that has it first): links to its files, but for those that the command has replaced."""
    version, folder = request.param, tmp_path_factory.mktemp("patched")
    shutil.copytree(unpacked(f"sglang=={version}") / "sglang", folder / "sglang", copy_function=os.symlink)
    assert run("apply", folder) == 0
    return version, path_with(version, folder)


MARKS = """
import json, os, pkgutil, sys
from sglang.srt.plugins import load_plugins_by_group
paths = {path: getattr(pkgutil.resolve_name(path), "r3channel_hook", None) for path in sys.argv[1:]}
ours, loaded, registered, refused = [name for name in sys.modules if name.startswith("r3channel")], {}, {}, []
def told(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        refused.append(str(error))
if os.environ["R3CHANNEL_ENGINE"] == "1":
    loaded = load_plugins_by_group("sglang.srt.plugins")
    from r3channel.config import EngineConfig
    from r3channel.engine import sglang, sglang_hooks, sglang_plugin
    os.environ["R3CHANNEL_CODEC"] = "brotli"
    told(sglang_plugin.hook, "refuse_engine")
    del os.environ["R3CHANNEL_CODEC"]
    sglang.apply(EngineConfig.from_environment())
    hooks = sglang.HookRegistry._hooks
    registered = {path: (hook.__name__, kind.value) for path, ((kind, hook, _),) in hooks.items()}
    paths = {path: getattr(pkgutil.resolve_name(path), "r3channel_hook", None) for path in registered}
    del pkgutil.resolve_name(sglang_hooks.path_of("collect_frame")).r3channel_hook
    told(sglang_hooks.is_patched)
facts = {"marks": paths, "ours": ours, "loaded": [*loaded], "registered": registered, "refused": refused}
print("FACTS " + json.dumps(facts))
"""


def marks(patched: tuple[str, str], **variables: str) -> dict[str, Any]:
    """What the hooked functions carry in a process of SGLang, and what the plug-in would have registered there."""
    version, path = patched
    return facts_of(
        MARKS, *hooked_names(version), **environment() | NO_PLUGIN | {"PYTHONPATH": path} | variables
    )


@pytest.mark.engine
@pytest.mark.full
def test_the_sources_have_each_hook_of_the_plug_in_and_none_while_it_is_off(patched: tuple[str, str]) -> None:
    tensors = "topk_logprobs:16,combine_weights" + ",sampling_masks" * (patched[0] != VERSION)
    on = marks(patched, R3CHANNEL_ENGINE="1", R3CHANNEL_TOKEN_TENSORS=tensors)
    assert on["loaded"] == ["r3channel_embedded"]
    capturer = next(path for path in on["registered"] if path.endswith("RoutedExpertsCapturer"))
    assert on["registered"].pop(capturer) == ["FrameCapturer", "replace"] and len(on["registered"]) >= 5
    assert {**on["marks"], capturer: None} == {**on["registered"], capturer: None}
    codec, hook = on["refused"]
    assert "brotli" in codec and "patched by another r3channel, which had no hook in" in hook
    off = marks(patched)
    assert set(off["marks"].values()) == {None} and off["ours"] == []


@pytest.fixture(scope="module", params=["patch alone", "patch and plug-in", "off"])
def server(
    request: pytest.FixtureRequest, patched: tuple[str, str], model: Path
) -> Iterator[tuple[str, str]]:
    env = {"PYTHONPATH": patched[1], "SGLANG_GRPC_PORT": str(free_port())}
    env |= without_other_models(unpacked(f"sglang=={VERSION}")) if patched[0] == VERSION else {}
    env |= NO_PLUGIN if request.param != "patch and plug-in" else {}
    # stock 0.5.15.post1 lets a pass write over the ids of the one before, with overlap
    on = request.param != "off"
    with serving(model, r3channel=on, overlap=on, weight_version="0", env=env) as server:
        yield server.url, patched[0] if on else ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("patched") / "model", layers=3, dense_layers=())


@pytest.mark.engine
@pytest.mark.full
def test_a_patched_engine_gives_the_ids_of_transformers_routers(server: tuple[str, str], model: Path) -> None:
    url, version = server
    replies = answers(url)
    if version:
        check_replies(replies, model=model, spec=SPEC)
        check_update(url, model)
        return
    expected = reference_ids(model, [reply.tokens for reply in replies])  # nothing is stamped
    for reply, wanted in zip(replies, expected, strict=True):
        ids_TLK = np.frombuffer(reply.raw, np.int32).reshape(wanted.ids_TLK.shape)
        assert wanted.differing_rows(ids_TLK) == []
