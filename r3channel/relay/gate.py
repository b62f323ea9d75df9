"""The relay's door to engines: who may send, where to, and whether an engine is what it should be.

Everything that engines say comes through here: probes' replies from the caller, hellos and parcels from the ingest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3channel.bearer import obtain_token
from r3channel.config import ChannelConfig
from r3channel.errors import PluginNotApplied, RoutingError, UsageError
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.ingest import frame_bytes_of, verify_frame
from r3channel.relay.intake import Intake
from r3channel.wire.frame import FRAME_MAGIC
from r3channel.wire.hello import Hello
from r3channel.wire.receipt import Source

if TYPE_CHECKING:
    from r3channel.relay.http import IngestServer


class Gate:
    """CLOSED -> OPEN (`serve`) -> CLOSED. Is the `relay.http.Door` of the ingest; any thread."""

    def __init__(self, config: ChannelConfig, *, engines: EngineRegistry, intake: Intake) -> None:
        self._config, self._engines, self._intake = config, engines, intake
        self._server: IngestServer | None = None
        self._bound: dict[int, Hello] = {}

    @property
    def bound(self) -> list[Hello]:
        """The engines that said hello to the ingest: their frames come here."""
        return list(self._bound.values())

    def serve(self, token_file: str | Path | None) -> str:
        """Open the ingest; returns its address. The token's file is created, mode 0600, when it does not exist."""
        from r3channel.relay.http import IngestServer

        if self._server is not None:
            raise UsageError(f"the ingest is open already, at {self._server.url}")
        path = Path(token_file or self._config.token_file or "")
        if not path.name:
            raise UsageError(
                "direct delivery needs a token: give serve a token_file, or set R3CHANNEL_TOKEN_FILE"
            )
        token = obtain_token(path)
        self._server = IngestServer(
            self,
            token=token,
            host=self._config.interface,
            port=self._config.ingest_port,
            max_body_bytes=self._config.unclaimed_bytes,
        )
        return self._server.url

    def close(self, *, timeout_s: float) -> None:
        if self._server is not None:
            self._server.close(timeout_s=timeout_s)

    def check_reply(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Judge an engine by one reply. Raises PluginNotApplied, or EngineSilent for a hello that is refused."""
        try:
            hello, data = Hello.split(frame_bytes_of(reply, sample_id="probe", engine=engine))
            if hello is not None:
                self._engines.greet(hello, engine=engine)
            if data[:4] != FRAME_MAGIC:
                raise PluginNotApplied(
                    f"engine {engine} answers with {len(data)} bytes of stock routing, expected a frame. Is r3channel "
                    "installed in the engine's environment, and was R3CHANNEL_ENGINE=1 set when it started? The engine's "
                    "log names a hook that failed"
                )
            verify_frame(data, spec=self._engines.spec, sample_id="probe", tokens=tokens, engine=engine)
        except RoutingError as error:
            raise PluginNotApplied(f"engine {engine} does not send usable frames: {error}") from error
        if hello is None:
            self._engines.vouch(engine)

    # -- the ingest's threads --------------------------------------------------------------------------------------

    def greet(self, hello: Hello) -> None:
        self._engines.greet(hello)
        self._bound[hello.boot_id] = hello

    def knows(self, boot_id: int) -> bool:
        return self._engines.knows(boot_id)

    def has_room(self, nbytes: int) -> bool:
        return self._intake.has_room(nbytes)

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        self._intake.deliver(boot_id, count, body)
