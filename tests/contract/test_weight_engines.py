"""A session's engines: what becomes of answers that a healthy SGLang does not give (the healthy ones: tests/engine), who may
join, and who may get requests."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from r3channel.errors import ConfigError, DeadlineExceeded, EngineRefused, RegistryRefused, UsageError
from r3channel.weights.engine import EngineHandle
from r3channel.weights.session import WeightSync
from tests.support.direct import hello_of
from tests.support.fake_engine import FakeEngine
from tests.support.http_answers import Answering
from tests.support.waits import UPDATE_S
from tests.support.weights import broadcasting, give, weights

Serve = Callable[[int, bytes], EngineHandle]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that give one answer to everything."""
    with ExitStack() as servers:
        yield lambda *answer: EngineHandle(servers.enter_context(Answering(lambda *_: answer)).url)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b'{"success": false, "message": "not now"}', r":\d+ /begin_weight_update answered .*not now"),
        (200, b"<html>gateway</html>", "answered no JSON: <html>"),
        (200, b"[]", "expected a JSON object"),
        (503, b"busy", "HTTP 503: busy"),
    ],
)
def test_what_is_no_answer_of_an_engine_is_refused(serve: Serve, status: int, body: bytes, said: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        serve(status, body).begin(timeout_s=5)


def test_checksums_of_another_form_are_a_refusal(serve: Serve) -> None:
    with pytest.raises(EngineRefused, match="no checksums"):
        serve(200, b'{"success": true, "ranks": [{}]}').weight_checksums(timeout_s=5)


def test_a_silent_engine_ends_at_the_deadline_and_leaves_its_versions_unknown() -> None:
    """As one that a dead session left paused: it answers no request until the next update, which who asks here is to make."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = EngineHandle(f"http://127.0.0.1:{listener.getsockname()[1]}")
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"/pause_generation: no answer within 0\.3 s"):
            client.pause("retract", timeout_s=0.3)
        assert time.monotonic() - begun_s < 2
        client.learn_versions(timeout_s=0.3)
        assert (client.torch, client.nccl) == ("", "")


@pytest.mark.parametrize("key", ["key-of-ours\n", "key-of-ours\u20ac"])
def test_an_api_key_that_fits_into_no_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as refused:
        EngineHandle("http://127.0.0.1:9", api_key=key)
    assert "key-of-ours" not in str(refused.value)


def test_a_proxy_in_the_environment_is_not_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    serve(200, b'{"success": true}').end(timeout_s=5)


def routing(data: bytes) -> bytes:
    """A reply with it."""
    return json.dumps({"meta_info": {"routed_experts": base64.b64encode(data).decode()}}).encode()


WITHOUT_VERSIONS = routing(hello_of().to_bytes())


ANSWERS = {
    "stock": (200, routing(bytes(64))), "no routing": (200, b'{"meta_info": {}}'),
    "refused": (400, b"routed experts are not returned"), "plug-in without them": (200, WITHOUT_VERSIONS),
}  # fmt: skip


@pytest.mark.parametrize(("status", "body"), ANSWERS.values(), ids=ANSWERS)
def test_an_engine_that_names_no_versions_leaves_them_unknown(serve: Serve, status: int, body: bytes) -> None:
    client = serve(status, body)
    client.torch = "2.0" if body == WITHOUT_VERSIONS else ""
    client.learn_versions(timeout_s=5)
    assert (client.torch, client.nccl) == ("", "")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://engine", "http://", "http://127.0.0.1:x"])
def test_an_address_without_scheme_or_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        EngineHandle(url)


# -- who may join, and who may get requests -----------------------------------------------------------------------------------

OURS = str(torch.__version__)


def urls(*engines: FakeEngine) -> tuple[str, ...]:
    return tuple(sorted(engine.url for engine in engines))


@pytest.mark.parametrize(("what", "theirs", "ours"), [("torch", "2.1.0", OURS), ("nccl", "2.26.2", "2.27.3")])
def test_awex_handshake_refuses_an_engine_of_other_versions_before_a_group_is_formed(
    what: str, theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r3channel.weights.engine.nccl_version", lambda: "2.27.3")
    monkeypatch.setattr("r3channel.weights.groups.device_of", lambda _: torch.device("cpu"))
    good, bad = FakeEngine(), FakeEngine()
    other = EngineHandle(bad.url)
    setattr(other, what, theirs)
    unlike = rf"{bad.url} runs {what} {theirs}, the trainer {ours.split('+')[0]}"
    refused = pytest.raises(RegistryRefused, match=unlike)
    with WeightSync.whole([good.url, other], backend="nccl") as sync, refused:
        sync.connect(timeout_s=UPDATE_S)
    assert "/init_weights_update_group" not in good.calls + bad.calls

    with broadcasting(good) as sync:
        give(sync, 1)
        monkeypatch.setattr(sync._engines, "_ours", {"torch": OURS.split("+")[0], "nccl": "2.27.3"})
        with pytest.raises(RegistryRefused, match=f"{what} {theirs}"):
            sync.add_engine(other, timeout_s=UPDATE_S)
        assert sync.routable() == urls(good) == tuple(sync.engine_states)


def test_awex_engines_are_routable_from_their_commit_on_and_not_while_an_update_is_under_way() -> None:
    pair = FakeEngine(), FakeEngine()
    during: list[tuple[str, ...]] = []

    with broadcasting(*pair) as sync:

        def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
            for named in weights(version).items():
                during.append(sync.routable())
                yield named

        assert sync.routable() == ()
        give(sync, 1)
        assert sync.routable() == urls(*pair)
        give(sync, 2, watched(2))
        assert sync.routable() == urls(*pair) and set(during) == {()}
        with pytest.raises(UsageError, match="version 1 after 2"):
            give(sync, 1)
        newcomer = FakeEngine()
        sync.add_engine(newcomer.url, timeout_s=UPDATE_S)
        assert sync.routable() == urls(*pair)
        sync.republish(weights(2).items(), engines=[newcomer.url], timeout_s=UPDATE_S)
        assert sync.routable() == urls(*pair, newcomer)
        sync.remove_engine(newcomer.url)
        assert sync.routable() == urls(*pair)
