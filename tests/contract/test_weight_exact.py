"""Several trainer processes: each sends its own rows, or its own tensors to all engines: each bucket once, in one order, and
without an engine that is lost. What one of them suffers the others are told."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.float8_blocks import quantise
from r3channel.errors import TransportError
from r3channel.transport.base import Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, in_background
from r3channel.weights.groups import JointReceiver, turns
from r3channel.weights.loader_map import dry_run
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.session import WeightSync
from tests.contract.exact_rank import FLOAT8, plain, weights
from tests.dist.ranks import run_ranks
from tests.support import weights as whole
from tests.support.fake_engine import UPDATE, FakeEngine, Model
from tests.support.waits import SOON_S, UPDATE_S, busy
from tests.support.weights import holds, serving

RANK = "tests.contract.exact_rank"


@pytest.mark.parametrize("dies", [1, 0])
def test_an_error_of_either_trainer_rank_says_what_version_engines_hold(tmp_path: Path, dies: int) -> None:
    tensors = weights(1)
    metas = [TensorMeta.of(*named) for named in tensors.items()]
    # what torch imports for a first one takes its time, which an engine has not
    dry_run(Model(tensors), metas)
    pair = empty(2)
    urls = [engine.url for engine in pair]
    results = run_ranks(RANK, tmp_path, world_size=2, job={"engines": urls, "dies": dies})
    assert all(holds(engine, 2, weights(2)) for engine in pair)
    left = results[1 - dies]
    assert left["sent"] == len(pair) * sum(tensor.nbytes for tensor in weights(1).values()) / 2
    kind, spoiled = left["spoiled"]
    assert kind == "WeightUpdateFailed" and "holds NaN" in spoiled and left["version"] == 1
    # The second time all hold what they held the time before, and no plan was made for that.
    assert all("(64 elements), of which the sources hold 32" in said for _, said in left["short"])
    assert "staged other bytes of version 1 than was committed" in left["other"][1]
    kind, lost = left["lost"]
    assert kind == "TrainerRankLost"
    if dies:
        assert "weight version 2 is committed" in lost and left["after"] == left["held"] == 2
        assert all(f"{url}: serving the committed weights" in lost for url in urls)
    else:
        assert "rank 0 was committing weight version 2" in lost and left["after"] == 1
        assert all(f"{url}: version 2" in lost for url in urls)


@pytest.mark.parametrize(
    ("ranks", "round_of_death"),
    [pytest.param(2, 0, marks=pytest.mark.long), (3, 2), pytest.param(4, 3, marks=pytest.mark.long)],
)
def test_ranks_send_in_one_group_in_one_order_and_who_dies_in_a_round_costs_that_update(
    tmp_path: Path, ranks: int, round_of_death: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[int, list[int]] = {}
    recv = ProcessGroupTransport.recv

    def noted(wire: ProcessGroupTransport, src: int, *rest: Any, **more: Any) -> None:
        received.setdefault(wire.rank - ranks, []).append(src)
        recv(wire, src, *rest, **more)

    monkeypatch.setattr(ProcessGroupTransport, "recv", noted)
    engines = empty(3)
    job = {"engines": [engine.url for engine in engines], "kills": round_of_death}
    results = run_ranks(RANK, tmp_path, world_size=ranks, job=job)
    # Of the first update, as NCCL needs it: gloo would take any order.
    for number, found in enumerate(results):
        counts = [found["order"].count(ranks + engine) for engine in range(3)]
        assert found["order"] == [ranks + to for to, _ in turns(number, 1, counts, max(ranks, 3))]
    for engine, came in received.items():
        counts = [found["order"].count(ranks + engine) for found in results]
        assert came[: sum(counts)] == [who for who, _ in turns(engine, -1, counts, max(ranks, 3))]
    del results[1]
    assert results[0]["sent"] == len(engines) * sum(tensor.nbytes for tensor in weights(1).values()) / 2
    for found in results:
        assert found["spoiled"][0] == found["lost"][0] == "WeightUpdateFailed"
        assert re.search(r"holds NaN|joint group has ended; .*trainer rank \d", found["spoiled"][1]), found
        # who left first may reach a third by way of a second, which is named then
        named = r"joint group has ended; engine \S+ rank 0: .*trainer rank \d|: trainer rank 1 is gone"
        assert re.search(named, found["lost"][1]), found["lost"]
    assert all(holds(engine, 3, weights(3)) for engine in engines)
    with WeightSync.sharded(job["engines"], group=None, wire="gloo") as sync:
        sync.connect(timeout_s=UPDATE_S)
        sync.update(weights(5).items(), version=5, timeout_s=UPDATE_S)
    assert all(holds(engine, 5, weights(5)) for engine in engines)


def test_a_rank_that_is_to_leave_while_it_joins_leaves_once_it_has() -> None:
    store = RendezvousStore("127.0.0.1")
    where: dict[str, Any] = {"backend": "gloo", "name": "test-leaves", "connection": 0, "world_size": 2}
    where |= {"host": store.host, "port": store.port}
    receiver = JointReceiver(where=where, rank=1, timeout_s=SOON_S, trainers=1)
    joining = in_background(receiver.join, name="test-join")
    receiver.close("its trainer is gone")
    trainer = ProcessGroupTransport(Rendezvous(**where, rank=0), timeout_s=SOON_S, members="joint")
    joining.result(SOON_S)
    with pytest.raises(TransportError, match="closed"):
        trainer.recv(1, torch.empty(1, dtype=torch.uint8), timeout_s=SOON_S)


def test_a_word_of_an_update_that_was_given_up_does_not_count_in_the_next_one() -> None:
    receiver = JointReceiver(where={"name": "test-late", "world_size": 3}, rank=2, trainers=2)
    for update, trainer, records in ((7, 0, 1), (6, 1, 5), (7, 1, 1)):
        receiver.begin(update, trainer, records)
    assert list(receiver._order) == [0, 1]


def empty(count: int) -> list[FakeEngine]:
    return [FakeEngine(receives={n: 0 * t for n, t in weights(1).items()}) for _ in range(count)]


def test_rank_that_stops_alone_is_named_to_others_at_once_and_next_update_succeeds(tmp_path: Path) -> None:
    said = {
        "slot": "DeadlineExceeded: .*waited 0.2 s for step 3", "plan": "OSError: no memory", "link": "OSError: no buffer",
        "survey": "OSError: no room", "convert": "ValueError: gather failed", "kill": "is gone",
    }  # fmt: skip
    (engine,) = empty(1)
    job = {"engines": [engine.url], "stops": list(said)}
    first, _, third = run_ranks(RANK, tmp_path, world_size=3, job=job)
    for found, (how, words) in itertools.product((first, third), said.items()):
        seconds, kind, error = found[how]
        assert kind == "WeightUpdateFailed" and re.search(f"trainer rank 1.*{words}", error), (how, error)
        assert seconds < 2 * busy(), how
    assert engine.version == str(len(said)) and not engine.paused


def test_a_rank_that_stands_still_beyond_a_deadline_fails_that_update_and_no_other(tmp_path: Path) -> None:
    (engine,) = empty(1)
    job = {"engines": [engine.url], "late": 10}
    first, second = (found["told"] for found in run_ranks(RANK, tmp_path, world_size=2, job=job))
    assert [waited for *_, waited in first[1::2]] == [False] * 10, "none waited beyond its own deadline"
    first, second = ([said for said, _ in told] for told in (first, second))
    assert first[::2] == second[::2] == [[]] * 10
    assert all("ranks [1] did not come along" in error for _, error in first[1::2])
    assert [error for _, error in second[1::2] if "trainer rank 0" not in error] == []
    assert engine.version == "19" and not engine.paused


def test_shards_of_two_trainer_ranks_become_float8_at_an_engine_and_at_one_that_joins(tmp_path: Path) -> None:
    values, scales = quantise(plain(), (128, 128))
    wanted = {FLOAT8: values, f"{FLOAT8}_scale_inv": scales}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file(wanted, checkpoint / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (checkpoint / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    pair = [FakeEngine(receives={n: torch.zeros_like(t) for n, t in wanted.items()}) for _ in range(2)]
    job = {"engines": [pair[0].url], "joins": pair[1].url, "like": str(checkpoint)}
    results = run_ranks(RANK, tmp_path, world_size=2, job=job)
    assert [(found["tensors"], found["joined"]) for found in results] == [(2, 1), (2, 1)]
    assert all("Connection refused" in said for found in results for _, said in found["absent"])
    assert results[0]["routable"] == sorted(engine.url for engine in pair)
    for engine in pair:
        assert all(torch.equal(engine.tensors[n].float(), t.float()) for n, t in wanted.items())
        assert engine.version == "1" and not engine.paused


# -- whole tensors, each rank its own -----------------------------------------------------------------------------------


def test_a_bucket_is_broadcast_once_and_no_rank_that_fails_leaves_a_mixture(tmp_path: Path) -> None:
    engines = [FakeEngine() for _ in range(3)]
    engines[1].settings |= {"tp_size": 2}
    hows = ["good", "slow", "nan", "convert", "again", "kill"]
    job: dict[str, Any] = {"engines": [engine.url for engine in engines], "hows": hows}
    # a source that is slow takes longer; an engine does not, on a machine with much to do either
    job["engine_timeout_s"] = 2 * busy()
    first, second, *_, silent = run_ranks(RANK, tmp_path, world_size=4, job=job)
    for how in ("good", "slow", "again"):
        assert first[how]["said"] == [] and first[how]["sent"] == [1024] * 3  # of its kilobytes
        assert silent[how]["said"] == silent[how]["sent"] == []
        assert len(first[how]["routable"]) == 3
    assert "holds NaN" in first["nan"]["said"][1] and "gather failed" in silent["convert"]["said"][1]
    assert "trainer rank 1 is gone" in first["kill"]["said"][1] and second == {}
    for engine in engines:
        assert engine.paused and engine.version == "3"
        assert all(one == other for one, other in zip(engine.received, engines[0].received, strict=False))


def test_an_engine_that_is_lost_on_the_way_ends_no_update_of_the_others(tmp_path: Path) -> None:
    good, bad, other = (FakeEngine() for _ in range(3))
    bad.script[UPDATE, 3] = "die"
    job = {"engines": [good.url, bad.url, other.url], "hows": ["lost", "next"], "engine_timeout_s": UPDATE_S}
    found = run_ranks(RANK, tmp_path, world_size=3, job=job)
    assert holds(good, 2) and holds(other, 2)
    assert all(told["lost"]["said"] == told["next"]["said"] == [] for told in found)
    assert found[0]["lost"]["routable"] == sorted([good.url, other.url])
    assert good.calls.count(UPDATE) == 2 * len(whole.NAMES) + 1  # the bucket under way came again


def test_engines_with_our_half_get_the_ranks_tensors_staged(tmp_path: Path) -> None:
    engines = [serving(), serving()]
    job = {"engines": [engine.url for engine in engines], "hows": ["good", "again"], "staged": True}
    job["engine_timeout_s"] = UPDATE_S
    found = run_ranks(RANK, tmp_path, world_size=3, job=job)
    assert all(holds(engine, 2) and UPDATE not in engine.calls for engine in engines)
    assert [told["again"]["said"] for told in found] == [[]] * 3
