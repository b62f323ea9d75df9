"""What comes in: engines are judged, replies and frames verified and kept, until a step takes them or they are dropped.

The front half of `relay.relay.Relay`, which has the steps, and with them what `Front` leaves open: whether the relay is
open, and what keeps the store full. Knows no step, shard or trainer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.errors import StoreFull
from r3channel.metrics import Metrics, StageClock
from r3channel.recording import Recorder
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.gate import Gate
from r3channel.relay.inbox import Inbox
from r3channel.relay.ingest import Verified
from r3channel.relay.intake import Intake
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.wire.hello import Hello

_ADDERS = 2
"""Threads of `add_body_async`."""


class Front(ABC):
    """OPEN -> CLOSED. Public methods are thread safe; an error of a background thread is raised by the next call."""

    def __init__(
        self,
        spec: RoutingSpec,
        config: ChannelConfig,
        *,
        clock: StageClock | None,
        metrics: Metrics | None,
        recorder: Recorder | None,
    ) -> None:
        self.spec, self.config = spec, config
        self.clock = clock or StageClock("relay")
        self.metrics = metrics or Metrics("relay", clock=self.clock)
        self.engines = EngineRegistry(spec)
        self._store = FrameStore.open(config.store_dir, ceiling_bytes=config.store_bytes)
        self._inbox = Inbox(self._store)
        self._intake = Intake(
            spec,
            config,
            store=self._store,
            inbox=self._inbox,
            engines=self.engines,
            clock=self.clock,
            metrics=self.metrics,
            recorder=recorder,
            make_room=self._make_room,
        )
        self._gate = Gate(config, engines=self.engines, intake=self._intake)
        self._adders = ThreadPoolExecutor(_ADDERS, thread_name_prefix="r3channel-add")

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `UsageError` when it is closed, `BackgroundFailed` when a thread of it died."""

    @abstractmethod
    def _in_the_way(self) -> str:
        """What keeps frames from being freed."""

    # -- engines ---------------------------------------------------------------------------------------------------

    def serve(self, *, token_file: str | Path | None = None) -> str:
        """Open the ingest for directly delivered frames and return its address, for R3CHANNEL_RELAY_URL.

        The token's file (`config.token_file` by default) is created, mode 0600, when it does not exist; engines read the
        same one. Binds `config.interface` only.
        """
        self._check_open()
        return self._gate.serve(token_file)

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """Replies of these engines are refused (`EngineSilent`) unless each has said hello within `timeout_s` from now."""
        self.engines.expect(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Judge an engine by the reply to a tiny request before the first rollout, best to `wire.hello.probe_body()`.

        SGLang only logs a plug-in that fails; without this check the data would be found missing at the first step.
        """
        self._gate.check_reply(reply, engine=engine, tokens=tokens)

    @property
    def bound(self) -> list[Hello]:
        """The engines whose frames come to this relay's ingest."""
        return self._gate.bound

    # -- samples ----------------------------------------------------------------------------------------------

    def add(
        self,
        sample_id: str,
        reply: Mapping[str, Any],
        tokens: Sequence[int] | Ids,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Verified | None:
        """Verify and keep the routing of one sample.

        `reply` is the engine's decoded JSON, `tokens` the whole sequence (prompt and response). Raises a typed
        `RoutingError` naming sample and engine and keeps nothing; the caller decides what happens to a bad sample.
        None when the reply holds a receipt: the frame comes directly, and `seal` waits for it and names it if it is lost.

        `append`: a later turn (or the rest of an interrupted request) of a sample that is here, made with
        `routed_experts_start_len = rows held`. `tokens` is the whole sequence again; gaps, overlaps and changed tokens
        are refused, and the rows that are held stay.
        """
        self._check_open()
        self.engines.check(engine)
        return self._intake.add(sample_id, reply, tokens, engine=engine, adds_turn=append)

    def add_body(
        self,
        sample_id: str,
        body: bytes,
        tokens: Sequence[int] | Ids | Callable[[Any], Sequence[int]],
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Any:
        """As `add`, for the reply's body as it came; returns the parsed reply, its routing field emptied.

        The frame is decoded where it lies in the body, without the interpreter's lock, and only the rest is parsed: an eighth of
        the CPU of `json.loads` and `add`. `tokens` may be a function of the parsed reply. Raises also `RoutingMissing` for a body
        that is no JSON object. In a coroutine use `add_body_async`.

            body = await response.read()
            reply = await relay.add_body_async(name, body, lambda reply: prompt + reply["output_ids"], engine=url)
        """
        self._check_open()
        self.engines.check(engine)
        return self._intake.add_body(sample_id, body, tokens, engine=engine, adds_turn=append)

    async def add_body_async(
        self,
        sample_id: str,
        body: bytes,
        tokens: Sequence[int] | Ids | Callable[[Any], Sequence[int]],
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Any:
        """`add_body` on a thread of the relay's, so that the event loop goes on meanwhile."""
        self._check_open()
        add = partial(self.add_body, sample_id, body, tokens, engine=engine, append=append)
        return await asyncio.get_running_loop().run_in_executor(self._adders, add)

    def add_frame(
        self,
        sample_id: str,
        data: bytes,
        tokens: Sequence[int] | Ids,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Verified | None:
        """As `add`, for a frame that is already in hand (a recording, another transport, `splice.merge`)."""
        self._check_open()
        return self._intake.add_frame(sample_id, data, tokens, engine=engine, adds_turn=append)

    def rows_held(self, sample_id: str) -> int:
        """Rows of a sample that are here: `routed_experts_start_len` of its next turn."""
        held = self._inbox.held(sample_id)
        return held.sample.tokens - 1 if held is not None else 0

    def discard(self, sample_ids: Iterable[str]) -> int:
        """Drop samples that no assignment will name (filtered, over-sampled, aborted, evaluation); unknown ids are ignored."""
        return self._intake.drop(sample_ids, outcome="discarded")

    def holds(self, sample_id: str) -> bool:
        """Is the sample here: its frame awaited, waiting for a step, or in a step that is not delivered?"""
        return self._intake.awaits(sample_id) or self._inbox.knows(sample_id)

    def _make_room(self, nbytes: int) -> None:
        """Wait, at the ceiling of the store, for the background to free memory."""
        self._intake.expire()
        if self._store.wait_room(nbytes):
            return
        limit_s = self.config.room_timeout_s
        if not self._store.wait_room(nbytes, timeout_s=limit_s):
            raise StoreFull(
                f"waited {limit_s:.1f} s for room for a frame of {nbytes} bytes: {len(self._store)} frames fill store_bytes "
                f"({self.config.store_bytes}). {self._in_the_way()}; samples that no step has taken: "
                f"{len(self._inbox.names)}. Seal or discard, or raise store_bytes"
            )
