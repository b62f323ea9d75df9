"""The frameworks whose routers replay: one adapter each."""

from __future__ import annotations

from collections.abc import Iterator

from r3channel.observe.check import Check, CheckContext


def check_adapters(context: CheckContext) -> Iterator[Check]:
    """Whether the installed Megatron has the names that its adapter uses."""
    yield context.ask("Megatron names", f"from {__name__}.megatron import check_names as check")
