"""Searches for a short chain of mistakes that together explain nearly all ids that were seen.

A chain of moves tells for each cell (a slot and a layer) where its ids come from. The move that explains most of what is left is
put before the known ones, in the places where it holds. If no move explains much, two at once are tried. The search looks at
some cells, and then checks its result on all. All ids may have been changed, too, so moves are searched for under each reading
of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.mistakes import Catalogue
from r3channel.recordings.slots import Move, Slots
from r3channel.wire.digest import items_of, row_words
from r3channel.wire.routing import Ids

Chain = tuple[Move, ...]
"""The mistake that was made last comes first."""
_MOST, _SOME, _LEAST = 0.5, 0.25, 0.003
"""Shares of what is left. With `_MOST` no second mistake is tried; `_SOME` is the least in a place, `_LEAST` the least in all."""
_CLAIMS, _SAMPLED = 24, 1024
_TWICE, _TRIED = 1.5, 5
"""Two mistakes must explain `_TWICE` times as much as one. `_TRIED` first ones are tried with a second."""
_REPEATED = 8
"""Most cells with the same ids. The first of them is taken for the origin."""
_AT_ONCE = 1 << 18
"""Cells that are looked at in one pass: 2 MB a column."""
_AGAIN = 16
"""Below this number it is chance that ids are seen again with the same meaning, or that cells are explained."""
_CELLS = 16384
"""Most cells from which a mapping of ids is guessed."""
_WORD = 0xFFFF


class Search:
    """The chain of moves that explains most. `left_RL` are the cells that it does not explain.

    At the edges of a chain a move may say nothing of a cell. Indices are of the routers' cells, row by row.
    """

    def __init__(self, catalogue: Catalogue, left_RL: Bools, want_RLK: Ids, seen_RLK: Ids) -> None:
        """Start the search for what explains the cells in `left_RL`.

        Args:
            catalogue: the moves that are tried.
            left_RL: the cells to explain; other cells that differ are not looked at.
            want_RLK: the engines' ids, as they are to be compared.
            seen_RLK: the routers' ids, as they are to be compared.
        """
        self._catalogue, self._slots, sides = catalogue, catalogue.slots, catalogue.slots.sides
        self._want_N, self._seen_N = (words_RL.ravel() for words_RL in words_of(want_RLK, seen_RLK))
        self._cell_N = self._slots.cell_RL.ravel()
        self._want_C = np.zeros(len(self._slots.known_C), np.uint64)
        self._want_C[self._cell_N] = self._want_N
        self._differed_N = self._left_N = left_RL.ravel()
        self._asked_N = self._left_N | (sides.both_R[:, None] & ~sides.differs_RL).ravel()
        self._matched_N = np.zeros_like(self._left_N)
        self._accept(())
        while len(self.chain) < _CLAIMS and (longer := self._longer()) and self._accept(longer):
            pass
        self.left_RL = self._left_N.reshape(left_RL.shape)

    def hits(self, reading: str) -> dict[str, Bools]:
        """Return the cells that each mistake takes part in, by name.

        Args:
            reading: the name for cells whose ids were changed.
        """
        hits = {name: np.zeros_like(self._left_N) for name in (*(move.name for move in self.chain), reading)}
        for index in _parts(np.flatnonzero(self._differed_N & self._matched_N)):
            cells = self._cell_N[index]
            for move in self.chain:
                source = move.sources(cells)
                hits[move.name][index] |= source != cells
                cells = source
            known, want_NK = self._slots.ids_at(cells)
            rows, layers = np.divmod(index[known], self.left_RL.shape[1])
            hits[reading][index[known]] = (want_NK != self._slots.sides.seen_RLK[rows, layers]).any(-1)
        return {name: hit_N.reshape(self.left_RL.shape) for name, hit_N in hits.items() if name}

    def _matches(self, index: Ints, source_N: Ints) -> Bools:
        """Return whether cells have the ids of their sources.

        A cell whose source has no known ids keeps its former answer.
        """
        same = self._want_C[source_N] == self._seen_N[index]
        return np.where(self._slots.known_C[source_N], same, self._matched_N[index])

    # -- one step of the search -------------------------------------------------------------------------------------------------

    def _longer(self) -> Chain | None:
        """Return the chain with one or two more mistakes, or None.

        The added mistakes explain most of what is left. The result is None if none explain enough.
        """
        left = _spread(np.flatnonzero(self._left_N), _SAMPLED)
        right = _spread(np.flatnonzero(self._asked_N & self._matched_N), _SAMPLED // 2)
        if not len(left):
            return None
        index = np.concatenate([left, right])
        votes = _votes(self._cell_N[left], self._seen_N[left], self._cell_N, self._want_N)
        best = self._best(self.chain, index, votes)
        if best[0] < _MOST * len(left):
            tried = [self._best(base, index, votes) for base in self._firsts(*votes)]
            two = max(tried, key=itemgetter(0, 1), default=best)
            best = two if two[0] > _TWICE * best[0] else best
        return best[2] if best[0] >= max(1, _LEAST * len(left)) else None

    def _firsts(self, cell_N: Ints, from_N: Ints) -> list[Chain]:
        """Return `_TRIED` chains with one more mistake, the best first.

        The best is the chain after which the cells' votes for a second mistake agree most.
        """
        agreed = self._catalogue.count_votes
        moves = self._catalogue.candidates(_sources(self.chain, cell_N), from_N)
        chains = [(*self.chain, move) for move in moves]
        return sorted(chains, key=lambda chain: -agreed(_sources(chain, cell_N), from_N))[:_TRIED]

    def _best(self, base: Chain, index: Ints, votes: tuple[Ints, Ints]) -> tuple[int, int, Chain]:
        """Find the mistake that adds most cells, and moves fewest.

        Returns:
            Cells gained, cells moved as a negative number, and the chain with that mistake.
        """
        cell_N, from_N = votes
        matched = self._matches(index, _sources(base, self._cell_N[index]))
        before = int(matched.sum() - self._matched_N[index].sum())
        best = 0, 0, base
        for move in self._catalogue.candidates(_sources(base, cell_N), from_N):
            gained, moved, _ = self._place(base, move, [index])
            best = max(best, (before + gained, -moved, (*base, move)), key=itemgetter(0, 1))
        return best

    def _place(self, base: Chain, move: Move, parts: Iterable[Ints]) -> tuple[int, int, Move]:
        """Keep a mistake only where it explains much of what is left.

        Returns:
            Cells gained, cells moved, and the mistake in those places.
        """
        places, moved = int(move.place_S.max()) + 1, 0
        gain_P, left_P = np.zeros((2, places))
        for index in parts:
            cells = _sources(base, self._cell_N[index])
            source, place = move.sources(cells), move.place_S[cells // self._slots.width]
            without = self._matches(index, cells)
            gain_P += np.bincount(place, self._matches(index, source) * 1.0 - without, places)
            left_P += np.bincount(place, ~without, places)
            moved += int(np.count_nonzero(source != cells))
        made_P = gain_P > _SOME * left_P
        place_S = np.where(made_P[move.place_S], move.place_S, 0)
        return int(gain_P[made_P].sum()), moved, replace(move, place_S=place_S)

    def _accept(self, longer: Chain) -> bool:
        """Take a longer chain if it explains more of all cells."""
        everything, matched_N, known_N = np.arange(len(self._cell_N)), *np.zeros((2, len(self._cell_N)), bool)
        last = tuple(self._place(longer[:-1], move, _parts(everything))[2] for move in longer[-1:])
        for index in _parts(everything):
            source = _sources((*longer[:-1], *last), self._cell_N[index])
            known_N[index], matched_N[index] = self._slots.known_C[source], self._matches(index, source)
        if last and matched_N.sum() <= self._matched_N.sum():
            return False
        self.chain, self._matched_N = (*longer[:-1], *last), matched_N
        self._left_N = self._asked_N & known_N & ~matched_N
        return True


def words_of(*sides: Ids) -> list[Ids]:
    """Return a number for each row of a layer, for each side.

    Numbers are equal if and only if the rows' ids are.
    """
    kind = np.result_type(*sides)
    return [row_words(items_of(ids.astype(kind, copy=False))) for ids in sides]


def _votes(cell_N: Ints, seen_N: Ids, cell_M: Ints, want_M: Ids) -> tuple[Ints, Ints]:
    """Find the cells where each cell's ids were first seen.

    Returns:
        The cells whose words are among the others', and the first of the others with that word.
    """
    words, inverse = np.unique(seen_N, return_inverse=True)
    number_M = np.minimum(np.searchsorted(words, want_M), len(words) - 1)
    matches = np.flatnonzero(words[number_M] == want_M)[::-1]
    first = np.full(len(words), -1)
    first[number_M[matches]] = matches
    times = np.bincount(number_M[matches], minlength=len(words))
    known = ((times > 0) & (times <= _REPEATED))[inverse]
    return cell_N[known], cell_M[first[inverse][known]]


def _sources(chain: Chain, cell_N: Ints) -> Ints:
    for move in chain:
        cell_N = move.sources(cell_N)
    return cell_N


def _parts(index: Ints) -> Iterator[Ints]:
    return (index[at : at + _AT_ONCE] for at in range(0, len(index), _AT_ONCE))


def _spread(values: Ints, most: int) -> Ints:
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(np.int64))]


# -- readings of the ids -------------------------------------------------------------------------------------------------------


def search(
    sides: AlignedPair, left_RL: Bools, unshown: Callable[[Bools], Bools]
) -> tuple[dict[str, Bools], Bools]:
    """Find the mistakes that explain the cells in `left_RL`.

    Of all readings of the ids, the one that leaves the fewest cells counts.

    Args:
        sides: both sides of one pass.
        left_RL: the cells to explain.
        unshown: returns the cells that show nothing by themselves, of those that are left; only these are counted.

    Returns:
        The cells that each mistake takes part in, by name, the most cells first; and the cells that none explains.
    """
    catalogue, hits, best, least = Catalogue(sides), dict[str, Bools](), None, 0
    for name, *both in _readings(sides):
        tried = Search(catalogue, left_RL, *both)
        count = int(unshown(tried.left_RL).sum())
        if best is None or least - count > min(_AGAIN, _MOST * least):
            best, least, hits = tried, count, tried.hits(name)
        if not least:
            break
    assert best is not None
    tried = _relabel(catalogue, best.left_RL) if least else None
    if tried is not None and unshown(tried.left_RL).sum() <= _MOST * least:
        best, more = tried, tried.hits("physical_ids")
        hits |= {name: hit_RL | hits.get(name, hit_RL) for name, hit_RL in more.items()}
    return dict(sorted(hits.items(), key=lambda item: -int(item[1].sum()))), best.left_RL


def _readings(sides: AlignedPair) -> Iterator[tuple[str, Ids, Ids]]:
    """Yield each change's name, and both sides' ids with that change."""
    want_RLK, seen_RLK = sides.want_RLK, sides.seen_RLK
    yield "", want_RLK, seen_RLK
    yield "row_order", np.sort(want_RLK, -1), np.sort(seen_RLK, -1)
    if want_RLK.itemsize > 1:
        bytes_RLK = np.ascontiguousarray(want_RLK.astype("<i2")).view(np.uint8)
        yield "int16_as_uint8", bytes_RLK[..., : seen_RLK.shape[2]], seen_RLK
        yield "int16_as_uint8", bytes_RLK[..., ::2], seen_RLK
    last_N = seen_RLK[sides.differs_RL][:, -1].astype(np.int64)
    if (last_N == max(last_N[0], sides.spec.num_experts)).all():
        yield "fused_shared_expert", want_RLK[..., :-1], seen_RLK[..., :-1]


def _relabel(catalogue: Catalogue, left_RL: Bools) -> Search | None:
    """Return a search with the routers' ids mapped back, or None.

    The ids of cells that are left may stand one for one for other ids. Rows may have moved, too. So the first move is the one by
    which ids that are seen again mean the same again. The search's result then tells the mapping better.
    """
    best, chain = None, _first_chain(catalogue, left_RL)
    while chain is not None:
        seen_RLK = _put_back(catalogue.slots, chain, left_RL)
        tried = Search(catalogue, left_RL, catalogue.slots.sides.want_RLK, seen_RLK)
        if best is not None and tried.left_RL.sum() >= best.left_RL.sum():
            break
        best, chain = tried, tried.chain
    return best


def _first_chain(catalogue: Catalogue, left_RL: Bools) -> Chain | None:
    """Return the chain of the likeliest mapping, or None.

    The result is None if no mapping is likelier than chance.
    """
    slots, sides = catalogue.slots, catalogue.slots.sides
    at, cell_N = _spread(np.flatnonzero(left_RL), _CELLS), slots.cell_RL.ravel()
    want_N, seen_N = (_echoes(slots, ids_RLK).ravel() for ids_RLK in (sides.want_RLK, sides.seen_RLK))
    votes = _votes(cell_N[at], seen_N[at], cell_N, want_N)
    chains = [Chain(), *((move,) for move in catalogue.candidates(*votes))]
    agrees = [_count_again(_pairs(slots, chain, at)) for chain in chains]
    most, share = max(agrees)
    return chains[agrees.index((most, share))] if most >= _AGAIN and share >= _SOME else None


def _echoes(slots: Slots, ids_RLK: Ids) -> Ids:
    """Return words of how many slots back each id last occurred.

    The result is [R, L]. Other names of the ids make no difference to it.
    """
    by_slot, behind_RLK = np.argsort(slots.slot_R), np.zeros(ids_RLK.shape, np.int32)
    slot_N = np.repeat(slots.slot_R[by_slot], ids_RLK.shape[2])
    for layer in range(ids_RLK.shape[1]):
        ids_N, behind_N = ids_RLK[by_slot, layer].ravel(), np.zeros(len(slot_N), np.int32)
        order = np.argsort(ids_N, kind="stable")
        same = ids_N[order][1:] == ids_N[order][:-1]
        behind_N[order[1:][same]] = np.diff(slot_N[order])[same]
        behind_RLK[by_slot, layer] = behind_N.reshape(len(by_slot), -1)
    return words_of(behind_RLK)[0]


def _pairs(slots: Slots, chain: Chain, index: Ints) -> Ints:
    """Return (layer, routers' id, engines' id) of the cells' ids.

    The result is [N], three words packed into each number. The engines' ids are those that the chain moved there.
    """
    known, want_NK = slots.ids_at(_sources(chain, slots.cell_RL.ravel()[index]))
    rows, layers = np.divmod(index[known], slots.width - 1)
    words = layers[:, None], slots.sides.seen_RLK[rows, layers], want_NK
    layer, seen, want = (ids.astype(np.int64) & _WORD for ids in words)
    return (layer << 32 | seen << 16 | want).ravel()


def _count_again(pairs_N: Ints) -> tuple[int, float]:
    """Count the ids that are seen again with the same meaning.

    Returns:
        Their number, and their share of all ids that are seen again.
    """
    distinct, times = np.unique(pairs_N, return_counts=True)
    if not len(distinct):
        return 0, 0.0
    first = np.flatnonzero(np.diff(distinct >> 16, prepend=-1))
    again = int((np.maximum.reduceat(times, first) - 1).sum())
    return again, again / max(1, len(pairs_N) - len(first))


def _put_back(slots: Slots, chain: Chain, left_RL: Bools) -> Ids:
    """Return the routers' ids, mapped back in the cells that are left.

    An id is mapped to the engines' name for it, or to -1 if nothing tells.
    """
    distinct, times = np.unique(_pairs(slots, chain, np.flatnonzero(left_RL)), return_counts=True)
    distinct = distinct[np.argsort(-times, kind="stable")]
    for bits in (~_WORD, ~(_WORD << 16)):  # each id's most frequent meaning, and no two ids with one meaning
        distinct = distinct[np.sort(np.unique(distinct & bits, return_index=True)[1])]
    table = np.full((slots.own_L[-1], _WORD + 1), -1, np.int32)
    table[distinct >> 32, distinct >> 16 & _WORD] = distinct & _WORD
    seen_RLK = slots.sides.seen_RLK.astype(np.int32)
    rows, layers = np.nonzero(left_RL)
    seen_RLK[rows, layers] = table[layers[:, None], seen_RLK[rows, layers] & _WORD]
    return seen_RLK
