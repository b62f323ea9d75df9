"""`r3channel bench NAME`: measurements that print their own peers. Knows only names; a benchmark is imported when it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

BENCHES = {
    "capture": "what capture costs a real engine: off, stock, in-band, direct",
    "wire": "codecs: bytes per token, encode and decode speed, beside entropy and memcpy",
    "plan": "assignment and cutting: CPU time at realistic sizes",
    "e2e": "a train step through the channel and without routing, in pairs: CPU",
    "relay": "a step from the manager to every rank: ours, Ray's object store and Direct Transport, raw gloo",
    "weights": "the reverse path: SGLang per tensor, flattened, ours staged and in shared memory, raw gloo",
    "replay": "a train step of real Megatron with and without replay: CPU time, interleaved",
}
"""Name -> what it measures, as its help says."""
OF_CLONE = ("capture", "e2e", "weights", "replay")
"""Benchmarks that start real engines or trainers without a GPU. They lie in examples/embedded, which is in no wheel."""


def parts_of(name: str) -> Mapping[str, Callable[..., dict[str, Any]]]:
    """Return what a benchmark measures, by name of the part.

    The benchmark's module is imported here; `replay` shares the module of `e2e`.

    Args:
        name: A benchmark of `BENCHES`.
    """
    module, table = ("e2e", "REPLAY") if name == "replay" else (name, "PARTS")
    package = "examples.embedded.bench" if name in OF_CLONE else "r3channel.bench"
    return getattr(importlib.import_module(f"{package}.{module}"), table)


def run(argv: Sequence[str]) -> int:
    """Run the benchmark that is named first.

    Without torch or Ray its help has everything but its parts.

    Args:
        argv: The benchmark's name, then its options.

    Returns:
        The exit status.

    Raises:
        ConfigError: For an unknown benchmark, or for one that needs a clone of the repository where there is none.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("  r3channel bench wire --quick\n\nusage: r3channel bench NAME [options]\n")
        print("\n".join(f"  {name:10s} {text}" for name, text in BENCHES.items()))
        return 0
    if argv[0] not in BENCHES:
        raise ConfigError(f"benchmark {argv[0]!r}, expected one of {', '.join(BENCHES)}")
    bare = argv[-1] in ("-h", "--help") and not all(map(importlib.util.find_spec, ("ray", "torch")))
    if argv[0] in OF_CLONE and not (bare or Path(__file__).parents[2].joinpath("examples/embedded").is_dir()):
        raise ConfigError(
            f"bench {argv[0]} starts real engines or trainers with examples/embedded, which is part of the repository and not of "
            "the wheel; clone the repository, type `make setup`, and run the benchmark there"
        )
    harness = importlib.import_module("r3channel.bench.harness")
    return harness.run(argv, {} if bare else parts_of(argv[0]), about=BENCHES[argv[0]])
