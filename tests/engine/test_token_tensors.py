"""Tensors that the real SGLang gives with each token, through the relay to trainers of another layout, against the logits of
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.errors import EngineReported
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import PROBE_PREFIX, Hello
from tests.engine.client import Reply, direct_to, generate, random_prompt, serving
from tests.engine.reference import NEAR_TIE, Expected, reference_ids
from tests.support.delivery import places_of, receive, receivers_of
from tests.support.samples import SPEC

pytestmark = [pytest.mark.engine, pytest.mark.full]

TOP_K = 8
DELIVERIES = pytest.mark.parametrize("delivery", ["inband", pytest.param("direct", marks=pytest.mark.long)])
FORCED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
Channel = tuple[Relay, str, ThreadPoolExecutor]
NEW_TOKENS = 70  # SGLang streams, also what is not asked to stream, every 50


def sampled(url: str, length: int, *, top_k: int = TOP_K) -> Reply:
    sampling = {"temperature": 1.0, "top_k": top_k, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    extra = {"return_sampling_mask": True, "sampling_params": sampling}
    return generate(url, random_prompt(length, seed=length), new_tokens=NEW_TOKENS, **extra)


@contextmanager
def channel(model_dir: Path, work: Path, *asked: str, **more: str) -> Iterator[Channel]:
    """A relay, its engine's address, and threads that ask it. `asked`: delivery, layout, token tensors."""
    delivery, layout, option = asked
    relay = Relay(SPEC, TrainerLayout.parse(layout), ChannelConfig(token_tensors=option))
    own = {"R3CHANNEL_TOKEN_TENSORS": option, "R3CHANNEL_DELIVERY": delivery}
    env = direct_to(relay, work) | own | more
    with closing(relay), serving(model_dir, env=env) as server, ThreadPoolExecutor(4) as pool:
        yield relay, server.url, pool


def delivered(relay: Relay, replies: list[Reply], model: Path) -> tuple[list[RankShard], list[Expected]]:
    """A step of them, sample 2 of reply 2; and what transformers computes for each."""
    for number, reply in enumerate(replies):
        relay.add(str(number), reply.as_json, reply.tokens)
    names = [str(number) for number in range(len(replies))]
    ticket = relay.seal(0, Assignment.round_robin(names, dp=1, microbatch_size=2))
    expected = reference_ids(model, [reply.tokens for reply in replies])
    return receive(receivers_of(relay), ticket), expected


@DELIVERIES
def test_tokens_that_could_be_chosen_reach_the_logits(delivery: str, model_dir: Path, tmp_path: Path) -> None:
    with channel(model_dir, tmp_path, delivery, "tp=2,cp=2", "sampling_masks") as (relay, url, pool):
        replies = list(pool.map(lambda length: sampled(url, length), (3, 40, 150)))
        replies.append(sampled(url, 20, top_k=1))
        plain = generate(url, [5, 6, 7], new_tokens=2)  # no masks asked for: none behind the frame
        shards, expected = delivered(relay, replies, model_dir)
    assert not any(row for reply in replies for row in reply.meta["output_token_sampling_mask"])
    assert {len(reply.meta["output_token_sampling_logprobs"]) for reply in replies} == {NEW_TOKENS}
    assert len(plain.raw) < 2000
    seen = 0
    for shard in shards:
        both = [shard.tensor("sampling_masks", i) for i in range(shard.num_microbatches)]
        rows = [[value.tolist() for value in values] for values in both]
        for number, place, name, at in places_of(shard):
            (offsets, ids), which = rows[number], int(name)
            got = set(ids[offsets[place] : offsets[place + 1]])
            seen += check(got, replies[which], expected[which], at, top_k=1 if which == 3 else TOP_K)
    assert seen == 2 * len(replies) * NEW_TOKENS  # on both TP ranks


def check(got: set[int], reply: Reply, expected: Expected, at: int, *, top_k: int) -> int:
    """The mask at one position against the best logits there; 1 where a token was made from it."""
    made = range(len(reply.prompt) - 1, len(reply.tokens) - 1)
    if at not in made:
        assert not got, f"position {at} of {len(reply.tokens)} made no token"
        return 0
    assert reply.tokens[at + 1] in got
    ordered = np.argsort(-expected.logits_TV[at], kind="stable")
    best, after = expected.logits_TV[at][ordered[[top_k - 1, top_k]]]
    assert got == set(ordered[:top_k].tolist()) or best - after <= NEAR_TIE
    return 1


# -- the likeliest tokens, of what sampled ---------------------------------------------------------------------------------

K, TEMPERATURE = 16, 0.7
FLOAT16 = 0.004
"""The error of a log-prob above -8, at most."""


def likeliest(url: str, length: int, **sampling: Any) -> Reply:
    wanted = {"temperature": TEMPERATURE, "ignore_eos": True, "max_new_tokens": NEW_TOKENS, **sampling}
    extra = {"return_logprob": True, "top_logprobs_num": K, "sampling_params": wanted}
    return generate(url, random_prompt(length, seed=length), new_tokens=NEW_TOKENS, **extra)


@DELIVERIES
def test_the_likeliest_tokens_are_of_what_sampled(delivery: str, model_dir: Path, tmp_path: Path) -> None:
    """Also of requests that were retracted in the middle."""
    option, layout = f"topk_logprobs:{K}", "tp=2,cp=2,pp=2"
    with channel(model_dir, tmp_path, delivery, layout, option, **FORCED) as (relay, url, pool):
        replies = list(pool.map(lambda length: likeliest(url, length), (3, 40, 150, 20)))
        plain = generate(url, [5, 6, 7], new_tokens=2, return_logprob=True, top_logprobs_num=3)
        refused = likeliest(url, 9, top_p=0.9)
        with pytest.raises(EngineReported, match=r"topk_logprobs of a request with top_p=0\.9"):
            relay.add("refused", refused.as_json, refused.tokens)
        shards, expected = delivered(relay, replies, model_dir)
    assert [len(row) for row in plain.meta["output_top_logprobs"]] == [3, 3]  # SGLang's own, as ever
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    assert not any(row for reply in replies for row in reply.meta["output_top_logprobs"])
    seen = 0
    for shard in (shard for shard in shards if shard.shard.pp):
        both = [shard.tensor("topk_logprobs", i) for i in range(shard.num_microbatches)]
        rows = [[value.flatten(0, 1).numpy() for value in values] for values in both]
        for number, place, name, at in places_of(shard):
            ids, logprobs, tail = (value[place] for value in rows[number])
            row = ids, logprobs.astype(np.float64), float(tail)
            seen += is_likeliest(row, replies[int(name)], expected[int(name)], at)
    assert seen == 2 * len(replies) * NEW_TOKENS  # on both TP ranks


def is_likeliest(row: tuple[Any, Any, float], reply: Reply, expected: Expected, at: int) -> int:
    """1 where a token was made: its entry is what the reply's JSON says, and all are those of transformers."""
    (ids, logprobs, tail), made = row, at - len(reply.prompt) + 1
    if not 0 <= made < len(reply.output):
        assert (ids == -1).all() and not logprobs.any() and tail == 0, at
        return 0
    scaled = expected.logits_TV[at].astype(np.float64) / TEMPERATURE
    whole = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
    assert np.abs(whole[ids] - logprobs).max() < FLOAT16 and (np.diff(logprobs) <= 0).all()
    assert whole[ids].min() >= np.sort(whole)[-K] - NEAR_TIE and len(set(ids.tolist())) == K
    assert abs(tail - (1 - np.exp(whole[ids]).sum())) < 1e-4
    chosen, token, _ = reply.meta["output_token_logprobs"][made]
    assert token not in ids or abs(logprobs[ids == token][0] - chosen) < FLOAT16
    return 1


# -- what routers weigh their choices with ---------------------------------------------------------------------------------


@DELIVERIES
def test_weights_are_those_of_transformers(delivery: str, model_dir: Path, tmp_path: Path) -> None:
    """Also of requests that were retracted in the middle, and of those whose prompt lay in the prefix cache."""
    asked = model_dir, tmp_path, delivery, "tp=2,sp=1,cp=2,pp=2", "combine_weights"
    with channel(*asked, **FORCED) as (relay, url, pool):
        probe = generate(url, [5, 6], new_tokens=1, rid=PROBE_PREFIX + "0")
        hello, frame = Hello.split(probe.raw)
        prompts = [random_prompt(length, seed=length) for length in (3, 40, 150)]
        replies = list(pool.map(lambda prompt: generate(url, prompt, new_tokens=NEW_TOKENS), prompts))
        replies.append(generate(url, [*replies[1].tokens, 7], new_tokens=3))
        shards, expected = delivered(relay, replies, model_dir)
    assert hello is not None and parse_frame(frame, spec=SPEC).rows == 2  # and no weights behind it
    assert hello.weighing == ("scoring=softmax renormalize=True scaling=1.0 applied=False dtype=float16",)
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    assert replies[3].meta["cached_tokens"] > len(prompts[1])
    seen = 0
    for shard in shards:
        for number, batch in enumerate(shard.shard.microbatches):
            (weights_LRK,), layers = shard.tensor("combine_weights", number), shard.shard.layers
            ids_LRK = np.stack([shard.layer_ids(number, layer) for layer in layers]).astype(int)
            wanted_LRK, (sample_R, at_R) = np.zeros(ids_LRK.shape), shard.shard.row_map(number, tp=shard.tp)
            for row in np.flatnonzero(sample_R >= 0):
                scores_TLE = expected[int(batch.sample_ids[sample_R[row]])].scores_TLE
                all_LE = np.exp(scores_TLE[at_R[row]][list(shard.shard.sources)])
                chosen_LK = np.take_along_axis(all_LE, ids_LRK[:, row], -1)
                wanted_LRK[:, row] = chosen_LK / chosen_LK.sum(-1, keepdims=True)
                seen += len(layers)
            # float16's error, and that of float32 sums
            assert np.allclose(weights_LRK, wanted_LRK, rtol=6e-4, atol=0)
    assert seen == sum(len(reply.tokens) - 1 for reply in replies) * SPEC.num_moe_layers
