"""Samples between their replies and their step: frames that came with the reply, and frames that come another way.

    reply with a frame     -> in the inbox
    reply with a receipt   -> WAITING -> in the inbox when its frame is there       (in either order)
    later turn of a sample -> its rows are appended, in the order of the replies

A frame that came before its reply is kept, unclaimed, under a ceiling. Public methods may be called from any thread.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from r3channel.config import ChannelConfig
from r3channel.errors import (
    FrameMissing,
    R3Error,
    RoutingError,
    RoutingMissing,
    SampleTwice,
    SampleUnknown,
    StepError,
    StoreFull,
    UsageError,
)
from r3channel.metrics import Metrics, StageClock
from r3channel.recording import Recorder
from r3channel.relay.arrival import Arrived
from r3channel.relay.awaited import Awaited
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.inbox import Inbox
from r3channel.relay.ingest import (
    Verified,
    frame_bytes_of,
    key_of,
    receipt_in,
    verify_frame,
)
from r3channel.relay.keeper import Keeper
from r3channel.relay.landing import Landed, Landing
from r3channel.relay.prefixes import PrefixShelf
from r3channel.relay.reply import split_reply
from r3channel.relay.store import FrameStore
from r3channel.relay.unclaimed import Unclaimed
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.wire.receipt import FrameName, Receipt, Source

_RETRY_S = 0.2
"""Between two tries, while a step is sealed, to keep what the store had no room for."""


class Intake:
    """The way into the inbox; whoever has it in hand takes samples out of the inbox itself."""

    def __init__(
        self,
        spec: RoutingSpec,
        config: ChannelConfig,
        *,
        store: FrameStore,
        inbox: Inbox,
        engines: EngineRegistry,
        clock: StageClock,
        metrics: Metrics,
        recorder: Recorder | None,
        make_room: Callable[[int], None],
    ) -> None:
        self._spec, self._config, self._engines = spec, config, engines
        self._store, self._inbox = store, inbox
        self._clock, self._metrics, self._recorder = clock, metrics, recorder
        self._claims: dict[str, deque[Awaited]] = {}
        self._failed: dict[str, Awaited] = {}
        """The first claim of a sample that failed since its caller was told: it is told when a step names the sample."""
        self._by_name: dict[FrameName, Awaited] = {}
        self._unclaimed = Unclaimed()
        self._prefixes = PrefixShelf(spec, max_bytes=config.prefix_bytes)
        self._landing = Landing(
            spec, store=store, prefixes=self._prefixes, clock=clock, invalid_rows=config.invalid_rows
        )
        self._keeper = Keeper(spec, store=store, inbox=inbox, clock=clock, metrics=metrics, recorder=recorder)
        self._make_room = make_room
        self._changed = threading.Condition(threading.RLock())

    # -- replies ---------------------------------------------------------------------------------------------------

    def add(
        self,
        sample_id: str,
        reply: Mapping[str, Any],
        tokens: Sequence[int] | Ids,
        *,
        engine: str,
        adds_turn: bool,
    ) -> Verified | None:
        """Take a reply. None when it holds a receipt whose frame has not come or was verified when it came."""
        with self._rejections():
            data = frame_bytes_of(reply, sample_id=sample_id, engine=engine)
            claim = Awaited(sample_id, frozen(tokens), engine, key_of(reply), adds_turn, receipt_in(data))
            return self._settle(claim, data)

    def add_body(
        self,
        sample_id: str,
        body: bytes,
        tokens: Sequence[int] | Ids | Callable[[Any], Sequence[int]],
        *,
        engine: str,
        adds_turn: bool,
    ) -> Any:
        """As `add`, for a reply that is not parsed yet; returns it without its frame."""
        with self._rejections():
            try:
                reply, data = split_reply(body)
            except ValueError as error:
                raise RoutingMissing(
                    f"sample {sample_id} from engine {engine}: {len(body)} bytes beginning with {body[:40]!r} are no JSON, "
                    f"expected a reply: {error}"
                ) from error
            if not data:
                data = frame_bytes_of(reply, sample_id=sample_id, engine=engine)
            whole = tokens(reply) if callable(tokens) else tokens
            claim = Awaited(sample_id, frozen(whole), engine, key_of(reply), adds_turn, receipt_in(data))
            self._settle(claim, data)
            return reply

    def add_frame(
        self, sample_id: str, data: bytes, tokens: Sequence[int] | Ids, *, engine: str, adds_turn: bool
    ) -> Verified | None:
        """As `add`, for a frame that is in hand."""
        with self._rejections():
            return self._settle(Awaited(sample_id, frozen(tokens), engine, None, adds_turn, None), data)

    def _settle(self, claim: Awaited, data: bytes) -> Verified | None:
        verified = None
        if claim.receipt is None:
            with self._clock.span("verify"):
                verified = self._verify(claim, data)
            claim.arrived = Arrived(verified.frame, data)
        self._make_room(len(data) + 4 * len(claim.tokens))
        with self._changed:
            self._queue(claim)
            self._advance(claim.sample_id)
            if claim.error is not None:
                if self._failed.get(claim.sample_id) is claim:  # told now, not when the step is sealed
                    del self._failed[claim.sample_id]
                raise claim.error
            if (
                claim.full is not None and claim.receipt is None
            ):  # the caller has the frame; one that came directly stays
                self._withdraw(claim)
                raise claim.full
        return verified

    def _verify(self, claim: Awaited, data: bytes) -> Verified:
        return verify_frame(
            data,
            spec=self._spec,
            sample_id=claim.sample_id,
            tokens=len(claim.tokens),
            engine=claim.engine,
            expected_key=claim.key,
            held_rows=None if claim.adds_turn else 0,
            invalid_rows=self._config.invalid_rows,
        )

    def _queue(self, claim: Awaited) -> None:
        known = self._inbox.held(claim.sample_id) is not None or claim.sample_id in self._claims
        if known and not claim.adds_turn:
            raise SampleTwice(f"sample {claim.sample_id} was added twice; was a request retried?")
        if not known and claim.adds_turn:
            raise SampleUnknown(
                f"sample {claim.sample_id} has no turn to append to; rejected, discarded, expired or sealed before?"
            )
        if claim.receipt is not None:
            self._claim(claim, claim.receipt)
        if not known:
            self._failed.pop(claim.sample_id, None)
        self._claims.setdefault(claim.sample_id, deque()).append(claim)

    def _claim(self, claim: Awaited, receipt: Receipt) -> None:
        claim.check_receipt(receipt)
        frame = self._unclaimed.claim(receipt.name)
        if frame is None:
            self._by_name[receipt.name] = claim
        else:
            claim.give(frame)

    # -- frames that come directly ---------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """May engines send so much more, or must they wait until replies claim what is here, or steps are delivered?"""
        if self._unclaimed.nbytes >= self._config.unclaimed_bytes:
            self.expire()
        return self._unclaimed.nbytes < self._config.unclaimed_bytes and self._store.wait_room(nbytes)

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        """Take an opened parcel of `count` frames. Repeating it does no harm; a bad frame is told to the reply that claims it.

        Raises ReceiptInvalid when it is no parcel, PrefixMissing when rows that its frames share are not here (then nothing is
        taken), StoreFull when there is no room for all of it (then send it again), and what `body` raises.
        """
        engine = self._engines.name_of(boot_id)
        self._metrics.inc("r3channel_bytes_total", body.left, leg="engine_direct")
        landed = self._landing.read(boot_id, count, body, engine=engine, wanted=self._wants)
        try:
            while landed:
                self._take_frame(landed.pop(0), engine=engine)
        finally:
            for one in landed:
                self._landing.let_go(one)

    def _wants(self, name: FrameName) -> bool:
        with self._changed:
            return not self._unclaimed.knows(name)

    def _take_frame(self, landed: Landed, *, engine: str) -> None:
        frame: Arrived | RoutingError
        try:
            frame = self._landing.verify(landed, engine=engine)
        except RoutingError as error:
            frame = error
        with self._changed:
            self._arrive(landed.name, frame, nbytes=len(landed.data))

    def _arrive(self, name: FrameName, frame: Arrived | RoutingError, *, nbytes: int) -> None:
        claim = self._by_name.pop(name, None)
        if claim is not None:
            self._unclaimed.remember(name)
            claim.give(frame)
            self._advance(claim.sample_id)
            if claim.error is not None:
                self._reject(claim.error)
        elif self._unclaimed.knows(name):
            self._let_go(frame)
        else:
            self._unclaimed.put(name, frame, nbytes=nbytes)

    def _let_go(self, frame: Arrived | R3Error | None) -> None:
        """Free a frame that no sample will keep."""
        if isinstance(frame, Arrived) and frame.key:
            self._store.release(frame.key)

    # -- in the order of the replies -------------------------------------------------------------------------------

    def _advance(self, sample_id: str) -> None:
        """Keep what can be kept. An error ends a sample's claims; it is told at once or when the step is sealed."""
        claims = self._claims.get(sample_id)
        while claims and claims[0].settled and self._finish(claims[0]):
            claims.popleft()
        if not claims:
            self._claims.pop(sample_id, None)
        self._changed.notify_all()

    def _finish(self, claim: Awaited) -> bool:
        """Keep its frame, or let it go with an error. False at the store's ceiling: it stays where it is, to be tried again."""
        claim.full = None
        try:
            if claim.error is None:
                self._keeper.keep(claim)
        except StoreFull as error:
            claim.full = error
            return False
        except R3Error as error:
            claim.error = error
        except Exception as error:  # of whatever kind: this sample's, and nobody else's
            claim.error = StepError(f"{claim.where}: its frame could not be kept: {error!r}")
            claim.error.__cause__ = error
        if claim.error is not None:
            self._failed.setdefault(claim.sample_id, claim)
            self._let_go(claim.arrived)
            claim.arrived = None
            return True
        self._failed.pop(claim.sample_id, None)
        if claim.adds_turn:  # its rows lie behind those of the turns before now
            self._let_go(claim.arrived)
        return True

    def _withdraw(self, claim: Awaited) -> None:
        """Forget the newest claim of a sample."""
        self._claims[claim.sample_id].pop()
        if not self._claims[claim.sample_id]:
            del self._claims[claim.sample_id]

    # -- to a step, or away ----------------------------------------------------------------------------------------

    def wait(self, sample_ids: Iterable[str], *, timeout_s: float, step: int) -> None:
        """Until no frame of these samples is outstanding. Raises the error of a frame that came damaged, FrameMissing, or
        StoreFull for frames that are here and could not be kept."""
        wanted, deadline_s = list(sample_ids), time.monotonic() + timeout_s
        with self._changed:
            while self._outstanding(wanted) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(min(left_s, _RETRY_S))
            failed = next((self._failed[name].error for name in wanted if name in self._failed), None)
            here = [claim for name in wanted for claim in self._claims.get(name, ())]
            late = [claim for claim in here if claim.arrived is None]
            failed = failed or next((claim.full for claim in here if claim.full is not None), None)
        if failed is not None:
            raise failed
        if late:
            raise FrameMissing(
                f"step {step}: waited {timeout_s:.1f} s for {len(late)} frames whose receipts came: "
                + "; ".join(claim.describe(self._engines) for claim in late[:5])
            )

    def _outstanding(self, names: Sequence[str]) -> bool:
        """Does any of these wait, once what the store had no room for was tried again?"""
        for name in names:
            if name in self._claims and self._claims[name][0].full is not None:
                self._advance(name)
        return any(name in self._claims for name in names)

    def awaits(self, sample_id: str) -> bool:
        """Is a frame of this sample still to come?"""
        with self._changed:
            return sample_id in self._claims

    def drop(self, sample_ids: Iterable[str], *, outcome: str) -> int:
        """Forget samples, frames that are still to come included; unknown ids are ignored."""
        names = list(dict.fromkeys(sample_ids))
        with self._changed:
            dropped = {name for name in names if self._drop_claims(name)}
            dropped |= set(self._inbox.drop(names))
            self._changed.notify_all()
            if self._recorder is not None:
                for name in dropped:
                    self._recorder.forget(name)
        self._metrics.inc("r3channel_samples_total", len(dropped), outcome=outcome)
        return len(dropped)

    def _drop_claims(self, name: str) -> bool:
        claims = self._claims.pop(name, ())
        for claim in claims:
            if claim.receipt is not None and self._by_name.pop(claim.receipt.name, None) is not None:
                self._unclaimed.remember(
                    claim.receipt.name
                )  # its frame is still to come, and nobody will claim it
            self._let_go(claim.arrived)
        self._failed.pop(name, None)
        return bool(claims)

    def expire(self) -> None:
        """Drop samples that no assignment named and frames that no reply claimed, `expiry_s` after they came."""
        limit_s = time.monotonic() - self._config.expiry_s
        with self._changed:
            old = self._inbox.older_than(self._config.expiry_s)
            old += [name for name, claims in self._claims.items() if claims[0].since_s < limit_s]
            for frame in self._unclaimed.expire(self._config.expiry_s):
                self._let_go(frame)
            for name in [name for name, claim in self._failed.items() if claim.since_s < limit_s]:
                del self._failed[name]
        if old:
            self.drop(old, outcome="expired")

    def status(self) -> dict[str, Any]:
        with self._changed:
            return {
                "pending": self._inbox.names,
                "waiting": sorted(self._claims),
                "failed": {name: str(claim.error) for name, claim in sorted(self._failed.items())},
                "unclaimed": {"frames": len(self._unclaimed), "bytes": self._unclaimed.nbytes},
            }

    @contextmanager
    def _rejections(self) -> Iterator[None]:
        try:
            yield
        except R3Error as error:
            self._reject(error)
            raise

    def _reject(self, error: R3Error) -> None:
        self._metrics.inc("r3channel_samples_total", outcome="rejected")
        self._metrics.inc("r3channel_rejected_total", reason=error.reason)


def frozen(tokens: Sequence[int] | Ids) -> Ids:
    """A copy as int32 that the caller cannot change."""
    if isinstance(tokens, np.ndarray | range):
        return np.array(tokens, dtype=np.int32)
    try:
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)  # half the time of np.array
    except struct.error as error:
        raise UsageError(f"{len(tokens)} tokens that are not all int32 ids: {error}") from error
