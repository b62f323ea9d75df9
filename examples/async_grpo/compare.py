"""Both ends side by side: what the engine's replies held against what the routers used. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Rows = dict[str, np.ndarray]
"""Equally long arrays: sample (text), position, layer, ids [N, K]; routers also rank, step, pass."""


@dataclass
class Comparison:
    """Adds up over steps."""

    ids_compared: int = 0
    ids_different: int = 0
    rows_missing: int = 0
    """(pass, row, layer) that the engine returned and no router used, or that was used too often."""
    engine: list[Rows] = field(default_factory=list)
    router: list[Rows] = field(default_factory=list)


def engine_rows(replied: dict[str, np.ndarray], layers: tuple[int, ...]) -> Rows:
    """Flat rows of a step's replies; `replied` maps sample to ids [T, L, K]."""
    parts: dict[str, list[np.ndarray]] = {"sample": [], "position": [], "layer": [], "ids": []}
    for name, ids_TLK in replied.items():
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
