"""Ray without its overloads: `ray.get` with a deadline and a plain type, and `ray.remote` for a class."""

from __future__ import annotations

from typing import Any

import ray


def fetch(references: Any, *, timeout_s: float = 300.0) -> Any:
    """`ray.get` that ends by its deadline."""
    return ray.get(references, timeout=timeout_s)


def actor_class(cls: type, **options: Any) -> Any:
    """The class as a Ray actor class."""
    remote: Any = ray.remote
    return remote(**options)(cls)
