"""Weight updates against a real SGLang server: what arrives, what is served, and what a failure leaves behind.

And weights of models that do more than copy them: what they join, derive, and move while they serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from r3channel import errors
from r3channel.weights.checksums import tensor_checksum
from r3channel.weights.engine import EngineHandle, PauseMode
from r3channel.weights.session import WeightSync
from r3channel.weights.staged_copy import Wire
from r3channel.weights.transaction import EngineState
from r3channel.wire.routing import RowKind
from tests.engine.client import PROMPT, generate, greedy, post, random_prompt, serving, stream
from tests.engine.conftest import Weights
from tests.engine.families import ON_CPU, write_families
from tests.support.waits import ENGINE_S, UPDATE_S
from tests.support.weights import as_engine_keeps, checksums, connected

pytestmark = pytest.mark.engine

GATE = "model.layers.2.mlp.gate.weight"
BUCKET_BYTES = 1 << 20  # ten buckets of this model


@pytest.fixture(scope="module")
def client(engine_url: str) -> EngineHandle:
    return EngineHandle(engine_url)


BROADCAST = pytest.mark.parametrize("sync", ["broadcast"], indirect=True)


@pytest.fixture(params=["staged", "shared_memory", "broadcast"])
def sync(request: pytest.FixtureRequest, restored: None, engine_url: str) -> Iterator[WeightSync]:
    """A connected session."""
    with session(engine_url, request.param) as opened:
        yield opened


def session(engine_url: str, way: str) -> WeightSync:
    wire: Wire = "shared_memory" if way == "shared_memory" else "tcp"
    return connected([engine_url], bucket_bytes=BUCKET_BYTES, staged=way != "broadcast", wire=wire)


def test_every_parameter_of_the_engine_equals_the_trainers_bit_for_bit(
    sync: WeightSync, client: EngineHandle, original: Weights, changed: Weights
) -> None:
    client.learn_versions(timeout_s=UPDATE_S)
    (before,) = client.weight_checksums(timeout_s=UPDATE_S)
    sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
    (after,) = client.weight_checksums(timeout_s=UPDATE_S)

    assert before == {name: tensor_checksum(w) for name, w in as_engine_keeps(original).items()}
    assert after == {name: tensor_checksum(w) for name, w in as_engine_keeps(changed).items()}
    assert client.torch == torch.__version__
    routers = [name for name in after if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3 and all(after[name] != before[name] for name in routers)


def test_answers_come_back(sync: WeightSync, engine_url: str, original: Weights, changed: Weights) -> None:
    tokens, version = greedy(engine_url)
    sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
    new_tokens, new_version = greedy(engine_url)
    cached = generate(engine_url, PROMPT, new_tokens=1).meta["cached_tokens"]
    sync.update(original.items(), version=2, timeout_s=UPDATE_S)
    flushed = generate(engine_url, PROMPT, new_tokens=1).meta["cached_tokens"]

    assert cached > 0 == flushed  # no key or value of the old weights is used again
    assert (version, new_version) == ("0", "1") and new_tokens != tokens
    assert greedy(engine_url) == (tokens, "2")


def test_the_report_counts_every_byte_and_its_stages_add_up(sync: WeightSync, changed: Weights) -> None:
    """The best of six: another process may have had the core between two stages of one."""
    *_, report = reports = [sync.update(changed.items(), version=1, timeout_s=UPDATE_S) for _ in range(6)]
    assert report.payload_bytes == sum(w.nbytes for w in changed.values())
    assert (report.tensors, report.buckets, report.version) == (len(changed), 10, 1)
    shares = [sum(each.seconds.values()) / each.wall_s for each in reports]
    assert 0.95 <= max(shares) <= 1


@BROADCAST
def test_a_wrong_shape_keeps_the_version_pauses_the_engine_and_the_next_update_repairs(
    sync: WeightSync, client: EngineHandle, engine_url: str, original: Weights, changed: Weights
) -> None:
    tokens, _ = greedy(engine_url)
    wrong = {**changed, GATE: torch.zeros(64, 64)}
    said = r"version 1 was not committed, version None stays: bucket \d+ .*64, 64"
    with pytest.raises(errors.WeightUpdateFailed, match=said) as failure:
        sync.update(wrong.items(), version=1, timeout_s=UPDATE_S)

    assert engine_url in str(failure.value) and isinstance(failure.value.__cause__, errors.EngineRefused)
    assert sync.engine_states == {engine_url: EngineState.FENCED} and sync.version is None
    assert client.weight_version(timeout_s=UPDATE_S) == "0"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(greedy, engine_url)
        time.sleep(0.5)
        assert not waiting.done()  # a dirty engine serves nothing

        sync.update(original.items(), version=1, timeout_s=UPDATE_S)
        assert waiting.result(ENGINE_S) == (tokens, "1")
    assert sync.engine_states == {engine_url: EngineState.SERVING}


def test_a_changed_manifest_is_refused_by_tensor(sync: WeightSync, changed: Weights) -> None:
    sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
    other = {**changed, GATE: changed[GATE].bfloat16()}
    with pytest.raises(errors.WeightUpdateFailed, match=rf"expected {GATE} float32") as failure:
        sync.update(other.items(), version=2, timeout_s=UPDATE_S)
    assert isinstance(failure.value.__cause__, errors.ManifestMismatch)


def test_a_router_in_another_dtype_is_reported(restored: None, engine_url: str, changed: Weights) -> None:
    lossy = {name: w.bfloat16() if name == GATE else w for name, w in changed.items()}
    with session(engine_url, "staged") as sync:
        report = sync.update(lossy.items(), version=1, timeout_s=UPDATE_S)
    assert report.rounded == {GATE: "bfloat16 -> float32"}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_running_request_survives_an_update_with_all_its_rows(
    sync: WeightSync, engine_url: str, changed: Weights, mode: PauseMode
) -> None:
    new_tokens = 400
    with connected([engine_url], pause=mode, staged=sync._must_stage) as session:
        chunks = stream(engine_url, PROMPT, new_tokens=new_tokens)
        next(chunks)  # it runs
        session.update(changed.items(), version=1, timeout_s=UPDATE_S)
        *_, reply = chunks
    spans = reply.meta["weight_versions"]
    frame = reply.frame()

    assert [span["version"] for span in spans] == ["0", "1"]
    assert spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == new_tokens == len(reply.output)
    assert frame.ids().shape == (len(PROMPT) + new_tokens - 1, 3, 8)
    # `retract` computes the earlier rows again with the new weights; what was answered keeps the rows that it was answered with.
    runs = [(span.weight_version, span.kind) for span in frame.provenance]
    again = [(1, RowKind.PREFILLED)] if mode == "retract" else []
    assert runs == [(0, RowKind.PREFILLED), (0, RowKind.DECODED), *again, (1, RowKind.DECODED)]
    assert frame.provenance[0].end == len(PROMPT)
    assert frame.kept_rows == (frame.provenance[1].end if again else 0)


def test_released_weights_come_back_as_new_ones(sync: WeightSync, engine_url: str, changed: Weights) -> None:
    """As slime does around an update where trainers and engines share GPUs."""
    for version in (1, 2):  # at first no link stands
        post(engine_url + "/release_memory_occupation", {"tags": ["weights"]})
        with pytest.raises(errors.WeightUpdateFailed, match="released the memory of its weights"):
            sync.update(changed.items(), version=version, timeout_s=UPDATE_S)
        post(engine_url + "/resume_memory_occupation", {"tags": ["weights"]})
        sync.update(changed.items(), version=version, timeout_s=UPDATE_S)
        assert greedy(engine_url)[1] == str(version)


def test_a_bracket_left_open_is_taken_over(sync: WeightSync, client: EngineHandle, changed: Weights) -> None:
    client.pause("retract", timeout_s=UPDATE_S)
    client.begin(timeout_s=UPDATE_S)
    sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
    assert client.weight_version(timeout_s=UPDATE_S) == "1"


@BROADCAST
def test_misuse_is_named(sync: WeightSync, changed: Weights) -> None:
    with pytest.raises(errors.UsageError, match="is ready"):
        sync.connect(timeout_s=UPDATE_S)
    sync.close()
    with pytest.raises(errors.UsageError, match="is closed"):
        sync.update(changed.items(), version=4, timeout_s=UPDATE_S)


# -- models that do more than copy ----------------------------------------------------------------------------------------

PLUGIN: dict[str, Any] = {"capture": False, "r3channel": False, "env": ON_CPU | {"R3CHANNEL_WEIGHTS": "1"}}
EPLB = ("--ep-size", "2", "--enable-eplb", "--eplb-rebalance-num-iterations", "20")


def checksums_from_disk(url: str, model: Path) -> Any:
    """Where SGLang has loaded it itself."""
    post(f"{url}/update_weights_from_disk", {"model_path": str(model), "load_format": "auto"})
    return checksums(url)


MLA = [pytest.param("deepseek_v3", 2, marks=pytest.mark.long), ("glm4_moe_lite", 1)]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tp"), MLA)
def test_mla_is_staged_in_parts_and_serves_as_loaded_from_disk(family: str, tp: int, tmp_path: Path) -> None:
    write_families(tmp_path, family)
    weights = load_file(tmp_path / family / "model.safetensors")
    with serving(tmp_path / family, tp=tp, extra_args=("--load-format", "dummy"), **PLUGIN) as server:

        def logprobs() -> Any:
            """They tell what is derived from parameters, too."""
            asked = {"return_logprob": True, "logprob_start_len": 0, "routing": False}
            meta = generate(server.url, random_prompt(40, seed=4), new_tokens=8, **asked).meta
            return meta["input_token_logprobs"], meta["output_token_logprobs"]

        with connected([server.url], staged=True) as sync:
            report = sync.update(weights.items(), version=1, timeout_s=UPDATE_S)
        updated = checksums(server.url), logprobs()
        assert (checksums_from_disk(server.url, tmp_path / family), logprobs()) == updated
        assert report.loaded == "" and report.verified == sum(map(len, updated[0][0]))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_experts_that_eplb_moves_are_learned(model_dir: Path, original: Weights, changed: Weights) -> None:
    """And they stay while an update is on its way."""
    with serving(model_dir, tp=2, extra_args=EPLB, **PLUGIN) as server:

        def moved() -> bool:
            """Whether experts moved within passes in which they should have, twice."""
            before = checksums(server.url)
            generate(server.url, random_prompt(9, seed=1), new_tokens=50, routing=False)
            return checksums(server.url) != before

        def meanwhile() -> Any:
            for number, named in enumerate(changed.items(), start=1):
                assert number < len(changed) or not moved()
                yield named

        tokens, _ = greedy(server.url)
        with connected([server.url], staged=True, bucket_bytes=1 << 20) as sync:
            sync.update(changed.items(), version=1, timeout_s=UPDATE_S)
            assert moved() and greedy(server.url)[0] != tokens
            sync.update(original.items(), version=2, timeout_s=UPDATE_S)
            placed = checksums(server.url)
            assert checksums_from_disk(server.url, model_dir) == placed
            assert greedy(server.url) == (tokens, "2")
            sync.update(meanwhile(), version=3, timeout_s=UPDATE_S)
            assert moved()
