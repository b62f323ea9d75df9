"""What relay and receiver say to each other on the connection that carries the rows. Plain values in JSON; no I/O here.

    receiver                      relay
    GROUP  {gpu}               ->                    asks for a process group; gpu: the receiver's own, where that is NCCL's
                               <- GROUP {...}        where both join it, at once; once per connection
    READY  {run, step, seal, group} ->                  group: rows are to come over that process group
                               <- WAIT                  again and again while they are not prepared, or others have their turn
                               <- ROWS  {nbytes, digests, hash}    then the rows, then the digests (see below)
                                                          tensors, [[bytes, xxh3_64], ...], where the ticket names some:
                                                          then those (see `plan.token_tensors`)
    POSTED                     ->                    over a process group alone: its first receive waits for rows
    DAMAGED {run, step, seal}  ->                    rows that do not have their digests
                               <- AGAIN              they are whole here: say READY again
    DONE   {run, step, seal}   ->                    whole and verified
                               <- THANKS
                               <- ERROR {...}        in answer to anything: the relay's own typed error

The digests are two tables of uint64: what the engines made of each sample of the DP rank, [sample][MoE layer], and what the rows
that this receiver gets must have, [sample][travelling column].
`digests` are their bytes, `hash` is their xxh3_64: most of the first table says nothing about the rows that travel beside it.
"""

from __future__ import annotations

import json

from r3channel import errors
from r3channel.errors import R3Error, TransportError
from r3channel.typed import Json

_NAMES = ("READY", "GROUP", "ROWS", "DAMAGED", "AGAIN", "DONE", "THANKS", "ERROR", "WAIT", "POSTED")
READY, GROUP, ROWS, DAMAGED, AGAIN, DONE, THANKS, ERROR, WAIT, POSTED = range(len(_NAMES))

_MOST_ERROR_BYTES = 64_000
SEAL = ("run", "step", "seal")
_TYPES: dict[str, tuple[type, ...]] = dict.fromkeys(("run", "gpu", "backend", "name", "host"), (str,))
"""Types of the values that are no numbers."""
Seal = tuple[str, int, int]


def pack(**values: object) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def unpack(kind: int, body: bytes, *, expected: int, names: tuple[str, ...] = ()) -> Json:
    """Return the values of a record of the expected kind.

    An ERROR record raises the error that it carries.

    Args:
        kind: The kind of the record.
        body: Its bytes.
        expected: The kind that the caller waits for.
        names: Values that the record must have.

    Raises:
        TransportError: The record is of another kind, cannot be read, or lacks a value.
    """
    try:
        values: Json = json.loads(body) if body else {}
        if kind == ERROR:
            raise error_of(values)
        fits = type(values) is dict and all(type(values[n]) in _TYPES.get(n, (int, bool)) for n in names)
        if kind == expected and fits:
            return values
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TransportError(f"a record of kind {kind} cannot be read: {error!r}") from error
    name = _NAMES[kind] if kind < len(_NAMES) else kind
    raise TransportError(f"a record {name} of {len(body)} bytes, expected {_NAMES[expected]} with {names}")


def seal_of(identity: Seal) -> Json:
    """Return a seal's identity as a record has it."""
    return dict(zip(SEAL, identity, strict=True))


def seal_in(values: Json) -> Seal:
    """Return the identity of the seal that a record names."""
    return values["run"], values["step"], values["seal"]


def values_of(error: R3Error) -> Json:
    """Return an error as plain values for an ERROR record.

    The record that `pack` makes of them has at most 64 kB: longer texts and lists are cut, and the counts of cut lists are kept.
    """
    ranks, cut = [list(rank) for rank in error.ranks], list[str]()
    values: Json = {"samples": list(error.samples), "engines": list(error.engines), "ranks": ranks}
    for kind, items in values.items():
        count = len(items)
        while len(json.dumps(items)) > _MOST_ERROR_BYTES // 6:
            del items[len(items) // 2 :]
        if len(items) < count:
            cut.append(f"{count} {kind} in all")
    message = " ... ".join([str(error)[: _MOST_ERROR_BYTES // 12], *cut])
    return {"error": type(error).__name__, "message": message, "step": error.step, **values}


def error_of(values: Json) -> R3Error:
    """Return the error that an ERROR record carries.

    Only classes of this package are made, by name; another name becomes a TransportError.
    """
    kind = getattr(errors, str(values["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, R3Error)):
        kind = TransportError
    step = values["step"]
    return kind(
        str(values["message"]),
        samples=[str(name) for name in values["samples"]],
        engines=[str(name) for name in values["engines"]],
        ranks=[tuple(int(part) for part in rank) for rank in values["ranks"]],
        step=None if step is None else int(step),
    )
