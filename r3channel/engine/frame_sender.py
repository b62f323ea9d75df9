"""Sends a finished request's frame out of the engine: in the reply, or to the relay with a frame reference in the reply.

    scheduler's thread   Outlet.reply(unfinished) -> bytes for the reply; never waits
    sender's thread      encode -> parcel -> POST, again until it is taken or `deliver_timeout_s` is over

If the relay does not take frames, they wait in a queue that is bounded by bytes. When the queue is full, further requests are
answered in-band (the relay takes both), so nothing is lost and the engine does not stand still. A parcel that arrived damaged is
built and sent again. A frame that was not taken in time is given up and logged; the relay names it when it seals. This module
knows no engine.
"""

from __future__ import annotations

import atexit
import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from r3channel.config import EngineConfig
from r3channel.engine.capture import UnfinishedFrame
from r3channel.errors import ConfigError
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.transport.auth import read_token
from r3channel.transport.network import local_address
from r3channel.wire import parcel
from r3channel.wire.codec import AUTO, codec_named
from r3channel.wire.frame import encode_error, sample_key
from r3channel.wire.hello import PROBE_PREFIX, Hello
from r3channel.wire.parcel import FrameReference, Status

log = logging.getLogger(__name__)

_ONE_SEND_BYTES = 1 << 16
_ANSWER_TIMEOUT_S = 10.0
_BACKOFF_S = (0.02, 2.0)
"""First and longest pause between two tries."""
_CLOSE_TIMEOUT_S = 2.0


class Outlet:
    """Makes what the reply of a finished request carries. One thread calls `reply`: the scheduler's."""

    def __init__(self, config: EngineConfig, hello: Hello, *, replica: int = 0) -> None:
        """Start the metrics and, for direct delivery, the sender.

        Args:
            config: The engine's settings.
            hello: What the engine says of itself.
            replica: Index of this process among the engine's processes that reply. Each has a metrics page of its own.
        """
        # In-band the scheduler's thread pays, so a costly codec is for the sender only.
        self._inband_codec = AUTO if is_costly(config) else config.codec
        clock = StageClock("engine", max_spans=0)
        clock.keep(config.trace, f"engine {hello.engine}")
        address = partial(local_address, towards=urlsplit(config.relay_url).hostname or "")
        self.metrics = Metrics.of("engine", config, clock=clock, offset=replica, address=address)
        self.stage = clock.span if self.metrics.url or clock.trace else nullcontext
        """Times the stages of our work in an engine. Where nobody reads the times, the scheduler's thread pays nothing."""
        self._hello = hello = replace(hello, page=self.metrics.target, replica=replica)
        self.metrics.measure("r3channel_engine_frames_total", way="inband")
        self.metrics.measure("r3channel_engine_kept_rows_total")
        self.metrics.measure("r3channel_engine_capture_waits_total")
        direct = config.delivery == "direct"
        self.sender = Sender.start(config, hello, metrics=self.metrics) if direct else None
        """Its thread encodes frames; without it `reply` does."""

    def reply(self, unfinished: UnfinishedFrame, *, request_id: str) -> np.ndarray | bytearray:
        """Return the bytes of a finished request's reply; never wait.

        Args:
            unfinished: The request's rows.
            request_id: SGLang's id of the request.

        Returns:
            Writable memory, because torch wants it: a frame, a frame reference, or for a probe a hello with its frame. A probe's
            frame that cannot be encoded is an error frame.

        Raises:
            RoutingError: In-band, if the rows cannot be encoded.
        """
        if request_id.startswith(PROBE_PREFIX):
            return bytearray(self._hello.to_bytes() + encode_or_report(unfinished, codec=self._inband_codec))
        if self.sender is not None and (reference := self.sender.offer(unfinished)) is not None:
            return bytearray(reference.to_bytes())
        self.metrics.inc("r3channel_engine_frames_total", way="overflowed" if self.sender else "inband")
        return unfinished.encode(codec=self._inband_codec)

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.metrics.close()


def is_costly(config: EngineConfig) -> bool:
    """Return whether only the sender's thread may use the codec.

    Args:
        config: The engine's settings.

    Raises:
        ConfigError: If the codec is unknown or lacks its package, or if a costly codec is configured with in-band delivery.
    """
    costly = getattr(codec_named(config.codec), "costly", False)  # AUTO is no codec, and chooses cheap ones
    if costly and config.delivery == "inband":
        raise ConfigError(
            f"codec {config.codec!r} with in-band delivery would be paid by the scheduler's thread for every request; set "
            "R3CHANNEL_DELIVERY=direct, where another thread pays, or use stored, lz4 or auto"
        )
    return costly


def report(error: Exception, *, request_id: str) -> bytes:
    """Return the frame that tells the relay why there are no rows.

    Args:
        error: The reason.
        request_id: SGLang's id of the request.
    """
    return encode_error(f"{type(error).__name__}: {error}", sample_key=sample_key(request_id))


def encode_or_report(unfinished: UnfinishedFrame, *, codec: str) -> bytes:
    """Return the frame's bytes, or an error frame if encoding fails.

    Args:
        unfinished: The request's rows.
        codec: Name of the codec, or "auto".
    """
    try:
        return unfinished.encode(codec=codec).tobytes()
    except Exception as error:
        log.exception("r3channel: a frame cannot be encoded")
        return encode_error(f"{type(error).__name__}: {error}", sample_key=unfinished.sample_key)


class _Waiting(NamedTuple):
    serial: int
    unfinished: UnfinishedFrame
    since_s: float


class Sender:
    """Sends frames to the relay; RUNNING -> CLOSED. One thread calls `offer`; the sender's own thread does the rest."""

    def __init__(self, config: EngineConfig, hello: Hello, *, token: str, metrics: Metrics) -> None:
        parts = urlsplit(config.relay_url)
        try:
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # the port is not a number
            usable = False
        if not usable:
            raise ConfigError(f"R3CHANNEL_RELAY_URL is {config.relay_url!r}, expected http://host:port")
        self._target, self._config, self._hello, self._token = parts, config, hello, token
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._bytes = self._serial = 0
        self._closed = threading.Event()
        self._session, self._refusal = "", ""
        self._connection: http.client.HTTPConnection | None = None
        self._metrics = metrics
        metrics.measure("r3channel_engine_frames_total")
        metrics.set("r3channel_engine_queue_limit_bytes", config.queue_bytes)
        metrics.watch("r3channel_engine_queue_bytes", lambda: self._bytes)
        metrics.watch("r3channel_engine_greeted", lambda: bool(self._session))
        self._thread = threading.Thread(target=self._run, name="r3channel-deliver", daemon=True)

    @classmethod
    def start(cls, config: EngineConfig, hello: Hello, *, metrics: Metrics) -> Sender:
        """Read the token and start the thread.

        The relay need not be up yet.
        """
        sender = cls(config, hello, token=read_token(config.token_file), metrics=metrics)
        sender._thread.start()
        atexit.register(sender.close)
        return sender

    def offer(self, unfinished: UnfinishedFrame) -> FrameReference | None:
        """Queue a frame and return its reference at once.

        Returns:
            The reference, or None if the queue is full or the sender is closed. The reply must then carry the frame.
        """
        with self._changed:
            if self._closed.is_set() or self._bytes + unfinished.nbytes > self._config.queue_bytes:
                return None
            self._serial += 1
            self._bytes += unfinished.nbytes
            self._waiting.append(_Waiting(self._serial, unfinished, time.monotonic()))
            self._changed.notify()
            return FrameReference(
                sample_key=unfinished.sample_key, boot_id=self._hello.boot_id, serial=self._serial,
                first_row=unfinished.first_row, rows=unfinished.rows,
            )  # fmt: skip

    def close(self) -> None:
        """Send the waiting frames, for 2 s at most, and stop.

        A second call does nothing.
        """
        with self._changed:
            self._closed.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._say_hello()
            while (batch := self._take()) is not None:
                self._deliver(batch, deadline_s=batch[0].since_s + self._config.deliver_timeout_s)
                with self._changed:
                    self._bytes -= sum(item.unfinished.nbytes for item in batch)
        except BaseException:
            self._closed.set()  # from now on replies carry their frames themselves
            log.exception("r3channel: direct delivery has ended, frames go in-band")

    def _encode(self, batch: Sequence[_Waiting]) -> list[bytes]:
        codec = self._config.codec
        frames = [(item.serial, encode_or_report(item.unfinished, codec=codec)) for item in batch]
        return parcel.pack_parcel(self._hello.boot_id, frames)

    def _take(self) -> list[_Waiting] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
            batch, size = [], 0
            while self._waiting and size < parcel.PARCEL_BYTES and len(batch) < parcel.PARCEL_FRAMES:
                batch.append(self._waiting.popleft())
                size += batch[-1].unfinished.nbytes
            return batch or None

    def _deliver(self, batch: Sequence[_Waiting], *, deadline_s: float) -> None:
        with self._metrics.clock.span("frame"):
            parts, pause_s = self._encode(batch), _BACKOFF_S[0]
        made_anew = False
        while True:
            with self._metrics.clock.span("http"):
                status, reason = self._offer_parcel(parts)
            if status == Status.TAKEN:
                self._metrics.inc("r3channel_engine_frames_total", len(batch), way="direct")
                return
            if status == Status.TOO_LARGE or (status == Status.NO_PARCEL and made_anew):
                break
            if status == Status.COME_AGAIN:  # the relay lives and has no room: waiting loses nothing
                deadline_s = time.monotonic() + self._config.deliver_timeout_s
            if status in (Status.NO_PARCEL, Status.FRAME_DAMAGED):
                parts, made_anew = self._encode(batch), True
            if self._closed.is_set() or time.monotonic() + pause_s > deadline_s:
                break
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_S[1])
        self._metrics.inc("r3channel_engine_frames_total", len(batch), way="given_up")
        log.error(
            "r3channel: %d frames (serials %d to %d) were not taken by the relay at %s: %s",
            len(batch), batch[0].serial, batch[-1].serial, self._config.relay_url, reason,
        )  # fmt: skip

    def _offer_parcel(self, parts: Sequence[bytes]) -> tuple[int, str]:
        if not self._session and not self._say_hello():
            return 0, self._refusal
        status, reason = self._post(parcel.FRAMES_PATH, parts)
        self._session = "" if status == Status.HELLO_FIRST else self._session
        return status, reason

    def _say_hello(self) -> bool:
        status, reason = self._post(parcel.HELLO_PATH, [self._hello.to_bytes()])
        greeted = status == Status.TAKEN
        if not greeted and reason != self._refusal:  # said once, not at every try
            log.warning("r3channel: the relay at %s took no hello: %s", self._config.relay_url, reason)
        self._session, self._refusal = (reason, "") if greeted else ("", reason)
        return greeted

    def _post(self, path: str, parts: Sequence[bytes]) -> tuple[int, str]:
        """Send a POST; return (HTTP status, reason), 0 if nobody answered."""
        try:
            connection = self._connection = self._connection or self._connect()
            if connection.sock is None:
                connection.connect()
            assert connection.sock is not None
            size = sum(map(len, parts))
            headers = {"Authorization": f"Bearer {self._token}", parcel.SESSION_HEADER: self._session}
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            headers[parcel.ADDRESS_HEADER] = str(connection.sock.getsockname()[:2])
            body = b"".join(parts) if size < _ONE_SEND_BYTES else parts
            connection.request("POST", self._target.path.rstrip("/") + path, body=body, headers=headers)
            reply = connection.getresponse()
            text = reply.read(2000).decode(errors="replace")
            return reply.status, text if reply.status == Status.TAKEN else f"{reply.status} {text}"
        except (OSError, http.client.HTTPException) as error:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            return 0, f"{type(error).__name__}: {error}"

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._target.scheme == "https" else http.client.HTTPConnection
        return kind(self._target.hostname or "", self._target.port, timeout=_ANSWER_TIMEOUT_S)
