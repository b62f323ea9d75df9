"""How the ids of one chunk become bytes and back. A codec id is a promise: its bytes are decoded for ever.

`encode` takes a C-contiguous uint8 view; `decode_into` fills a caller's buffer of exactly the decoded size and trusts no
size from the wire. A codec does not know about rows, layers or hashes.
"""

from __future__ import annotations

from typing import Protocol

import lz4.block

from r3channel.errors import ConfigError, PayloadCorrupt

LZ4_WORTH_IT = 0.95
"""lz4 is kept only when a chunk shrinks below this share: on real ids it gains nothing, on padding half (notes: wire
measurements, 65,536 tokens x 48 layers x top-8)."""


class Codec(Protocol):
    """One reversible coding of a chunk."""

    codec_id: int
    name: str

    def encode(self, raw: memoryview) -> bytes | memoryview: ...

    def decode_into(self, wire: memoryview, out: memoryview) -> None:
        """Fill `out` entirely or raise `PayloadCorrupt`; never write past it."""
        ...


class Stored:
    """The ids as they are.

    >>> bytes(Stored().encode(memoryview(b"abc")))
    b'abc'
    """

    codec_id = 0
    name = "stored"

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode_into(self, wire: memoryview, out: memoryview) -> None:
        if len(wire) != len(out):
            raise PayloadCorrupt(f"stored chunk has {len(wire)} bytes, expected {len(out)}")
        out[:] = wire


class Lz4:
    """lz4 block format without a size prefix.

    >>> out = bytearray(1000)
    >>> Lz4().decode_into(memoryview(Lz4().encode(memoryview(bytes(1000)))), memoryview(out))
    >>> out == bytes(1000)
    True
    """

    codec_id = 1
    name = "lz4"

    def encode(self, raw: memoryview) -> bytes:
        return lz4.block.compress(raw, store_size=False)

    def decode_into(self, wire: memoryview, out: memoryview) -> None:
        try:
            raw = lz4.block.decompress(wire, uncompressed_size=len(out))
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise PayloadCorrupt(
                f"lz4 chunk of {len(wire)} bytes does not decode to {len(out)}: {error}"
            ) from error
        if len(raw) != len(out):  # a bound larger than the content is not an error for the library
            raise PayloadCorrupt(f"lz4 chunk decodes to {len(raw)} bytes, expected {len(out)}")
        out[:] = raw


STORED, LZ4 = Stored(), Lz4()
CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (STORED, LZ4)}
CODEC_NAMES = ("auto", *(codec.name for codec in CODECS.values()))


def encode_chunk(raw: memoryview, *, codec: str) -> tuple[int, bytes | memoryview]:
    """(codec id, bytes). `auto` and `lz4` fall back to `stored` where lz4 does not shrink the chunk by 5 %.

    >>> encode_chunk(memoryview(bytes(range(100))), codec="auto")[0] == Stored.codec_id
    True
    """
    if codec not in CODEC_NAMES:
        raise ConfigError(f"codec {codec!r}, expected one of {CODEC_NAMES}")
    if codec != "stored":
        packed = LZ4.encode(raw)
        if len(packed) < LZ4_WORTH_IT * len(raw):
            return LZ4.codec_id, packed
    return STORED.codec_id, STORED.encode(raw)
