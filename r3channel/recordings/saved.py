"""What `torch.save` wrote, as plain values and numpy arrays. Nothing is unpickled: the pickle's opcodes are read one by one, and
no name in it is looked up or called. What is no number, text, list, dict or array becomes `Foreign`, with its name.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid

_STORAGES = {
    "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8", "Half": "<f2", "Float": "<f4",
    "Double": "<f8", "Bool": "?",
}  # fmt: skip
"""`torch ByteStorage` and so on -> numpy's type."""
_NUMBERS = "?iuf"
"""Kinds of numpy's dtypes that are read."""


@dataclass(frozen=True)
class Foreign:
    """An object that stays unread."""

    name: str


@dataclass
class _Array:
    """A numpy array whose bytes come in the next BUILD."""

    value: Any = None


def read_saved(path: Path) -> Any:
    """Raises RecordingInvalid for what is no file of `torch.save`, or cut or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            root = pickled.removesuffix("data.pkl")
            return _plain(_Machine(lambda key: archive.read(f"{root}data/{key}")).run(archive.read(pickled)))
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise RecordingInvalid(f"{path}: expected a file that torch.save wrote: {error!r}") from error


class _Machine:
    """The pickle's own stack, of values."""

    def __init__(self, storage: Callable[[str], bytes]) -> None:
        self._storage, self._memo = storage, dict[int, Any]()
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self._stack.append(argument)
            elif name not in ("PROTO", "FRAME"):
                # An unknown one is an AttributeError: damaged, or another protocol.
                getattr(self, f"_{name.lower()}")(argument)
        raise ValueError("the pickle has no end")

    def _global(self, name: str) -> None:
        self._stack.append(Foreign(name))

    def _mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _put(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def _get(self, at: int) -> None:
        self._stack.append(self._memo[at])

    _binput = _long_binput = _put
    _binget = _long_binget = _get

    def _tuple(self, _: Any) -> None:
        values = tuple(self._marked())
        self._stack.append(values)

    def _last(self, _: Any, *, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    _tuple1 = partialmethod(_last, count=1)
    _tuple2 = partialmethod(_last, count=2)
    _tuple3 = partialmethod(_last, count=3)

    def _append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value)

    def _appends(self, _: Any) -> None:
        values = self._marked()
        self._stack[-1].extend(values)

    def _setitem(self, _: Any) -> None:
        key, value = self._stack[-2:]
        del self._stack[-2:]
        self._set(key, value)

    def _setitems(self, _: Any) -> None:
        values = self._marked()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        if isinstance(self._stack[-1], dict):
            self._stack[-1][key] = value

    def _binpersid(self, _: Any) -> None:
        _, kind, key, _, count = self._stack.pop()
        found = np.frombuffer(self._storage(key), _STORAGES[kind.name[6:-7]])
        if len(found) != count:
            raise ValueError(f"storage {key} has {len(found)} numbers, expected {count}")
        self._stack.append(found)

    def _reduce(self, _: Any) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        self._stack.append(_made(called.name if isinstance(called, Foreign) else "", arguments))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state, built = self._stack.pop(), self._stack[-1]
        if isinstance(built, np.dtype) and state[1] == ">":
            raise ValueError("an array of big-endian numbers")
        if isinstance(built, _Array):
            _, shape, dtype, fortran, data = state
            flat = np.frombuffer(data, dtype)
            built.value = flat.reshape(shape, order="F" if fortran else "C")


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """What calling that name would give, of the few that arrays are made with."""
    if name == "torch._utils _rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    if name == "collections OrderedDict":
        return {}
    if name.endswith("multiarray _reconstruct"):
        return _Array()
    if name == "numpy dtype":
        dtype = np.dtype(str(arguments[0]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of {dtype}")
        return dtype
    if name == "_codecs encode":
        return arguments[0].encode("latin1")
    return Foreign(name)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    plain = tuple(int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
    if count and any(size > 1 and a != b for size, a, b in zip(shape, stride, plain, strict=True)):
        raise ValueError(f"a tensor of strides {stride} for shape {shape}; expected a contiguous one")
    if not 0 <= offset <= offset + count <= len(storage):
        raise ValueError(f"a tensor of {count} numbers at {offset} of {len(storage)}")
    return storage[offset : offset + count].reshape(shape)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return value.value if isinstance(value, _Array) else value


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_ARGUMENTS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINBYTES",
        "SHORT_BINBYTES",
    ]
)
