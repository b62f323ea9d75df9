"""Which relay has each sample: replies in, claims to the relay that their receipts point to. Holds no frames.

reply with a receipt -> claimed at the engine's relay | waiting, until that engine has said hello to some relay
later turn           -> to the relay of the turns before, after its tokens were compared with theirs
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import xxhash

from r3channel.errors import (
    FrameMissing,
    R3Error,
    RelayLost,
    SampleTwice,
    SampleUnknown,
    TokensChanged,
    TurnElsewhere,
)
from r3channel.relay.bindings import Bindings
from r3channel.relay.peer import Peer
from r3channel.relay.roster import Roster
from r3channel.routing import Ids
from r3channel.wire.receipt import Receipt


@dataclass(frozen=True, slots=True)
class Claim:
    """A reply whose frame went to a relay."""

    sample_id: str
    receipt: Receipt
    request_id: str | None
    tokens_T: Ids
    """int64; the whole sequence."""
    engine: str
    append: bool
    since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The newest turn of a sample: where it is, and what the next one must begin with."""

    relay: int
    rows: int
    digest: int
    """Of the tokens that have rows."""
    since_s: float


class Claims:
    """Any thread."""

    def __init__(self, roster: Roster, bindings: Bindings) -> None:
        self._roster, self._bindings = roster, bindings
        self._turns: dict[str, _Turn] = {}
        self._waiting: dict[str, list[Claim]] = defaultdict(list)
        self._failed: dict[str, R3Error] = {}
        self._lock = threading.RLock()

    # -- replies ---------------------------------------------------------------------------------------------------

    def add(self, claim: Claim) -> None:
        """Tell it to its relay, now or when that is known. Raises what the relay raises, `TokensChanged` or `TurnElsewhere`."""
        number = self._bindings.relay_of(claim.receipt.boot_id)
        with self._lock:
            if number is None or claim.sample_id in self._waiting:  # in the order of the replies
                self._waiting[claim.sample_id].append(claim)
                return
        self._tell(claim, number)

    def _tell(self, claim: Claim, number: int) -> None:
        def call(peer: Peer) -> None:
            peer.claim(
                sample_id=claim.sample_id,
                receipt=claim.receipt.to_bytes(),
                request_id=claim.request_id,
                tokens=len(claim.tokens_T),
                engine=claim.engine,
                append=claim.append,
            )

        first_row = claim.receipt.first_row
        with self.turn(claim.sample_id, number, claim.tokens_T, first_row=first_row, append=claim.append):
            self._roster.at(number, call)

    @contextmanager
    def turn(
        self, sample_id: str, number: int, tokens_T: Ids, *, first_row: int | None, append: bool
    ) -> Iterator[None]:
        """Check a reply against the turns before it, and remember it unless the block raises what the relay said."""
        with self._lock:
            before = self._turns.get(sample_id)
            if before is not None and append:
                _check_append(sample_id, number, tokens_T, before, first_row=first_row)
            elif before is not None:
                self._check_once(sample_id, number, before)
            self._turns[sample_id] = _Turn(
                number, len(tokens_T) - 1, _digest(tokens_T[:-1]), time.monotonic()
            )
        try:
            yield
        except (
            RelayLost
        ):  # it may have taken the reply all the same: what comes next for this sample goes there, too
            raise
        except R3Error:
            self._restore(sample_id, before)
            raise
        self._failed.pop(sample_id, None)

    def _check_once(self, sample_id: str, number: int, before: _Turn) -> None:
        if before.relay != number and self._holds(before.relay, sample_id):
            raise SampleTwice(
                f"sample {sample_id} was added twice: relay {before.relay} has the first, relay {number} the second. Was a "
                "request retried?"
            )

    def _holds(self, number: int, sample_id: str) -> bool:
        try:
            return self._roster.at(number, lambda peer: peer.holds(sample_id=sample_id))
        except RelayLost:
            return False

    def _restore(self, sample_id: str, before: _Turn | None) -> None:
        with self._lock:
            self._turns.pop(sample_id, None)
            if before is not None:
                self._turns[sample_id] = before

    # -- to a step, or away ----------------------------------------------------------------------------------------

    def settle(self, names: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Until every receipt of these samples was told to a relay. Raises what a relay said, or `FrameMissing`."""
        told = self._bindings.wait(lambda: self._tell_waiting(names), timeout_s=timeout_s)
        with self._lock:
            failed = next((self._failed[name] for name in names if name in self._failed), None)
            late = [claim for name in names for claim in self._waiting.get(name, ())]
        if failed is not None:
            raise failed
        if not told:
            raise FrameMissing(f"step {step}: waited {timeout_s:.1f} s for {self._describe(late)}")

    def _describe(self, late: Sequence[Claim]) -> str:
        which = [
            f"sample {one.sample_id} from engine {one.engine}, frame {one.receipt.serial}" for one in late
        ]
        silent = sorted(self._bindings.silent)
        return (
            f"{len(late)} frames whose receipts came: {'; '.join(which[:5])}; "
            + (f"relays {silent} do not answer, and " if silent else "")
            + f"the engine never said hello to any of {len(self._roster)} relays. Are R3CHANNEL_RELAY_URL and "
            "R3CHANNEL_TOKEN_FILE those of its node's?"
        )

    def _tell_waiting(self, names: Iterable[str]) -> bool:
        """Tell what can be told; is nothing left?"""
        with self._lock:
            for name in [name for name in names if name in self._waiting]:
                self._tell_sample(name)
            return not any(name in self._waiting for name in names)

    def _tell_sample(self, name: str) -> None:
        claims = self._waiting[name]
        while claims and (number := self._bindings.relay_of(claims[0].receipt.boot_id)) is not None:
            try:
                self._tell(claims.pop(0), number)
            except R3Error as error:
                self._failed.setdefault(name, error)
        if not claims:
            del self._waiting[name]

    def holders(self, names: Sequence[str], *, step: int) -> dict[int, tuple[str, ...]]:
        """Relay -> its samples, in the given order."""
        with self._lock:
            unknown = [name for name in names if name not in self._turns]
            if unknown:
                raise SampleUnknown(
                    f"step {step}: {len(unknown)} of {len(names)} assigned samples are not here: {unknown[:5]}. Rejected, "
                    "discarded, expired, or sealed before?"
                )
            found: dict[int, list[str]] = defaultdict(list)
            for name in names:
                found[self._turns[name].relay].append(name)
        return {number: tuple(own) for number, own in sorted(found.items())}

    def relay_of(self, sample_id: str) -> int | None:
        """Where the sample is; None when no relay was told of it."""
        with self._lock:
            turn = self._turns.get(sample_id)
        return None if turn is None else turn.relay

    def forget(self, names: Iterable[str]) -> tuple[dict[int, list[str]], int]:
        """(relay -> those of the samples that it has, number of the others that were waiting)."""
        by_relay: dict[int, list[str]] = defaultdict(list)
        waiting = 0
        with self._lock:
            for name in dict.fromkeys(names):
                turn, waited = self._turns.pop(name, None), self._waiting.pop(name, None)
                self._failed.pop(name, None)
                if turn is not None:
                    by_relay[turn.relay].append(name)
                else:
                    waiting += waited is not None
        return by_relay, waiting

    def expire(self, seconds: float, *, but: Collection[str]) -> None:
        """Forget samples that nobody assigned; their relays drop them by themselves."""
        limit_s = time.monotonic() - seconds
        with self._lock:
            old = [name for name, turn in self._turns.items() if turn.since_s < limit_s and name not in but]
            old += [name for name, claims in self._waiting.items() if claims[0].since_s < limit_s]
        self.forget(old)

    @property
    def waiting(self) -> list[str]:
        with self._lock:
            return sorted(self._waiting)


def _check_append(
    sample_id: str, number: int, tokens_T: Ids, before: _Turn, *, first_row: int | None
) -> None:
    if before.relay != number:
        raise TurnElsewhere(
            f"sample {sample_id}: its next turn was delivered to relay {number}, rows 0..{before.rows} are at relay "
            f"{before.relay}; expected the same. Send the turns of one conversation to engines of one node"
        )
    if first_row in (None, before.rows) and _digest(tokens_T[: before.rows]) != before.digest:
        raise TokensChanged(
            f"sample {sample_id}: the first {before.rows} tokens differ from those that the held rows were made for; expected "
            "the same. Was the conversation tokenized anew? Append token ids, not text"
        )


def _digest(tokens_T: Ids) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens_T).data)
