"""The package as it is without numba: every place that asks for the compiled loops gets none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from r3channel.engine import capture
from r3channel.plan import placement as place
from r3channel.wire import digest
from r3channel.wire.codec import packed9


@contextmanager
def numba(there: bool) -> Iterator[None]:
    assert digest.kernels() is not None, "the locked environment has it; without it nothing is compared"
    with pytest.MonkeyPatch.context() as patch:
        for module in () if there else (capture, place, digest, packed9):
            patch.setattr(module, "kernels", lambda: None)
        yield
