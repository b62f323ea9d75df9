"""The engine's end of direct delivery, as an engine runs it: the real outlet and sender, with rows of our making."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from r3channel.config import EngineConfig
from r3channel.engine.capture import UnfinishedFrame
from r3channel.engine.frame_sender import Outlet, Sender
from r3channel.model.spec import RoutingSpec
from r3channel.relay.relay import Relay
from r3channel.relay.verify import VerifiedRows
from r3channel.transport.auth import read_token
from r3channel.wire import parcel
from r3channel.wire.frame import sample_key
from r3channel.wire.hello import Hello
from r3channel.wire.routing import Ids, RowKind
from r3channel.wire.source import InHand
from tests.support.samples import SPEC, random_ids, reply_of
from tests.support.waits import SOON_S


def hello_of(
    engine: str = "http://e:1", *, boot_id: int = 11, spec: RoutingSpec = SPEC, context: int = 0
) -> Hello:
    return Hello(
        engine=engine, boot_id=boot_id, spec_digest=spec.digest, spec=spec.to_dict(), sglang="0.5.23",
        r3channel="0.1.0", hooks=("capture",), delivery="direct", codec="auto", context=context,
    )  # fmt: skip


def draft_of(
    request_id: str, rows: int, *, first_row: int = 0, seed: int = 0, version: int = 0
) -> UnfinishedFrame:
    unfinished = UnfinishedFrame(SPEC, rows=rows, first_row=first_row, sample_key=sample_key(request_id))
    unfinished.runs = [(first_row, first_row + rows, version, int(RowKind.DECODED))] if rows else []
    unfinished.ids_TLK[:] = random_ids(first_row + rows, seed=seed)[first_row:]
    return unfinished


def reference_reply(
    request_id: str, tokens: int, *, serial: int, boot_id: int = 11, first_row: int = 0
) -> dict[str, Any]:
    """The reply of a request whose frame comes directly, or never."""
    reference = parcel.FrameReference(
        sample_key=sample_key(request_id), boot_id=boot_id, serial=serial, first_row=first_row,
        rows=tokens - 1 - first_row,
    )  # fmt: skip
    return reply_of(reference.to_bytes(), request_id=request_id)


def parcel_of(*frames: tuple[int, bytes], boot_id: int = 11) -> bytes:
    return b"".join(parcel.pack_parcel(boot_id, frames))


def deliver(relay: Relay, *frames: tuple[int, bytes], boot_id: int = 11) -> None:
    """As the door does with a parcel of (serial, frame) that came whole."""
    source = InHand(parcel_of(*frames, boot_id=boot_id))
    boot_id, count = parcel.open_parcel(source)
    relay.intake.deliver(boot_id, count, source)


def headers_of(token_file: Path, session: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {read_token(token_file)}", parcel.SESSION_HEADER: session}


def ask(url: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    """One request to a relay's ingest, on a connection of its own -> the status and text of its answer."""
    target = urlsplit(url)
    with closing(http.client.HTTPConnection(target.hostname or "", target.port, timeout=SOON_S)) as peer:
        peer.request("POST", path, body, headers)
        return (answer := peer.getresponse()).status, answer.read().decode()


def said_hello(url: str, token_file: Path) -> str:
    """The session of an engine that has said hello."""
    return ask(url, parcel.HELLO_PATH, hello_of().to_bytes(), headers_of(token_file))[1]


def post(url: str, token_file: Path, body: bytes) -> int:
    """The status of the answer to a parcel of an engine that has said hello."""
    return ask(url, parcel.FRAMES_PATH, body, headers_of(token_file, said_hello(url, token_file)))[0]


def turns_here(relay: Relay, name: str) -> list[VerifiedRows]:
    """What lies in a relay of a sample, turn by turn."""
    sample = relay.samples.table.samples.get(name)
    return list(sample.held) if sample else []


def rows_here(relay: Relay, name: str) -> Ids:
    """The same as one array [T, L, K]."""
    return np.concatenate([rows.ids_TLK for rows in turns_here(relay, name)])


class Engine:
    """Finishes requests. A context manager; ends its sender."""

    def __init__(
        self, relay_url: str, token_file: Path, *, hello: Hello | None = None, **options: Any
    ) -> None:
        config = EngineConfig(delivery="direct", relay_url=relay_url, token_file=str(token_file), **options)
        self.hello = hello or hello_of()
        self.outlet = Outlet(config, self.hello)

    @property
    def sender(self) -> Sender:
        assert self.outlet.sender is not None
        return self.outlet.sender

    def frames(self, way: str) -> int:
        """How many left this way."""
        return int(self.outlet.metrics.value("r3channel_engine_frames_total", way=way))

    def finish(
        self, request_id: str, tokens: int, *, first_row: int = 0, seed: int = 0,
        ids_TLK: Ids | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The JSON reply of a request of `tokens` tokens, with random ids unless some are given."""
        unfinished = draft_of(request_id, tokens - 1 - first_row, first_row=first_row, seed=seed)
        if ids_TLK is not None:
            unfinished.ids_TLK[:] = ids_TLK
        return reply_of(bytes(self.outlet.reply(unfinished, request_id=request_id)), request_id=request_id)

    def close(self) -> None:
        self.outlet.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
