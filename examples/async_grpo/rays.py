"""Ray without its overloads: `ray.get` with a deadline and a plain type, and `ray.remote` for a class. Imported when used."""

from __future__ import annotations

from typing import Any


def start(**options: Any) -> None:
    """`ray.init`, again where a busy machine lets the new node's first 30 s pass: Ray has no option for that limit."""
    import ray

    for attempts_left in (2, 1, 0):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or not attempts_left:
                raise
            ray.shutdown()


def fetch(references: Any, *, timeout_s: float = 300.0) -> Any:
    """`ray.get` that ends by its deadline."""
    import ray

    return ray.get(references, timeout=timeout_s)


def actor_class(cls: type, **options: Any) -> Any:
    """The class as a Ray actor class."""
    import ray

    remote: Any = ray.remote
    return remote(**options)(cls)


def is_done(reference: Any) -> bool:
    """Whether a call has ended. Raises what it raised."""
    import ray

    done, _ = ray.wait([reference], timeout=0)
    if done:
        ray.get(done[0])
    return bool(done)
