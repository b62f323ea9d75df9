"""Who talks to whom in which round: the circle method, for any number of ranks. Arithmetic only.

Every pair of ranks meets exactly once, and no rank meets two others in one round. An even world takes W - 1 rounds, an odd
one W rounds with one rank idle in each. Halving schedules, which need a power of two, skip pairs silently otherwise.

Because all ranks walk the rounds in the same order, and the lower rank of a pair sends first, blocking sends and receives
cannot deadlock: the pair of the earliest unfinished round can always go on.
"""

from __future__ import annotations


def round_count(world_size: int) -> int:
    """How many rounds let every pair meet."""
    return 0 if world_size < 2 else world_size - 1 + world_size % 2


def round_of(a: int, b: int, world_size: int) -> int:
    """The round in which ranks a and b meet.

    Ranks sit on a circle of M = W - 1 (W even) or W (W odd) seats and meet when their numbers add up to twice the round,
    modulo M. W even: the last rank sits in the middle and meets rank r in round r.

    >>> [round_of(0, b, 4) for b in (1, 2, 3)]
    [2, 1, 0]
    """
    low, high = sorted((a, b))
    if not 0 <= low < high < world_size:
        raise ValueError(f"ranks {a} and {b} of {world_size}: expected two different ranks of that world")
    seats = round_count(world_size)
    if high == seats:
        return low
    return (low + high) * ((seats + 1) // 2) % seats


def partner(rank: int, round_index: int, world_size: int) -> int | None:
    """Whom `rank` meets in this round; None when it is idle.

    >>> [partner(0, r, 3) for r in range(3)]
    [None, 2, 1]
    """
    seats = round_count(world_size)
    even = world_size % 2 == 0
    if even and rank == seats:
        return round_index
    other = (2 * round_index - rank) % seats
    if other != rank:
        return other
    return seats if even else None
