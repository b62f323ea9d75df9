"""Which mistakes, made one after another, predict the ids that were seen: as few as possible, that leave as little as possible.

A chain of moves says of each cell (a slot and a layer) where its ids come from. The move that explains most of what is
left goes before those that are known, in the places where it holds; where none explains much, two at once are tried. The search
looks at some cells; what it finds is held against all. All ids may have been changed, too: moves are searched for under each
reading of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair, Bools, Ints
from r3channel.recordings.mistakes import Catalogue
from r3channel.recordings.slots import Move, Slots, Votes
from r3channel.wire.routing import Ids
from r3channel.wire.validate import items_of, row_words

Chain = tuple[Move, ...]
"""The mistake that was made last stands first."""
_MOST, _SOME, _LEAST = 0.5, 0.25, 0.003
"""Shares of what is left that a mistake explains: so that no second is tried with it; in each of its places; at all."""
_CLAIMS, _SAMPLED = 24, 1024
_TWICE, _TRIED = 1.5, 5
"""So many times as much as one must two explain; first ones of two, of which the second is searched for."""
_REPEATED = 8
"""Cells with the same ids, of which the first is taken for the origin."""
_AGAIN = 16
"""Ids that must be seen again and mean the same again, and cells that must be explained, not to be chance."""
_LAYERS, _CELLS, _ROUNDS = 8, 4096, 3
"""Layers and cells of which a mapping of ids is guessed; how often it is told from what was found with the last."""
_WORD = 0xFFFF


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
    """The chain of moves that explains most. `left_RL`: what it does not; at its edges a move may say nothing of a cell."""

    def __init__(self, catalogue: Catalogue, left_RL: Bools, want_RLK: Ids, seen_RLK: Ids) -> None:
        """Search for what explains the cells that are left; what else differs is not looked at. Both sides' ids as they are to be
        compared."""
        self._catalogue, self._slots, sides = catalogue, catalogue.slots, catalogue.slots.sides
        self._want_RL, self._seen_RL = words_of(want_RLK, seen_RLK)
        self._rows, self._layers = self._want_RL.shape
        self._want_RL = np.pad(self._want_RL, ((0, 1), (0, 1)))
        self._asked_RL = left_RL | (sides.both_R[:, None] & ~sides.differs_RL)
        self._differed_RL = self.left_RL = left_RL
        self.matched_RL = np.zeros_like(left_RL)
        self._accept(())
        while len(self.chain) < _CLAIMS and (longer := self._longer()) and self._accept(longer):
            pass

    def hits(self) -> dict[str, Bools]:
        """Return the cells that each mistake takes part in, by its name; the largest first."""
        hits = dict[str, Bools]()
        for layer, cells in enumerate(self._all()):
            slots, layers = cells[:2]
            for move in self.chain:
                source = move.sources(slots, layers)
                hit_R = self._differed_RL[:, layer] & cells.matched & _moved(source, slots, layers)
                if hit_R.any():
                    hits.setdefault(move.name, np.zeros_like(self.left_RL))[:, layer] |= hit_R
                slots, layers = source
        return dict(sorted(hits.items(), key=lambda item: -int(item[1].sum())))

    def changed_RL(self) -> Bools:
        """Return the cells that are explained, and have not the very ids of where they come from."""
        changed_RL, sides = self._differed_RL & self.matched_RL, self._slots.sides
        for layer, cells in enumerate(self._all()):
            slots, layers = _sources_of(self.chain, *cells[:2])
            known = np.flatnonzero(changed_RL[:, layer] & self._known(slots, layers))
            want_NK = sides.want_RLK[self._slots.row_S[slots[known]], layers[known]]
            changed_RL[known, layer] = (want_NK != sides.seen_RLK[known, layer]).any(-1)
        return changed_RL

    # -- what a chain predicts ---------------------------------------------------------------------------------------------

    def _matched(self, cells: Cells, slots: Ints, layers: Ints) -> Bools:
        """Whether cells have the ids of these slots and layers; where those are none, as before."""
        same = self._want_RL[self._slots.row_S[slots], layers] == cells.seen
        return np.where(self._known(slots, layers), same, cells.matched)

    def _known(self, slots: Ints, layers: Ints) -> Bools:
        return (self._slots.row_S[slots] < self._rows) & (layers < self._layers)

    def _all(self) -> Iterator[Cells]:
        """All cells, layer by layer."""
        for layer in range(self._layers):
            yield self._cells(np.arange(self._rows), np.full(self._rows, layer))

    def _cells(self, rows: Ints, layers: Ints) -> Cells:
        return Cells(
            self._slots.slot_R[rows], layers, self._seen_RL[rows, layers], self.matched_RL[rows, layers]
        )

    # -- one step of the search -------------------------------------------------------------------------------------------------

    def _longer(self) -> Chain | None:
        """The chain with the mistake, or the two, that explain most of what is left; None where none explains enough."""
        left = _spread(np.flatnonzero(self.left_RL), _SAMPLED)
        right = _spread(np.flatnonzero(self._asked_RL & self.matched_RL), _SAMPLED // 2)
        if not len(left):
            return None
        cells = self._cells(*np.divmod(np.concatenate([left, right]), self._layers))
        votes = self._votes(cells, len(left))
        best = self._best(self.chain, cells, votes)
        if best.gained < _MOST * len(left):
            tried = [self._best(base, cells, votes) for base in self._firsts(votes)]
            two = max(tried, key=_score, default=best)
            best = two if two.gained > _TWICE * best.gained else best
        return best.chain if best.gained >= max(1, _LEAST * len(left)) else None

    def _firsts(self, votes: Votes) -> list[Chain]:
        """The chains with one more mistake beyond which cells vote most alike for a second."""
        chains = [(*self.chain, first) for first in self._catalogue.candidates(_beyond(self.chain, votes))]
        return sorted(chains, key=lambda chain: -self._catalogue.agreed(_beyond(chain, votes)))[:_TRIED]

    def _best(self, base: Chain, cells: Cells, votes: Votes) -> Found:
        """A chain with the mistake that adds most."""
        before = int(self._matched(cells, *_sources_of(base, *cells[:2])).sum() - cells.matched.sum())
        tried = [Found(0, 0, base)]
        for mistake in self._catalogue.candidates(_beyond(base, votes)):
            gained, moved, _ = self._placed(base, mistake, [cells])
            tried.append(Found(before + gained, -moved, (*base, mistake)))
        return max(tried, key=_score)

    def _placed(self, base: Chain, mistake: Move, parts: Iterable[Cells]) -> tuple[int, int, Move]:
        """(cells gained, cells moved, the mistake in the places where it explains much of what is left)."""
        places, moved = int(mistake.place_S.max()) + 1, 0
        gain_P, left_P = np.zeros((2, places))
        for cells in parts:
            slots, layers = _sources_of(base, *cells[:2])
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
        chain = tuple(self._placed(longer[:-1], last, self._all())[2] for last in longer[-1:])
        chain, matched_RL, known_RL = (*longer[:-1], *chain), *np.zeros((2, *self.left_RL.shape), bool)
        for layer, cells in enumerate(self._all()):
            source = _sources_of(chain, *cells[:2])
            known_RL[:, layer], matched_RL[:, layer] = self._known(*source), self._matched(cells, *source)
        if chain and matched_RL.sum() <= self.matched_RL.sum():
            return False
        self.chain, self.matched_RL = chain, matched_RL
        self.left_RL = self._asked_RL & known_RL & ~matched_RL
        return True

    def _votes(self, cells: Cells, left: int) -> Votes:
        """The first `left` cells, and where their ids are found on the engines' side."""
        first = Cells(cells.slots[:left], cells.layers[:left], cells.seen[:left], cells.matched[:left])
        return _votes_of(self._slots, first, self._want_RL[:-1, :-1], np.arange(self._layers))


def words_of(*sides: Ids) -> list[Ids]:
    """Return of each side a number for each row of a layer, equal where the ids are."""
    kind = np.result_type(*sides)
    return [row_words(items_of(ids.astype(kind, copy=False))) for ids in sides]


def _votes_of(slots: Slots, cells: Cells, want_RP: Ids, layers_P: Ints) -> Votes:
    """Return cells, and where what they have is found among the engines' side's words of some layers."""
    words, inverse = np.unique(cells.seen, return_inverse=True)
    want_N = want_RP.ravel()
    number_N = np.minimum(np.searchsorted(words, want_N), len(words) - 1)
    matches = np.flatnonzero(words[number_N] == want_N)[::-1]
    first = np.full(len(words), -1)
    first[number_N[matches]] = matches
    times = np.bincount(number_N[matches], minlength=len(words))
    known = ((times > 0) & (times <= _REPEATED))[inverse]
    rows, places = np.divmod(first[inverse][known], len(layers_P))
    return Votes(cells.slots[known], cells.layers[known], slots.slot_R[rows], layers_P[places])


def _score(candidate: Found) -> tuple[int, int]:
    return candidate[:2]


def _sources_of(chain: Chain, slots: Ints, layers: Ints) -> tuple[Ints, Ints]:
    for mistake in chain:
        slots, layers = mistake.sources(slots, layers)
    return slots, layers


def _beyond(chain: Chain, votes: Votes) -> Votes:
    """What a mistake before those of the chain would have to move, and from where."""
    return Votes(*_sources_of(chain, *votes[:2]), *votes[2:])


def _moved(source: tuple[Ints, Ints], slots: Ints, layers: Ints) -> Bools:
    return (source[0] != slots) | (source[1] != layers)


def _spread(values: Ints, most: int) -> Ints:
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(np.int64))]


# -- readings of the ids -------------------------------------------------------------------------------------------------------


def search(
    sides: AlignedPair, left_RL: Bools, unshown: Callable[[Bools], Bools]
) -> tuple[dict[str, Bools], Bools]:
    """Return the cells that each mistake takes part in, by its name, and those that none explains.

    That reading of the ids counts that leaves the fewest cells, of those that `unshown` leaves: what shows nothing by itself.
    """
    catalogue, hits, best, least = Catalogue(sides), dict[str, Bools](), None, 0
    for name, *both in _readings(sides):
        tried = Search(catalogue, left_RL, *both)
        count = int(unshown(tried.left_RL).sum())
        if best is None or least - count > min(_AGAIN, _MOST * least):
            best, least = tried, count
            hits = ({name: tried.changed_RL()} if name else {}) | tried.hits()
        if not least:
            return hits, tried.left_RL
    assert best is not None
    tried = _relabelled(catalogue, best.left_RL)
    if tried is None or unshown(tried.left_RL).sum() > _MOST * least:
        return hits, best.left_RL
    for name, hit_RL in tried.hits().items():
        hits[name] = hit_RL | hits.get(name, hit_RL)
    return {"physical_ids": tried.changed_RL(), **hits}, tried.left_RL


def _readings(sides: AlignedPair) -> Iterator[tuple[str, Ids, Ids]]:
    """What can be done to all ids of a step: name, and both sides' ids as they are to be compared then."""
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


def _relabelled(catalogue: Catalogue, left_RL: Bools) -> Search | None:
    """Search with the routers' ids put back, where those of the cells that are left stand one for one for others.

    Rows may have moved, too. The first move is the one by which ids that are seen again mean the same again; what the search
    finds then tells the mapping better.
    """
    best, chain = None, _first_chain(catalogue, left_RL)
    for _ in range(_ROUNDS):
        if chain is None:
            break
        seen_RLK = _put_back(catalogue.slots, chain, left_RL)
        tried = Search(catalogue, left_RL, catalogue.slots.sides.want_RLK, seen_RLK)
        if best is not None and tried.left_RL.sum() >= best.left_RL.sum():
            break
        best, chain = tried, tried.chain
    return best


def _first_chain(catalogue: Catalogue, left_RL: Bools) -> Chain | None:
    """None where no mapping is likelier than chance."""
    slots, sides = catalogue.slots, catalogue.slots.sides
    layers_P = _spread(np.flatnonzero(left_RL.any(0)), _LAYERS)
    rows, places = np.divmod(_spread(np.flatnonzero(left_RL[:, layers_P]), _CELLS), len(layers_P))
    layers = layers_P[places]
    want_RP, seen_RP = (_echoes(slots, ids[:, layers_P]) for ids in (sides.want_RLK, sides.seen_RLK))
    cells = Cells(slots.slot_R[rows], layers, seen_RP[rows, places], np.zeros(len(rows), bool))
    moves = catalogue.candidates(_votes_of(slots, cells, want_RP, layers_P))
    chains = [Chain(), *((move,) for move in moves)]
    agrees = [_again(_pairs(slots, chain, rows, layers)) for chain in chains]
    most, share = max(agrees)
    return chains[agrees.index((most, share))] if most >= _AGAIN and share >= _SOME else None


def _echoes(slots: Slots, ids_RLK: Ids) -> Ids:
    """[R, L]: how many slots before each of a row's ids was there last, as words. Other names of the ids make no difference."""
    by_slot, behind_RLK = np.argsort(slots.slot_R), np.zeros(ids_RLK.shape, np.int32)
    slot_N = np.repeat(slots.slot_R[by_slot], ids_RLK.shape[2])
    for layer in range(ids_RLK.shape[1]):
        ids_N, behind_N = ids_RLK[by_slot, layer].ravel(), np.zeros(len(slot_N), np.int32)
        order = np.argsort(ids_N, kind="stable")
        same = ids_N[order][1:] == ids_N[order][:-1]
        behind_N[order[1:][same]] = np.diff(slot_N[order])[same]
        behind_RLK[by_slot, layer] = behind_N.reshape(len(by_slot), -1)
    return words_of(behind_RLK)[0]


def _pairs(slots: Slots, chain: Chain, rows: Ints, layers: Ints) -> Ints:
    """[N]: layer, routers' id and engines' id of each id of cells, as the chain moved them, in one number of three words."""
    sides = slots.sides
    from_slots, from_layers = _sources_of(chain, slots.slot_R[rows], layers)
    from_rows = slots.row_S[from_slots]
    known = (from_rows < len(sides.want_RLK)) & (from_layers < slots.own_L[-1])
    want_NK = sides.want_RLK[from_rows[known], from_layers[known]].astype(np.int64)
    seen_NK = sides.seen_RLK[rows[known], layers[known]].astype(np.int64)
    return ((layers[known][:, None] << 32) + ((seen_NK & _WORD) << 16) + (want_NK & _WORD)).ravel()


def _again(pairs_N: Ints) -> tuple[int, float]:
    """(ids that are seen again and stand for the same again, their share of those that are seen again)."""
    distinct, times = np.unique(pairs_N, return_counts=True)
    if not len(distinct):
        return 0, 0.0
    first = np.flatnonzero(np.diff(distinct >> 16, prepend=-1))
    again = int((np.maximum.reduceat(times, first) - 1).sum())
    return again, again / max(1, len(pairs_N) - len(first))


def _put_back(slots: Slots, chain: Chain, left_RL: Bools) -> Ids:
    """The routers' ids, those of cells that are left as the engines call them; -1 where nothing tells."""
    rows, layers = np.nonzero(left_RL)
    distinct, times = np.unique(_pairs(slots, chain, rows, layers), return_counts=True)
    distinct = distinct[np.argsort(-times, kind="stable")]
    for bits in (~_WORD, ~(_WORD << 16)):  # for each id what it stands for most often, and no two for one
        distinct = distinct[np.sort(np.unique(distinct & bits, return_index=True)[1])]
    table = np.full((slots.own_L[-1], _WORD + 1), -1, np.int32)
    table[distinct >> 32, distinct >> 16 & _WORD] = distinct & _WORD
    seen_RLK = slots.sides.seen_RLK.astype(np.int32)
    seen_RLK[rows, layers] = table[layers[:, None], seen_RLK[rows, layers] & _WORD]
    return seen_RLK
