"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fake_engine import FakeEngine


@pytest.fixture
def start() -> Iterator[Callable[[], FakeEngine]]:
    """Starts fake engines; all end with the test."""
    engines: list[FakeEngine] = []

    def begin() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    yield begin
    for engine in engines:
        engine.die()
