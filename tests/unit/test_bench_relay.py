"""The relay benchmark's own code: end states, ratios and figures. The whole of it: `r3channel bench relay`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from r3channel.bench import relay
from r3channel.bench import relay_paths as paths
from r3channel.bench import relay_peers as peers
from r3channel.bench.harness import Effort
from r3channel.bench.relay import CASE, Round, path_of
from r3channel.bench.relay_paths import OWN, Case, Workload, digest
from r3channel.bench.relay_peers import ALL, DIRECT, LIMIT, NUMPY, PEERS, SLIME
from r3channel.plan.placement import place_samples
from r3channel.relay.relay import Relay

SMALL = Case("qwen3-30b-a3b", tokens=1_500, dp=4)


@pytest.mark.parametrize("path", PEERS)
def test_every_peer_ends_with_the_rows_that_our_placement_makes_and_a_wrong_one_is_seen(path: str) -> None:
    work = Workload(SMALL)
    for dp in range(SMALL.dp):
        taking = peers.ArraysTaking(work.plan, dp, path)
        blank, ids = digest(taking.tensors()), work.wide if path == SLIME else work.narrow
        samples = [torch.from_numpy(ids[name]) for name in work.of_rank(dp)]
        taking.hold(samples)
        assert digest(taking.tensors()) == _placed(work, dp) != blank
        taking.hold([samples[0].roll(1, 0), *samples[1:]])
        assert digest(taking.tensors()) != _placed(work, dp)


def test_our_own_path_ends_with_the_same_rows_over_tcp() -> None:
    work = Workload(SMALL)
    sending, ends = paths.ChannelSending(work), []
    with closing(sending.relay):
        ranks = [paths.ChannelTaking(SMALL, rank, sending.relay) for rank in range(SMALL.dp)]
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
        paths.add_bodies(held, work.bodies)
        ticket = held.seal(0, work.assignment)
        rows_N = paths.receive(held, ticket)
        held.join_previous(timeout_s=5)
    views = ticket.plan.shard(dp=0, pp=0).views(rows_N)
    assert digest([torch.from_numpy(layer) for view in views for layer in view[0]]) == _placed(work, 0)


def test_each_part_of_our_path_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_work", lambda model, effort: Workload(Case(model, tokens=1_500)))
    monkeypatch.setattr(relay, "SEALS", {64: "dp=4,packing=thd"})
    found: dict[str, Any] = {}
    for name in ("bodies", "seal"):
        found |= relay.PARTS[name](Effort(quick=True, rounds=1))
    assert found["body_to_placed_cpu_us_per_token"].keys() == set(relay.MODELS)
    assert min(found["body_to_placed_cpu_us_per_token"].values()) > 0
    assert found["seal_ms"]["64"] > 0


@pytest.mark.parametrize("path", [SLIME, NUMPY])
def test_a_peer_reads_stock_replies_only_in_rounds_of_the_whole_way(path: str) -> None:
    sending = peers.StoreSending(Workload(SMALL), path)
    assert sending.prepare(whole=False) == (0.0, 0.0)
    assert min(sending.prepare(whole=True)) > 0


def test_a_path_is_its_medians_and_the_whole_way_is_that_of_the_rounds_that_had_it() -> None:
    walls = {OWN: (1.0, 0.5), SLIME: (8.0, 3.0), NUMPY: (8.0, 3.0), DIRECT: (6.0, 0.0), LIMIT: (0.5, 0.0)}
    seen = {
        path: [Round(wall, 8.0, 0.1, (s, s / 2)), Round(wall, 8.0, 0.1, (0.0, 0.0))]
        for path, (wall, s) in walls.items()
    }
    found = {path: path_of(path, seen, bytes_sent=CASE.tokens * 384) for path in ALL}
    own = found[OWN]
    assert own["wall_s"] == 1.0 and own["bytes_per_token"] == 384
    assert own["whole_wall_s"] == 1.5 and own["whole_cpu_s"] == 8.25
    assert own["manager_cpu_us_per_token"] == pytest.approx(0.35 / CASE.tokens * 1e6)
    assert found[DIRECT]["whole_wall_s"] == 9.0  # decodes what Ray's uint8 path decodes
    assert found[LIMIT]["whole_wall_s"] is found[LIMIT]["manager_cpu_us_per_token"] is None


def _placed(work: Workload, dp: int) -> str:
    """What the relay would send to this rank."""
    shard = work.plan.shard(dp=dp, pp=0)
    whole = place_samples(work.plan, dp=dp, ids_of=work.ids)[shard.key]
    return digest([torch.from_numpy(layer) for view in shard.views(whole) for layer in view[0]])
