"""Hostile input that coverage guides, by Atheris: `python -m tests.chaos.guided [KIND...] --seconds S`.

libFuzzer changes the inputs of a kind (`mutations`) and keeps those that reach new branches of r3channel. As in `hostile`, most
are signed anew, and an oracle or a typed error judges each. It says what it does; its last line of a kind begins with "Done".
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import atheris

COMPILED = ["r3channel.wire.kernels", "r3channel.plan.placement"]
"""What Numba compiles cannot be watched."""
with atheris.instrument_imports(include=["r3channel"], exclude=COMPILED):  # pyright: ignore
    from tests.chaos.hostile import Run, stop
    from tests.chaos.mutations import KINDS, change

_SIGNED, _MOST_BYTES = 0.85, 4096


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Ends the process: with status 0 where nothing failed. An input's first byte says which part of the corpus it replaces."""
    kind, run = KINDS[name], Run({name: KINDS[name]})
    for number, parts in enumerate(kind.corpus):
        folder.joinpath(str(number)).write_bytes(bytes([number]) + next(iter(parts.values())))

    def part_of(data: bytes | bytearray) -> str:
        return next(iter(kind.corpus[(data or b"\0")[0] % len(kind.corpus)]))

    def read(data: bytes) -> None:
        run.one(name, {part_of(data): data[1:]})
        assert not run.failures, run.failures

    def changed(data: bytes, most: int, seed: int) -> bytes:
        """By libFuzzer, or as `hostile` does, which knows numbers and JSON."""
        rng = random.Random(seed)
        ours = rng.random() < 0.5 and len(data) > 1
        whole = bytearray(data if ours else atheris.Mutate(data, most))
        inner = whole[1:]
        if ours:
            change(inner, rng)
        if rng.random() < _SIGNED:
            kind.sign(part_of(whole), inner, rng)
        return bytes(whole[:1] + inner)[:most]

    signal.signal(signal.SIGPROF, stop)
    run.arm()
    options = f"-max_total_time={seconds} -use_value_profile=1 -max_len={_MOST_BYTES} -artifact_prefix={folder}/ {folder}"
    atheris.Setup([sys.argv[0], *options.split()], read, custom_mutator=changed)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=int, default=600, help="of each kind")
    args, failed = parser.parse_args(), list[str]()
    for name in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            if not (child := os.fork()):  # libFuzzer does not return
                fuzz(name, args.seconds, Path(folder))
            failed += [name] * bool(os.waitpid(child, 0)[1])
    print(f"failed: {failed}" if failed else f"no failure: {', '.join(args.kinds)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
