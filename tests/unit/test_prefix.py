"""Shared prompts: rows sent once, keyed by the rows themselves; what differs is sent in full, what is lost is named."""

from __future__ import annotations

import numpy as np
import pytest

from r3channel import errors
from r3channel.model.presets import model_named
from r3channel.wire.frame import PrefixRef, encode_frame, parse_frame
from r3channel.wire.prefix import (
    MIN_ROWS,
    PrefixCache,
    encode_prefix,
    parse_prefix,
    prefix_digest,
    resolve,
)
from tests.samples import SPEC, WIDE, random_ids

PROMPT = 40
TOKENS = np.arange(PROMPT)


def sample(seed: int) -> np.ndarray:
    """Rows of a sample: the group's prompt, then its own."""
    return np.concatenate([random_ids(PROMPT), random_ids(30, seed=seed + 1)])


def test_siblings_send_their_prompt_once_and_arrive_whole() -> None:
    cache, kept, frames = PrefixCache(SPEC, max_bytes=1 << 20), {}, 0
    for seed in range(4):
        ids = sample(seed)
        shared = cache.share(ids[:PROMPT], token_ids=TOKENS, weight_version=3)
        if shared.frame is not None:
            prefix = parse_prefix(shared.frame, spec=SPEC)
            kept[prefix.digest], frames = prefix.ids_TLK, frames + 1
        data = encode_frame(SPEC, expert_ids_TLK=ids, prefix=shared.ref)
        frame = resolve(parse_frame(data, spec=SPEC), kept.get)
        assert np.array_equal(frame.routing(sample_id="s").expert_ids_TLK, ids) and frame.rows == PROMPT + 30
        assert np.array_equal(frame.decode(layers=(2, 3)), ids[:, 1:])
    assert frames == 1


def test_a_group_of_eight_costs_at_most_079_of_the_bytes_without_sharing() -> None:
    """A prompt of 1,024 rows, and 3,072 of each response."""
    spec, shape = model_named("qwen3-30b-a3b").spec, (4096, 48, 8)
    ids_TLK = np.random.default_rng(0).integers(0, spec.num_experts, shape, np.uint8)
    cache, alone, sent = PrefixCache(spec, max_bytes=64 << 20), 0, 0
    for _ in range(8):
        alone += len(encode_frame(spec, expert_ids_TLK=ids_TLK))
        shared = cache.share(ids_TLK[:1024], token_ids=np.arange(1024), weight_version=0)
        frame = encode_frame(spec, expert_ids_TLK=ids_TLK, prefix=shared.ref)
        sent += len(frame) + len(shared.frame or b"")
    assert sent <= 0.79 * alone


def test_a_sibling_whose_rows_differ_in_one_id_is_sent_in_full() -> None:
    cache = PrefixCache(SPEC, max_bytes=1 << 20)
    assert cache.share(random_ids(PROMPT), token_ids=TOKENS, weight_version=3).ref is not None
    other = random_ids(PROMPT)
    other[17, 1] = other[17, 1, ::-1].copy()
    shared = cache.share(other, token_ids=TOKENS, weight_version=3)
    assert shared.ref is None and shared.frame is None


def test_equal_rows_are_one_prefix_whatever_tokens_led_to_them() -> None:
    cache = PrefixCache(SPEC, max_bytes=1 << 20)
    first = cache.share(random_ids(PROMPT), token_ids=TOKENS, weight_version=3)
    second = cache.share(random_ids(PROMPT), token_ids=TOKENS, weight_version=4)
    assert second.ref == first.ref and second.frame is None


def test_rows_with_an_invalid_one_and_few_rows_are_not_shared() -> None:
    cache = PrefixCache(SPEC, max_bytes=1 << 20)
    valid = TOKENS != 5
    assert cache.share(random_ids(PROMPT), token_ids=TOKENS, weight_version=0, valid_T=valid).ref is None
    few = MIN_ROWS - 1
    assert cache.share(random_ids(few), token_ids=TOKENS[:few], weight_version=0).ref is None


def test_the_cache_forgets_the_least_recently_used_and_stays_under_its_bound() -> None:
    one = random_ids(PROMPT).nbytes
    cache = PrefixCache(SPEC, max_bytes=2 * one)
    refs = []
    for seed in (0, 1, 0, 2):
        ids = random_ids(PROMPT, seed=seed)
        refs.append(cache.share(ids, token_ids=TOKENS + seed, weight_version=0).ref)
        assert cache.nbytes <= 2 * one
    assert [cache.frame(ref.digest) is not None for ref in refs if ref] == [True, False, True, True]
    cache.clear()
    assert cache.nbytes == 0 and cache.frame(refs[0].digest) is None


def test_a_prefix_can_be_asked_for_again() -> None:
    cache = PrefixCache(SPEC, max_bytes=1 << 20)
    shared = cache.share(random_ids(PROMPT), token_ids=TOKENS, weight_version=3)
    assert shared.ref is not None and cache.frame(shared.ref.digest) == shared.frame


def frame_without_its_prefix() -> bytes:
    ids = sample(0)
    ref = PrefixRef(prefix_digest(SPEC, ids[:PROMPT]), PROMPT)
    return encode_frame(SPEC, expert_ids_TLK=ids, prefix=ref)


def test_a_prefix_that_is_not_here_is_named() -> None:
    frame = parse_frame(frame_without_its_prefix(), spec=SPEC)
    for ask in (
        frame.decode,
        frame.ids,
        frame.verify,
        lambda: resolve(frame, {}.get),
        lambda: frame.routing(sample_id="s"),
    ):
        with pytest.raises(errors.PrefixMissing, match=r"rows 0\.\.40"):
            ask()


def test_a_frame_is_verified_together_with_the_rows_of_its_prefix() -> None:
    frame, ids = parse_frame(frame_without_its_prefix(), spec=SPEC), sample(0)
    out = np.empty_like(ids)
    assert resolve(frame, lambda _: ids[:PROMPT]).verify(out) is out and np.array_equal(out, ids)
    with pytest.raises(errors.FrameCorrupt, match="not those that the engine hashed"):
        resolve(frame, lambda _: ids[1 : PROMPT + 1]).verify()


def test_damaged_rows_of_a_prefix_are_refused() -> None:
    data = bytearray(encode_prefix(SPEC, expert_ids_TLK=random_ids(PROMPT)))
    data[-1] ^= 1
    with pytest.raises(errors.FrameCorrupt, match="not those of digest"):
        parse_prefix(bytes(data), spec=SPEC)


def test_a_prefix_of_other_rows_is_refused() -> None:
    frame = parse_frame(frame_without_its_prefix(), spec=SPEC)
    with pytest.raises(errors.FrameCorrupt, match="has 7 rows"):
        resolve(frame, lambda _: random_ids(7))
    with pytest.raises(errors.RoutingError):
        resolve(frame, lambda _: random_ids(PROMPT, spec=WIDE))


def test_a_prefix_frame_is_no_sample_and_a_sample_no_prefix() -> None:
    with pytest.raises(errors.FrameVersionMismatch, match="kind prefix, expected expert_ids"):
        parse_frame(encode_prefix(SPEC, expert_ids_TLK=random_ids(PROMPT)), spec=SPEC)
    with pytest.raises(errors.FrameVersionMismatch, match="kind expert_ids, expected prefix"):
        parse_prefix(encode_frame(SPEC, expert_ids_TLK=random_ids(PROMPT)), spec=SPEC)


def test_a_prefix_with_a_repeated_expert_is_refused() -> None:
    ids = random_ids(PROMPT)
    ids[9, 0, 1] = ids[9, 0, 0]
    with pytest.raises(errors.ExpertIdInvalid, match="row 9"):
        parse_prefix(encode_prefix(SPEC, expert_ids_TLK=ids), spec=SPEC)
