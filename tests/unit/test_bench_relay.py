"""The relay benchmark's own code: end states, ratios and figures. The whole of it runs in tests/dist."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.bench import relay
from r3channel.bench.harness import Effort
from r3channel.bench.relay import CASE, Round, path_of, ratios_of
from r3channel.bench.relay_paths import (
    ALL,
    DIRECT,
    LIMIT,
    NUMPY,
    OWN,
    PEERS,
    SLIME,
    ArraysTaking,
    Case,
    ChannelSending,
    ChannelTaking,
    HeldRows,
    Router,
    StoreSending,
    Workload,
    add_bodies,
    digest,
)
from r3channel.plan.placement import place_samples
from r3channel.relay.relay import Relay

SMALL = Case("qwen3-30b-a3b", tokens=1_500, dp=4)


def taking_of(work: Workload, path: str, dp: int) -> ArraysTaking:
    return ArraysTaking(HeldRows(work.plan, dp, np.int32 if path == SLIME else np.uint8), path)


@pytest.mark.parametrize("path", PEERS)
def test_every_peer_ends_with_the_rows_that_our_placement_makes(path: str) -> None:
    work = Workload(SMALL)
    for dp in range(SMALL.dp):
        taking = taking_of(work, path, dp)
        blank = digest(taking.tensors())
        taking.hold(_samples(work, path, dp))
        assert digest(taking.tensors()) == _placed(work, dp) != blank


def test_another_peer_in_the_same_memory_cannot_pass_on_what_was_left() -> None:
    work = Workload(SMALL)
    taking = taking_of(work, NUMPY, 0)
    blank = digest(taking.tensors())
    taking.hold(_samples(work, NUMPY, 0))
    taking.blank()
    assert digest(taking.tensors()) == blank


def test_a_wrong_placement_has_another_digest() -> None:
    work = Workload(SMALL)
    taking = taking_of(work, NUMPY, 0)
    samples = _samples(work, NUMPY, 0)
    samples[0] = np.roll(samples[0], 1, axis=0)
    taking.hold(samples)
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
    work = Workload(Case("qwen3-30b-a3b", tokens=65_536, dp=4))
    assert sum(work.lengths.values()) == 65_536
    first, second = work.ids("sample-0")[:100], work.ids("sample-1")[:100]
    assert not np.array_equal(first, second)


def test_our_own_path_ends_with_the_same_rows_over_tcp() -> None:
    work = Workload(SMALL)
    sending, ends = ChannelSending(work), []
    with closing(sending.relay):
        ranks = [ChannelTaking(SMALL, rank, sending.relay) for rank in range(SMALL.dp)]
        wall_s, cpu_s = sending.prepare(whole=True)
        assert wall_s > 0 and cpu_s > 0
        start_s = sending.deliver(lambda rank, ticket: ends.append(ranks[rank].take(ticket)))
        sending.settle()
        assert len(ends) == 4 and min(ends) > start_s
        assert [digest(rank.tensors()) for rank in ranks] == [_placed(work, dp) for dp in range(SMALL.dp)]
        rows = SMALL.tokens - len(work.lengths)
        assert sending.bytes_sent == rows * work.spec.bytes_per_token
        for rank in ranks:
            rank.receiver.close()


def test_a_body_goes_the_whole_way_without_a_connection() -> None:
    work = Workload(Case("qwen3-30b-a3b", tokens=1_500))
    with closing(Relay(work.spec, work.case.trainer)) as held:
        add_bodies(held, work.bodies)
        ticket = held.seal(0, work.assignment)
        rows_N = relay.receive(held, ticket)
        held.join_previous(timeout_s=5)
    views = ticket.plan.shard(dp=0, pp=0).views(rows_N)
    assert digest([torch.from_numpy(layer) for view in views for layer in view[0]]) == _placed(work, 0)


def test_each_part_of_our_path_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_work", lambda model, effort: Workload(Case(model, tokens=1_500)))
    monkeypatch.setattr(relay, "SEALS", {64: "dp=4,packing=thd"})
    found: dict[str, Any] = {}
    for name in ("bodies", "seal", "digests"):
        found |= relay.PARTS[name](Effort(quick=True, rounds=1))
    assert found["body_to_placed_cpu_us_per_token"].keys() == set(relay.MODELS)
    assert min(found["body_to_placed_cpu_us_per_token"].values()) > 0
    assert found["seal_ms"]["64"] > 0 and found["digest_cpu_us_per_token"] > 0


@pytest.mark.parametrize("path", [SLIME, NUMPY])
def test_a_peer_reads_stock_replies_only_in_rounds_of_the_whole_way(path: str) -> None:
    sending = StoreSending(Workload(SMALL), path)
    assert sending.prepare(whole=False) == (0.0, 0.0)
    assert min(sending.prepare(whole=True)) > 0


def rounds_of(wall: float, held: float, before: tuple[float, float]) -> list[Round]:
    return [Round(wall, held, 8.0, 0.1, before), Round(wall, held, 8.0, 0.1, (0.0, 0.0))]


def seen() -> dict[str, list[Round]]:
    found = {path: rounds_of(8.0, 8.0, (3.0, 2.0)) for path in PEERS}
    found[DIRECT] = rounds_of(9.0, 9.0, (0.0, 0.0))
    return found | {OWN: rounds_of(1.0, 0.8, (0.5, 0.25)), LIMIT: rounds_of(0.5, 0.5, (0.0, 0.0))}


def test_a_path_is_its_medians_and_the_whole_way_is_that_of_the_rounds_that_had_it() -> None:
    own, direct, limit = (
        path_of(path, seen(), bytes_sent=CASE.tokens * 384) for path in (OWN, DIRECT, LIMIT)
    )
    assert own["wall_s"] == 1.0 and own["held_wall_s"] == 0.8 and own["bytes_per_token"] == 384
    assert own["whole_wall_s"] == 1.5 and own["whole_cpu_s"] == 8.25
    assert own["manager_cpu_us_per_token"] == pytest.approx(0.35 / CASE.tokens * 1e6)
    assert direct["whole_wall_s"] == 12.0  # decodes what Ray's uint8 path decodes
    assert limit["whole_wall_s"] is limit["manager_cpu_us_per_token"] is None


def test_ratios_are_medians_over_rounds_and_the_best_peer_is_chosen_round_by_round() -> None:
    rounds = seen()
    rounds[NUMPY] = [*rounds_of(4.0, 4.0, (3.0, 2.0)), *rounds_of(1.0, 1.0, (3.0, 2.0))]
    rounds[DIRECT] = [*rounds_of(2.0, 2.0, (0.0, 0.0)), *rounds_of(9.0, 9.0, (0.0, 0.0))]
    rounds = {path: (rows * 2)[:4] for path, rows in rounds.items()}
    ratios = ratios_of(rounds, {path: path_of(path, rounds, bytes_sent=1) for path in ALL})
    assert ratios["vs_slime"] == 8.0
    assert ratios["vs_best_peer"] == 1.5  # of 2, 2, 1 and 1
    assert ratios["of_raw_gloo"] == pytest.approx(0.5 / 0.8)  # ends with bytes held, as raw gloo does
    assert ratios["whole_wall_vs_slime"] == pytest.approx((8.0 + 3.0) / (1.0 + 0.5))
    assert ratios["whole_cpu_vs_best_peer"] == pytest.approx((8.0 + 2.0) / (8.0 + 0.25))


def _samples(work: Workload, path: str, dp: int) -> list[Any]:
    if path == SLIME:
        return [torch.from_numpy(work.wide[name]) for name in work.of_rank(dp)]
    return [work.narrow[name] for name in work.of_rank(dp)]


def _placed(work: Workload, dp: int) -> str:
    """What the relay would send to this rank."""
    shard = work.plan.shard(dp=dp, pp=0)
    whole = place_samples(work.plan, dp=dp, ids_of=work.ids)[shard.key]
    return digest([torch.from_numpy(layer) for view in shard.views(whole) for layer in view[0]])
