"""`r3channel errors NAME`: what an error means and what to do, as `r3channel/errors.md` has it."""

from __future__ import annotations

from collections.abc import Sequence

from r3channel import errors
from r3channel.errors import R3Error, UsageError, nearest
from r3channel.tools import commands


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("errors")
    parser.add_argument("name", nargs="?", help="an error's class, or its reason; without it all are listed")
    name = parser.parse_args(argv).name
    kinds = every_error()
    if name is None:
        print("\n".join(f"{kind.__name__:22} {describe(kind)}" for kind in kinds))
        return 0
    matches = [kind for kind in kinds if name.lower() in (kind.__name__.lower(), kind.reason)]
    if not matches:
        raise UsageError(f"no error is named {name!r}{nearest(name, [kind.__name__ for kind in kinds])}")
    for kind in matches:
        print(
            f"{kind.__name__} ({kind.__mro__[1].__name__}, reason {kind.reason}): {describe(kind)}\n{kind.remedy}"
        )
    return 0


def every_error() -> list[type[R3Error]]:
    """Return the root error and all below it, in their file's order."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, R3Error)]


def describe(error: type[R3Error]) -> str:
    """Return the first paragraph of an error's docstring, on one line."""
    return " ".join((error.__doc__ or "").split("\n\n")[0].split())
