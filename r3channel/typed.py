"""Type checks for public calls: the error names the wrong argument, not the later line that breaks on it."""

from __future__ import annotations

import collections.abc as containers
import inspect
from collections.abc import Callable
from functools import wraps
from itertools import chain
from numbers import Integral, Number, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from r3channel.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
Json = dict[str, Any]
"""A JSON object."""
_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,), bytes: (bytes, bytearray, memoryview), int: (Integral,), float: (Real,), bool: (bool,), NoneType: (NoneType,),
}  # fmt: skip
_NO_ITEMS = str, bytes, Number, NoneType


def check_types(call: F) -> F:
    """Make a call refuse arguments that are not what their annotations say.

    The check tells text, bytes and numbers apart, a text from a sequence of texts, and a mapping from other values. Nothing else
    that an annotation names is looked at.

    >>> from collections.abc import Sequence
    >>> @check_types
    ... def seal(step: int, names: Sequence[str] = ()) -> int:
    ...     return step
    >>> seal(3, ["a"]), seal("3")
    Traceback (most recent call last):
    r3channel.errors.UsageError: seal: step is '3' (str), expected int

    Raises:
        UsageError: Names the call, the argument, what it is and what was expected.
    """
    names, checks = [*inspect.signature(call).parameters], dict[str, Callable[[Any], bool]]()

    @wraps(call)
    def call_checked(*arguments: Any, **named: Any) -> Any:
        if not checks:  # not before: a hint may name what its module defines later
            checks.update({name: _check_of(hint) for name, hint in get_type_hints(call).items()})
        # not `signature.bind`, which costs a sixth of `Relay.add` of a short reply; what does not bind, the call refuses itself
        for name, value in chain(zip(names, arguments, strict=False), named.items()):
            if name in checks and not checks[name](value):
                wanted = call.__annotations__[name]
                raise UsageError(
                    f"{call.__qualname__}: {name} is {value!r:.80} ({type(value).__name__}), expected {wanted}"
                )
        return call(*arguments, **named)

    return call_checked  # pyright: ignore[reportReturnType]


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return the check of a value that has this hint."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        ways = [_check_of(one) for one in inner]
        return lambda value: any(fits(value) for fits in ways)
    if hint in _PLAIN:
        kinds, other = _PLAIN[hint], () if hint is bool else bool
        return lambda value: isinstance(value, kinds) and not isinstance(value, other)
    if origin is containers.Mapping:
        keys = str if inner[0] is str else object
        return lambda value: isinstance(value, origin) and all(isinstance(key, keys) for key in value)
    if origin is containers.Iterable:  # not looked into: it may be readable only once
        return lambda value: not isinstance(value, _NO_ITEMS)
    if origin is containers.Sequence:
        no_items, fits = (*_NO_ITEMS, containers.Mapping), _check_of(inner[0])
        deeper = inner[0] is str or get_origin(inner[0]) is containers.Sequence
        return lambda value: not isinstance(value, no_items) and (not deeper or all(map(fits, value)))
    return lambda _: True
