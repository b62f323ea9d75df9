"""The parts that all benchmarks share: options, interleaved rounds, clocks, the stamp of the machine, and how results are
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from r3channel.tools import commands

_T = TypeVar("_T")
_COPY_BYTES = 256 << 20
_PACKAGES = ("numpy", "torch", "sglang", "megatron-core", "ray", "numba")


class Effort(NamedTuple):
    """The amount of work that the options ask for."""

    quick: bool = False
    rounds: int | None = None

    def choose(self, full: _T, quick: _T) -> _T:
        return quick if self.quick else full

    def rounds_of(self, full: int, quick: int) -> int:
        return self.rounds or self.choose(full, quick)


Parts = Mapping[str, Callable[[Effort], dict[str, Any]]]
"""Name -> the call that measures this part. It returns keys of the result; dictionaries of equal name are merged."""


def run(argv: Sequence[str], parts: Parts, *, about: str) -> int:
    """Measure and print; return exit status 0.

    Args:
        argv: The benchmark's name, then its options.
        parts: What the benchmark measures.
        about: The description in its help.
    """
    parser = commands.parser("bench", prog=f"bench {argv[0]}", description=about)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="little data, few rounds: the result's shape")
    parser.add_argument("--rounds", type=at_least_one, help="interleaved rounds of each part")
    parser.add_argument("--only", choices=sorted(parts) or None, action="append", help="repeatable")
    options = parser.parse_args(argv[1:])
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {}
    for name in options.only or parts:
        for key, value in parts[name](Effort(options.quick, options.rounds)).items():
            result[key] = result.get(key, {}) | value if isinstance(value, dict) else value
    result |= {"command": shlex.join(["r3channel", "bench", *argv]), "machine": stamp(load_before)}
    print(json.dumps(result) if options.json else text(result))
    return 0


def at_least_one(text: str) -> int:
    """Parse a count of at least 1 for argparse.

    Without a round there is nothing to take a median of.

    Raises:
        argparse.ArgumentTypeError: For any other text.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


# -- rounds ----------------------------------------------------------------------------------------------------------------


def interleave(
    calls: Mapping[str, Callable[[], _T]], *, rounds: int, warm_up: int = 1
) -> dict[str, list[_T]]:
    """Make all calls in every round and return their results.

    So all calls see the same machine. Each round begins with another call.

    Args:
        calls: Calls by name.
        rounds: Number of rounds whose results are kept.
        warm_up: Number of rounds before them, whose results are not kept.

    Returns:
        What each call returned, by name.
    """
    names, seen = list(calls), {name: [] for name in calls}
    for number in range(rounds + warm_up):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = calls[name]()
            if number >= warm_up:
                seen[name].append(result)
    return seen


def time_call(
    call: Callable[[], object], *, clock: Callable[[], float] = time.process_time, min_s: float = 0.0
) -> Callable[[], float]:
    """Return a call that returns its own seconds.

    Args:
        call: What is timed.
        clock: The clock in seconds. The default is this process's CPU time, which moves less than wall time on a shared machine.
        min_s: A shorter call is repeated until it takes this many seconds, and the mean is returned.
    """
    repeats = 1

    def seconds() -> float:
        begin_s = clock()
        for _ in range(repeats):
            call()
        return (clock() - begin_s) / repeats

    if min_s:
        seconds()  # compiles, and touches the memory
        repeats = max(1, round(min_s / max(1e-6, seconds())))
    return seconds


def medians_s(calls: Mapping[str, Callable[[], object]], *, rounds: int, **options: Any) -> dict[str, float]:
    """Return each call's median seconds over interleaved rounds.

    Args:
        calls: Calls by name.
        rounds: Number of rounds.
        options: Options of `time_call`.
    """
    seen = interleave({name: time_call(call, **options) for name, call in calls.items()}, rounds=rounds)
    return {name: median(values) for name, values in seen.items()}


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> dict[str, float]:
    """Return the median of `ours` over `theirs`, pair by pair.

    Returns:
        The median, and the bounds of its 95 % interval (bootstrap).
    """
    ratios = np.array([mine / other for mine, other in zip(ours, theirs, strict=True)])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def family_of(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    import psutil

    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """Return the CPU seconds that living processes have used.

    Threads that have ended are included. A process that has ended counts nothing. Each process's own CPU clock is read, in
    nanoseconds (Linux: clock id ~pid << 3 | 2, see clock_getcpuclockid(3)).
    """
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)
    return total


# -- what is printed -------------------------------------------------------------------------------------------------------


def stamp(load_before: float) -> dict[str, Any]:
    """Return a description of the machine as plain values.

    Args:
        load_before: The system's load before the benchmark.

    Returns:
        Among others `load`, the system's load of one minute, before and after the benchmark; the second value counts the
        benchmark itself. `memcpy_gbps` is the speed of one thread between two touched buffers far larger than the cache.
    """
    versions = {found.name: found.version for found in distributions() if found.name in _PACKAGES}
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    copy_s = time_call(lambda: np.copyto(target, source), clock=time.monotonic)
    name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": name[1] if name else platform.machine(),  # the kernel does not tell the name on ARM
        "cores": len(os.sched_getaffinity(0)), "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "memcpy_gbps": round(_COPY_BYTES / 1e9 / min(copy_s() for _ in range(7)), 1),
        "versions": {"python": platform.python_version(), **versions},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def describe(machine: dict[str, Any]) -> str:
    """Return a machine's stamp on one line.

    >>> describe({"cpu": "Intel Xeon", "cores": 2, "load": [0.3, 2.0]}), describe({"cpu": "AMD EPYC", "cores": 2, "load": []})
    ('2 x Intel Xeon, load 0.3 to 2.0', '2 x AMD EPYC, load unknown')
    """
    load = " to ".join(f"{value:.1f}" for value in machine["load"]) or "unknown"
    return f"{machine['cores']} x {machine['cpu']}, load {load}"


def text(result: Mapping[str, Any]) -> str:
    """Return a result as text for a person.

    Entries with equal keys become a table; every other figure is on a line of its own.
    """
    lines = list(_lines("", {key: value for key, value in result.items() if key != "machine"}))
    machine = result["machine"]
    return "\n".join([*lines, "", f"{describe(machine)}, memcpy {machine['memcpy_gbps']} GB/s"])


def _lines(name: str, value: Any) -> Iterator[str]:
    rows = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(rows, Mapping):
        yield f"{name}: {_cell(value)}"
    elif rows and all(isinstance(row, Mapping) for row in rows.values()) and len(rows) > 1:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [[name, *columns]]
        cells += [
            [str(key), *(_cell(row.get(column, "")) for column in columns)] for key, row in rows.items()
        ]
        widths = [max(len(row[number]) for row in cells) for number in range(len(columns) + 1)]
        yield ""
        for row in cells:
            yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield ""
    else:
        for key, inner in rows.items():
            yield from _lines(f"{name} {key}".strip(), inner)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
