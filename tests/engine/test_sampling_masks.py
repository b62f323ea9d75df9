"""Sampling masks of the real SGLang, through the relay to trainers of another layout, against the logits of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.delivery import receive, receivers_of
from tests.engine.client import Reply, direct_to, generate, random_prompt, serving
from tests.engine.reference import NEAR_TIE, Expected, reference_ids
from tests.samples import SPEC

pytestmark = [pytest.mark.engine, pytest.mark.full]

TOP_K = 8
NEW_TOKENS = 70  # SGLang streams, also what is not asked to stream, every 50


def sampled(url: str, length: int, *, top_k: int = TOP_K) -> Reply:
    sampling = {"temperature": 1.0, "top_k": top_k, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    extra = {"return_sampling_mask": True, "sampling_params": sampling}
    return generate(url, random_prompt(length, seed=length), new_tokens=NEW_TOKENS, **extra)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delivery", ["inband", "direct"])
def test_the_tokens_that_could_be_chosen_reach_the_logits_that_chose_them(
    delivery: str, model_dir: Path, tmp_path: Path
) -> None:
    relay = Relay(SPEC, TrainerLayout.parse("tp=2,cp=2"), ChannelConfig(sampling_masks=True))
    env = {"R3CHANNEL_SAMPLING_MASKS": "1", **direct_to(relay, tmp_path), "R3CHANNEL_DELIVERY": delivery}
    with serving(model_dir, env=env) as server, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda length: sampled(server.url, length), (3, 40, 150)))
        replies.append(sampled(server.url, 20, top_k=1))
        plain = generate(server.url, [5, 6, 7], new_tokens=2)  # no masks asked for: none behind the frame
        names = [f"s{number}" for number in range(len(replies))]
        for name, reply in zip(names, replies, strict=True):
            relay.add(name, {"meta_info": reply.meta}, reply.tokens, engine=server.url)
            assert not any(reply.meta["output_token_sampling_mask"])
            assert len(reply.meta["output_token_sampling_logprobs"]) == NEW_TOKENS
        ticket = relay.seal(0, Assignment.round_robin(names, dp=1, microbatch_size=2))
    assert len(plain.raw) < 2000
    shards = receive(receivers_of(relay), ticket)
    expected = reference_ids(model_dir, [reply.tokens for reply in replies], folder=tmp_path)
    seen = 0
    for shard in shards:
        for number, batch in enumerate(shard.shard.microbatches):
            offsets, ids = (tensor.tolist() for tensor in shard.sampling_mask(number))
            sample, position = (part.ravel().tolist() for part in shard.shard.token_map(number))
            for place, (index, at) in enumerate(zip(sample, position, strict=True)):
                which = names.index(batch.sample_ids[index])
                got = set(ids[offsets[place] : offsets[place + 1]])
                seen += check(got, replies[which], expected[which], at, top_k=1 if which == 3 else TOP_K)
    relay.close()
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
