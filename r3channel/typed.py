"""Type checks for public calls: the error names the wrong argument, not the later line that breaks on it."""

from __future__ import annotations

import collections.abc as containers
import inspect
from collections.abc import Callable
from functools import wraps
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
    signature, hints = inspect.signature(call), dict[str, Any]()

    @wraps(call)
    def call_checked(*arguments: Any, **named: Any) -> Any:
        if not hints:
            hints.update(get_type_hints(call))
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError:  # the call itself raises Python's better message
            given = dict[str, Any]()
        for name, value in given.items():
            if not _fits(value, hints.get(name, Any)):
                wanted = signature.parameters[name].annotation
                raise UsageError(
                    f"{call.__qualname__}: {name} is {value!r:.80} ({type(value).__name__}), expected {wanted}"
                )
        return call(*arguments, **named)

    return call_checked  # pyright: ignore[reportReturnType]


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint]) and (hint is bool or not isinstance(value, bool))
    if origin is containers.Mapping:
        keyed = isinstance(value, containers.Mapping)
        return keyed and (inner[0] is not str or all(isinstance(key, str) for key in value))
    if origin in (containers.Sequence, containers.Iterable):
        if isinstance(value, (str, bytes, Number, NoneType)):
            return False
        if origin is containers.Iterable:  # not looked into: it may be readable only once
            return True
        deeper = inner[0] is str or get_origin(inner[0]) is containers.Sequence
        plain = not isinstance(value, containers.Mapping)
        return plain and (not deeper or all(_fits(item, inner[0]) for item in value))
    return True
