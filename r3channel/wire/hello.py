"""What an engine says about itself: before its first frame if it delivers directly, else in the reply to a probe. No I/O.

    hello    magic, bytes u32, JSON           in front of the probe's own frame when it is in a reply

A probe is an ordinary request of few tokens whose id begins with `PROBE_PREFIX`. Any engine with the plug-in answers a probe with
its hello, whichever way the engine's frames travel and whatever is between.
"""

from __future__ import annotations

import json
import struct
import uuid
from dataclasses import asdict, dataclass, fields

from r3channel.errors import FrameCorrupt
from r3channel.typed import Json

HELLO_MAGIC = b"R3H\x01"
PROBE_PREFIX = "r3channel-probe-"
MAX_HELLO_BYTES = 16384
_HEAD = struct.Struct("<4sI")
_LATER = ("torch", "nccl", "page", "unread", "weighing", "context", "kept_bytes", "replica")
"""Fields that an older engine does not send."""
_KINDS: dict[str, type] = {
    **dict.fromkeys(("boot_id", "spec_digest", "context", "kept_bytes", "replica"), int),
    **dict.fromkeys(("engine", "page"), str), "spec": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """One engine process.

    >>> hello = Hello(engine="http://e:1", boot_id=3, spec_digest=4, spec={}, sglang="0.5.23", r3channel="0.1.0",
    ...               hooks=("a",), delivery="inband", codec="auto")
    >>> Hello.split(hello.to_bytes() + b"frame") == (hello, b"frame")
    True
    """

    engine: str
    """Its address, or the name it was given."""
    boot_id: int
    spec_digest: int
    spec: Json
    """`RoutingSpec.to_dict()`: what differs can then be said by field."""
    sglang: str
    r3channel: str
    hooks: tuple[str, ...]
    """Names of SGLang that were replaced or wrapped."""
    delivery: str
    codec: str
    allowed: tuple[str, ...] = ()
    """Refusals that its operator has overridden."""
    unread: tuple[str, ...] = ()
    """Settings of its own that were neither tested nor read."""
    weighing: tuple[str, ...] = ()
    """How its routers make `combine_weights`: scoring, renormalised or not, the factor and whether it is applied."""
    torch: str = ""
    nccl: str = ""
    """For the handshake of the weights; empty where the engine's r3channel is older, or its torch has no NCCL."""
    context: int = 0
    """The most tokens that a sequence of this engine can have, prompt and response; 0: not known."""
    kept_bytes: int = 0
    """Ceiling of rows that its retracted requests keep; 0 where the engine's r3channel is older and keeps none."""
    page: str = ""
    """host:port of its /metrics; empty where it serves none."""
    replica: int = 0
    """The number of this process among the engine's processes that reply."""

    def to_bytes(self) -> bytes:
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return _HEAD.pack(HELLO_MAGIC, len(text)) + text

    @classmethod
    def split(cls, data: bytes | memoryview) -> tuple[Hello | None, bytes]:
        """Split bytes into a hello and what follows it.

        Returns:
            (hello, rest); the hello is None where `data` does not begin with one.

        Raises:
            FrameCorrupt: The hello is incomplete or cannot be read.
        """
        data = bytes(data)
        if data[:4] != HELLO_MAGIC:
            return None, data
        if len(data) < _HEAD.size:
            raise FrameCorrupt(f"a hello of {len(data)} bytes is shorter than its head")
        _, size = _HEAD.unpack_from(data)
        if size > MAX_HELLO_BYTES or _HEAD.size + size > len(data):
            raise FrameCorrupt(f"a hello announces {size} bytes, {len(data) - _HEAD.size} follow")
        end = _HEAD.size + size
        return cls._from_json(data[_HEAD.size : end]), data[end:]

    @classmethod
    def _from_json(cls, text: bytes) -> Hello:
        try:
            values = {f.name: f.default for f in fields(cls) if f.name in _LATER} | json.loads(text)
            found = {f.name: values[f.name] for f in fields(cls)}
            for name, kind in _KINDS.items():
                if type(found[name]) is not kind:
                    raise TypeError(f"{name} is a {type(found[name]).__name__}")
            if not (0 <= found["boot_id"] < 1 << 64 and 0 <= found["context"] < 1 << 32):
                raise ValueError(f"boot_id is {found['boot_id']}, context {found['context']}")
            for name in ("hooks", "allowed", "unread", "weighing"):
                found[name] = tuple(str(item) for item in found[name])
            for name in ("sglang", "r3channel", "delivery", "codec", "torch", "nccl"):
                found[name] = str(found[name])
            return cls(**found)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FrameCorrupt(f"a hello cannot be read: {error!r}") from error


def probe_body(input_ids: tuple[int, ...] = (5, 6)) -> Json:
    """Return a /generate request that asks for an engine's hello.

    Args:
        input_ids: The engine also returns a frame of `len(input_ids)` rows.
    """
    return {
        "rid": PROBE_PREFIX + uuid.uuid4().hex,
        "input_ids": list(input_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": True,
    }
