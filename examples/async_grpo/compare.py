"""Both ends side by side: what the engine's replies held against what the routers used. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3channel.wire.digest import coefficients
from r3channel.wire.validate import items_of, row_words

if TYPE_CHECKING:  # a room that is not entered without the flag
    from r3channel.trainer.audit import Consumed

Rows = dict[str, np.ndarray]
"""Equally long arrays: sample (text), position, layer, ids [N, K]; routers also rank, step, pass."""


@dataclass
class Comparison:
    """Adds up over steps."""

    ids_compared: int = 0
    ids_different: int = 0
    rows_missing: int = 0
    """(pass, row, layer) that the engine returned and no router used, or that was used too often."""
    digests_compared: int = 0
    digests_different: int = 0
    engine: list[Rows] = field(default_factory=list)
    router: list[Rows] = field(default_factory=list)


class DigestLedger:
    """Per (pass, sample, layer) the sum of row digests, to compare with the engine's.

    Ranks and micro-batches that hold parts of one sample add up: `(a + b) mod 2**64`.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str, int], int] = {}

    def add(
        self, consumed: Consumed, *, sample_ids: Sequence[str], samples_R: np.ndarray, positions_R: np.ndarray
    ) -> None:
        """Add one router call.

        Args:
            sample_ids: names of the micro-batch's samples.
            samples_R: for each row the index of its sample, -1 where the row is padding (left out).
            positions_R: for each row its token position.
        """
        for index, sample_id in enumerate(sample_ids):
            rows_T = np.flatnonzero(samples_R == index)
            words_T = row_words(items_of(consumed.ids_RK[rows_T]))
            positions_T = positions_R[rows_T]
            known_P = coefficients(0, int(positions_T.max(initial=-1)) + 1)
            digest = int((words_T * known_P[positions_T]).sum(dtype=np.uint64))
            key = (consumed.pass_name, sample_id, consumed.layer)
            self.sums[key] = (self.sums.get(key, 0) + digest) % 2**64


def engine_rows(replied: dict[str, tuple[np.ndarray, np.ndarray | None]], layers: tuple[int, ...]) -> Rows:
    """Flat rows of a step's replies; `replied` maps sample to (ids [T, L, K], digests [L])."""
    parts: dict[str, list[np.ndarray]] = {"sample": [], "position": [], "layer": [], "ids": []}
    for name, (ids_TLK, _) in replied.items():
        rows, count = len(ids_TLK), len(layers)
        parts["sample"].append(np.full(rows * count, name))
        parts["position"].append(np.repeat(np.arange(rows), count))
        parts["layer"].append(np.tile(np.asarray(layers), rows))
        parts["ids"].append(ids_TLK.reshape(rows * count, -1))
    return {name: np.concatenate(values) for name, values in parts.items()}


def compare_step(
    total: Comparison, *, engine: Rows, router: Rows, copies: int, passes: tuple[str, ...]
) -> tuple[int, int]:
    """Match every router row with the engine's by (sample, position, layer); returns (compared, different) of this step.

    `passes` must all be there. `copies`: how many ranks use each row in one pass (tp without sequence parallelism, else 1).
    A row that is missing or used too often counts all its ids as different.
    """
    names = np.unique(engine["sample"])
    keys = _keys(engine, names)
    order = np.argsort(keys)
    keys, ids = keys[order], engine["ids"][order]
    compared = 0
    unknown = ~np.isin(router["pass"], passes)
    different = int(unknown.sum()) * ids.shape[1]
    for name in passes:
        chosen = router["pass"] == name
        found = _keys({column: values[chosen] for column, values in router.items()}, names)
        at = np.searchsorted(keys, found).clip(max=len(keys) - 1)
        known = keys[at] == found
        used = router["ids"][chosen]
        different += int((used[known] != ids[at[known]]).sum())
        wrong_count = int(np.abs(np.bincount(at[known], minlength=len(keys)) - copies).sum()) + int(
            (~known).sum()
        )
        total.rows_missing += wrong_count
        different += wrong_count * ids.shape[1]
        compared += int(known.sum()) * ids.shape[1]
    total.ids_compared += compared
    total.ids_different += different
    total.engine.append(engine)
    total.router.append(router)
    return compared, different


def compare_digests(
    total: Comparison, *, replied: dict[str, tuple[np.ndarray, np.ndarray | None]], parts: list[dict[Any, int]],
    layers: tuple[int, ...], copies: int,
) -> None:  # fmt: skip
    """The engine's own per-layer digests against the sum over ranks of what their routers used."""
    sums: dict[Any, int] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = (sums.get(key, 0) + value) % 2**64
    for (_, sample, layer), value in sums.items():
        digests = replied[sample][1]
        if digests is not None:
            total.digests_compared += 1
            expected = int(digests[layers.index(layer)]) * copies % 2**64
            total.digests_different += value != expected


def _keys(rows: Rows, names: np.ndarray) -> np.ndarray:
    sample = np.searchsorted(names, rows["sample"]).clip(max=len(names) - 1)
    sample = np.where(names[sample] == rows["sample"], sample, len(names))
    return (
        (sample.astype(np.int64) << 44)
        | (rows["position"].astype(np.int64) << 16)
        | rows["layer"].astype(np.int64)
    )


def join(parts: list[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def dump(folder: Path, total: Comparison) -> None:
    """engine.npz and router.npz; see the README for their columns."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in (("engine", total.engine), ("router", total.router)):
        arrays: dict[str, Any] = join(parts)
        np.savez_compressed(folder / f"{name}.npz", **arrays)
