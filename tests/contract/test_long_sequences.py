"""A sample of 131,072 tokens over four context-parallel ranks: every row at its router, and no memory beside the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MARGIN = 24 * MIB
"""Four receivers' buckets of 1 MiB, two alive at each end, row maps of one layer's size, and what the allocator keeps."""


def run(tokens: int) -> dict[str, int]:
    child = subprocess.run(
        [sys.executable, str(ROOT / "tests/contract/long_sample.py"), str(tokens)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.full
def test_131072_tokens_reach_their_routers_in_the_memory_of_their_rows() -> None:
    """The relay holds the rows once and the receivers once; what is beside them does not grow with the tokens."""
    beside = []
    for tokens in (32_768, 131_072):
        found = run(tokens)
        assert (found["right"], found["wrong"]) == (2 * found["rows"], 0)  # a log-prob and a forward pass
        beside.append(found["peak_bytes"] - 2 * found["row_bytes"])
    assert max(beside) < MARGIN and beside[1] < beside[0] + 8 * MIB, [size / MIB for size in beside]
