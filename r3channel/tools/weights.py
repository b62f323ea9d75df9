"""`r3channel weights verify`: compares running engines' weights with the trainer's committed weights, or with one another.

    r3channel weights verify --engine http://127.0.0.1:30000 --manifest committed.json

The committed weights come from the trainer's manifest file. Exit status: 0 equal, 1 different, 2 could not look. The command
only asks; it changes nothing. The digests are those of CPU engines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from r3channel.errors import ConfigError
from r3channel.tools import commands

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One parameter that is not as expected; None for a side that does not have it."""

    engine: str
    name: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        held = "the engine has no such parameter" if self.found is None else f"the engine holds {self.found}"
        if self.expected is None:
            return f"{self.name}: {held}, the manifest does not name it"
        return f"{self.name}: expected {self.expected}, {held}"


def run(argv: Sequence[str]) -> int:
    """Run the command as the module describes it."""
    options = _parser().parse_args(argv)
    from r3channel.weights.engine import EngineHandle
    from r3channel.weights.store import HeldWeights

    clients = [EngineHandle(url) for url in options.engine]
    held = None if options.manifest is None else HeldWeights.read(options.manifest)
    limit = {"timeout_s": options.timeout_s}
    engines = {one.url: (one.weight_version(**limit), one.weight_checksums(**limit)) for one in clients}
    if held is None and len(engines) < 2:
        raise ConfigError(
            "one engine without --manifest: there is nothing to compare with. Give a second --engine"
        )
    version, first = next(iter(engines.values())) if held is None else (str(held.version), [])
    wanted = {url: first if held is None else held.of_ranks(len(sums)) for url, (_, sums) in engines.items()}
    differences = [d for url, own in engines.items() for d in compare_ranks(wanted[url], own[1], engine=url)]
    versions, counts = {url: own for url, (own, _) in engines.items()}, [*map(_count, wanted.values())]
    stale = [url for url, other in versions.items() if other != version]
    if options.json:
        fields = {"parameters": counts[0], "version": version, "engine_versions": versions}
        print(json.dumps(fields | {"different": [asdict(difference) for difference in differences]}))
    else:
        print(_text(counts, version, versions, differences))
    return 1 if differences or stale else 0


def compare_ranks(
    wanted: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, str]], *, engine: str
) -> list[Difference]:
    """Compare an engine's checksums rank by rank.

    Raises:
        ConfigError: the engine has another number of ranks, so that the ranks' parts cannot be compared.
    """
    if len(wanted) != len(found):
        raise ConfigError(f"{engine} has {len(found)} ranks, expected {len(wanted)}: their parts differ")
    names = [engine if len(found) == 1 else f"{engine} rank {rank}" for rank in range(len(found))]
    return [d for name, a, b in zip(names, wanted, found, strict=True) for d in compare(a, b, engine=name)]


def _count(ranks: Sequence[Mapping[str, str]]) -> int:
    return sum(map(len, ranks))


def compare(wanted: Mapping[str, str], found: Mapping[str, str], *, engine: str) -> list[Difference]:
    """Return the parameters whose checksums differ, in order of names."""
    names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return [Difference(engine, name, wanted.get(name), found.get(name)) for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("weights")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    verify = verbs.add_parser("verify", help="digests of what engines hold against the trainer's manifest")
    verify.add_argument("--engine", metavar="URL", action="append", required=True, help="repeatable")
    verify.add_argument(
        "--manifest", metavar="FILE", help="what the trainer wrote; without it engines are compared"
    )
    verify.add_argument("--timeout-s", type=float, default=120.0, help="deadline of each engine's answer")
    verify.add_argument("--json", action="store_true")
    return parser


def _text(
    counts: Sequence[int], version: str, versions: Mapping[str, str], differences: Sequence[Difference]
) -> str:
    lines = []
    for (url, engine_version), count in zip(versions.items(), counts, strict=True):
        mine = [difference for difference in differences if difference.engine.split(" ")[0] == url]
        verdict = "equal" if not mine else f"{len(mine)} differ"
        note = "" if engine_version == version else f", but it says version {engine_version}"
        lines.append(f"{url}: {count} parameters of version {version}: {verdict}{note}")
        lines += [f"  {difference}" for difference in mine[:_SHOWN]]
        lines += [f"  and {len(mine) - _SHOWN} more"] if len(mine) > _SHOWN else []
    return "\n".join(lines)
