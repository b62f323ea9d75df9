"""The relay's ingest: frames and hellos that engines send over HTTP. Moves bytes; judges none of them itself.

    POST /v1/hello     a hello                 200, or 422 with the reason of its refusal
    POST /v1/frames    a parcel of frames      200 once they are verified and kept
    both               bearer token            401 without; 411, 413 without or with too large a Content-Length
                                               409 engine unknown: say hello; 503 no room: come again
                                               424 a shared prompt's rows are not here: send them again

One thread runs the event loop, others verify, so that a large body holds up nobody. It binds the interface it is told, the
loopback one by default. Plain HTTP: on any other interface it belongs on a private network.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from r3channel.bearer import authorises
from r3channel.errors import PrefixMissing, R3Error, StoreFull, UsageError
from r3channel.relay.memory import BufferPool
from r3channel.wire.hello import MAX_HELLO_BYTES, Hello
from r3channel.wire.receipt import read_parcel

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
"""aiohttp's read buffer: at 64 KiB, its default, the same body costs 2.5 times the CPU (notes: wire measurements)."""
_BODIES_AT_ONCE = 4
_BODY_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 30.0
_VERIFIERS = 2
_IDLE_S = 60.0


class Door(Protocol):
    """What is behind the ingest. All calls come from its threads."""

    def greet(self, hello: Hello) -> None: ...

    def knows(self, boot_id: int) -> bool: ...

    def has_room(self, nbytes: int) -> bool: ...

    def deliver(self, body: memoryview) -> None: ...


class IngestServer:
    """STARTING -> SERVING -> CLOSED. The constructor returns once the port is bound."""

    def __init__(self, door: Door, *, token: str, host: str, port: int, max_body_bytes: int) -> None:
        try:
            from aiohttp import web
        except ImportError as error:
            raise UsageError(
                'the ingest of direct delivery needs aiohttp: pip install "r3channel[direct]"'
            ) from error
        self._web: Any = web
        self._door, self._token = door, token
        self._max_body_bytes = max_body_bytes
        self._buffers = BufferPool(memory_bytes=_BODIES_AT_ONCE * max_body_bytes)
        self._pool = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="r3channel-verify")
        self._loop = asyncio.new_event_loop()
        self._runner: Any = None
        self._stop = asyncio.Event()
        self._started: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self.url = ""
        """Base address; what engines get as R3CHANNEL_RELAY_URL."""
        self._thread = threading.Thread(
            target=self._run, args=(host, port), name="r3channel-ingest", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S) or self._error is not None:
            raise UsageError(f"the ingest cannot listen on {host}:{port}: {self._error}") from self._error

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop listening; requests under way are cut. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self, host: str, port: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(host, port))
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self, host: str, port: int) -> None:
        web = self._web
        self._bodies = asyncio.Semaphore(_BODIES_AT_ONCE)
        app = web.Application()
        app.router.add_post("/v1/hello", self._guarded(self._hello, limit=MAX_HELLO_BYTES))
        app.router.add_post("/v1/frames", self._guarded(self._frames, limit=self._max_body_bytes))
        self._runner = web.AppRunner(app, access_log=None, read_bufsize=_READ_BYTES, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, host, port)
            await site.start()
            bound = self._runner.addresses[0]
            self.url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
            self._started.set()
            await self._stop.wait()
        finally:
            await self._runner.cleanup()

    def _guarded(self, handler: Callable[[memoryview], Any], *, limit: int) -> Callable[[Any], Any]:
        """Token and size are judged before a byte of the body is read."""

        async def handle(request: Any) -> Any:
            if not authorises(request.headers.get("Authorization"), self._token):
                return self._answer(401, "the bearer token is missing or another one", close=True)
            if request.content_length is None:
                return self._answer(411, "Content-Length is missing", close=True)
            if request.content_length > limit:
                return self._answer(413, f"{request.content_length} bytes, at most {limit}", close=True)
            async with self._bodies:
                return await self._handle(request, handler)

        return handle

    async def _handle(self, request: Any, handler: Callable[[memoryview], Any]) -> Any:
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await self._read(request)
        except TimeoutError:
            return self._answer(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s", close=True)
        except StoreFull as error:
            return self._answer(503, str(error), close=True)
        try:
            return await handler(body)
        except R3Error as error:
            return self._answer(400, str(error))
        except Exception:
            log.exception("r3channel: the ingest failed on a request")
            return self._answer(500, "the relay failed; its log says why")

    async def _hello(self, body: memoryview) -> Any:
        hello, rest = Hello.split(bytes(body))
        if hello is None or rest:
            return self._answer(400, "the body is no hello")
        try:
            self._door.greet(hello)
        except R3Error as error:
            return self._answer(422, str(error))
        return self._answer(200, "welcome")

    async def _frames(self, body: memoryview) -> Any:
        boot_id, _ = read_parcel(body)
        if not self._door.knows(boot_id):
            return self._answer(409, "this engine has not said hello, or its hello was refused")
        if not self._door.has_room(len(body)):
            return self._answer(503, "no room for more frames: unclaimed, or not delivered yet")
        try:
            await self._loop.run_in_executor(self._pool, self._door.deliver, body)
        except PrefixMissing as error:
            return self._answer(424, str(error))
        except StoreFull as error:
            return self._answer(503, str(error))
        return self._answer(200, "taken")

    async def _read(self, request: Any) -> memoryview:
        """The body, whose length has been bounded, in a buffer that is used again when nothing refers to it."""
        self._buffers.trim(idle_s=_IDLE_S)
        body = self._buffers.take(request.content_length).data
        at = 0
        async for part in request.content.iter_any():
            body[at : at + len(part)] = part
            at += len(part)
        return body[:at]

    def _answer(self, status: int, text: str, *, close: bool = False) -> Any:
        response = self._web.Response(status=status, text=text)
        if close:  # an unread body must not be taken for the next request
            response.force_close()
        return response
