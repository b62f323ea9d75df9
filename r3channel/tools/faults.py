"""The one table of what can be wrong with a channel (faults.toml): a series, the values of a well one, a sentence, a remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Series(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


class Fault(NamedTuple):
    """One row; faults.toml says what each column is."""

    series: str
    says: str = ""
    do: str = ""
    alert: str = ""
    labels: Mapping[str, str] = {}
    of: str = ""
    least: float = 0
    most: float = 0

    def shown(self, page: Sequence[Series]) -> Iterator[Series]:
        """The series of a page that show this fault, each with the value that is judged."""
        whole = next((series.value for series in page if series.name == self.of and series.value), 1.0)
        for series in page if self.says else ():
            asked = series.name == self.series and self.labels.items() <= series.labels.items()
            if asked and not self.least <= series.value / whole <= self.most:
                yield series._replace(value=series.value / whole)


FAULTS = tuple(
    Fault(**row) for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
)
