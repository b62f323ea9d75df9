"""The relay benchmark's own code: end states, ratios, fits and report keys. The whole of it runs in tests/dist."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.bench.relay import costs, text
from r3channel.bench.relay.held import HeldRows, Router, digest
from r3channel.bench.relay.paths import ALL, PEERS, STORE
from r3channel.bench.relay.paths.channel import ChannelSending, ChannelTaking
from r3channel.bench.relay.paths.store import StoreTaking
from r3channel.bench.relay.results import paths_of, ratios_of
from r3channel.bench.relay.rounds import Seen
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case, Workload
from r3channel.plan.place import place_samples
from r3channel.relay.relay import Relay

SMALL = {"model": "qwen3-30b-a3b", "tokens": 1_500, "layers": 4}


@pytest.mark.parametrize("layout", ["dp=4", "dp=1,tp=2,pp=2"])
@pytest.mark.parametrize("path", ["ray_numpy_uint8", "ray_numpy_int32", "slime_torch_int32"])
def test_every_peer_ends_with_the_rows_that_our_placement_makes(layout: str, path: str) -> None:
    work = Workload(Case(layout=layout, **SMALL))
    for rank in range(work.case.trainer.world_size):
        coords = work.case.trainer.coords(rank)
        taking = StoreTaking(HeldRows(work.plan, coords, np.uint8 if "uint8" in path else np.int32), path)
        blank = digest(taking.tensors())
        taking.hold(_samples(work, path, coords.dp), Stages())
        assert digest(taking.tensors()) == _placed(work, rank) != blank


def test_another_peer_in_the_same_memory_cannot_pass_on_what_was_left() -> None:
    work = Workload(Case(layout="dp=4", **SMALL))
    held = HeldRows(work.plan, work.case.trainer.coords(0), np.int32)
    taking = StoreTaking(held, "ray_numpy_int32")
    blank = digest(taking.tensors())
    taking.hold(_samples(work, "ray_numpy_int32", 0), Stages())
    taking.blank()
    assert digest(taking.tensors()) == blank


def test_a_wrong_placement_has_another_digest() -> None:
    work = Workload(Case(layout="dp=4", **SMALL))
    taking = StoreTaking(HeldRows(work.plan, work.case.trainer.coords(0), np.int32), "ray_numpy_int32")
    samples = _samples(work, "ray_numpy_int32", 0)
    samples[0] = np.roll(samples[0], 1, axis=0)
    taking.hold(samples, Stages())
    assert digest(taking.tensors()) != _placed(work, 0)


def test_a_digest_does_not_depend_on_the_dtype_and_refuses_strided_rows() -> None:
    ids = torch.arange(48, dtype=torch.uint8).reshape(6, 8)
    assert digest([ids]) == digest([ids.to(torch.int32)])
    with pytest.raises(AssertionError, match="contiguous"):
        digest([ids[:, ::2]])


def test_a_router_takes_wide_ids_as_they_are_and_widens_narrow_ones_into_one_buffer() -> None:
    router = Router()
    wide = torch.arange(16, dtype=torch.int32).reshape(2, 8)
    narrow = wide.to(torch.uint8)
    assert router.take(wide) is wide
    first, second = router.take(narrow), router.take(narrow)
    assert torch.equal(first, wide) and first.data_ptr() == second.data_ptr()


def test_samples_of_a_case_have_its_tokens_and_differ_from_each_other() -> None:
    work = Workload(Case(model="qwen3-30b-a3b", tokens=65_536, layout="dp=4", layers=2))
    assert sum(work.lengths.values()) == 65_536
    assert work.case.spec.num_moe_layers == 2
    first, second = work.ids("sample-0")[:100], work.ids("sample-1")[:100]
    assert not np.array_equal(first, second)


def test_our_own_path_ends_with_the_same_rows_over_tcp() -> None:
    work = Workload(Case(layout="dp=2,pp=2", **SMALL))
    sending, taken = ChannelSending(work, "r3channel"), []
    with closing(sending):
        ranks = [ChannelTaking(work.case, work.case.trainer.coords(r), sending.relay) for r in range(4)]
        sending.prepare(Stages(), whole=True)
        delivery = sending.deliver(lambda rank, ticket: taken.append(ranks[rank].take(ticket, Stages())))
        sending.settle()
        assert delivery.stages.wall_s["seal"] > 0 and len(taken) == 4
        assert [digest(rank.tensors()) for rank in ranks] == [_placed(work, rank) for rank in range(4)]
        rows = work.case.tokens - len(work.lengths)
        assert sending.bytes_sent == rows * work.spec.bytes_per_token
        for rank in ranks:
            rank.close()


def test_a_body_goes_the_whole_way_without_a_connection() -> None:
    work = Workload(Case(layout="dp=1", **SMALL))
    with closing(Relay(work.spec, work.case.trainer)) as relay:
        for name, body in work.bodies.items():
            relay.add_body(name, body, lambda reply: reply["output_ids"])
        ticket = relay.seal(0, work.assignment)
        rows_N = costs.receive(relay, ticket)
        relay.join_previous(timeout_s=5)
    views = ticket.plan.shard(dp=0, pp=0).views(rows_N)
    assert digest([torch.from_numpy(layer) for view in views for layer in view[0]]) == _placed(work, 0)


def test_a_step_costs_time_and_its_rows_lie_in_the_store_and_in_the_shard() -> None:
    work = Workload(Case(layout="dp=1", **SMALL))
    whole, floor = costs._body_to_placed(work, 1)
    assert whole > 0 and floor > 0
    found = costs._received(work, 1)
    assert found["digest_cpu_us_per_token"] > 0
    assert found["step_memory_bytes"] > 2 * found["step_ids_bytes"] > 0


def test_a_stock_reply_holds_every_decoder_layer() -> None:
    work = Workload(Case(model="deepseek-v3", tokens=600, layout="dp=1"))
    reply = work.stock_reply("sample-0")
    rows = work.lengths["sample-0"] - 1
    assert len(reply) > rows * work.spec.num_layers * work.spec.top_k * 4 * 4 // 3


def test_ratios_are_medians_over_rounds_and_the_best_peer_is_chosen_round_by_round() -> None:
    seen = _seen()
    seen["ray_numpy_uint8"].wall_s = [4.0, 1.0, 4.0]
    seen["ray_direct_gloo_uint8"].wall_s = [2.0, 9.0, 9.0]
    ratios = ratios_of(seen)
    assert ratios["vs_ray_numpy_int32"] == 8.0
    assert ratios["vs_best_peer"] == 2.0  # of 2, 1 and 4
    assert ratios["of_raw_gloo"] == pytest.approx(0.5 / 0.8)  # ends with bytes held, as raw gloo does
    assert ratios["of_raw_gloo_widened"] == pytest.approx(0.5)
    assert ratios["exposed_of_raw_gloo"] == pytest.approx(0.5 / 0.625)
    assert ratios["whole_wall_vs_ray_numpy_int32"] == pytest.approx((8.0 + 3.0) / (1.0 + 0.5))
    assert ratios["whole_cpu_vs_best_peer"] == pytest.approx((8.0 + 2.0) / (1.0 + 0.25))


def test_the_report_has_the_keys_and_prints() -> None:
    report = _report()
    for name in ALL:
        path = report["paths"][name]
        assert {"wall_s", "cpu_s", "manager_cpu_us_per_token", "bytes_per_token", "stages_s"} <= set(path)
    printed = text.table(report)
    assert all(name in printed for name in ALL) and "target 8.0" in printed
    assert "they wait 625.0 ms" in printed
    report["ratio"]["vs_best_peer"] = None  # a quick run has no peer
    assert "vs_best_peer: not measured" in text.table(report)


def _samples(work: Workload, path: str, dp: int) -> list[Any]:
    arrays = work.narrow if "uint8" in path else work.wide
    found = [arrays[name] for name in work.of_rank(dp)]
    return [torch.from_numpy(ids) for ids in found] if "torch" in path else found


def _placed(work: Workload, rank: int) -> str:
    """What the relay would send to this rank."""
    coords = work.case.trainer.coords(rank)
    shard = work.plan.shard(dp=coords.dp, pp=coords.pp)
    whole = place_samples(work.plan, dp=coords.dp, ids_of=work.ids)[shard.key]
    slot = coords.tp if shard.tp_slots > 1 else 0
    return digest([torch.from_numpy(layer) for view in shard.views(whole) for layer in view[slot]])


def _seen() -> dict[str, Seen]:
    seen = {
        name: Seen(wall_s=[8.0] * 3, held_s=[8.0] * 3, cpu_s=[8.0] * 3, stages=[{"put": 1.0}] * 3)
        for name in ("ray_numpy_int32", *PEERS)
    }
    for name in STORE:
        seen[name].preparing = [{"json": 2.0, "base64": 1.0}]
        seen[name].preparing_cpu = [{"json": 1.5, "base64": 0.5}]
    own = Seen(
        wall_s=[1.0] * 3,
        held_s=[0.8] * 3,
        cpu_s=[1.0] * 3,
        manager_cpu_s=[0.1] * 3,
        exposed_s=[0.7, 0.6, 0.625],
    )
    own.stages = [{"seal": 0.002, "send": 0.5}] * 3
    own.preparing, own.preparing_cpu = [{"ingest": 0.5}] * 3, [{"ingest": 0.25}] * 3
    return seen | {"r3channel": own, "raw_gloo": Seen(wall_s=[0.5] * 3, held_s=[0.5] * 3, cpu_s=[0.5] * 3)}


def _report() -> dict[str, Any]:
    seen = _seen()
    every = {name: seen.get(name, seen["r3channel"]) for name in ALL}
    return {
        "model": "m", "tokens": 10, "layout": "dp=4", "rounds": 3,
        "paths": paths_of(every, tokens=10), "ratio": ratios_of(seen), "seal_ms": {"64": 2.0},
        "body_to_placed_cpu_us_per_token": {"m": 0.5}, "body_to_placed_floor_us_per_token": {"m": 0.3},
        "turns_us_per_token": 0.3, "digest_cpu_us_per_token": 0.2,
        "recording_cpu_us_per_token": {"low": 0.1, "median": 0.15, "high": 0.2, "pairs": 9},
        "step_memory_bytes": 9, "step_ids_bytes": 4,
        "limit": {"raw_gloo_wall_s": 0.5}, "peak_staging_bytes": 1,
        "socket_cpu_us_per_token": {"in_band": 1.0, "direct": 0.3}, "skipped": {"ray_direct_nixl": "no module"},
    }  # fmt: skip
