"""The exact plan end to end: real Megatron ranks send their own shards to every rank of real SGLang engines of two ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from examples.embedded.sglang import EngineOptions, EngineServer
from r3channel.cli import main
from r3channel.plan.layout import TrainerLayout
from r3channel.transport.process_group import in_background
from r3channel.weights.session import WeightSync
from tests.dist.ranks import run_ranks
from tests.support.waits import ENGINE_S, UPDATE_S
from tests.support.weights import checksums, connected

pytestmark = [pytest.mark.dist, pytest.mark.engine, pytest.mark.timeout(600)]

RANK = "tests.dist.weights_rank"
PLAIN: dict[str, Any] = {"capture": False, "r3channel": False, "env": {"R3CHANNEL_WEIGHTS": "1"}}
PARAMETERS = 38
"""Parameters of each rank of an engine."""


@pytest.fixture(scope="module")
def servers(model_dir: Path) -> Iterator[list[EngineServer]]:
    """Two engines of two ranks each, with our half."""
    options = EngineOptions(model=model_dir, tp=2, **PLAIN)
    with EngineServer(options) as one, EngineServer(options) as other:
        for server in (one, other):
            server.wait_ready(ENGINE_S)
        yield [one, other]


@pytest.fixture(scope="module")
def engines(servers: list[EngineServer]) -> list[str]:
    return [server.url for server in servers]


def verified(engines: list[str], manifest: str, capsys: pytest.CaptureFixture[str], *, version: int) -> None:
    asked = [word for url in engines for word in ("--engine", url)]
    assert main(["weights", "verify", *asked, "--manifest", manifest]) == 0
    assert capsys.readouterr().out.count(f"{2 * PARAMETERS} parameters of version {version}: equal") == 2


LAYOUTS = [
    pytest.param("tp=2,dp=2,ep=2", "float32", marks=pytest.mark.long, id="tp2-ep2"),
    pytest.param("tp=2", "float32", marks=pytest.mark.full, id="tp2"),
    pytest.param("dp=2,ep=2", "bfloat16", marks=pytest.mark.full, id="ep2-bfloat16"),
    pytest.param("pp=2", "float32", marks=pytest.mark.full, id="pp2"),
    pytest.param("dp=3", "float32", marks=pytest.mark.full, id="dp3"),
    pytest.param("tp=2,pp=2", "bfloat16", marks=pytest.mark.full, id="tp2-pp2-bfloat16"),
]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_every_parameter_of_every_rank_equals_what_sglang_loads_itself(
    engines: list[str], model_dir: Path, tmp_path: Path, layout: str, dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    manifest = str(tmp_path / "committed.json")
    job = {"what": "exact", "layout": layout, "dtype": dtype, "model": str(model_dir), "engines": engines}
    results = run_ranks(RANK, tmp_path / "ranks", job=job | {"manifest": manifest})
    whole = load_file(model_dir / "model.safetensors")
    experts = sum(t.numel() * (4 if dtype == "float32" else 2) for n, t in whole.items() if ".experts." in n)
    check_broadcast(results, list(whole), experts - experts // TrainerLayout.parse(layout).ep)
    check_results(results, sum(tensor.nbytes for tensor in whole.values()), engines=len(engines))

    verified(engines, manifest, capsys, version=5)
    got = checksums(*engines)

    expected = {n: 4 * (t if dtype == "float32" else t.to(torch.bfloat16).float()) for n, t in whole.items()}
    with WeightSync.whole(engines, staged=False) as sync:  # ranks are asked of the engines
        sync.connect(timeout_s=UPDATE_S)
        sync.update(expected.items(), version=7, timeout_s=UPDATE_S)
    assert got == checksums(*engines) and len(got[0]) == 2


def check_broadcast(results: list[dict[str, Any]], names: list[str], spared_bytes: int) -> None:
    """The engines hold what they hold over TCP; each tensor has one sender, which broadcasts it once; no rank gathers what other
    EP ranks hold."""
    assert all(sent == given for sent, given in (result["sent"] for result in results))
    assert results[0]["broadcast"] == results[0]["over_tcp"]
    assert sorted(name for result in results for name in result["sends"]) == sorted(names)
    assert {whole - own for own, whole in (result["gathered"] for result in results)} == {spared_bytes}


def check_results(results: list[dict[str, Any]], model_bytes: int, *, engines: int) -> None:
    """The lead's reports; every byte sent once per engine; and a NaN of the last rank is everybody's."""
    first = results[0]
    assert [report[:2] for report in first["reports"]] == [[n, 2 * PARAMETERS] for n in range(1, 6)]
    assert first["over_tcp"] == first["in_a_group"] != first["changed"]
    assert first["one"] == [2, 2 * PARAMETERS]
    for update in range(5):
        sent = sum(result["reports"][update][2] for result in results)
        # norms, routers and the like go to both ranks of an engine
        assert 1.0 <= sent / (engines * model_bytes) < 1.1
    assert all(re.search("NonFiniteWeights|NaN|joint group", result["refused"]) for result in results)


@pytest.mark.full
def test_tied_embeddings_over_two_stages_are_given_once(tmp_path: Path) -> None:
    one, other = run_ranks(RANK, tmp_path, job={"what": "tied", "layout": "pp=2"})
    assert one["names"] == other["names"] and len(set(one["names"])) == len(one["names"])
    assert one["names"].count("model.embed_tokens.weight") == 1
    for own in ("shards", "stage"):
        assert set(one[own]) | set(other[own]) == set(one["names"]) != set(one[own])


@pytest.mark.full
def test_an_engine_of_one_rank_is_filled_from_the_memory_of_two(engines: list[str], model_dir: Path) -> None:
    tensors = {n: 3 * tensor for n, tensor in load_file(model_dir / "model.safetensors").items()}
    with EngineServer(
        EngineOptions(model=model_dir, extra_args=("--load-format", "dummy"), **PLAIN)
    ) as dummy:
        dummy.wait_ready(ENGINE_S)
        with connected(engines[:1], staged=True) as sync:
            sync.update(tensors.items(), version=5, timeout_s=UPDATE_S)
            report = sync.add_engine(dummy.url, timeout_s=UPDATE_S)
            assert report is not None and (report.version, report.verified) == (5, PARAMETERS)
            assert set(sync.routable()) == {engines[0], dummy.url}
        got = checksums(dummy.url)
        with connected([dummy.url], staged=False) as sync:
            sync.update(tensors.items(), version=6, timeout_s=UPDATE_S)
        assert got == checksums(dummy.url)


@pytest.mark.full
def test_the_lines_of_the_readme_update_two_engines_and_bring_a_killed_one_back(
    servers: list[EngineServer], engines: list[str], model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Last of this file: it leaves another life of the second engine at its address, with weights of chance, and ends it."""
    (folder := tmp_path / "ranks").mkdir()
    again = EngineServer(replace(servers[1].options, extra_args=("--load-format", "dummy")))
    port = urlsplit(engines[1]).port
    monkeypatch.setattr("examples.embedded.sglang.free_port", lambda: port)

    def kill_and_start_again() -> None:
        while not (folder / "kill").exists():
            time.sleep(0.1)
        servers[1].close()
        (folder / "killed").touch()
        again.start().wait_ready(ENGINE_S)

    restarting = in_background(kill_and_start_again, name="test-restart")
    try:
        job = {"what": "readme", "layout": "tp=2,dp=2,ep=2", "model": str(model_dir), "engines": engines}
        results = run_ranks(RANK, folder, job=job)
        restarting.result(ENGINE_S)
        assert results == [{"version": 3, "evicted": {}, "states": 2}] * 4
        said = (folder / "log.0").read_text()
        assert "the engines are equal" in said
        assert f"2: {2 * PARAMETERS} parameters compared at each engine; lost: {{'{engines[1]}'" in said
        assert f"3: {2 * PARAMETERS} parameters compared at each engine; lost: {{}}" in said
        verified(engines, str(folder / "committed.json"), capsys, version=3)
    finally:
        again.close()
