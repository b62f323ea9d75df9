"""From rounds to the report's values: medians, ratios of the same round, per-token figures. Knows no transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from r3channel.bench.relay.paths import DIRECT, PEERS
from r3channel.bench.relay.rounds import Seen

OWN = "r3channel"
BASE = "ray_numpy_int32"
_DECODES = "ray_numpy_uint8"
"""Measures the decoding for Ray Direct Transport, which starts from the same arrays."""


def paths_of(seen: Mapping[str, Seen], *, tokens: int) -> dict[str, Any]:
    """Per path what the issue's table shows. Times in seconds, medians; CPU per token in microseconds."""
    return {path: _path(path, rounds, seen, tokens) for path, rounds in seen.items()}


def _path(path: str, rounds: Seen, seen: Mapping[str, Seen], tokens: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "wall_s": median(rounds.wall_s),
        "held_wall_s": median(rounds.held_s),
        "cpu_s": median(rounds.cpu_s),
        **_whole(path, rounds, seen),
        "manager_cpu_us_per_token": None,
        "bytes_per_token": rounds.bytes_sent / tokens,
        "reply_bytes_per_token": rounds.reply_bytes / tokens,
        "stages_s": rounds.stages_s(),
        "manager_cpu_stages_s": _medians(rounds.cpu_stages),
        "rounds": len(rounds.wall_s),
    }
    if rounds.exposed_s:
        values["exposed_wall_s"] = median(rounds.exposed_s)
    if rounds.manager_cpu_s:
        cpu_s = median(rounds.manager_cpu_s) + _borrowed_s(path, seen)
        values["manager_cpu_us_per_token"] = cpu_s / tokens * 1e6
    return values


def _whole(path: str, rounds: Seen, seen: Mapping[str, Seen]) -> dict[str, Any]:
    """From the bodies of replies on; None where that was not measured (the limit, which begins with placed rows)."""
    before = seen.get(_DECODES, rounds) if path in DIRECT else rounds
    if not before.preparing:
        return {"whole_wall_s": None, "whole_cpu_s": None}
    wall_s, cpu_s = (sum(_medians(of).values()) for of in (before.preparing, before.preparing_cpu))
    return {"whole_wall_s": wall_s + median(rounds.wall_s), "whole_cpu_s": cpu_s + median(rounds.cpu_s)}


def _borrowed_s(path: str, seen: Mapping[str, Seen]) -> float:
    if path not in DIRECT or _DECODES not in seen:
        return 0.0
    return sum(_medians(seen[_DECODES].preparing_cpu).values())


def ratios_of(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """Medians of per-round ratios, above 1 where ours is faster; a round's best peer is the fastest one of that round.

    `of_raw_gloo` ends where raw gloo ends, with the bytes held; `of_raw_gloo_widened` counts our widening, too.
    `exposed_of_raw_gloo` is a ratio of medians: ours of the rounds in which placing was done when the trainers came.
    """
    ours, raw = seen[OWN], seen.get("raw_gloo")
    peers = [seen[path].wall_s for path in PEERS if path in seen]
    found: dict[str, Any] = {"vs_ray_numpy_int32": None, "vs_best_peer": None, "of_raw_gloo": None}
    if BASE in seen:
        found["vs_ray_numpy_int32"] = _ratio(seen[BASE].wall_s, ours.wall_s)
    if peers:
        found["vs_best_peer"] = _ratio([min(walls) for walls in zip(*peers, strict=True)], ours.wall_s)
        found["best_peer"] = min(
            (path for path in PEERS if path in seen), key=lambda path: median(seen[path].wall_s)
        )
    if raw is not None:
        found["of_raw_gloo"] = _ratio(raw.wall_s, ours.held_s)
        found["of_raw_gloo_widened"] = _ratio(raw.wall_s, ours.wall_s)
        found["exposed_of_raw_gloo"] = median(raw.wall_s) / median(ours.exposed_s) if ours.exposed_s else None
    return found | _whole_ratios(seen)


def _whole_ratios(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """Of medians: not every round of a peer begins with its replies."""
    found: dict[str, Any] = {}
    for what in ("whole_wall_s", "whole_cpu_s"):
        values = {path: _whole(path, rounds, seen)[what] for path, rounds in seen.items()}
        peers = [value for path, value in values.items() if path in PEERS and value]
        for name, theirs in (
            ("vs_ray_numpy_int32", values.get(BASE)),
            ("vs_best_peer", min(peers, default=None)),
        ):
            ratio = theirs / values[OWN] if theirs and values[OWN] else None
            found[f"{what.removesuffix('_s')}_{name}"] = ratio
    return found


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return median(a / b for a, b in zip(theirs, ours, strict=True))


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for values in rounds for name in values))
    return {name: median(values[name] for values in rounds if name in values) for name in names}
