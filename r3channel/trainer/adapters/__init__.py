"""The frameworks whose routers replay: one adapter each."""

from __future__ import annotations

from collections.abc import Iterator

from r3channel.observe.check import Check, CheckContext


def check_adapters(context: CheckContext) -> Iterator[Check]:
    """Yield the check of the Megatron names that the adapter uses."""
    yield context.ask("Megatron names", f"from {__name__}.megatron import check_names as check")
