"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.delivery import MakeRelay, relays
from tests.support.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def engines_end_with_their_test() -> Iterator[None]:
    yield
    while FakeEngine.started:
        FakeEngine.started.pop().die()


@pytest.fixture
def make_relay() -> Iterator[MakeRelay]:
    """Makes relays; all are closed with the test."""
    with relays() as make:
        yield make
