"""From a parcel on a socket to verified frames in the store, each read to the place where it stays.

A frame that carries all its rows is received into the store and verified there: its bytes are written once and never copied. One
that shares rows with others is read beside the store, and put into it when its rows are whole. Knows no reply and no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from r3channel.errors import PrefixMissing, RoutingError
from r3channel.metrics import StageClock
from r3channel.relay.arrival import Arrived
from r3channel.relay.ingest import verify_arrival
from r3channel.relay.prefixes import PrefixShelf, is_prefix, prefix_of, refers_to_prefix
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import open_verified
from r3channel.wire.receipt import FrameName, Source, new_memory, read_frames


@dataclass(frozen=True, slots=True)
class Landed:
    """A frame as it was read: whole, and not verified."""

    name: FrameName
    data: memoryview
    key: str
    """Of its place in the store, which is not committed yet; empty when it lies beside."""
    shared: Mapping[bytes, Ids]
    """Rows that the frames of its parcel share, by digest: an eviction after it was read costs it nothing."""


class Landing:
    """Any thread. Whoever gets a `Landed` verifies it or lets it go."""

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        store: FrameStore,
        prefixes: PrefixShelf,
        clock: StageClock,
        invalid_rows: str,
    ) -> None:
        self._spec, self._store, self._prefixes = spec, store, prefixes
        self._clock, self._invalid_rows = clock, invalid_rows
        self._copies = count()

    def read(
        self, boot_id: int, number: int, body: Source, *, engine: str, wanted: Callable[[FrameName], bool]
    ) -> list[Landed]:
        """The frames of an opened parcel; its PREFIX frames are kept, and frames that are not `wanted` are left out.

        Raises ReceiptInvalid when it is no parcel, PrefixMissing when rows that its frames share are not here, StoreFull; then
        nothing is kept.
        """
        keys: dict[int, str] = {}

        def place(serial: int, size: int, head: bytes) -> memoryview:
            beside = is_prefix(head) or refers_to_prefix(head) or not wanted((boot_id, serial))
            if beside or serial in keys:
                return new_memory(serial, size, head)
            key = self._key(boot_id, serial)
            memory = self._store.reserve(key, size)
            keys[serial] = key
            return memory

        try:
            with self._clock.span("http"):
                frames = read_frames(body, number, place=place)
            for _, data in frames:
                if is_prefix(data):
                    self._prefixes.put(data, engine=engine)
            shared = self._shared_rows(frames, engine=engine)
        except BaseException:
            for key in keys.values():
                self._store.release(key)
            raise
        seen: dict[int, Landed] = {}
        for serial, data in frames:
            if not is_prefix(data) and wanted((boot_id, serial)):
                seen.setdefault(serial, Landed((boot_id, serial), data, keys.pop(serial, ""), shared))
        for key in keys.values():  # somebody else brought it meanwhile
            self._store.release(key)
        return list(seen.values())

    def verify(self, landed: Landed, *, engine: str) -> Arrived:
        """Check all that can be said before the reply is known, and commit it. Raises a RoutingError, or StoreFull.

        Whatever is raised, the frame's place is released.
        """
        try:
            with self._clock.span("verify"):
                frame, whole = verify_arrival(
                    landed.data,
                    spec=self._spec,
                    engine=engine,
                    serial=landed.name[1],
                    invalid_rows=self._invalid_rows,
                    lookup=landed.shared.get,
                )
            if not landed.key:
                return self._put(landed.name, whole, frame.payload_hash)
            self._store.commit(landed.key)
        except BaseException:
            self.let_go(landed)
            raise
        return Arrived(frame, landed.data, landed.key)

    def let_go(self, landed: Landed) -> None:
        if landed.key:
            self._store.release(landed.key)

    def _put(self, name: FrameName, whole: bytes | memoryview, payload_hash: int) -> Arrived:
        key = self._key(*name)
        with self._clock.span("ingest"):
            self._store.put(key, whole)
            data = self._store.get(key)
        return Arrived(open_verified(data, spec=self._spec, payload_hash=payload_hash), data, key)

    def _key(self, boot_id: int, serial: int) -> str:
        """A fresh one: a parcel that is sent twice may be read twice at once."""
        return f"frame {boot_id:x}/{serial}/{next(self._copies)}"

    def _shared_rows(self, frames: Sequence[tuple[int, memoryview]], *, engine: str) -> dict[bytes, Ids]:
        """What the frames of a parcel refer to. Raises PrefixMissing where some of it is not here."""
        found: dict[bytes, Ids] = {}
        for serial, data in frames:
            digest = None
            with suppress(RoutingError):  # a damaged frame is told to its reply
                digest = None if is_prefix(data) else prefix_of(data, spec=self._spec, engine=engine)
            if digest is None:
                continue
            rows_TLK = self._prefixes.get(digest)
            if rows_TLK is None:
                raise PrefixMissing(
                    f"frame {serial} from engine {engine} shares rows of prefix {digest.hex()}, which is not here; evicted, or "
                    "sent to another relay?"
                )
            found[digest] = rows_TLK
        return found
