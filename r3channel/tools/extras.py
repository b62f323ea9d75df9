"""The packages that each role of a run needs, what is installed, and how to get what is missing.

This module imports none of the packages.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from typing import NamedTuple

from r3channel.observe.check import Check, CheckContext

_EMBEDDED = "make setup in a clone of the repository"
EXTRAS = {
    "sglang": ("sglang",),
    "megatron": ("megatron", "mbridge"),
    "ray": ("ray",),
    "metrics": ("prometheus_client", "psutil", "rich"),
    "fast": ("numba", "orjson", "pybase64"),
    "dense": ("zstandard",),
    "direct": ("h11",),
    "plot": ("matplotlib",),
}
"""Extra of r3channel -> the modules that it brings."""
_OF_MODULE = {module: extra for extra, modules in EXTRAS.items() for module in modules}
_MODULES = {"megatron-core": "megatron"}
"""Distribution -> its module, where they differ."""


def remedy(name: str) -> str:
    """Return how to get a module or distribution.

    >>> remedy("h11"), remedy("lz4")
    ('pip install "r3channel[direct]"', 'pip install lz4')
    """
    if name == "torch":
        return "install the build for this machine's accelerator: pip install torch==2.13.0"
    extra = _OF_MODULE.get(_MODULES.get(name, name))
    if extra is None:
        return f"pip install {name}"
    without = f"; without a GPU: {_EMBEDDED}" if extra in ("sglang", "megatron") else ""
    return f'pip install "r3channel[{extra}]"{without}'


class Role(NamedTuple):
    """The packages that one role of a run needs."""

    needs: tuple[str, ...]
    helps: dict[str, str]
    """Distribution that the role can do without -> what is lost without it."""


_FAST = {
    "numba": "checks and placement are slower",
    "orjson": "replies are parsed slower",
    "pybase64": "frames in replies are decoded slower",
}
_RAY = {"ray": "no relay in a Ray actor"}
_METRICS = {"prometheus_client": "no /metrics"}
_DENSE = {"zstandard": "no codec `set`"}
ROLES = {
    "relay": Role(
        ("torch", "lz4", "xxhash"), _RAY | _FAST | {"h11": "no direct delivery"} | _DENSE | _METRICS
    ),
    "engine": Role(("torch", "sglang", "lz4", "xxhash"), _DENSE),
    "trainer": Role(
        ("torch", "megatron-core", "xxhash"),
        {"mbridge": "no weights to engines"} | _RAY | {"numba": _FAST["numba"]} | _METRICS,
    ),
    "all": Role(
        ("torch", "sglang", "megatron-core", "mbridge", "ray", "lz4", "xxhash", "prometheus_client"),
        _FAST | {"h11": "no direct delivery"} | _DENSE,
    ),
}


def check_packages(context: CheckContext) -> Iterator[Check]:
    """Yield checks of Python, the role's needs, then its helpers."""
    yield check_python(sys.version_info[:3], gpu=context.gpu)
    role = ROLES[context.role]
    for name, loss in (dict.fromkeys(role.needs, "") | role.helps).items():
        yield check_distribution(name, loss=loss)


def check_python(version: tuple[int, int, int], *, gpu: bool) -> Check:
    return Check(
        name="python",
        ok=version >= (3, 11, 0),
        found=f"{'.'.join(map(str, version))} ({platform.machine()}, {'GPU' if gpu else 'no GPU'})",
        remedy="r3channel needs Python 3.11 or newer",
    )


def check_distribution(name: str, *, loss: str = "") -> Check:
    """Check by its metadata whether a distribution is installed.

    Args:
        name: the distribution.
        loss: what does not work without it; with a text, its absence is no fault.
    """
    try:
        return Check(name=name, ok=True, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if loss:
            return Check(name=name, ok=True, found=f"not installed: {loss}; {remedy(name)}")
        return Check(name=name, ok=False, found="not installed", remedy=remedy(name))
