"""Token ids of a sequence and their identity: two sequences with one hash are the same. Knows no routing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import UsageError

Tokens = np.ndarray[Any, np.dtype[np.int32]]


def as_tokens(tokens: Sequence[int] | np.ndarray[Any, Any]) -> Tokens:
    """A copy as int32 that the caller cannot change. Raises UsageError for what are no token ids."""
    if isinstance(tokens, np.ndarray | range):
        return np.array(tokens, dtype=np.int32)
    try:
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)  # half the time of np.array
    except struct.error as error:
        raise UsageError(f"{len(tokens)} tokens that are not all int32 ids: {error}") from error


def hash_tokens(tokens: Tokens) -> int:
    """xxh3_64 of the ids as little-endian int32.

    >>> hash_tokens(as_tokens([1, 2])) == hash_tokens(as_tokens(range(1, 3)))
    True
    """
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, "<i4").data)
