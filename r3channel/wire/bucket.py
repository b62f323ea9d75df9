"""A shard on the wire: fixed-size headers and slices of at most `bucket_bytes`. Pure; both ends use it.

Every bucket is announced by a header of `BUCKET_HEADER_BYTES`, so nothing of unknown size is ever received.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import BucketCorrupt

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_MAGIC = b"R3B\x01"
_HEADER = struct.Struct("<4sIQHHIIQQQQ")
BUCKET_HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeader:
    """What follows: which slice of which shard of which step."""

    epoch: int
    step: int
    dp: int
    pp: int
    index: int
    count: int
    offset: int
    nbytes: int
    payload_hash: int

    def to_bytes(self) -> _Bytes:
        out = bytearray(BUCKET_HEADER_BYTES)
        _HEADER.pack_into(
            out, 0, _MAGIC, self.epoch, self.step, self.dp, self.pp, self.index, self.count, self.offset, self.nbytes,
            self.payload_hash, 0,
        )  # fmt: skip
        struct.pack_into("<Q", out, BUCKET_HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(out[:-8])))
        return np.frombuffer(out, np.uint8)

    @classmethod
    def from_bytes(cls, data_N: _Bytes) -> BucketHeader:
        raw = data_N.tobytes()
        magic, *values, header_hash = _HEADER.unpack(raw)
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(raw[:-8]) != header_hash:
            raise BucketCorrupt(
                f"bucket header {raw[:12].hex()}... is damaged; expected magic {_MAGIC!r} and a matching hash"
            )
        names = ("epoch", "step", "dp", "pp", "index", "count", "offset", "nbytes", "payload_hash")
        return cls(**dict(zip(names, values, strict=True)))


def bucket_slices(nbytes: int, *, bucket_bytes: int) -> list[slice]:
    """Slices of a shard in order; an empty shard has none.

    >>> bucket_slices(10, bucket_bytes=4)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    return [slice(at, min(at + bucket_bytes, nbytes)) for at in range(0, nbytes, bucket_bytes)]


def bucket_headers(
    shard_N: _Bytes, *, bucket_bytes: int, epoch: int, step: int, dp: int, pp: int
) -> Iterator[BucketHeader]:
    """The headers of a shard's buckets in order; each hashes its slice when it is asked for."""
    slices = bucket_slices(len(shard_N), bucket_bytes=bucket_bytes)
    for index, part in enumerate(slices):
        yield BucketHeader(
            epoch=epoch,
            step=step,
            dp=dp,
            pp=pp,
            index=index,
            count=len(slices),
            offset=part.start,
            nbytes=part.stop - part.start,
            payload_hash=hash_bucket(shard_N[part]),
        )


def hash_bucket(data_N: _Bytes) -> int:
    """xxh3_64 of a contiguous uint8 array (8 ms per GB, measured)."""
    return xxhash.xxh3_64_intdigest(data_N.data)
