"""How engines talk to a relay's ingest over HTTP: paths, sizes, and what each answer means. For both ends; no I/O.

    POST /v1/hello     a hello (`wire.hello`)
    POST /v1/frames    a parcel of frames (`wire.parcel`), of an engine whose hello was taken
    both               with `Authorization: Bearer TOKEN` and a Content-Length; chunked bodies are not read

A connection is kept for further requests unless the answer says `Connection: close`.
"""

from __future__ import annotations

from enum import IntEnum

HELLO_PATH, FRAMES_PATH = "/v1/hello", "/v1/frames"
PARCEL_BYTES = 8 << 20
"""An engine closes a parcel at this size: large enough that a request costs little per frame, small enough to be sent at once.
Its last frame may exceed it."""
PARCEL_FRAMES = 256
"""Requests whose frames an engine puts into one parcel."""
MAX_PARCEL_FRAMES = 1024
"""A parcel that announces more is none."""


class Status(IntEnum):
    """Every answer that the ingest gives, as an HTTP status."""

    TAKEN = 200
    """The hello is known; or every frame of the parcel is kept until a reply claims it or it expires."""
    NO_PARCEL = 400
    """What was sent is no HTTP, no hello, no parcel, or a parcel that cannot be used. Worth one more try, encoded anew."""
    NO_TOKEN = 401
    """The bearer token is missing or another one. The body was not read."""
    NO_SUCH_PATH = 404
    NO_SUCH_METHOD = 405
    TOO_SLOW = 408
    """The body stood still, or took too long in all. Come again."""
    HELLO_FIRST = 409
    """This relay does not know the engine: it began anew, or refused the hello. Say hello."""
    NO_LENGTH = 411
    """Content-Length is missing. The body was not read."""
    TOO_LARGE = 413
    """No parcel of this size is ever taken. The body was not read."""
    HELLO_REFUSED = 422
    """The engine is not what the relay expects; the text says in which field."""
    FRAME_DAMAGED = 425
    """A frame of the parcel came damaged: send the parcel again. Its other frames were kept, and are known by their names."""
    FAILED = 500
    """A defect of the relay, in its log. Come again."""
    COME_AGAIN = 503
    """No room, or busy with other bodies. What was not kept must come again; it may have been read or not."""
