"""Rows that samples of one prompt share travel once, past any loss of them: real sender, real ingest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.frame_view import PrefixRef
from r3channel.wire.parcel import PREFIX_SERIAL
from r3channel.wire.prefix import encode_prefix, prefix_digest
from tests.direct import LIMIT_S, Engine, deliver, hello_of, receipt_reply, rows_here
from tests.samples import SPEC, random_ids

PROMPT = list(range(65))
"""64 rows of it are shared: the last token's row is each sample's own."""


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(kept_prefix_bytes=1 << 20))
    yield relay
    with suppress(errors.StepError):
        relay.close()


def sibling(number: int, *, tokens: int = 200) -> Any:
    """Rows of the shared prompt, then rows of its own."""
    return np.concatenate([random_ids(64, seed=99), random_ids(tokens - 65, seed=number)])


def finish_all(relay: Relay, engine: Engine, samples: dict[str, Any]) -> float:
    """Finish, add and await the samples; returns the bytes that the ingest took for them."""
    before = relay.metrics.value("r3channel_bytes_total", leg="engine_direct")
    for name, ids_TLK in samples.items():
        tokens = len(ids_TLK) + 1
        reply = engine.finish(name, tokens, prompt=PROMPT, ids_TLK=ids_TLK)
        relay.add(name, reply, range(tokens))
    relay.intake.await_frames(list(samples), timeout_s=LIMIT_S, step=0)
    for name, ids_TLK in samples.items():
        assert np.array_equal(rows_here(relay, name), ids_TLK), name
    return relay.metrics.value("r3channel_bytes_total", leg="engine_direct") - before


def forget_prompts(relay: Relay) -> None:
    """As when other prompts took their place."""
    relay.intake.landing._prefixes._rows.clear()


def test_equal_rows_of_a_prompt_are_sent_once(relay: Relay, tmp_path: Path) -> None:
    url = relay.serve(token_file=tmp_path / "token")
    with Engine(url, tmp_path / "token") as engine:
        sent = finish_all(relay, engine, {f"s{number}": sibling(number) for number in range(8)})
    with Engine(url, tmp_path / "token", hello=hello_of(boot_id=12), sent_prefix_bytes=0) as engine:
        full = finish_all(relay, engine, {f"f{number}": sibling(number) for number in range(8)})
    saved_rows = 7 * 64
    assert sent == pytest.approx(full - saved_rows * SPEC.bytes_per_token, abs=8 * 160)


def test_siblings_that_chose_other_experts_are_sent_in_full(relay: Relay, tmp_path: Path) -> None:
    url = relay.serve(token_file=tmp_path / "token")
    other = sibling(2)
    other[10] = random_ids(1, seed=1234)[0]
    with Engine(url, tmp_path / "token") as engine:
        finish_all(relay, engine, {"s1": sibling(1), "s2": other, "s3": sibling(3)})


def test_rows_that_the_relay_has_lost_are_asked_for_again(relay: Relay, tmp_path: Path) -> None:
    with Engine(relay.serve(token_file=tmp_path / "token"), tmp_path / "token") as engine:
        finish_all(relay, engine, {"s1": sibling(1), "s2": sibling(2)})
        forget_prompts(relay)
        finish_all(relay, engine, {"s3": sibling(3)})
        assert engine.frames("given_up") == 0


def test_a_relay_that_restarts_gets_shared_rows_again(tmp_path: Path) -> None:
    port = 0
    engine = None
    for life in range(2):
        config = ChannelConfig(ingest_port=port)
        relay = Relay(SPEC, TrainerLayout(), config)
        url = relay.serve(token_file=tmp_path / "token")
        port = int(url.rsplit(":", 1)[1])
        engine = engine or Engine(url, tmp_path / "token")
        finish_all(relay, engine, {f"s{life}{number}": sibling(10 * life + number) for number in range(3)})
        relay.close()
    assert engine is not None
    engine.outlet.close()


def test_a_prefix_needs_no_more_memory_than_allowed(relay: Relay, tmp_path: Path) -> None:
    with Engine(
        relay.serve(token_file=tmp_path / "token"), tmp_path / "token", sent_prefix_bytes=4000
    ) as engine:
        for number in range(5):
            prompt_rows = np.concatenate([random_ids(64, seed=number), random_ids(30, seed=50 + number)])
            reply = engine.finish(f"r{number}", 95, prompt=[number, *PROMPT[1:]], ids_TLK=prompt_rows)
            relay.add(f"s{number}", reply, range(95))
        relay.intake.await_frames([f"s{number}" for number in range(5)], timeout_s=LIMIT_S, step=0)
        assert engine.sender._prefixes.nbytes <= 4000


def prompt_of(number: int) -> list[int]:
    return [number, *PROMPT[1:]]


def test_prompts_that_the_relay_has_no_room_for_at_once_are_sent_in_full(tmp_path: Path) -> None:
    config = ChannelConfig(kept_prefix_bytes=64 * SPEC.bytes_per_token)
    relay = Relay(SPEC, TrainerLayout(), config)
    with Engine(relay.serve(token_file=tmp_path / "token"), tmp_path / "token") as engine:
        with engine.sender._changed:  # the sender takes all of them as one parcel
            replies = [
                engine.finish(f"s{number}", 100, prompt=prompt_of(number), seed=number) for number in range(3)
            ]
        for number, reply in enumerate(replies):
            relay.add(f"s{number}", reply, range(100))
        relay.intake.await_frames(["s0", "s1", "s2"], timeout_s=LIMIT_S, step=0)
    relay.discard(["s0", "s1", "s2"])
    relay.close()


def test_a_shared_prompt_that_is_refused_costs_its_own_samples_only(relay: Relay, tmp_path: Path) -> None:
    bad = sibling(1)
    bad[10, 0, 1] = bad[10, 0, 0]
    with Engine(relay.serve(token_file=tmp_path / "token"), tmp_path / "token") as engine:
        with engine.sender._changed:
            replies = {
                "bad": engine.finish("bad", 200, prompt=prompt_of(1), ids_TLK=bad),
                "good": engine.finish("good", 200, prompt=prompt_of(2), ids_TLK=sibling(2)),
            }
        for name, reply in replies.items():
            with suppress(errors.ExpertIdInvalid):  # where it has arrived before
                relay.add(name, reply, range(200))
        relay.intake.await_frames(["good"], timeout_s=LIMIT_S, step=0)
        assert engine.frames("given_up") == 0
    relay.discard(["good", "bad"])


def test_rows_that_are_evicted_once_their_frame_is_here_are_not_lost(relay: Relay) -> None:
    ids_TLK = sibling(1)
    prefix = encode_prefix(SPEC, expert_ids_TLK=ids_TLK[:64])
    ref = PrefixRef(prefix_digest(SPEC, ids_TLK[:64]), 64)
    frame = encode_frame(SPEC, expert_ids_TLK=ids_TLK, prefix=ref, sample_key=sample_key("r"))
    relay.intake.greet(hello_of())
    with pytest.raises(errors.PrefixMissing, match="frame 1 from engine http://e:1"):
        deliver(relay, (1, frame))
    deliver(relay, (PREFIX_SERIAL, prefix), (1, frame))
    forget_prompts(relay)
    relay.add("s", receipt_reply("r", 200, serial=1), range(200))
    assert np.array_equal(rows_here(relay, "s"), ids_TLK)
