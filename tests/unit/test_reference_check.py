"""The comparison of engine and transformers: it must forgive float32 ties and nothing else."""

from __future__ import annotations

import numpy as np

from tests.engine.reference import Expected

ROWS, LAYERS, TOP_K = 40, 3, 8


def expected() -> Expected:
    rng = np.random.default_rng(0)
    ids_TLK = np.argsort(rng.random((ROWS, LAYERS, 128)), axis=-1)[..., :TOP_K]
    return Expected(ids_TLK, np.full((ROWS, LAYERS), 0.01), *[np.zeros((ROWS, 1))] * 2)


def test_a_swap_of_near_equals_is_forgiven_and_any_other_is_named() -> None:
    wanted = expected()
    swapped = wanted.ids_TLK.copy()
    assert wanted.differing_rows(swapped) == []
    swapped[7, 1, :2] = swapped[7, 1, 1::-1]
    assert wanted.differing_rows(swapped) == [(7, 1)]
    wanted.gaps_TL[7, 1] = 1e-7
    assert wanted.differing_rows(swapped) == []


def test_rows_of_another_position_are_named_although_a_tie_changed_the_set() -> None:
    wanted = expected()
    wanted.gaps_TL[0, 0] = 1e-7
    shifted = np.roll(wanted.ids_TLK, 1, axis=0)
    assert len(wanted.differing_rows(shifted)) == ROWS * LAYERS - 1


def test_a_few_rows_after_a_tie_that_changed_the_set_are_its_consequence() -> None:
    wanted = expected()
    wanted.gaps_TL[5, 1] = 1e-7
    changed = wanted.ids_TLK.copy()
    changed[5, 1, -1] = next(i for i in range(128) if i not in changed[5, 1])
    changed[5, 2, :2] = changed[5, 2, 1::-1]
    assert wanted.differing_rows(changed) == []
    changed[4, 2, :2] = changed[4, 2, 1::-1]
    assert wanted.differing_rows(changed) == [(4, 2)]
