"""Which known misalignments the channel itself notices, without a recording: at the relay's door, where the trainer says its own
version, and where a router is handed its rows. What it cannot notice is listed here by name, as the recordings' README lists it.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.errors import DigestMismatch, R3Error
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.recordings.step import RecordedStep
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.staleness import Staleness
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame
from tests.support.misaligned import CASES, PLAIN, Rows, engine_step, rows_of

NOT_HANDED = {
    "mixed_versions": "the ids are right; the ticket is the only one that says versions",
    "version_off_by_one": "the ids are right; the trainer's own version is another witness",
    "mtp_shift": "the channel hands MTP routers nothing, unless the layout maps one",
    "fused_shared_expert": "a row that is handed out has top-k columns",
}
"""What no digest of rows at the routers' end can show, and why."""
AT_THE_DOOR = {"zero_rows", "duplicated_ids", "out_of_range", "mtp_shift", "fused_shared_expert"}
"""What an engine's own frame is refused for; everything else that an engine gets wrong before it hashes is hashed wrong."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_between_engine_and_router_is_noticed_before_the_router_uses_it(name: str) -> None:
    spec, layout, mistake = CASES[name][0]
    want = engine_step(spec, layout)
    seen = mistake(want)
    of_pass = "recompute" if name.startswith("recompute") else "forward"
    plain = engine_step(spec)  # the same rows, on one rank
    same_shape = seen.spec == spec
    rows = {
        s.sample_id: seen.ids(s.sample_id, of_pass=of_pass)[0] if same_shape else rows_of(plain)[s.sample_id]
        for s in plain.samples
    }
    assert is_noticed(plain, rows) == (name not in NOT_HANDED)


def is_noticed(want: RecordedStep, rows: Rows) -> bool:
    shard = want.ticket.plan.shard(dp=0, pp=0)
    names = [name for batch in shard.microbatches for name in batch.sample_ids]
    digests_SL = np.stack([layer_digests(want.ids(name)[0], first_row=0) for name in names])
    whole_N = torch.from_numpy(place_samples(want.ticket.plan, dp=0, ids_of=rows.__getitem__)[shard.key])
    layers = [want.spec.moe_index(layer) for layer in shard.layers]
    expected_SL = torch.from_numpy(np.ascontiguousarray(digests_SL[:, layers]).view(np.int64))
    own = RankShard(want.ticket, shard, whole_N, tp=0, digests_SL=expected_SL)
    try:
        for microbatch in range(own.num_microbatches):
            for layer in shard.layers:
                own.check_digest(microbatch, layer, own.layer_ids(microbatch, layer))
    except DigestMismatch:
        assert own.digests.checked >= own.digests.different > 0
        return True
    assert (own.digests.checked, own.digests.different) == (digests_SL.size, 0)
    return False


def test_versions_that_are_one_off_are_ahead_of_the_trainers(caplog: pytest.LogCaptureFixture) -> None:
    """By default a line in the log; with a bound an error, as of one too low (tests/unit/test_rank_shard.py)."""
    want = engine_step()
    newest = max(want.ticket.weight_versions)
    Staleness(want.ticket, version=newest).check()
    assert not caplog.records
    Staleness(want.ticket, version=newest - 1).check()  # what engines said is one more than what they had
    assert "stamped before their update" in caplog.text


@pytest.mark.parametrize(
    "name", sorted({name for name, cases in CASES.items() if cases[0][0] == PLAIN} | AT_THE_DOOR)
)
def test_what_an_engine_itself_says_wrongly_is_refused_where_its_bytes_show_it(name: str) -> None:
    """Also as more layers or columns than the model has, which is another spec than the relay's."""
    want, spec = engine_step(), PLAIN
    rows = rows_of(want)
    if name == "out_of_range":
        rows["s1"][3, 2, 0] = PLAIN.num_experts
    else:
        seen = CASES[name][0][2](engine_step(PLAIN, CASES[name][0][1]))
        spec, rows = seen.spec, rows | {own: ids for own, ids in rows_of(seen).items() if own in rows}
    refused = 0
    with closing(Relay(PLAIN, TrainerLayout(), ChannelConfig())) as relay:
        for own, ids in rows.items():
            try:
                relay.add_frame(own, encode_frame(spec, expert_ids_TLK=ids), want.tokens[own])
            except R3Error:
                refused += 1
        relay.discard(list(rows))
    assert bool(refused) == (name in AT_THE_DOOR)
