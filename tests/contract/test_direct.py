"""Frames from an engine to the relay past the reply: real sender, real sockets. Nothing is lost unnoticed or taken twice."""

from __future__ import annotations

import base64
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import numpy as np
import pytest

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import beside_bytes
from r3channel.relay import samples
from r3channel.relay.journal import read_remains
from r3channel.relay.relay import Relay
from r3channel.transport.auth import obtain_token, read_token
from r3channel.wire.frame import FRAME_MAGIC
from r3channel.wire.parcel import FRAMES_PATH, HELLO_PATH, REFERENCE_MAGIC
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.support import direct
from tests.support.delivery import MakeRelay, receive, receivers_of
from tests.support.direct import Engine
from tests.support.samples import SPEC, flipped, random_ids, reply_for
from tests.support.waits import SOON_S, until


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

    def begin(self, nbytes: int) -> socket.socket:
        """A connection on which a parcel of so many bytes is announced."""
        target = urlsplit(self.url)
        peer = socket.create_connection((target.hostname or "", target.port or 0), timeout=SOON_S)
        headers = {"Host": "x", "Content-Length": nbytes} | self.headers()
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        peer.sendall(f"POST {FRAMES_PATH} HTTP/1.1\r\n{head}\r\n".encode())
        return peer

    def headers(self) -> dict[str, str]:
        """Those of an engine that has said hello."""
        return direct.headers_of(self.token_file, direct.said_hello(self.url, self.token_file))

    def hello(self, body: bytes) -> int:
        """The answer to a hello."""
        return direct.ask(self.url, HELLO_PATH, body, direct.headers_of(self.token_file))[0]


Open = Callable[..., Place]


@pytest.fixture
def open_place(make_relay: MakeRelay, tmp_path: Path) -> Open:
    def make(*, port: int = 0, **changes: Any) -> Place:
        relay = make_relay(ingest_port=port, **{"frame_timeout_s": SOON_S, **changes})
        return Place(relay, relay.serve(token_file=tmp_path / "token"), tmp_path / "token")

    return make


@pytest.fixture
def place(open_place: Open) -> Place:
    return open_place()


def frame(request_id: str, rows: int, **options: Any) -> bytes:
    return direct.draft_of(request_id, rows, **options).encode().tobytes()


def unclaimed(place: Place) -> int:
    return place.relay.status()["unclaimed"]["frames"]


# -- the frame gets there ------------------------------------------------------------------------------------------------


def test_the_caller_may_go_on_with_its_list_of_tokens_before_the_frame_is_there(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r1", 9)
        until(lambda: unclaimed(place) == 1, "the frame is there")
        for name, its in (("early", reply), ("late", direct.reference_reply("r2", 9, serial=2))):
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


def test_a_connection_without_a_thread_costs_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        place.hello(direct.hello_of().to_bytes())
    assert place.hello(direct.hello_of().to_bytes()) == 200


def test_relays_that_start_at_once_share_the_token_that_one_of_them_creates(tmp_path: Path) -> None:
    for attempt in range(20):
        path, together = tmp_path / f"token-{attempt}", threading.Barrier(3)

        def ask(path: Path = path, together: threading.Barrier = together) -> str:
            together.wait(SOON_S)
            return obtain_token(path)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(ask) for _ in range(3)]
            assert {future.result(SOON_S) for future in futures} == {read_token(path)}


def test_a_token_that_another_relay_is_writing_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    threading.Timer(0.2, path.write_text, ("x" * 64,)).start()
    assert obtain_token(path) == "x" * 64


def test_a_body_that_comes_after_the_end_is_refused_as_every_other_call_is(place: Place) -> None:
    place.relay.close()
    with pytest.raises(errors.UsageError, match="closed"):
        place.relay.add_body("s1", b"{}", [1, 2])


@pytest.mark.parametrize("frame_first", [True, False])
def test_of_a_response_that_was_cut_the_rows_of_the_tokens_that_are_left_come_directly(
    open_place: Open, tmp_path: Path, frame_first: bool
) -> None:
    """A frame that did not get there whole is taken when it comes again; the next turn begins where the rest ends."""
    place = open_place(journal=str(tmp_path / "journal"))
    place.relay.samples.engines.greet(direct.hello_of())
    whole, ids = frame("r1", 8), random_ids(8)
    parts = [whole, whole] if frame_first else [flipped(whole, 8 * -5), whole]
    if frame_first:
        direct.deliver(place.relay, (1, whole))
    place.add("s1", direct.reference_reply("r1", 9, serial=1), 5, cut=True)
    with suppress(errors.FrameCorrupt):
        direct.deliver(place.relay, (1, parts[0]))
    direct.deliver(place.relay, (1, parts[1]))
    assert np.array_equal(direct.rows_here(place.relay, "s1"), ids[:4]) and place.relay.rows_held("s1") == 4
    (folder,) = (tmp_path / "journal").iterdir()
    (saved,) = read_remains(folder).samples["s1"]
    assert (saved.tokens, saved.tokens_hash) == (5, hash_tokens(as_tokens(range(5))))
    assert place.relay.metrics.value("r3channel_cut_rows_total") == 4
    place.add("s1", direct.reference_reply("r2", 9, serial=2, first_row=4), 9, append=True)
    direct.deliver(place.relay, (2, frame("r2", 4, first_row=4)))
    assert np.array_equal(direct.rows_here(place.relay, "s1"), ids)
    receive(receivers_of(place.relay), place.seal("s1"))  # compares digests
    place.relay.join_previous(timeout_s=SOON_S)
    until(lambda: place.relay.metrics.value("r3channel_samples_total", outcome="cut") == 1)
    assert place.relay.status()["store"]["frames"] == 0


def test_no_frame_of_other_rows_is_cut_to_fit(place: Place) -> None:
    place.relay.samples.engines.greet(direct.hello_of())
    place.add("s1", direct.reference_reply("r1", 9, serial=1), 5, cut=True)
    direct.deliver(place.relay, (1, frame("r1", 6, first_row=2)))
    with pytest.raises(errors.RowCountMismatch, match=r"the frame has rows 2\.\."):
        place.seal("s1")


def test_a_seal_does_not_wait_for_a_sample_that_is_discarded_meanwhile(place: Place) -> None:
    place.add("s1", direct.reference_reply("r1", 9, serial=1), 9)
    wait = place.relay.samples.changed.wait
    waits: list[float | None] = []

    def discard_then_wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        if len(waits) == 1:
            threading.Thread(target=place.relay.discard, args=(["s1"],)).start()
        return wait(timeout)

    place.relay.samples.changed.wait = discard_then_wait  # type: ignore[method-assign]
    with pytest.raises(errors.SampleUnknown):
        place.seal("s1")
    assert len(waits) == 1  # woken by the discard, not by its deadline


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


# -- the frame does not get there ----------------------------------------------------------------------------------------


def test_one_error_names_every_lost_frame_so_that_one_discard_clears_them(open_place: Open) -> None:
    place = open_place(frame_timeout_s=0.1)
    lost = [f"s{number}" for number in range(40)]
    for number, name in enumerate(lost):
        reply = direct.reference_reply(name, 9, serial=number + 1, boot_id=number % 4)
        place.relay.add(name, reply, range(9), engine=f"http://e{number % 4}:1")
    place.add("good", reply_for("good", 9), 9)
    said = r"step 0: waited 0.1 s for 40 frames .*sample s1 from engine http://e1:1, frame 2.*; and 35 more"
    with pytest.raises(errors.FrameMissing, match=said) as raised:
        place.seal(*lost, "good")
    assert raised.value.samples == tuple(lost)
    assert raised.value.engines == tuple(f"http://e{number}:1" for number in range(4))
    assert raised.value.step == 0 and place.relay.discard(raised.value.samples) == 40
    place.seal("good")


def test_a_frame_of_an_engine_that_never_said_hello_is_named_with_the_reason(open_place: Open) -> None:
    place = open_place(frame_timeout_s=0.1)
    with Engine("http://127.0.0.1:9", place.token_file) as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        said = "never said hello to this relay; are R3CHANNEL_RELAY_URL"
        with pytest.raises(errors.FrameMissing, match=said):
            place.seal("s1")
        place.relay.samples.engines.greet(engine.hello)  # which its reply to a probe brought
        with pytest.raises(errors.FrameMissing, match=f"has not reached {place.url}; does a firewall drop"):
            place.seal("s1")


def test_a_dead_engines_frames_are_not_awaited(open_place: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_GONE_S", 0.1)
    place = open_place(frame_timeout_s=SOON_S)
    with place.engine() as engine, ThreadPoolExecutor(1) as pool:
        until(lambda: place.relay.samples.engines.knows(engine.hello.boot_id))
        place.add("s1", direct.reference_reply("s1", 9, serial=99), 9)
        sealed = pool.submit(place.seal, "s1")
        with pytest.raises(TimeoutError):
            sealed.result(1.0)
        assert engine.sender._connection is not None
        engine.sender._connection.close()
        said = r"sample s1 from engine http://e:1, frame 99, .* died, or was started anew, before its frame"
        with pytest.raises(errors.FrameMissing, match=said):
            sealed.result(SOON_S / 2)


def test_a_full_queue_sends_the_frame_in_the_reply(place: Place) -> None:
    with Engine("http://127.0.0.1:9", place.token_file, queue_bytes=12_500) as engine:
        fields = [engine.finish(f"r{i}", 99)["meta_info"]["routed_experts"] for i in range(4)]
        magics = [base64.b64decode(field)[:4] for field in fields]
        assert magics == [REFERENCE_MAGIC, REFERENCE_MAGIC, FRAME_MAGIC, FRAME_MAGIC]
        assert engine.frames("overflowed") == 2


# -- the frame is damaged, or another one --------------------------------------------------------------------------------


def test_swapped_references_are_refused(place: Place) -> None:
    with place.engine() as engine:
        first, second = engine.finish("r1", 9), engine.finish("r2", 9)
        first["meta_info"]["id"], second["meta_info"]["id"] = "r2", "r1"
        with pytest.raises(errors.FrameReferenceInvalid, match="were replies swapped"):
            place.add("s1", first, 9)


def test_a_reply_that_is_added_twice_is_refused_and_costs_the_first_nothing(place: Place) -> None:
    place.relay.samples.engines.greet(direct.hello_of())
    place.add("first", reply := direct.reference_reply("r", 9, serial=1), 9)
    for _ in range(2):  # while its frame is awaited, and when it is here
        with pytest.raises(errors.FrameReferenceInvalid, match=r"sample again .*added twice"):
            place.add("again", reply, 9)
        direct.deliver(place.relay, (1, frame("r", 8)))
    place.seal("first")


@pytest.mark.parametrize("frame_first", [True, False])
def test_a_reference_of_a_reply_without_a_name_takes_no_others_frame(place: Place, frame_first: bool) -> None:
    """The key of request a with the serial of b's frame; both have 8 rows."""
    place.relay.samples.engines.greet(direct.hello_of())
    reply = direct.reference_reply("a", 9, serial=2)
    del reply["meta_info"]["id"]
    if not frame_first:
        place.add("a", reply, 9)
    direct.deliver(place.relay, (2, frame("b", 8)))
    with pytest.raises(errors.FrameCorrupt, match="were replies swapped") as raised:
        place.add("a", reply, 9) if frame_first else place.seal("a")
    assert raised.value.samples == ("a",) and direct.turns_here(place.relay, "a") == []


def test_a_frame_that_was_damaged_where_it_was_encoded_is_encoded_anew(place: Place) -> None:
    with place.engine() as engine:
        encode, encoded = engine.sender._encode, list[list[bytes]]()

        def encode_damaged_at_first(batch: Any) -> list[bytes]:
            encoded.append(parts := encode(batch))
            if len(encoded) == 1:
                head, entry, frame, pad = parts
                parts[:] = head, entry, flipped(frame, 8 * -5), pad
            return parts

        engine.sender._encode = encode_damaged_at_first  # type: ignore[method-assign]
        place.add("s1", engine.finish("r1", 9), 9)
        until(lambda: engine.frames("direct") == 1, "the frame is taken")
        place.seal("s1")
        assert len(encoded) == 2


# -- the store is full ---------------------------------------------------------------------------------------------------


def test_frames_that_no_reply_claims_fill_no_more_than_the_store(place: Place) -> None:
    size = 40 * SPEC.bytes_per_token + beside_bytes(SPEC, spans=1)
    place.relay.samples.store.ceiling_bytes = 3 * size
    with place.engine() as engine:
        replies, statuses, post = list[Any](), list[int](), engine.sender._post

        def heard(*request: Any) -> tuple[int, str]:
            statuses.append((answer := post(*request))[0])
            return answer

        engine.sender._post = heard  # type: ignore[method-assign]
        for index in range(3):
            replies.append(engine.finish(f"r{index}", 41))
            until(lambda index=index: unclaimed(place) == index + 1, "the frame is there")
        replies.append(engine.finish("r3", 41))
        until(lambda: 503 in statuses, "the relay says that it has no room")
        assert unclaimed(place) == 3 and place.relay.status()["store"]["bytes"] == 3 * size
        for index, reply in enumerate(replies):  # a frame reference needs no room, wherever its frame is
            assert place.add(f"s{index}", reply, 41) is None
        assert place.relay.status()["waiting"] == ["s3"]
        assert place.relay.discard(["s0"]) == 1
        until(lambda: not place.relay.status()["waiting"], "the fourth came once there was room")
        until(lambda: statuses[-1] == 200, "and its engine is told, a little later")
        assert engine.frames("given_up") == 0
        place.seal("s1", "s2", "s3")


def test_a_body_that_is_cut_leaves_nothing_of_itself(place: Place) -> None:
    place.relay.samples.engines.greet(direct.hello_of())
    body = direct.parcel_of((1, frame("r1", 400)))
    with place.begin(len(body)) as peer:
        peer.sendall(body[:-100])
        until(lambda: len(place.relay.samples.store) == 1, "its place is taken")
    until(lambda: len(place.relay.samples.store) == 0, "its place is given back")
    assert direct.post(place.url, place.token_file, body) == 200 and unclaimed(place) == 1


# -- the door ------------------------------------------------------------------------------------------------------------


def test_a_body_larger_than_the_store_is_refused_before_it_is_read(open_place: Open) -> None:
    place = open_place(store_bytes=64 << 20)
    with place.begin((64 << 20) + 1) as peer:  # and not a byte of it
        assert b" 413 " in peer.recv(100)
    assert place.hello(bytes(20000)) == 413


def test_a_token_file_is_made_for_its_owner_and_the_door_is_on_loopback_by_default(place: Place) -> None:
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600 and len(read_token(place.token_file)) >= 32
    assert place.url.startswith("http://127.0.0.1:")
    assert place.hello(b"R3H\x01 and so on") == 400


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [("x" * 64, 0o640, "mode 0640, expected 0600"), ("secret123", 0o600, "9 characters")],
)
def test_a_token_that_is_no_secret_is_not_printed(tmp_path: Path, content: str, mode: int, said: str) -> None:
    (file := tmp_path / "token").write_text(content)
    file.chmod(mode)
    with pytest.raises(errors.ConfigError, match=said) as refused:
        read_token(file)
    assert content not in str(refused.value)


# -- engines -------------------------------------------------------------------------------------------------------------


def test_an_expected_engine_that_stays_silent_is_refused_with_the_reason(place: Place) -> None:
    place.relay.expect_engines(["http://e:1"], timeout_s=0.2)
    said = r"engine http://e:1 did not say hello in time.*R3CHANNEL_ENGINE=1"
    with pytest.raises(errors.PluginNotApplied, match=said):
        place.add("s1", reply_for("s1", 9), 9)


def test_an_expected_engine_that_said_hello_is_used(place: Place) -> None:
    place.relay.expect_engines(["http://e:1/"], timeout_s=SOON_S)
    with place.engine() as engine:
        place.add("s1", engine.finish("r1", 9), 9)
        place.seal("s1")


def test_an_engine_of_another_model_is_refused_with_the_field(place: Place) -> None:
    other = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=8)
    place.relay.expect_engines(["http://e:1"], timeout_s=SOON_S)
    assert place.hello(direct.hello_of(spec=other).to_bytes()) == 422
    said = r"routing has {'num_experts': 64}, expected {'num_experts': 128}"
    with pytest.raises(errors.PluginNotApplied, match=said):
        place.add("s1", reply_for("s1", 9), 9)


def test_a_probe_is_answered_in_band_with_hello_and_frame(place: Place) -> None:
    with place.engine() as engine:
        reply = engine.finish("r3channel-probe-1", 3)
        place.relay.expect_engines(["http://known-as:2"], timeout_s=0.1)
        place.relay.check_engine(reply, engine="http://known-as:2", tokens=3)
    assert "SGLang 0.5.23" in place.relay.status()["engines"]["http://known-as:2"]
