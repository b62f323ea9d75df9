"""Frames from an engine to the relay past the reply: real sender, real sockets. Nothing is lost unnoticed or taken twice."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from r3channel import errors
from r3channel.bearer import create_token, obtain_token, read_token
from r3channel.config import ChannelConfig, EngineConfig
from r3channel.engine.delivery import FRAMES_PATH
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay import store as store_module
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import FRAME_MAGIC, parse_frame, sample_key
from r3channel.wire.receipt import RECEIPT_MAGIC, Receipt, pack_parcel
from tests.direct import Engine, draft_of, hello_of
from tests.samples import SPEC, frame_of, random_ids, reply_for, reply_of

LIMIT_S = 20.0


@dataclass
class Place:
    """A relay with its ingest open."""

    relay: Relay
    url: str
    token_file: Path

    def engine(self, **options: Any) -> Engine:
        return Engine(self.url, self.token_file, **options)

    def add(self, sample_id: str, reply: dict[str, Any], tokens: int, **options: Any) -> Any:
        return self.relay.add(sample_id, reply, range(tokens), engine="http://e:1", **options)

    def seal(self, *names: str, step: int = 0) -> Any:
        return self.relay.seal(step, Assignment.round_robin(list(names), dp=1, microbatch_size=len(names)))

    def rows_of(self, name: str) -> np.ndarray:
        held = self.relay._inbox.held(name)
        assert held is not None
        return parse_frame(self.relay._store.get(held.key), spec=SPEC).decode()

    def post(self, path: str, body: bytes, *, token: str | None = None, **headers: str) -> int:
        target = urlsplit(self.url)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=LIMIT_S)
        value = read_token(self.token_file) if token is None else token
        try:
            connection.request(
                "POST", path, body=body, headers={"Authorization": f"Bearer {value}", **headers}
            )
            return connection.getresponse().status
        finally:
            connection.close()


Open = Callable[..., Place]


def receipt_for(request_id: str, *, serial: int, rows: int) -> Receipt:
    return Receipt(
        sample_key=sample_key(request_id), boot_id=hello_of().boot_id, serial=serial, first_row=0, rows=rows
    )


@pytest.fixture
def open_place(tmp_path: Path) -> Iterator[Open]:
    places: list[Place] = []

    def make(*, port: int = 0, **changes: Any) -> Place:
        config = ChannelConfig(
            backend="loopback", ingest_port=port, **{"frame_timeout_s": LIMIT_S, **changes}
        )
        relay = Relay(SPEC, TrainerLayout(), config)
        places.append(Place(relay, relay.serve(token_file=tmp_path / "token"), tmp_path / "token"))
        return places[-1]

    yield make
    for place in places:
        with suppress(errors.StepError):
            place.relay.close()


@pytest.fixture
def place(open_place: Open) -> Place:
    return open_place()


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


def unclaimed(place: Place) -> int:
    return place.relay.status()["unclaimed"]["frames"]


# -- the frame gets there ------------------------------------------------------------------------------------------------


def test_a_reply_carries_a_receipt_and_the_relay_has_the_frame(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 40, seed=3)
        assert len(reply["meta_info"]["routed_experts"]) <= 64
        assert place.add("s1", reply, 40) is None
        place.seal("s1")
    ticket_sample = place.relay._ledger.steps[0].ticket.samples[0]
    assert ticket_sample.tokens == 40


def test_rows_are_exact_whichever_comes_first(place: Place) -> None:
    with place.engine() as engine:
        early, late = engine.finish("r1", 40, seed=1), engine.finish("r2", 7, seed=2)
        until(lambda: unclaimed(place) == 2, "both frames are there before their replies")
        place.add("early", early, 40)
        reply = engine.finish("r3", 12, seed=3)
        place.add("at once", reply, 12)
        place.add("late", late, 7)
        until(lambda: not place.relay.status()["waiting"], "no frame is outstanding")
    for name, tokens, seed in (("early", 40, 1), ("late", 7, 2), ("at once", 12, 3)):
        assert np.array_equal(place.rows_of(name), random_ids(tokens - 1, seed=seed)), name


def test_the_caller_may_go_on_with_its_list_of_tokens_before_the_frame_is_there(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 9)
        until(lambda: unclaimed(place) == 1, "the frame is there")
        late = reply_of(receipt_for("r2", serial=2, rows=8).to_bytes(), request_id="r2")
        for name, its in (("early", reply), ("late", late)):
            tokens = list(range(9))
            place.relay.add(name, its, tokens)
            tokens += [1, 2, 3]  # the next turn's prompt
        engine.finish("r2", 9)
        assert len(place.seal("early", "late").samples) == 2


def test_tokens_that_are_no_ids_are_refused_and_the_frame_waits(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 9)
        with pytest.raises(errors.UsageError, match="int32"):
            place.relay.add("s1", reply, [0.5] * 9)  # type: ignore[list-item]
        place.add("s1", reply, 9)
        place.seal("s1")


def test_a_frame_that_the_store_has_no_room_to_name_is_kept_until_it_has(
    open_place: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply came first, so the frame is named when it comes, and the engine has its 200 whatever becomes of that."""
    segment_bytes = len(frame_of(2000)) + 8192  # such a frame and its name, and nothing else
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", segment_bytes)
    place = open_place(frame_timeout_s=2.0)
    place.relay._store.ceiling_bytes = 2 * segment_bytes
    for name, tokens in (("old", 2000), ("filling", 3)):  # a segment each
        place.add(name, reply_for(name, tokens), tokens)
    place.add("s1", reply_of(receipt_for("r1", serial=1, rows=1999).to_bytes(), request_id="r1"), 2000)
    with place.engine() as engine:
        engine.finish("r1", 2000)
        until(lambda: len(place.relay._store) == 3, "the frame is there")
        with pytest.raises(errors.StoreFull, match="s1"):
            place.seal("s1")
        place.relay.discard(["old"])
        place.seal("s1")


def test_the_ingest_goes_on_after_a_connection_for_which_there_was_no_thread(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse_one(thread: threading.Thread) -> None:
        if thread.name == "r3channel-ingest-one" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_one)
    with pytest.raises(OSError):
        place.post("/v1/hello", hello_of().to_bytes())
    assert place.post("/v1/hello", hello_of().to_bytes()) == 200


def test_relays_that_start_at_once_share_the_token_that_one_of_them_creates(tmp_path: Path) -> None:
    for attempt in range(20):
        path, together = tmp_path / f"token-{attempt}", threading.Barrier(3)

        def ask(path: Path = path, together: threading.Barrier = together) -> str:
            together.wait(LIMIT_S)
            return obtain_token(path)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(ask) for _ in range(3)]
            assert {future.result(LIMIT_S) for future in futures} == {read_token(path)}


def test_a_token_that_another_relay_is_writing_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    threading.Timer(0.2, path.write_text, ("x" * 64,)).start()
    assert obtain_token(path) == "x" * 64


def add_damaged(place: Place, engine: Engine) -> None:
    """A sample of two turns, whose first one's frame comes damaged after both replies."""
    place.relay.engines.greet(engine.hello)
    first, second = (
        draft_of(name, 8, first_row=row).encode().tobytes() for name, row in (("r1", 0), ("r2", 8))
    )
    for serial, (name, row) in enumerate((("r1", 0), ("r2", 8)), 101):
        receipt = replace(receipt_for(name, serial=serial, rows=8), first_row=row)
        place.add("s1", reply_of(receipt.to_bytes(), request_id=name), row + 9, append=bool(row))
    damaged = first[:-1] + bytes([first[-1] ^ 1])
    body = b"".join(pack_parcel(engine.hello.boot_id, [(101, damaged), (102, second)]))
    assert place.post(FRAMES_PATH, body) == 200
    assert place.relay.status()["waiting"] == []


def test_of_several_turns_the_one_that_came_damaged_is_named(place: Place) -> None:
    with place.engine() as engine:
        add_damaged(place, engine)
        assert "hash" in place.relay.status()["failed"]["s1"]
        for _ in range(2):
            with pytest.raises(errors.PayloadCorrupt, match="s1"):
                place.seal("s1")
        place.add("s1", engine.finish("r1", 9), 9)  # made again
        place.seal("s1")
    assert place.relay.status()["failed"] == {}


def test_a_failure_that_no_step_asks_for_is_forgotten(open_place: Open) -> None:
    place = open_place(expiry_s=0.2)
    with place.engine() as engine:
        add_damaged(place, engine)
        time.sleep(0.3)
        with pytest.raises(errors.SampleUnknown):
            place.seal("s1")
    assert not place.relay._intake._failed


def test_a_body_that_comes_after_the_end_is_refused_as_every_other_call_is(place: Place) -> None:
    place.relay.close()
    with pytest.raises(errors.UsageError, match="closed"):
        asyncio.run(place.relay.add_body_async("s1", b"{}", [1, 2]))


def test_a_frame_whose_sample_was_discarded_before_it_came_takes_no_room(place: Place) -> None:
    place.add("s1", reply_of(receipt_for("r1", serial=1, rows=8).to_bytes(), request_id="r1"), 9)
    assert place.relay.discard(["s1"]) == 1
    with place.engine() as engine:
        engine.finish("r1", 9)
        engine.finish("r2", 9)
        until(lambda: unclaimed(place), "a frame that a reply may still claim is there")
    assert unclaimed(place) == len(place.relay._store) == 1


def test_a_seal_does_not_wait_for_a_sample_that_is_discarded_meanwhile(open_place: Open) -> None:
    place = open_place()
    place.add("s1", reply_of(receipt_for("r1", serial=1, rows=8).to_bytes(), request_id="r1"), 9)
    threading.Timer(0.2, place.relay.discard, (["s1"],)).start()
    begin_s = time.monotonic()
    with pytest.raises(errors.SampleUnknown):
        place.seal("s1")
    assert time.monotonic() - begin_s < LIMIT_S / 2


def test_many_frames_share_requests(place: Place) -> None:
    with place.engine() as engine:
        replies = {f"r{i}": engine.finish(f"r{i}", 5 + i, seed=i) for i in range(300)}
        for index, (name, reply) in enumerate(replies.items()):
            place.add(name, reply, 5 + index)
        until(lambda: not place.relay.status()["waiting"], "all frames came")  # the first checks import numba
        place.seal(*replies)
    assert place.relay.metrics.value("r3channel_samples_total", outcome="received") == 300


def test_a_relay_that_starts_later_gets_what_waited(tmp_path: Path, open_place: Open) -> None:
    token, first = tmp_path / "token", open_place()
    port = urlsplit(first.url).port
    first.relay.close()
    with Engine(first.url, token) as engine:
        reply = engine.finish("r1", 9)
        time.sleep(0.2)
        place = open_place(port=port)
        place.add("s1", reply, 9)
        until(lambda: not place.relay.status()["waiting"], "the frame came after all")


def test_a_relay_that_restarts_hears_the_hello_again(open_place: Open) -> None:
    first = open_place()
    with first.engine() as engine:
        first.add("s1", engine.finish("r1", 9), 9)
        first.seal("s1")
        port = urlsplit(first.url).port
        with suppress(errors.StepError):
            first.relay.close()
        second = open_place(port=port)
        second.add("s2", engine.finish("r2", 9), 9)
        second.seal("s2")
        assert second.relay.status()["engines"]["http://e:1"].startswith("SGLang 0.5.23")


def test_a_frame_that_is_sent_twice_is_taken_once(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 9, seed=1)
        place.add("s1", reply, 9)
        place.seal("s1")
        frame = draft_of("r1", 8, seed=1).encode().tobytes()
        body = b"".join(pack_parcel(engine.hello.boot_id, [(2, frame), (2, frame)]))
        first = b"".join(pack_parcel(engine.hello.boot_id, [(1, frame)]))
        assert [place.post("/v1/frames", data) for data in (body, body, first)] == [200, 200, 200]
    assert unclaimed(place) == 1  # frame 2, once; frame 1 was claimed before


def test_in_band_and_direct_replies_may_be_mixed(place: Place) -> None:
    with place.engine() as engine:
        place.add("direct", engine.finish("r1", 9), 9)
        place.add("inband", reply_for("inband", 9), 9)
        assert len(place.seal("direct", "inband").samples) == 2


def test_the_event_loop_goes_on_while_a_body_is_added(place: Place) -> None:
    """The thread that adds goes on only when the loop has turned ten times: on the loop's own thread it never would."""
    turned, turns = threading.Event(), 0

    def tokens(reply: Any) -> Sequence[int]:
        assert turned.wait(LIMIT_S), "the event loop stood still"
        return reply["output_ids"]

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 10:
                turned.set()
            await asyncio.sleep(0)

    async def add(bodies: dict[str, bytes]) -> None:
        turning = asyncio.create_task(turn())
        for name, body in bodies.items():
            turned.clear()
            nonlocal turns
            turns = 0
            await place.relay.add_body_async(name, body, tokens, engine="http://e:1")
        turning.cancel()

    with place.engine() as engine:
        replies = {"direct": engine.finish("r1", 40, seed=1), "inband": reply_for("inband", 40, seed=1)}
        asyncio.run(
            add(
                {
                    name: json.dumps(reply | {"output_ids": list(range(40))}).encode()
                    for name, reply in replies.items()
                }
            )
        )
        place.seal("direct", "inband")
    assert place.relay.metrics.value("r3channel_samples_total", outcome="received") == 2


# -- the frame does not get there ----------------------------------------------------------------------------------------


def test_a_lost_frame_is_named_when_its_step_is_sealed(open_place: Open) -> None:
    place = open_place(frame_timeout_s=3.0)
    with place.engine() as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        place.seal("s1")
        engine.sender._post = lambda path, parts: (200, "")  # type: ignore[method-assign]
        place.add("s2", engine.finish("r2", 9), 9)
        with pytest.raises(
            errors.FrameMissing, match=r"step 1: waited 3.0 s .*sample s2 from engine http://e:1, frame 2"
        ):
            place.seal("s2", step=1)
        assert place.relay.discard(["s2"]) == 1
        place.add("s3", reply_for("s3", 9), 9)
        place.seal("s3", step=1)


def test_a_frame_of_an_engine_that_never_said_hello_is_named_with_the_reason(open_place: Open) -> None:
    place = open_place(frame_timeout_s=0.5)
    with Engine("http://127.0.0.1:9", place.token_file) as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        with pytest.raises(
            errors.FrameMissing, match="never said hello to this relay; are R3CHANNEL_RELAY_URL"
        ):
            place.seal("s1")


def test_a_frame_damaged_on_the_way_is_named_with_its_sample(place: Place) -> None:
    place.relay.engines.greet(hello_of())
    with Engine("http://127.0.0.1:9", place.token_file) as engine:
        place.add("s1", engine.finish("r1", 9), 9)
    damaged = bytearray(draft_of("r1", 8).encode().tobytes())
    damaged[-3] ^= 4
    assert place.post("/v1/frames", b"".join(pack_parcel(11, [(1, bytes(damaged))]))) == 200
    with pytest.raises(errors.PayloadCorrupt, match=r"sample s1: .*frame 1 from engine http://e:1"):
        place.seal("s1")
    assert place.relay.metrics.value("r3channel_rejected_total", reason="payload") == 1


def test_a_frame_with_rows_of_another_length_is_named(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 9)
        until(lambda: unclaimed(place) == 1, "the frame is there")
        with pytest.raises(errors.RowCountMismatch, match=r"rows 0\.\.8 for 12 tokens"):
            place.add("s1", reply, 12)


def test_swapped_receipts_are_refused(place: Place) -> None:
    with place.engine() as engine:
        first, second = engine.finish("r1", 9), engine.finish("r2", 9)
        first["meta_info"]["id"], second["meta_info"]["id"] = "r2", "r1"
        with pytest.raises(errors.ReceiptInvalid, match="were replies swapped"):
            place.add("s1", first, 9)


def test_a_full_queue_sends_the_frame_in_the_reply(place: Place) -> None:
    with Engine("http://127.0.0.1:9", place.token_file, queue_bytes=5200) as engine:
        replies = [
            base64.b64decode(engine.finish(f"r{i}", 99)["meta_info"]["routed_experts"]) for i in range(4)
        ]
        assert [reply[:4] for reply in replies] == [RECEIPT_MAGIC, RECEIPT_MAGIC, FRAME_MAGIC, FRAME_MAGIC]
        assert engine.sender.overflowed == 2


def test_what_the_relay_does_not_take_in_time_is_given_up(place: Place) -> None:
    with Engine("http://127.0.0.1:9", place.token_file, deliver_timeout_s=0.1) as engine:
        engine.finish("r1", 9)
        until(lambda: engine.sender.given_up == 1, "the frame is given up")


def test_frames_that_no_reply_claims_fill_no_memory(open_place: Open) -> None:
    place = open_place(unclaimed_bytes=3000)
    with place.engine() as engine:
        replies = []
        for index in range(4):  # 1,144 bytes each
            replies.append(engine.finish(f"r{index}", 41))
            time.sleep(0.05)
        until(lambda: unclaimed(place) == 3, "the ceiling is reached")
        time.sleep(0.2)
        assert unclaimed(place) == 3
        for index, reply in enumerate(replies):
            place.add(f"s{index}", reply, 41)
        until(lambda: not place.relay.status()["waiting"], "the fourth came once there was room")


def test_a_frame_that_finds_the_store_full_is_delivered_when_there_is_room(
    open_place: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 1 << 16)
    place = open_place()
    place.relay._store.ceiling_bytes = 1 << 16
    place.add("old", reply_for("old", 1900), 1900)  # 44 KiB of 64
    with place.engine() as engine:
        statuses = recorded(engine)
        reply = engine.finish("r1", 1900, seed=2)
        until(lambda: 503 in statuses, "the relay says that it has no room")
        assert place.add("s1", reply, 1900) is None
        assert len(place.relay._store) == 1 and place.relay.status()["waiting"] == ["s1"]
        assert place.relay.discard(["old"]) == 1
        until(lambda: not place.relay.status()["waiting"], "the frame came after all")
        assert statuses[-1] == 200 and engine.sender.given_up == 0
    assert np.array_equal(place.rows_of("s1"), random_ids(1899, seed=2))


def recorded(engine: Engine) -> list[int]:
    """What the relay answers to this engine's parcels from now on."""
    statuses: list[int] = []
    post = engine.sender._post

    def listen(path: str, parts: Sequence[bytes]) -> tuple[int, str]:
        status, reason = post(path, parts)
        statuses.extend([status] if path == FRAMES_PATH else [])
        return status, reason

    engine.sender._post = listen  # type: ignore[method-assign]
    return statuses


def test_a_parcel_for_which_there_is_no_room_leaves_no_part_of_itself(
    open_place: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 1 << 16)
    place = open_place()
    place.relay._store.ceiling_bytes = 1 << 16
    place.relay.engines.greet(hello_of())
    frames = [(n, draft_of(f"r{n}", 18, seed=n).encode().tobytes()) for n in range(1, 101)]
    body = b"".join(pack_parcel(11, frames))
    assert place.relay._intake.has_room(len(body))  # only the records' headers make it too much
    assert place.post("/v1/frames", body) == 503
    assert unclaimed(place) == 0 and len(place.relay._store) == 0
    assert place.post("/v1/frames", b"".join(pack_parcel(11, frames[:90]))) == 200
    assert unclaimed(place) == 90


def test_a_body_that_is_cut_leaves_nothing_of_itself(place: Place) -> None:
    place.relay.engines.greet(hello_of())
    frame = draft_of("r1", 400).encode().tobytes()
    body = b"".join(pack_parcel(11, [(1, frame)]))
    target = urlsplit(place.url)
    with socket.create_connection((target.hostname or "", target.port or 0), timeout=LIMIT_S) as peer:
        head = (
            f"POST /v1/frames HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {read_token(place.token_file)}\r\n"
        )
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-100])
        until(lambda: len(place.relay._store) == 1, "its place is taken")
    until(lambda: len(place.relay._store) == 0, "its place is given back")
    assert place.post("/v1/frames", body) == 200 and unclaimed(place) == 1


def test_a_sample_can_be_discarded_before_its_frame_is_there(place: Place) -> None:
    with Engine("http://127.0.0.1:9", place.token_file) as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        assert place.relay.discard(["s1"]) == 1
    assert place.relay.status()["waiting"] == []


# -- turns ---------------------------------------------------------------------------------------------------------------


def test_a_turn_is_appended_even_when_its_frame_overtakes_the_one_before(place: Place) -> None:
    place.relay.engines.greet(hello_of())
    with Engine("http://127.0.0.1:9", place.token_file) as engine:
        first, second = engine.finish("r1", 9, seed=1), engine.finish("r2", 20, first_row=8, seed=1)
        place.add("s1", first, 9)
        place.add("s1", second, 20, append=True)
    frames = [draft_of("r1", 8, seed=1), draft_of("r2", 11, first_row=8, seed=1)]
    for serial in (2, 1):
        data = frames[serial - 1].encode().tobytes()
        assert place.post("/v1/frames", b"".join(pack_parcel(11, [(serial, data)]))) == 200
    until(lambda: not place.relay.status()["waiting"], "both turns are there")
    expected = np.concatenate([random_ids(8, seed=1), random_ids(19, seed=1)[8:]])
    assert np.array_equal(place.rows_of("s1"), expected)
    assert place.seal("s1").samples[0].tokens == 20


# -- the door ------------------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_taken(place: Place) -> None:
    for token in ("", "x" * 64, read_token(place.token_file)[:-1]):
        assert place.post("/v1/hello", hello_of().to_bytes(), token=token) == 401
        assert place.post("/v1/frames", b"", token=token) == 401
    assert place.relay.status()["engines"] == {}


def test_a_body_larger_than_allowed_is_refused_before_it_is_read(open_place: Open) -> None:
    place = open_place(unclaimed_bytes=3000)
    assert place.post("/v1/frames", bytes(3001)) == 413
    assert place.post("/v1/hello", bytes(20000)) == 413


def test_a_body_without_a_length_is_refused(place: Place) -> None:
    headers = {"Transfer-Encoding": "chunked"}
    assert place.post("/v1/frames", b"0\r\n\r\n", **headers) in (400, 411)


def test_what_is_no_parcel_is_refused(place: Place) -> None:
    place.relay.engines.greet(hello_of())
    assert place.post("/v1/frames", b"R3P\x01 and so on") == 400
    assert place.post("/v1/hello", b"R3H\x01 and so on") == 400


def test_the_ingest_listens_on_loopback_unless_told_otherwise(place: Place) -> None:
    assert place.url.startswith("http://127.0.0.1:")


def test_a_token_file_is_made_for_its_owner_only(place: Place) -> None:
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600
    assert len(read_token(place.token_file)) >= 32


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    create_token(tmp_path / "token")
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(errors.TokenError, match="mode 0640, expected 0600"):
        read_token(tmp_path / "token")


def test_a_short_token_is_refused_and_not_printed(tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("secret123")
    with pytest.raises(errors.TokenError, match="9 characters") as refused:
        read_token(tmp_path / "token")
    assert "secret123" not in str(refused.value)


# -- engines -------------------------------------------------------------------------------------------------------------


def test_an_expected_engine_that_stays_silent_is_refused_with_the_reason(place: Place) -> None:
    place.relay.expect_engines(["http://e:1"], timeout_s=0.2)
    with pytest.raises(
        errors.EngineSilent, match=r"engine http://e:1 did not say hello in time.*R3CHANNEL_ENGINE=1"
    ):
        place.add("s1", reply_for("s1", 9), 9)


def test_an_expected_engine_that_said_hello_is_used(place: Place) -> None:
    place.relay.expect_engines(["http://e:1/"], timeout_s=LIMIT_S)
    with place.engine() as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        place.seal("s1")


def test_an_engine_of_another_model_is_refused_with_the_field(place: Place) -> None:
    other = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=8)
    place.relay.expect_engines(["http://e:1"], timeout_s=LIMIT_S)
    assert place.post("/v1/hello", hello_of(spec=other).to_bytes()) == 422
    with pytest.raises(
        errors.EngineSilent, match=r"routing has {'num_experts': 64}, expected {'num_experts': 128}"
    ):
        place.add("s1", reply_for("s1", 9), 9)


def test_a_probe_is_answered_in_band_with_hello_and_frame(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r3channel-probe-1", 3)
        place.relay.expect_engines(["http://known-as:2"], timeout_s=0.1)
        place.relay.check_engine(reply, engine="http://known-as:2", tokens=3)
    assert "SGLang 0.5.23" in place.relay.status()["engines"]["http://known-as:2"]


# -- configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"R3CHANNEL_DELIVERY": "carrier pigeon"}, "expected inband or direct"),
        ({"R3CHANNEL_DELIVERY": "direct"}, "needs R3CHANNEL_RELAY_URL"),
        ({"R3CHANNEL_CODEC": "set"}, "another thread pays"),
        ({"R3CHANNEL_ALLOW": "speculative,everything"}, r"names \['everything'\]"),
    ],
)
def test_an_engine_configuration_that_cannot_work_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        EngineConfig.from_environment(values)


def test_refusals_are_overridden_by_word() -> None:
    config = EngineConfig.from_environment({"R3CHANNEL_ALLOW": "speculative, pp"})
    assert config.allowed == {"speculative", "pp"}
