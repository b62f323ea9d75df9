"""One finding of the doctor, as a line of text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `found` says what was seen; `remedy` what to do when it is not well."""

    name: str
    ok: bool
    found: str
    remedy: str = ""

    def line(self) -> str:
        text = f"{'ok' if self.ok else 'FAIL':4}  {self.name:22} {self.found}"
        return text if self.ok else f"{text}; {self.remedy}"
