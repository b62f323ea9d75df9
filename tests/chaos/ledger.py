"""Follows every row of every sample from the engine's own routers to the trainer's, by what outlives any process: files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.chaos.actors import NOTES

PASSES = ("forward", "recompute", "logprob")
_Rows = dict[int, list[list[list[int]]]]


class Ledger:
    """One thread."""

    def __init__(self, folder: Path, tap: Path, layers: tuple[int, ...]) -> None:
        self._folder, self._tap, self._layers = folder, tap, layers
        self._read = Counter[Path]()
        self._made = defaultdict[str, _Rows](lambda: defaultdict(list))
        """Request -> position -> ids [L][K] as the engine's routers chose them, each time it was computed."""
        self._asked = dict[str, tuple[str, int]]()
        """Sample -> request, and the tokens of its prompt."""
        self._received, self._sealed = dict[str, int](), set[str]()
        """Sample -> its rows."""
        self._named = dict[str, str]()
        self.counts = Counter(dict.fromkeys(("made", "received", "sealed", "delivered", "used"), 0))
        self.faults = Counter(dict.fromkeys(("lost", "duplicated", "wrong_rows"), 0))
        self.named = Counter[str]()
        self.rows = 0
        self.told = list[str]()
        """The first faults, in words."""

    def give_up(self, step: int, why: str) -> list[str]:
        """No trainer will use the step's samples: each is named. Returns them."""
        self._take_notes()
        names = [name for name in self._asked if name.startswith(f"step{step}/")]
        self._named |= {name: self._named.get(name, why) for name in names}
        self._close(names)
        return names

    def settle(self, step: int, parts: list[dict[str, Any]]) -> None:
        """The step was trained: every sealed row was used once in each pass by the one rank that needs it, and is the engine's."""
        self._take_notes()
        names = [name for name in self._asked if name.startswith(f"step{step}/")]
        used = defaultdict[str, Counter[tuple[str, int, int]]](Counter)
        for rows in filter(None, parts):
            columns = (rows[key].tolist() for key in ("sample", "pass", "position", "layer", "ids"))
            for name, kind, position, layer, ids in zip(*columns, strict=True):
                used[name][kind, position, layer] += 1
                chosen = self._choices(name, position)
                if all(each[self._layers.index(layer)] != ids for each in chosen):
                    self._fault("wrong_rows", f"{name}, row {position}, layer {layer}: {ids}, made: {chosen}")
                self.rows += 1
        for name in names:
            if name not in used and name not in self._named:
                self._fault("lost", f"{name}: asked for, {self._stage_of(name)}, and neither used nor named")
            positions = range(self._received[name] if name in used else 0)
            for key in ((kind, at, layer) for kind in PASSES for at in positions for layer in self._layers):
                if (times := used[name][key]) != 1:
                    self._fault("duplicated" if times else "lost", f"{name}, {key}: used {times} times")
        self.counts.update(delivered=len(used), used=len(used))
        self._close(names)

    def _choices(self, name: str, position: int) -> list[list[list[int]]]:
        """Of a prompt that several requests share the engine keeps one request's rows, as it keeps its cache."""
        request, prompt = self._asked.get(name, ("", 0))
        group = name.rpartition("/")[0] + "/"
        alike = [other for other in self._made if other.startswith(group)] if position < prompt else [request]
        return [row for other in alike for row in self._made[other][position]]

    def _stage_of(self, name: str) -> str:
        return "sealed" if name in self._sealed else "received" if name in self._received else "not received"

    def _fault(self, kind: str, text: str) -> None:
        self.faults[kind] += 1
        if len(self.told) < 5:
            self.told.append(f"{kind}: {text}")

    def _close(self, names: list[str]) -> None:
        for name in names:
            made = self._made.pop(self._asked.pop(name)[0], None)
            known = (made, name in self._received, name in self._sealed)
            self.counts.update(dict(zip(("made", "received", "sealed"), map(bool, known), strict=True)))
            if why := self._named.pop(name, ""):
                self.named[why] += 1

    def _take_notes(self) -> None:
        for line in self._lines(self._folder / NOTES):
            self._asked |= line.get("asked", {})
            self._named |= line.get("named", {})
            self._received |= line.get("received", {})
            self._sealed |= {*line.get("sealed", ())}
        for path in self._tap.glob("*.jsonl"):
            for rid, start, _, ids in self._lines(path):
                for position, row in enumerate(ids, start):
                    self._made[rid][position].append(row)

    def _lines(self, path: Path) -> list[Any]:
        """Whole lines that are new: a killed process may leave half of one."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            whole = file.read().rpartition(b"\n")[0]
        self._read[path] += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]
