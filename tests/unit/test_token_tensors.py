"""Tensors that tokens bring beside expert ids: on the wire, through the relay, and at each trainer's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3channel import errors
from r3channel.cli import main
from r3channel.config import ChannelConfig
from r3channel.engine.token_tensors import KeptTopk, TopkBatch, TopkRow, tensor_frame
from r3channel.observe.metric_table import LABELS
from r3channel.observe.metrics import Metrics
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import Machines, add_up, plan_of
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import Recorder
from r3channel.recordings.recording import Recording
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.relay_connection import RelayConnection
from r3channel.wire import header
from r3channel.wire.frame import encode_error, sample_key
from r3channel.wire.parcel import FrameReference
from r3channel.wire.source import InHand
from r3channel.wire.tensor_frame import TensorRows, encode_tensor, parse_tensors
from r3channel.wire.token_tensors import MOST_ENTRIES, REGISTRY, TOPK_VOCABULARY, TokenTensor, tensors_of
from tests.support.delivery import MakeRelay, places_of, receive, receivers_of, relays, start
from tests.support.samples import SPEC, flipped, frame_of, random_ids, reply_of
from tests.support.waits import SOON_S

PROMPT, VOCAB = 4, 500
MASKS = REGISTRY["sampling_masks"]()
TOKENS = {f"s{i}": n for i, n in enumerate((9, 30, 17, 6))}
Rows = list[list[int]]
FRAME = frame_of(9, sample_key=sample_key("s"))
REFERENCE = FrameReference(sample_key=sample_key("s"), boot_id=1, serial=1, first_row=0, rows=8)


@pytest.fixture
def make_relay() -> Any:
    with relays(token_tensors="sampling_masks") as make:
        yield make


def masks_of(rows: Rows, *, first_row: int, request: str) -> bytes:
    lengths_T, ids_N = np.array([*map(len, rows)], int), np.array([*chain(*rows)], np.uint32)
    return encode_tensor(TensorRows(MASKS, first_row, lengths_T, ids_N, sample_key(request)))


def reply_with(name: str, tokens: int, rows: Rows) -> dict[str, Any]:
    """A frame, and behind it the masks of the last tokens."""
    frame = frame_of(tokens, seed=tokens, sample_key=sample_key(name))
    masks = masks_of(rows, first_row=tokens - 1 - len(rows), request=name)
    return reply_of(frame + masks, request_id=name)


def fill(relay: Relay, tensor: TokenTensor = MASKS, *, damage: int = 0) -> dict[str, list[Any]]:
    """The step's samples -> what must be at each position but the last: a list for each column."""
    expected, fields = dict[str, list[Any]](), tensor.entry.names or ()
    for name, tokens in TOKENS.items():
        rng, rows = np.random.default_rng(tokens), tokens - PROMPT
        lengths_T = np.where(rng.random(rows) < 0.5, 1, rng.integers(0, 20, rows))
        entries_N = np.empty(lengths_T.sum(), tensor.entry)
        for field in fields:
            entries_N[field] = rng.integers(0, VOCAB, len(entries_N))
        tail = bytearray(
            encode_tensor(TensorRows(tensor, PROMPT - 1, lengths_T, entries_N, sample_key(name)))
        )
        tail[-1] ^= damage
        frame = frame_of(tokens, seed=tokens, sample_key=sample_key(name))
        relay.add(name, reply_of(frame + bytes(tail), request_id=name), range(tokens))
        parts = np.split(entries_N, np.cumsum(lengths_T)[:-1])
        made = [[part[field].tolist() for field in fields] for part in parts]
        expected[name] = [[[] for _ in fields]] * (PROMPT - 1) + made
    return expected


def are_those(seen: Iterable[tuple[tuple[str, int], Any]], expected: dict[str, list[Any]]) -> None:
    """Each token has its row, last tokens and padding none; all are there."""
    places, none = set[tuple[str, int]](), expected["s0"][0]
    for (name, at), row in seen:
        assert row == (expected[name][at] if at < len(expected.get(name, ())) else none), (name, at)
        places.add((name, at))
    assert {(name, at) for name, rows in expected.items() for at in range(len(rows))} <= places


def shard_of(relay: Relay) -> RankShard:
    """The one sample `s`, at a single rank."""
    return receive(receivers_of(relay), relay.seal(0, Assignment.given([[["s"]]])))[0]


def masks_at_tokens(shard: RankShard) -> dict[tuple[str, int], list[int]]:
    """(sample, position) -> the tokens of its mask."""
    return {place: row[0] for place, row in seen_at(shard, MASKS.name).items()}


def seen_at(shard: RankShard, tensor: str) -> dict[tuple[str, int], list[list[Any]]]:
    """(sample, position) -> its row's entries in each column, of all positions of the shard's model input."""
    found: dict[tuple[str, int], list[list[Any]]] = {}
    values = (shard.tensor(tensor, number) for number in range(shard.num_microbatches))
    rows = [[one.tolist() for one in each] for each in values]
    for number, place, name, at in places_of(shard):
        offsets, *columns = rows[number]
        found[name, at] = [column[offsets[place] : offsets[place + 1]] for column in columns]
    return found


@pytest.mark.parametrize(
    "layout",
    ["", "dp=2", "tp=2", "tp=2,sp=1", "cp=2", "dp=2,cp=2,packing=thd", "pp=2", "dp=2,tp=2,pp=2,cp=2"],
)
def test_each_token_of_the_last_stage_gets_its_engines_mask(make_relay: MakeRelay, layout: str) -> None:
    relay = make_relay(layout)
    expected = fill(relay)
    dp = relay.layout.dp
    ticket = relay.seal(0, Assignment.round_robin(list(TOKENS), dp=dp, microbatch_size=4 // dp))
    receivers, seen = receivers_of(relay), list[tuple[tuple[str, int], Any]]()
    for shard in receive(receivers, ticket):
        if shard.shard.pp == relay.layout.pp - 1:
            seen += seen_at(shard, MASKS.name).items()
        else:
            with pytest.raises(errors.UsageError, match="last stage"):
                shard.tensor("sampling_masks", 0)
    are_those(seen, expected)
    relay.join_previous()
    assert relay.status()["store"] == {"frames": 0, "bytes": 0}


def test_turns_bring_their_own_masks_in_band_or_not_and_what_lies_between_has_none(
    make_relay: MakeRelay,
) -> None:
    relay = make_relay("")
    first, second = ([[*range(at), 400] for at in range(count)] for count in (5, 4))
    relay.add("s", reply_with("s", 9, first), range(9))
    reference = REFERENCE._replace(sample_key=sample_key("t"), first_row=8, rows=5)
    more = reference.to_bytes() + masks_of(second, first_row=9, request="t")
    relay.add("s", reply_of(more, request_id="t"), range(14), append=True)
    later = InHand(frame_of(6, first_row=8, sample_key=sample_key("t"), provenance=None))
    relay.intake.arrive(reference.name, relay.intake.verifier.keep(later, where="t", max_rows=5))
    found = masks_at_tokens(shard_of(relay))
    assert [found["s", at] for at in range(14)] == [*[[]] * 3, *first, [], *second, []]


def test_an_abandoned_step_keeps_its_masks_and_a_discarded_sample_frees_them(make_relay: MakeRelay) -> None:
    relay = make_relay("")
    expected = fill(relay)
    whole = Assignment.round_robin(list(TOKENS), dp=1, microbatch_size=4)
    relay.seal(0, whole)
    assert relay.abandon(0) == 4
    (shard,) = receive(receivers_of(relay), relay.seal(1, whole))
    assert [masks_at_tokens(shard)["s1", 20]] == expected["s1"][20]
    relay.join_previous()
    fill(relay)
    assert relay.discard(TOKENS) == 4
    assert relay.status()["store"] == {"frames": 0, "bytes": 0}


@pytest.mark.parametrize(
    ("tail", "error"),
    [
        (b"", errors.RoutingMissing),
        (masks_of([[1]] * 5, first_row=3, request="other"), errors.RowCountMismatch),
        (masks_of([[1]] * 4, first_row=3, request="s"), errors.RowCountMismatch),
        (masks_of([[1]] * 5, first_row=3, request="s")[:-1], errors.FrameCorrupt),
        (FRAME, errors.RoutingError),
        (encode_error("out of ids", sample_key=sample_key("s")), errors.EngineReported),
    ],
)
def test_masks_that_misfit_are_refused(make_relay: MakeRelay, tail: bytes, error: type[Exception]) -> None:
    relay = make_relay("")
    with pytest.raises(error, match="sample s from engine e"):
        relay.add("s", reply_of(FRAME + tail, request_id="s"), range(9), engine="e")
    assert (relay.status()["store"], relay.status()["pending"]) == ({"frames": 0, "bytes": 0}, [])


@pytest.mark.parametrize("front", [FRAME, REFERENCE.to_bytes()])
def test_masks_that_nobody_asked_for_are_refused(front: bytes) -> None:
    reply = reply_of(front + masks_of([[1]] * 5, first_row=3, request="s"), request_id="s")
    with relays() as make, pytest.raises(errors.RoutingError, match="token_tensors does not name"):
        make("").add("s", reply, range(9))


def test_a_reply_that_is_left_to_the_live_router_needs_no_masks(make_relay: MakeRelay) -> None:
    relay = make_relay("", on_missing="live", max_live=1.0)
    relay.add("s", {"meta_info": {"id": "s"}}, range(9))
    assert not any(masks_at_tokens(shard_of(relay)).values())


def test_no_memory_for_masks_is_told_to_all(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = make_relay("tp=2")
    entries = sum(len(row[0]) for rows in fill(relay).values() for row in rows)
    ticket = relay.seal(0, Assignment.round_robin(list(TOKENS), dp=1, microbatch_size=4))
    nbytes, empty = 2 * 4 * max(TOKENS.values()) + 4 * entries, torch.empty

    def full(*size: Any, **options: Any) -> torch.Tensor:
        if size == (nbytes,):  # TP0 has them as they came
            raise MemoryError("no room for masks")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    first, second = (rank.exception(SOON_S) for rank in start(receivers_of(relay), ticket))
    assert isinstance(second, MemoryError) and isinstance(first, errors.PeerFailed)


def test_masks_and_durability_are_not_had_together() -> None:
    with pytest.raises(errors.ConfigError, match="journal"):
        ChannelConfig(token_tensors="sampling_masks", journal="anywhere")
    with relays(token_tensors="sampling_mask") as make, pytest.raises(errors.ConfigError, match="_support"):
        make()


# -- a tensor that nobody has thought of ---------------------------------------------------------------------------------


MADE_UP = TokenTensor("made_up", 77, np.dtype([("number", "<u2"), ("share", "<f2")]), "hope")


def flip(relay: Relay) -> None:
    """A bit of every tensor at rest; a second time it is whole again."""
    for held in chain.from_iterable(sample.tensors for sample in relay.samples.table.samples.values()):
        np.frombuffer(held.block.view, np.uint8)[-1] ^= 1


def test_a_tensor_is_a_declaration_and_damage_on_every_leg_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(REGISTRY, "made_up", lambda: MADE_UP)
    monkeypatch.setitem(header._KINDS, MADE_UP.kind, MADE_UP.name)
    monkeypatch.setitem(LABELS, "tensor", (*REGISTRY,))
    with relays(token_tensors="made_up") as make:
        relay = make("dp=2,tp=2,pp=2,cp=2", recorder=Recorder(tmp_path))
        with pytest.raises(errors.FrameCorrupt, match="made_up"):  # in the reply
            fill(relay, MADE_UP, damage=1)
        expected = fill(relay, MADE_UP)
        receivers, whole = receivers_of(relay), Assignment.round_robin(list(TOKENS), dp=2, microbatch_size=2)
        flip(relay)
        with pytest.raises(errors.FrameCorrupt, match=r"made_up of sample s. at rest"):
            receive(receivers, relay.seal(0, whole))
        flip(relay)
        relay.abandon(0)
        receive_all, damaged = RelayConnection._recv_all, list[bytearray]()

        def damaging(connection: RelayConnection, out: bytearray, *rest: Any) -> None:
            receive_all(connection, out, *rest)
            if len(damaged) < 3:  # on the wire: it is sent again
                damaged.append(out)
                out[-1] ^= 1

        monkeypatch.setattr(RelayConnection, "_recv_all", damaging)
        shards = receive(receivers, relay.seal(1, whole))
        seen = [seen_at(shard, "made_up") for shard in shards if shard.shard.pp]
        relay.join_previous()
    recorded = Recording.open(tmp_path).step(1)
    for cp in range(2):  # on disk
        shard, whole_N = recorded.ticket.plan.shard(dp=0, pp=1, cp=cp), recorded.shards(dp=0)[0, 1, cp]
        options = {"tp": 1, "tensors": recorded.tensor_shard(shard)}
        again = RankShard.from_whole(recorded.ticket, shard, torch.from_numpy(whole_N), **options)
        seen.append(seen_at(again, "made_up"))
    assert len(damaged) == 3 and recorded.cut == ()
    are_those((place for shard in seen for place in shard.items()), expected)


def test_plan_metrics_check_diff_and_arrays_read_the_declaration(
    tmp_path: Path, make_relay: MakeRelay, capsys: pytest.CaptureFixture[str]
) -> None:
    relay = make_relay("pp=2", recorder=Recorder(tmp_path / "rec"))
    rows = {name: [[at + 1, 400] for at in range(PROMPT - 1, tokens - 1)] for name, tokens in TOKENS.items()}
    rows["s1"][7] = [VOCAB]  # not of its token
    for name, tokens in TOKENS.items():
        relay.add(name, reply_with(name, tokens, rows[name]), range(tokens))
    receivers = receivers_of(relay)
    receive(receivers, relay.seal(0, Assignment.round_robin(list(TOKENS), dp=1, microbatch_size=4)))
    relay.join_previous()
    made = sum(map(len, rows.values()))
    counted = partial(Metrics.value, name="r3channel_tensor_bytes_total", tensor=MASKS.name)
    came = [counted(each.metrics) for each in (relay, *receivers)]
    assert came == [10 * made - 4, 0, 2 * 4 * max(TOKENS.values()) + 8 * made - 4]  # padded
    rec, npz, again = (str(tmp_path / name) for name in ("rec", "npz", "again"))
    assert main(["check", rec]) == 1
    said = "tensor_row (1 rows of layers): step 0, sample s1, position 10. sampling_masks"
    assert said in capsys.readouterr().out
    assert main(["export", rec, "--format", "npz", "--out", npz]) == 0
    arrays = dict(np.load(path := npz + "/step-000000.npz"))
    for changed, code in ((0, 0), (1, 1)):
        arrays["sampling_masks.entries"]["token_id"][-1] += changed
        np.savez(path, **arrays)
        assert main(["import", path, "--format", "npz", "--out", again + str(changed)]) == 0
        assert main(["diff", rec, again + str(changed)]) == code
    assert "sampling_masks: another in 1 samples" in capsys.readouterr().out
    arrays["sampling_masks.lengths"][0] += 1
    np.savez(path, **arrays)
    assert main(["import", path, "--format", "npz", "--out", again]) == 2
    data = bytearray((segment := tmp_path / "rec/step-000000.r3s").read_bytes())
    data[-50] ^= 1  # the last row length of the last sample
    segment.write_bytes(data)
    assert Recording.open(rec).step(0).cut == ("s3",)


@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2,sp=1,pp=2,cp=2", "tp=2,pp=2", "tp=2,sp=1,cp=2,packing=thd", "pp=4"]
)
def test_each_router_gets_the_weights_of_its_ids(layout: str, tmp_path: Path) -> None:
    """Each weight is its id, so that a row, a layer or a slot of another place is seen. A row that no pass has made has none."""
    (tensor,) = tensors_of("combine_weights", SPEC)
    with relays(token_tensors="combine_weights") as make:
        relay = make(layout, recorder=Recorder(tmp_path))
        for name, tokens in TOKENS.items():
            lengths_T, entries_T = np.ones(tokens - 1, np.uint16), np.empty(tokens - 1, tensor.entry)
            entries_T["weight"], lengths_T[2] = random_ids(tokens - 1, seed=tokens), 0
            rows = TensorRows(tensor, 0, lengths_T, np.delete(entries_T, 2), sample_key(name))
            data = frame_of(tokens, seed=tokens, sample_key=sample_key(name)) + encode_tensor(rows)
            relay.add(name, reply_of(data, request_id=name), range(tokens))
        dealt = Assignment.round_robin(list(TOKENS), dp=relay.layout.dp, microbatch_size=2)
        shards = receive(receivers_of(relay), relay.seal(0, dealt))
        relay.join_previous()
    recorded, seen = Recording.open(tmp_path).step(0), 0
    for shard in (shard for shard in shards if shard.shard.layers):
        own, told = shard.shard, {"tp": shard.tp, "tensors": recorded.tensor_shard(shard.shard)}
        whole = recorded.shards(dp=own.dp)[own.key]
        again = RankShard.from_whole(recorded.ticket, own, torch.from_numpy(whole), **told)
        for number in range(shard.num_microbatches):
            ids_LRK = torch.stack([shard.layer_ids(number, layer) for layer in own.layers])
            there_R = torch.from_numpy(~np.isin(own.row_map(number, tp=shard.tp)[1], (-1, 2)))
            for weights_LRK, *_ in (each.tensor("combine_weights", number) for each in (shard, again)):
                assert torch.equal(weights_LRK, (ids_LRK * there_R[:, None]).half())
            seen += int(there_R.sum()) * len(ids_LRK)
    rows = sum(tokens - 2 for tokens in TOKENS.values()) * relay.layout.tp // relay.layout.tp_slots
    assert seen == rows * SPEC.num_moe_layers


@pytest.mark.parametrize(
    ("option", "nbytes", "wire", "last"),
    [("sampling_masks", 34, 34, 34), ("topk_logprobs:128", 550, 550, 550), ("combine_weights", 50, 18 + 34, 34)],
)  # fmt: skip
def test_a_plan_has_the_bytes_of_tensors(option: str, nbytes: int, wire: int, last: int) -> None:
    """Weights go to the stages of one MoE layer and of two, other tensors to the last stage alone; there are 400 tokens."""
    plan = plan_of([101] * 4, spec=SPEC, layout=TrainerLayout.parse("pp=2"))
    plain, more = (add_up(plan, machines=Machines(), tensors=tensors_of(names)) for names in ("", option))
    assert more.tensor_bytes_per_token == {option.partition(":")[0]: nbytes}
    assert more.frame_bytes - plain.frame_bytes == 400 * nbytes
    assert more.wire_bytes - plain.wire_bytes == 400 * wire
    assert more.store_needed_bytes - plain.store_needed_bytes == 800 * nbytes
    assert more.held_bytes_tp0 - plain.held_bytes_tp0 == 800 * last
    assert more.placed_bytes_tp0 == plain.placed_bytes_tp0


# -- the likeliest tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "nbytes", "exact"), [("topk_logprobs", 548, 4e-3), ("topk_logprobs:12:float32", 79, 0)]
)
def test_packed_tokens_are_the_likeliest_with_their_log_probs_and_the_mass_of_the_others(
    option: str, nbytes: int, exact: float
) -> None:
    (tensor,) = tensors_of(option)
    logits_BV = torch.randn(5, TOPK_VOCABULARY, generator=torch.manual_seed(0))
    logprobs_BV = torch.log_softmax(logits_BV * 3, dim=-1)
    batch = TopkBatch(logprobs_BV, tensor)
    kept = KeptTopk(TopkRow(batch, row) for row in range(5))
    frame = tensor_frame(tensor, kept, prompt_tokens=3, new_tokens=5, request_id="s")
    (rows,) = parse_tensors(frame, [tensor], where="x")
    ids, logprobs, tail = (torch.from_numpy(value) for value in tensor.values(rows.entries_N))
    values, wanted = logprobs_BV.topk(ids.shape[1])
    assert (rows.first_row, rows.end_row, tensor.entry.itemsize) == (2, 7, nbytes)
    assert torch.equal(ids.long(), wanted) and ids.max() >= 1 << 16
    assert (logprobs.float() - values).abs().max() <= exact
    assert torch.allclose(tail, 1 - values.double().exp().sum(-1).float(), atol=1e-5)


@pytest.mark.parametrize("parameters", ["10", "260", "8:int8", "8,topk_logprobs:12"])
def test_an_option_that_cannot_be_is_refused(parameters: str) -> None:
    with pytest.raises(errors.ConfigError, match="topk_logprobs"):
        tensors_of(f"topk_logprobs:{parameters}")


def test_a_relay_that_expects_another_k_says_so() -> None:
    (other,) = tensors_of("topk_logprobs:12")
    rows = TensorRows(other, 3, np.ones(5, np.uint16), np.zeros(5, other.entry), sample_key("s"))
    reply = reply_of(FRAME + encode_tensor(rows), request_id="s")
    with (
        relays(token_tensors="topk_logprobs:8") as make,
        pytest.raises(errors.SpecMismatch, match="logprobs:8"),
    ):
        make("").add("s", reply, range(9))


# -- on the wire -------------------------------------------------------------------------------------------------------


def test_every_bit_that_flips_is_noticed() -> None:
    data = masks_of([[5, 6], [], [7]], first_row=3, request="s")
    for bit in range(8 * len(data)):
        with pytest.raises(errors.FrameError):
            parse_tensors(flipped(data, bit), [MASKS], where="x")


def test_a_mask_longer_than_its_length_can_say_is_refused() -> None:
    rows = TensorRows(MASKS, 0, np.array([MOST_ENTRIES + 1]), np.zeros(MOST_ENTRIES + 1, np.uint32))
    with pytest.raises(errors.RoutingError, match=str(MOST_ENTRIES)):
        encode_tensor(rows)
