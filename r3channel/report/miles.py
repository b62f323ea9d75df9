"""`r3channel miles`: why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from r3channel.errors import UsageError


def run(argv: Sequence[str]) -> NoReturn:
    raise UsageError(
        "miles has no adapter yet: its samples hold the decoded ids as arrays, which it cuts and joins in places that no hook "
        "reaches, and its replay lives in its own fork of Megatron (patches/README.md says where). Give Relay and TrainerChannel "
        "a loop of your own, or use `r3channel slime`"
    )
