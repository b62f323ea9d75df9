"""Follows every row of every sample from the engine's own routers to the trainer's, by what outlives any process: files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from tests.chaos.actors import NOTES

PASSES: tuple[str, ...] = ("forward", "recompute", "logprob")


class Ledger:
    """One thread."""

    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        self._folder, self._layers, self._read = folder, layers, Counter[Path]()
        self._made = defaultdict[str, dict[int, list[Any]]](lambda: defaultdict(list))
        """Request -> position -> ids [L][K] as the engine's routers chose them, each time it was computed."""
        self._begun = defaultdict[tuple[int, ...], list[Any]](list)
        """Beginning of a prompt -> the rows of its last token. An engine keeps one request's, for all that begin so, as it keeps
        its cache: over steps, where an update failed."""
        self._notes = {kind: dict[str, Any]() for kind in ("asked", "received", "sealed", "named")}
        """asked: (request, its prompt); received: rows; named: why no trainer uses it."""
        self.samples, self.named = Counter(made=0, received=0, sealed=0, delivered=0, used=0), Counter[str]()
        self.faults, self.rows = Counter(lost=0, duplicated=0, wrong_rows=0), 0
        self.told = list[str]()
        """The first faults, in words."""

    def close(self, step: int, *, why: str = "", parts: Iterable[dict[str, Any]] = ()) -> list[str]:
        """The step is over: given up (`why`), or trained, where `parts` are the rows that each rank's routers used. Every row of
        a sample that is not named was used once in each pass, and is the engine's. Returns the step's samples."""
        self._take_notes()
        received, named = self._notes["received"], self._notes["named"]
        names = [name for name in self._notes["asked"] if name.startswith(f"step{step}/")]
        named |= {name: named.get(name, why) for name in names if why}
        used = self._used(parts)
        for name in names:
            rows = range(0 if name in named else received.get(name, 1))
            wanted = Counter(product(PASSES, rows, self._layers))
            self._fault("lost", wanted - used[name], name)
            self._fault("duplicated", used[name] - wanted, name)
        for name in names:
            self._count(name, bool(used[name]))
        return names

    def _used(self, parts: Iterable[dict[str, Any]]) -> defaultdict[str, Counter[tuple[str, int, int]]]:
        used = defaultdict[str, Counter[tuple[str, int, int]]](Counter)
        for rows in filter(None, parts):
            columns = (rows[key].tolist() for key in ("sample", "pass", "position", "layer", "ids"))
            for name, kind, position, layer, ids in zip(*columns, strict=True):
                used[name][kind, position, layer] += 1
                chosen = [row[self._layers.index(layer)] for row in self._choices(name, position)]
                if ids not in chosen:
                    self._fault("wrong_rows", Counter([(position, layer)]), f"{name} {ids} {chosen}")
                self.rows += 1
        return used

    def _choices(self, name: str, position: int) -> list[Any]:
        request, prompt = self._notes["asked"].get(name, ("", []))
        shared = position < len(prompt)
        return self._begun[tuple(prompt[: position + 1])] if shared else self._made[request][position]

    def _fault(self, kind: str, where: Counter[Any], name: str) -> None:
        self.faults[kind] += where.total()
        self.told += [f"{kind}: {name}: {[*where][:3]}"] if where and len(self.told) < 5 else []

    def _count(self, name: str, used: bool) -> None:
        """The sample is followed no further."""
        notes = {kind: own.pop(name, "") for kind, own in self._notes.items()}
        made = self._made.pop(notes["asked"][0], None)
        known = {"made": made, "received": notes["received"], "sealed": notes["sealed"] is None}
        known |= {"delivered": used, "used": used}
        self.samples.update(stage for stage, is_known in known.items() if is_known)
        self.named.update([notes["named"]] if notes["named"] else ())

    def _take_notes(self) -> None:
        for line in self._lines(self._folder / NOTES):
            for kind, what in line.items():
                self._notes[kind] |= what
        prompts = dict(self._notes["asked"].values())
        for path in self._folder.glob("tap/*.jsonl"):
            for request, start, _, ids in self._lines(path):
                for position, row in enumerate(ids, start):
                    self._made[request][position].append(row)
                    self._begun[tuple(prompts.get(request, ())[: position + 1])].append(row)

    def _lines(self, path: Path) -> list[Any]:
        """Whole lines that are new: a killed process may leave half of one."""
        whole = path.read_bytes()[self._read[path] :].rpartition(b"\n")[0]
        self._read[path] += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]
