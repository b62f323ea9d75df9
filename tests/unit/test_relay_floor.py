"""The benchmark of the parts of direct ingest: every part runs; the figures themselves need a quiet machine."""

from __future__ import annotations

from r3channel.bench.relay_floor import measure


def test_every_part_costs_something_and_the_sums_are_theirs() -> None:
    seen = measure(rows=64, samples=2, rounds=1)
    assert list(seen) == ["socket", "head", "verify", "keep", "reply", "place", "sum", "step"]
    assert all(value > 0 for value in seen.values())
    assert (
        abs(seen["sum"] - sum(seen[part] for part in ("socket", "head", "verify", "reply", "place"))) < 1e-3
    )
    assert abs(seen["step"] - sum(seen[part] for part in ("verify", "keep", "place"))) < 1e-3
