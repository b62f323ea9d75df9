"""Verified samples that no step has taken yet: name -> frame in the store, in the order of arrival.

    put -> take (a step was sealed) | drop (discarded, or older than the expiry)

A name may be used again once its sample was dropped, or its step was delivered (`forget`); until then it is refused,
whatever the background has done with the bytes meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from r3channel.errors import SampleChanged, SampleTwice, SampleUnknown
from r3channel.plan.ticket import TicketSample
from r3channel.relay.segment import NO_TOKENS
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids

Frames = bytes | memoryview | str
"""A frame's bytes, or the key under which they lie in the store already."""


@dataclass(frozen=True, slots=True)
class Held:
    """One sample and where its frame lies."""

    sample: TicketSample
    key: str
    """In the frame store."""
    arrived_s: float
    """time.monotonic seconds."""
    tokens: Ids = field(default_factory=lambda: NO_TOKENS, repr=False, compare=False)
    """int32. What a later turn must begin with, the last one aside: that has no row yet."""


class Inbox:
    """Thread safe; every method is atomic."""

    def __init__(self, store: FrameStore) -> None:
        self._store = store
        self._held: dict[str, Held] = {}
        self._travelling: set[str] = set()
        self._lock = threading.Lock()
        self._serial = 0

    def put(self, sample: TicketSample, data: Frames, tokens: Ids = NO_TOKENS) -> None:
        """Keep a frame. Raises `SampleTwice`, or `StoreFull`; then nothing has changed."""
        name = sample.sample_id
        with self._lock:
            self._check_free(name)
            self._held[name] = self._keep(sample, data, tokens)

    def replace(self, sample: TicketSample, data: Frames, tokens: Ids) -> None:
        """Keep a longer frame of a sample that is here. Raises `SampleUnknown`, or `StoreFull`; then nothing has changed."""
        with self._lock:
            before = self._held.get(sample.sample_id)
            if before is None:
                raise SampleUnknown(
                    f"sample {sample.sample_id} is not here any more; sealed or dropped meanwhile?"
                )
            held = self._keep(sample, data, tokens)
            del self._held[sample.sample_id]  # to the end: it has arrived now
            self._held[sample.sample_id] = held
        self._store.release(before.key)

    def check_free(self, name: str, *, unless_held: bool = False) -> None:
        """Raise `SampleTwice` where `put` would; a sample that is held may be `replace`d."""
        with self._lock:
            if not (unless_held and name in self._held):
                self._check_free(name)

    def held(self, name: str) -> Held | None:
        """A sample that no step has taken yet."""
        with self._lock:
            return self._held.get(name)

    def _check_free(self, name: str) -> None:
        if name in self._held or name in self._travelling:
            where = "waits for a step" if name in self._held else "is in a step that is not delivered yet"
            raise SampleTwice(f"sample {name} was added twice; the first {where}. Was a request retried?")

    def _keep(self, sample: TicketSample, data: Frames, tokens: Ids) -> Held:
        if isinstance(data, str):
            self._store.claim(data, sample_id=sample.sample_id, tokens=tokens)
            return Held(sample, data, time.monotonic(), tokens)
        self._serial += 1
        held = Held(sample, f"{self._serial}:{sample.sample_id}", time.monotonic(), tokens)
        self._store.put(held.key, data, sample_id=sample.sample_id, tokens=tokens)
        return held

    def look(self, names: Sequence[str], *, step: int) -> tuple[TicketSample, ...]:
        """The samples of an assignment, still here afterwards. Raises `SampleUnknown` naming those that are not."""
        with self._lock:
            return tuple(held.sample for held in self._find(names, step=step))

    def take(self, samples: Sequence[TicketSample], *, step: int) -> list[Held]:
        """Hand samples over to a step, as its ticket describes them. All or none (`SampleUnknown`, `SampleChanged`)."""
        names = [sample.sample_id for sample in samples]
        with self._lock:
            found = self._find(names, step=step)
            _check_same(samples, found, step=step)
            for name in names:
                del self._held[name]
            self._travelling.update(names)
            return found

    def give_back(self, samples: Sequence[Held]) -> None:
        """Undo `take`: these wait for a step again."""
        with self._lock:
            for held in samples:
                self._travelling.discard(held.sample.sample_id)
                self._held[held.sample.sample_id] = held

    def knows(self, name: str) -> bool:
        """Would `put` refuse this name?"""
        with self._lock:
            return name in self._held or name in self._travelling

    def forget(self, names: Iterable[str]) -> None:
        """Their step was delivered."""
        with self._lock:
            self._travelling.difference_update(names)

    def drop(self, names: Iterable[str]) -> list[str]:
        """Release samples that no step will take; returns those that were here."""
        with self._lock:
            found = [self._held.pop(name) for name in dict.fromkeys(names) if name in self._held]
        for held in found:
            self._store.release(held.key)
        return [held.sample.sample_id for held in found]

    def older_than(self, seconds: float) -> list[str]:
        """Names that have waited longer; looks only at the oldest ones."""
        limit, old = time.monotonic() - seconds, []
        with self._lock:
            for name, held in self._held.items():
                if held.arrived_s >= limit:
                    break
                old.append(name)
        return old

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._held)

    def _find(self, names: Sequence[str], *, step: int) -> list[Held]:
        missing = [name for name in names if name not in self._held]
        if missing:
            raise SampleUnknown(
                f"step {step}: {len(missing)} of {len(names)} assigned samples are not here: {missing[:5]}. Rejected, "
                "discarded, expired, or sealed before?"
            )
        return [self._held[name] for name in names]


def _check_same(described: Sequence[TicketSample], found: Sequence[Held], *, step: int) -> None:
    for sample, held in zip(described, found, strict=True):
        if held.sample.frame_hash != sample.frame_hash:
            raise SampleChanged(
                f"step {step}: sample {sample.sample_id} has {held.sample.tokens} tokens in another frame now, its ticket says "
                f"{sample.tokens}; expected the same. Did a later turn come while the step was sealed? Seal after the last turn"
            )
