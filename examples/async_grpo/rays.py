"""Ray without its overloads: `ray.get` with a deadline and a plain type, and `ray.remote` for a class. Imported when used."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
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
    """`ray.get` that ends by its deadline, and at once when one of several fails, however long the others take."""
    import ray

    deadline_s = time.monotonic() + timeout_s
    waiting = references if isinstance(references, list) else [references]
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            raise TimeoutError(f"{len(waiting)} calls of actors have not ended after {timeout_s:g} s")
        ray.get(done)
    return ray.get(references)


def the_dead(actors: Mapping[str, Any], *, within_s: float = 3.0) -> dict[str, str]:
    """Name -> what Ray says of it, for those actors whose process has ended. Others may be busy for longer than `within_s`."""
    import ray
    from ray.exceptions import RayActorError

    asked = {name: actor.__ray_ready__.remote() for name, actor in actors.items()}
    done, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=within_s)
    found: dict[str, str] = {}
    for name, reference in asked.items():
        try:
            ray.get(reference if reference in done else [])
        except RayActorError as error:
            found[name] = _cause(str(error))
    return found


def _cause(text: str) -> str:
    """The process and the kind of its end, out of the lines that Ray says of a dead actor."""
    found = [re.search(pattern, text) for pattern in (r"pid: (\d+)", r"Worker exit type: (\w+)")]
    return "process " + (", ".join(each[1] for each in found if each) or text)


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
