"""All ranks agree on one thing, or all raise: plan hashes before a byte moves, the outcome after. Over plain sends.

Rank 0 hears everybody, decides, and tells everybody; records have a fixed size, because a transport cannot tell sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from r3channel.errors import PeerFailed, PlanMismatch
from r3channel.transport.base import Transport

_RECORD_BYTES = 1024
Decide = Callable[[Sequence[str]], str]


def agree_on_plan(transport: Transport, plan_hash: str, *, timeout_s: float) -> None:
    """Return when every rank planned the same; else every rank raises PlanMismatch with both hashes."""

    def verdict(hashes: Sequence[str]) -> str:
        other = next((rank for rank, seen in enumerate(hashes) if seen != hashes[0]), None)
        if other is None:
            return ""
        return (
            f"rank {other} planned {hashes[other]}, rank 0 planned {hashes[0]}; do they see the same shard maps, and "
            "run the same version?"
        )

    answer = _decide(transport, plan_hash, verdict, timeout_s=timeout_s)
    if answer:
        raise PlanMismatch(f"weights were not sent: {answer}")


def vote(transport: Transport, failure: BaseException | None, *, what: str, timeout_s: float) -> None:
    """Return when no rank failed. Else all raise: a rank that failed its own error, the others PeerFailed with the first."""
    told = "" if failure is None else f"{type(failure).__name__}: {failure}"

    def first(failures: Sequence[str]) -> str:
        return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), "")

    answer = _decide(transport, told, first, timeout_s=timeout_s)
    if failure is not None:
        raise failure
    if answer:
        raise PeerFailed(f"{what}: {answer}")


def agree_on_smallest(transport: Transport, value: int, *, timeout_s: float) -> int:
    """The smallest `value` of all ranks, on all ranks: what a bucket may take is never derived by each side alone."""
    answer = _decide(transport, str(value), lambda all_values: min(all_values, key=int), timeout_s=timeout_s)
    return int(answer)


def _decide(transport: Transport, mine: str, decide: Decide, *, timeout_s: float) -> str:
    limit = time.monotonic() + timeout_s
    buffer_N = torch.empty(_RECORD_BYTES, dtype=torch.uint8)
    peers = range(1, transport.world_size)
    if transport.rank != 0:
        transport.send(0, _record(mine), timeout_s=_left(limit))
        transport.recv(0, buffer_N, timeout_s=_left(limit))
        return _text(buffer_N)
    texts = [_text(_record(mine))]
    for peer in peers:
        transport.recv(peer, buffer_N, timeout_s=_left(limit))
        texts.append(_text(buffer_N))
    answer = _record(decide(texts))
    for peer in peers:
        transport.send(peer, answer, timeout_s=_left(limit))
    return _text(answer)


def _left(limit: float) -> float:
    return max(0.001, limit - time.monotonic())


def _record(text: str) -> torch.Tensor:
    raw = text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _text(record_N: torch.Tensor) -> str:
    return record_N.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
