"""Which mistakes, made one after another, predict the ids that were seen: as few as possible, that leave as little as possible.

A chain of mistakes says of each cell (a slot and a layer) where its ids come from. The mistake that explains most of what is
left goes before those that are known, in the places where it holds; where none explains much, two at once are tried. The search
looks at some cells; what it finds is held against all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.mistakes import Catalogue, Mistake, Votes
from r3channel.wire.routing import Ids
from r3channel.wire.validate import items_of, row_words

Chain = tuple[Mistake, ...]
"""The mistake that was made last stands first."""
_MOST, _SOME, _LEAST = 0.5, 0.25, 0.003
"""Shares of what is left that a mistake explains: so that no second is tried with it; in each of its places; at all."""
_CLAIMS, _SAMPLED = 24, 1024
_TWICE, _TRIED = 1.5, 5
"""So many times as much as one must two explain; first ones of two, of which the second is searched for."""
_REPEATED = 8
"""Cells with the same ids, of which the first is taken for the origin."""


class Cells(NamedTuple):
    """Columns. `matched`: the chain so far explains the ids, or they do not differ."""

    slots: Ints
    layers: Ints
    seen: Ids
    matched: Bools


class Found(NamedTuple):
    """A longer chain, its last mistake in all of its places. The best explains the most cells, then moves the fewest."""

    gained: int
    unmoved: int
    """Less than 0."""
    chain: Chain


class Search:
    """`left_RL` is what no mistake explains once `run` is done; at its edges a mistake may say nothing of a cell."""

    def __init__(self, sides: AlignedPair, left_RL: Bools) -> None:
        """What differs and is not left is explained by something else, and is not looked at."""
        self._catalogue = Catalogue(sides)
        slots, kind = self._catalogue.slots, np.result_type(sides.want_RLK, sides.seen_RLK)
        both = (items_of(ids.astype(kind, copy=False)) for ids in (sides.want_RLK, sides.seen_RLK))
        want_RL, self._seen_RL = map(row_words, both)
        self._rows, self._layers = want_RL.shape
        self._want_RL = np.pad(want_RL, ((0, 1), (0, 1)))
        self._slot_R = slots.at(sides.sample_R, sides.position_R)
        self._row_S = np.full(slots.none + 1, self._rows)
        self._row_S[self._slot_R] = np.where(sides.valid_R, np.arange(self._rows), self._rows)
        self._asked_RL = left_RL | (sides.both_R[:, None] & ~sides.differs_RL)
        self.left_RL, self._matched_RL = left_RL, ~left_RL
        self._chain: Chain = ()

    def run(self) -> dict[str, Bools]:
        """The cells that each mistake takes part in, by its name; the largest first."""
        differs_RL, hits = self.left_RL, dict[str, Bools]()
        while len(self._chain) < _CLAIMS and (longer := self._longer()) and self._accept(longer):
            pass
        for layer, cells in enumerate(self._all()):
            slots, layers = cells[:2]
            for mistake in self._chain:
                source = mistake.sources(slots, layers)
                hit_R = differs_RL[:, layer] & cells.matched & _moved(source, slots, layers)
                if hit_R.any():
                    hits.setdefault(mistake.name, np.zeros_like(differs_RL))[:, layer] |= hit_R
                slots, layers = source
        return dict(sorted(hits.items(), key=lambda item: -int(item[1].sum())))

    # -- what a chain predicts ---------------------------------------------------------------------------------------------

    def _matched(self, cells: Cells, slots: Ints, layers: Ints) -> Bools:
        """Whether cells have the ids of these slots and layers; where those are none, as before."""
        same = self._want_RL[self._row_S[slots], layers] == cells.seen
        return np.where(self._known(slots, layers), same, cells.matched)

    def _known(self, slots: Ints, layers: Ints) -> Bools:
        return (self._row_S[slots] < self._rows) & (layers < self._layers)

    def _all(self) -> Iterator[Cells]:
        """All cells, layer by layer."""
        for layer in range(self._layers):
            yield self._cells(np.arange(self._rows), np.full(self._rows, layer))

    def _cells(self, rows: Ints, layers: Ints) -> Cells:
        return Cells(self._slot_R[rows], layers, self._seen_RL[rows, layers], self._matched_RL[rows, layers])

    # -- one step of the search -------------------------------------------------------------------------------------------------

    def _longer(self) -> Chain | None:
        """The chain with the mistake, or the two, that explain most of what is left; None where none explains enough."""
        left = _spread(np.flatnonzero(self.left_RL), _SAMPLED)
        right = _spread(np.flatnonzero(self._asked_RL & self._matched_RL), _SAMPLED // 2)
        if not len(left):
            return None
        cells = self._cells(*np.divmod(np.concatenate([left, right]), self._layers))
        votes = self._votes(cells, len(left))
        best = self._best(self._chain, cells, votes)
        if best.gained < _MOST * len(left):
            tried = [self._best(base, cells, votes) for base in self._firsts(votes)]
            two = max(tried, key=_score, default=best)
            best = two if two.gained > _TWICE * best.gained else best
        return best.chain if best.gained >= max(1, _LEAST * len(left)) else None

    def _firsts(self, votes: Votes) -> list[Chain]:
        """The chains with one more mistake beyond which cells vote most alike for a second."""
        chains = [(*self._chain, first) for first in self._catalogue.candidates(_beyond(self._chain, votes))]
        return sorted(chains, key=lambda chain: -self._catalogue.agreed(_beyond(chain, votes)))[:_TRIED]

    def _best(self, base: Chain, cells: Cells, votes: Votes) -> Found:
        """A chain with the mistake that adds most."""
        before = int(self._matched(cells, *_sources(base, *cells[:2])).sum() - cells.matched.sum())
        tried = [Found(0, 0, base)]
        for mistake in self._catalogue.candidates(_beyond(base, votes)):
            gained, moved, _ = self._placed(base, mistake, [cells])
            tried.append(Found(before + gained, -moved, (*base, mistake)))
        return max(tried, key=_score)

    def _placed(self, base: Chain, mistake: Mistake, parts: Iterable[Cells]) -> tuple[int, int, Mistake]:
        """(cells gained, cells moved, the mistake in the places where it explains much of what is left)."""
        places, moved = int(mistake.place_S.max()) + 1, 0
        gain_P, left_P = np.zeros((2, places))
        for cells in parts:
            slots, layers = _sources(base, *cells[:2])
            source, place = mistake.sources(slots, layers), mistake.place_S[slots]
            without = self._matched(cells, slots, layers)
            gain_P += np.bincount(place, self._matched(cells, *source) * 1.0 - without, places)
            left_P += np.bincount(place, ~without, places)
            moved += int(np.count_nonzero(_moved(source, slots, layers)))
        made_P = gain_P > _SOME * left_P
        place_S = np.where(made_P[mistake.place_S], mistake.place_S, 0)
        return int(gain_P[made_P].sum()), moved, replace(mistake, place_S=place_S)

    def _accept(self, longer: Chain) -> bool:
        """Hold a longer chain against all cells; False where it explains nothing more."""
        chain = (*longer[:-1], self._placed(longer[:-1], longer[-1], self._all())[2])
        matched_RL, known_RL = np.zeros((2, *self.left_RL.shape), bool)
        for layer, cells in enumerate(self._all()):
            source = _sources(chain, *cells[:2])
            known_RL[:, layer], matched_RL[:, layer] = self._known(*source), self._matched(cells, *source)
        if matched_RL.sum() <= self._matched_RL.sum():
            return False
        self._chain, self._matched_RL = chain, matched_RL
        self.left_RL = self._asked_RL & known_RL & ~matched_RL
        return True

    def _votes(self, cells: Cells, left: int) -> Votes:
        """The first `left` cells, and where their ids are found on the engines' side."""
        words, inverse = np.unique(cells.seen[:left], return_inverse=True)
        want_N = self._want_RL[:-1, :-1].ravel()
        number_N = np.minimum(np.searchsorted(words, want_N), len(words) - 1)
        matches = np.flatnonzero(words[number_N] == want_N)[::-1]
        first = np.full(len(words), -1)
        first[number_N[matches]] = matches
        times = np.bincount(number_N[matches], minlength=len(words))
        known = ((times > 0) & (times <= _REPEATED))[inverse]
        rows, layers = np.divmod(first[inverse][known], self._layers)
        return Votes(cells.slots[:left][known], cells.layers[:left][known], self._slot_R[rows], layers)


def _score(candidate: Found) -> tuple[int, int]:
    return candidate[:2]


def _sources(chain: Chain, slots: Ints, layers: Ints) -> tuple[Ints, Ints]:
    for mistake in chain:
        slots, layers = mistake.sources(slots, layers)
    return slots, layers


def _beyond(chain: Chain, votes: Votes) -> Votes:
    """What a mistake before those of the chain would have to move, and from where."""
    return Votes(*_sources(chain, *votes[:2]), *votes[2:])


def _moved(source: tuple[Ints, Ints], slots: Ints, layers: Ints) -> Bools:
    return (source[0] != slots) | (source[1] != layers)


def _spread(values: Ints, most: int) -> Ints:
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(np.int64))]
