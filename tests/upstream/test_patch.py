"""`r3channel patch` on the releases of SGLang that it has hooks for: reversed, each file has its bytes again; patched, a real
server on CPU gives the ids of transformers' routers, without our plug-in and beside it, and is stock while r3channel is off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded.model import write_model
from examples.embedded.sglang import EngineServer, environment, free_port
from r3channel.cli import main
from r3channel.engine.sglang_hooks import TABLES, hooked
from r3channel.relay.reply import frame_bytes_of
from r3channel.tools.patch import known
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import Hello, probe_body
from r3channel.wire.routing import RowKind
from tests.engine.client import generate, generate_together, post, prompts_of, serving
from tests.engine.reference import reference_ids
from tests.upstream.test_older_engine import OVERLAY, SPEC, VERSION
from tests.upstream.wheels import unpacked

EACH = pytest.mark.parametrize("version", list(TABLES))
NO_PLUGIN = {"SGLANG_PLUGINS": "r3channel_embedded"}
"""Of the plug-ins that are installed, SGLang loads those that it needs on a CPU."""


def touched(version: str) -> list[str]:
    (patch,) = (patch for patch in known() if patch.name == f"sglang-{version}")
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
    for action, says in (
        ("check", "applicable"),
        ("apply", "applied"),
        ("check", "applied"),
        ("reverse", "applicable"),
    ):
        assert run(action, tmp_path) == 0
        assert f"sglang-{version} is {says}:" in capsys.readouterr().out
        now = content(tmp_path)
        assert now.keys() == before.keys()
        different = {file for file in now if now[file] != before[file]}
        assert different == (set(touched(version)) if says == "applied" else set())


@EACH
def test_one_changed_or_half_patched_file_is_refused_and_nothing_touched(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path, version)
    first, *_, last = touched(version)
    clean = (tmp_path / last).read_bytes()
    (tmp_path / last).write_bytes(clean + b"# another release\n")
    found = content(tmp_path)
    assert [run(action, tmp_path) for action in ("check", "apply", "reverse")] == [2, 2, 2]
    assert content(tmp_path) == found and f"changed: {last}" in capsys.readouterr().err
    (tmp_path / last).write_bytes(clean)
    assert run("apply", tmp_path) == 0
    (tmp_path / last).write_bytes(clean)
    capsys.readouterr()
    assert run("apply", tmp_path) == 2
    told = capsys.readouterr().err
    assert "half applied" in told and f"clean: {last}; patched: {first}" in told


# -- the whole release, patched --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(TABLES))
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(release, the path that has it first): links to its files, but for those that the command has replaced."""
    version, folder = request.param, tmp_path_factory.mktemp("patched")
    shutil.copytree(unpacked(f"sglang=={version}") / "sglang", folder / "sglang", copy_function=os.symlink)
    assert run("apply", folder) == 0
    overlay = [str(unpacked(wheel)) for wheel in OVERLAY] if version == VERSION else []
    return version, os.pathsep.join([str(folder), *overlay, environment()["PYTHONPATH"]])


MARKS = """
import json, os, pkgutil, sys
from sglang.srt.plugins import load_plugins_by_group
paths = {path: getattr(pkgutil.resolve_name(path), "r3channel_hook", None) for path in sys.argv[1:]}
ours, loaded, registered = [name for name in sys.modules if name.startswith("r3channel")], {}, {}
if os.environ["R3CHANNEL_ENGINE"] == "1":
    loaded = load_plugins_by_group("sglang.srt.plugins")
    from r3channel.config import EngineConfig
    from r3channel.engine import sglang
    sglang.apply(EngineConfig.from_environment())
    hooks = sglang.HookRegistry._hooks
    registered = {path: (hook.__name__, kind.value) for path, ((kind, hook, _),) in hooks.items()}
    paths = {path: getattr(pkgutil.resolve_name(path), "r3channel_hook", None) for path in registered}
print("FACTS " + json.dumps({"marks": paths, "ours": ours, "loaded": [*loaded], "registered": registered}))
"""


def marks(patched: tuple[str, str], **variables: str) -> dict[str, Any]:
    """What the hooked functions carry in a process of SGLang, and what the plug-in would have registered there."""
    version, path = patched
    child = subprocess.run(
        [sys.executable, "-c", MARKS, *hooked(version)], env={**environment(), **NO_PLUGIN, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


@pytest.mark.engine
@pytest.mark.full
def test_the_sources_have_each_hook_of_the_plug_in_and_none_while_r3channel_is_off(
    patched: tuple[str, str],
) -> None:
    masks = str(int(patched[0] != VERSION))
    on = marks(patched, R3CHANNEL_ENGINE="1", R3CHANNEL_SAMPLING_MASKS=masks)
    assert on["loaded"] == ["r3channel_embedded"]
    capturer = next(path for path in on["registered"] if path.endswith("RoutedExpertsCapturer"))
    assert on["registered"].pop(capturer) == ["FrameCapturer", "replace"] and len(on["registered"]) >= 5
    assert {**on["marks"], capturer: None} == {**on["registered"], capturer: None}
    off = marks(patched)
    assert set(off["marks"].values()) == {None} and off["ours"] == []


@pytest.fixture(scope="module", params=["patch alone", "patch and plug-in", "off"])
def server(
    request: pytest.FixtureRequest, patched: tuple[str, str], model: Path
) -> Iterator[tuple[EngineServer, str]]:
    env = {"PYTHONPATH": patched[1], "SGLANG_GRPC_PORT": str(free_port())}
    env |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": ""} if patched[0] == VERSION else {}
    env |= {} if request.param == "patch and plug-in" else NO_PLUGIN
    with serving(model, r3channel=request.param != "off", weight_version="0", env=env) as server:
        yield server, "" if request.param == "off" else patched[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("patched") / "model", layers=3, dense_layers=())


@pytest.mark.engine
@pytest.mark.full
def test_a_patched_engine_gives_the_ids_of_transformers_routers(
    server: tuple[EngineServer, str], model: Path, tmp_path: Path
) -> None:
    url, version = server[0].url, server[1]
    prompts = prompts_of((3, 40, 130, 300))
    replies = generate_together(url, prompts, new_tokens=20)
    replies.append(generate(url, prompts[-1], new_tokens=20))  # a prefix-cache hit
    expected = reference_ids(model, [reply.tokens for reply in replies], folder=tmp_path)
    for reply, wanted in zip(replies, expected, strict=True):
        stock = np.frombuffer(reply.raw, np.int32) if not version else None
        ids_TLK = (
            parse_frame(reply.raw, spec=SPEC).ids() if stock is None else stock.reshape(wanted.ids_TLK.shape)
        )
        assert wanted.differing_rows(ids_TLK) == []
    if not version:
        return
    said = json.loads(post(url + "/generate", probe_body()))
    hello, _ = Hello.split(frame_bytes_of(said, sample_id="probe", engine=url))
    assert hello is not None and hello.sglang == version
    body = {"model_path": str(model), "weight_version": "4", "flush_cache": True}
    assert json.loads(post(url + "/update_weights_from_disk", body))["success"]
    frame = parse_frame(generate(url, list(range(10, 30)), new_tokens=5).raw, spec=SPEC)
    spans = [(span.end, span.weight_version, span.kind) for span in frame.provenance]
    assert spans == [(20, 4, RowKind.PREFILLED), (24, 4, RowKind.DECODED)]
