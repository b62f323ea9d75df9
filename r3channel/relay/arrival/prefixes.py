"""Rows of shared prompts that engines sent once, for the frames that refer to them. Any thread.

Bounded: the least recently used rows go first. A frame whose prefix is gone is not taken, and the engine, which still holds the
sample, sends both again; so an eviction costs bytes and never a row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from r3channel.model.spec import RoutingSpec
from r3channel.wire.header import FLAG_PREFIX, KIND_PREFIX
from r3channel.wire.prefix import parse_prefix
from r3channel.wire.routing import Ids

_KIND_AT, _FLAGS_AT = 5, 7
"""Bytes of a frame's header, looked at before it is verified: to choose who verifies it."""


class PrefixShelf:
    """Digest -> rows, at most `max_bytes` of them (and always the newest)."""

    def __init__(self, spec: RoutingSpec, *, max_bytes: int) -> None:
        self._spec, self._max_bytes = spec, max_bytes
        self._rows: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def put(self, data: memoryview, *, engine: str) -> None:
        """Verify and keep a PREFIX frame; one that is here already is only remembered as used."""
        most = self._max_bytes // self._spec.bytes_per_token
        prefix = parse_prefix(data, spec=self._spec, engine=engine, max_rows=most)
        with self._lock:
            before = self._rows.pop(prefix.digest, None)
            self._rows[prefix.digest] = prefix.ids_TLK
            self.nbytes += prefix.ids_TLK.nbytes - (before.nbytes if before is not None else 0)
            while self.nbytes > self._max_bytes and len(self._rows) > 1:
                _, oldest = self._rows.popitem(last=False)
                self.nbytes -= oldest.nbytes

    def get(self, digest: bytes) -> Ids | None:
        with self._lock:
            if digest in self._rows:
                self._rows.move_to_end(digest)
            return self._rows.get(digest)


def is_prefix(data: bytes | memoryview) -> bool:
    """By the first bytes of a frame."""
    return len(data) > _FLAGS_AT and data[_KIND_AT] == KIND_PREFIX


def refers_to_prefix(data: bytes | memoryview) -> bool:
    """By the first bytes of a frame: does it say that it shares rows?"""
    return len(data) > _FLAGS_AT and bool(data[_FLAGS_AT] & FLAG_PREFIX)
