"""A dry run of the model's own loader: it shows which part of which checkpoint tensor goes where in a rank's parameters.

`load_weights` runs once on meta tensors. Nothing is read, and a copy is noted instead of done, so nothing is written. What a
loader joins before it copies it is noted piece by piece, and what it has the model derive from its parameters at the end (MLA's
`w_kc` and `w_vc`) as a call to be repeated (`derive`). A loader that does more (arithmetic, `.item()`) gets whole tensors staged,
and the run notes only which tensors reach which parameters. Where even that cannot be known (the loader replaces tensors, or
copies in another thread), `Learned.refused` says why.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from r3channel.errors import ManifestMismatch
from r3channel.weights.geometry import MOST_PIECES, Box, Needs, Part, PartTable, steps_of
from r3channel.weights.manifest import TensorMeta

_ATEN = torch.ops.aten
_COPY = _ATEN.copy_.default
NAMES_UNKNOWN = "which names it takes is not known"
"""The end of `Learned.refused` where a dry run did not tell which tensors reach a parameter."""
_POST_LOAD = "post_load_weights"
"""SGLang's name for what a model derives from its parameters once they are loaded."""


class NotReplayable(Exception):
    """The model's own loader does something that copies cannot repeat. Whole tensors are staged, and the loader places them."""


class Learned(NamedTuple):
    """The result of a dry run, valid while tensors and parameters stay the same."""

    tensors: tuple[TensorMeta, ...] = ()
    memory: Any = ("", {})
    """Where experts and parameters lay in the dry run."""
    placed: Callable[[], str] = str
    """Digests where experts lie now; empty where they always lie alike."""
    needs: Needs = Needs()
    refused: str = ""
    """Why whole tensors are staged and the model's own loader places them at the commit; empty where parts are placed."""
    copied: tuple[Part, ...] = ()
    """With `refused`: parts of parameters that this loader fills with plain copies alone, which are compared afterwards."""
    derived: tuple[tuple[str, tuple[Any, ...], Mapping[str, Any]], ...] = ()
    """Modules whose `post_load_weights` the loader calls, and with which arguments."""

    def moved_experts(self) -> str:
        """Return why a placement would land at the wrong experts.

        Returns:
            The reason; empty where experts lie as they did in the dry run.
        """
        return "" if self.placed() == self.memory[0] else "relink: experts have moved since it was linked"


def learn(model: torch.nn.Module, tensors: tuple[TensorMeta, ...], before: Learned) -> Learned:
    """Run the loader dry and return what it does.

    A run takes the loader's time in a paused engine, 0.7 ms a tensor. The model is as before in any case.

    Args:
        model: the engine's model.
        tensors: the checkpoint's tensors.
        before: the last result; it is returned if it still holds.

    Raises:
        ManifestMismatch: the model's loader refuses a name.
    """
    memory = before.placed(), _memory(model)
    if (before.tensors, before.memory) == (tensors, memory):
        return before
    result = partial(Learned, tensors, memory, before.placed)
    try:
        recorder = dry_run(model, tensors)
    except NotReplayable as error:
        return result(_whole_tensors(tensors, range(len(tensors)), ()), f"{error}; {NAMES_UNKNOWN}")
    missing, padding, copied = recorder.coverage()
    if recorder.refused:
        return result(_whole_tensors(tensors, sorted(recorder.used), missing), recorder.refused, copied)
    metas = tuple(TensorMeta.of(name, param) for name, param in recorder.named)
    noted = itertools.chain.from_iterable(recorder.parts.values())
    parts = sorted(noted, key=lambda part: (part.tensor, part.param, part.offset))
    return result(Needs(metas, PartTable.of(parts), missing, padding), derived=tuple(recorder.derived))


def derive(model: torch.nn.Module, learned: Learned) -> None:
    """Make the model compute its derived tensors from its parameters again.

    The model's own loader does so at its end.
    """
    for path, args, kwargs in learned.derived:
        getattr(model.get_submodule(path), _POST_LOAD)(*args, **kwargs)


def _whole_tensors(tensors: Sequence[TensorMeta], used: Sequence[int], missing: tuple[str, ...]) -> Needs:
    metas = tuple(tensors[index] for index in used)
    numbered = enumerate(zip(used, metas, strict=True))
    parts = [Part(at, Box.whole(meta.shape), n, 0, steps_of(meta.shape)) for n, (at, meta) in numbered]
    return Needs(metas, PartTable.of(parts), missing)


def dry_run(model: torch.nn.Module, tensors: Sequence[TensorMeta]) -> _Recorder:
    """Run the loader without copying and return what it does.

    Raises:
        NotReplayable: not even the names that the loader takes can be known.
        ManifestMismatch: the loader looks up a name that is not there.
    """
    before, attributes = _memory(model), _tensor_attributes(model)
    recorder = _Recorder(model, tensors)
    deriving = {path: module for path, module in model.named_modules() if hasattr(module, _POST_LOAD)}
    try:
        for path, module in deriving.items():  # the method would derive tensors from old weights
            vars(module)[_POST_LOAD] = partial(recorder.derives, path)
        with torch.no_grad(), recorder:
            named = zip((meta.name for meta in tensors), recorder.given, strict=True)
            model.load_weights(named)  # pyright: ignore[reportCallIssue]
    except KeyError as error:  # a loader that looks names up would fail so at the commit
        raise ManifestMismatch(f"load_weights has no place for {error}; is it misspelt?") from error
    except Exception as error:  # whatever a loader raises on a tensor without values
        raise NotReplayable(f"load_weights does more than copy: {type(error).__name__}: {error}") from error
    finally:
        for module in deriving.values():
            vars(module).pop(_POST_LOAD, None)
    if _memory(model) != before:
        raise NotReplayable("load_weights replaces parameters")
    if _tensor_attributes(model) != attributes:
        recorder.refuse("load_weights derives other tensors from the checkpoint")
    return recorder


class _Recorder(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module, tensors: Sequence[TensorMeta]) -> None:
        super().__init__()
        self._tensors = tensors
        self.given = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in tensors]
        """The checkpoint, without values."""
        self._tensor_of = {_storage(tensor): index for index, tensor in enumerate(self.given)}
        self.named = list(model.named_parameters())
        self._index: dict[int, int] = {}
        for index, (name, param) in enumerate(self.named):
            if self._index.setdefault(_storage(param), index) != index:
                raise NotReplayable(f"{name} shares its memory with another parameter")
            if not param.is_contiguous():
                raise NotReplayable(f"{name} is not contiguous")
        self.refused = ""
        """The first thing that is more than a copy."""
        self.parts = defaultdict[int, list[Part]](list)
        """Plain copies, by parameter; the next two are by parameter, too."""
        self.made = defaultdict[int, list[tuple[Part, bool]]](list)
        """Writes that are no plain copies: where, and whether something was put there."""
        self.padding = defaultdict[int, list[tuple[Part, torch.Tensor, float]]](list)
        """(place, view of it, constant) that a loader fills itself."""
        self.derived: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._joined: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor], int]] = {}
        """Storage that is views of the checkpoint side by side -> the whole, the views, and the axis that they lie along."""
        self.used: set[int] = set()
        """Tensors whose values reach a parameter, or memory that is derived from it."""
        self._made_of = {storage: {index} for storage, index in self._tensor_of.items()}
        """Storage -> the tensors that it was made of."""
        self._alive: list[torch.Tensor] = []
        """Keeps storages alive, so that none gets another's number."""

    def _place(self, view: torch.Tensor) -> Part:
        param = self._index[_storage(view)]
        offset = int(view.storage_offset()) - int(self.named[param][1].storage_offset())
        return Part(-1, Box.whole(view.shape), param, offset, view.stride())

    def coverage(self) -> tuple[tuple[str, ...], tuple[tuple[Part, float], ...], tuple[Part, ...]]:
        """Return what the copies leave open in the model's parameters.

        Returns:
            Parameters with items that neither a tensor nor padding fills; padding that is still to be filled; parts of parameters
            that are made of plain copies alone.
        """
        missing, padding, alone = list[str](), list[tuple[Part, float]](), list[Part]()
        for index, (name, param) in enumerate(self.named):
            # one parameter at a time: a host may have no room for all
            counts = torch.zeros(param.numel(), dtype=torch.uint8)
            for part in self.parts[index]:
                part.view(counts).add_(1)
            if bool((counts > 1).any()):
                self.refuse(f"{name} is written more than once")
            if not self.made[index] and bool((counts == 1).all()):
                alone += self.parts[index]
            for place, filled in self.made[index]:
                if filled:
                    place.view(counts).fill_(1)
            for place, view, constant in self.padding[index]:
                there = place.view(counts)
                if not bool((view == constant).all()):
                    if bool(there.any()):  # the loader fills it first, then places a tensor there
                        continue
                    padding.append((place, constant))
                there.fill_(1)
            if bool((counts == 0).any()):
                missing.append(name)
        return tuple(missing), tuple(padding), tuple(alone)

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def derives(self, path: str, *args: Any, **kwargs: Any) -> None:
        # the method may change quantised weights too, with their scales
        if any(param.itemsize == 1 for _, param in self.named):
            self.refuse("load_weights derives other tensors from quantised ones")
        self.derived.append((path, args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and self._copies(args[0], args[1]):
            return args[0]
        tensors = list(_tensors((*args, *kwargs.values())))
        sources = set[int]().union(*(self._made_of.get(_storage(tensor), ()) for tensor in tensors))
        if func is _COPY and not sources and self._is_padding(args[0], args[1]):
            return args[0]
        if func in (_ATEN.fill_.Scalar, _ATEN.zero_.default) and _storage(args[0]) in self._index:
            filled = self._place(args[0]), args[0], float((*args, 0.0)[1])
            self.padding[filled[0].param].append(filled)
            return args[0]
        if func is _ATEN._local_scalar_dense.default and sources:
            self.used |= sources
            names = ", ".join(self._tensors[index].name for index in sorted(sources))
            self.refuse(f"load_weights does more than copy: it looks at values of {names}")
            return args[0].dtype.is_floating_point * 0.0
        written = list(_find_written(func, args, kwargs))
        # `sum`, not `any`: `_keeps` must run for each
        if sum(self._keeps(func, value, sources) for value in written):
            return written[0] if len(func._schema.returns) == 1 else None
        if not sources:
            return func(*args, **kwargs)
        if func is _ATEN._to_copy.default and "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if not all(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        made = func(*args, **kwargs)
        for result in _tensors([made]):
            self._derive_from(result, sources)
        if func is _ATEN.cat.default:
            self._joined[_storage(made)] = made, args[0], (*args, 0)[1]
        return made

    def _keeps(self, func: Any, value: torch.Tensor, sources: set[int]) -> bool:
        """Return whether an operator must not write to this tensor.

        It must not if the memory is the model's or the caller's. The write is noted.
        """
        param = self._index.get(_storage(value))
        self._joined.pop(_storage(value), None)
        if param is None and (not sources or (value.is_meta and _storage(value) not in self._tensor_of)):
            return False
        what = "its own memory" if param is None else self.named[param][0]
        self.refuse(f"{func} writes {what} from something that is not the checkpoint")
        self.used |= sources
        if param is None:
            self._derive_from(value, sources)
        else:
            self.made[param].append((self._place(value), bool(sources) or func is _COPY))
        return True

    def _derive_from(self, value: torch.Tensor, sources: set[int]) -> None:
        if _storage(value) not in self._tensor_of:
            self._made_of.setdefault(_storage(value), set()).update(sources)
            self._alive.append(value)

    def _is_padding(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Return whether this copies what the parameter holds already.

        Loaders pad so. The place is noted as covered; nothing is copied.
        """
        if _storage(dst) not in self._index or src.is_meta or not bool((dst == src).all()):
            return False
        self.made[self._index[_storage(dst)]].append((self._place(dst), True))
        return True

    def _copies(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Return whether this copies boxes of the checkpoint into a parameter.

        Such a copy is noted and not done. Other uses of the checkpoint as a source are refused.
        """
        if _storage(src) not in self._tensor_of and _storage(src) not in self._joined:
            return False
        try:
            parts = self._parts(dst, src)
        except NotReplayable as error:
            self.refuse(str(error))
            return False
        self.parts[self._index[_storage(dst)]] += parts
        self.used |= {part.tensor for part in parts}
        return True

    def _parts(self, dst: torch.Tensor, src: torch.Tensor) -> list[Part]:
        if (joined := self._joined.get(_storage(src))) is not None:
            whole, views, axis = joined
            alike = dst.shape == src.shape == whole.shape and src.dtype == whole.dtype
            if not (alike and src.is_contiguous()):
                raise NotReplayable(f"a part of what it joins is copied, of shape {list(dst.shape)}")
            places = dst.split([view.shape[axis] for view in views], axis)
            return [part for to, view in zip(places, views, strict=True) for part in self._parts(to, view)]
        if _storage(dst) not in self._index or _storage(src) not in self._tensor_of:
            raise NotReplayable(f"what is computed is copied, or no parameter filled: {list(dst.shape)}")
        tensor, src = self._tensor_of[_storage(src)], src.expand(dst.shape)
        meta = self._tensors[tensor]
        if src.dtype != meta.dtype:
            raise NotReplayable(f"{meta.name} is read as {src.dtype}")
        return _boxes_of_view(tensor, meta, src, self._place(dst))


def _boxes_of_view(tensor: int, meta: TensorMeta, src: torch.Tensor, place: Part) -> list[Part]:
    """Return a copy of a strided view as boxes of the tensor."""
    steps = steps_of(meta.shape)
    # Of one item any stride is right, but torch gives no bytes of a view without a step.
    sizes, strides = [1] * len(steps), [1] * len(steps)
    begins = [(int(src.storage_offset()), place.offset)]  # of each box, in the tensor and in the parameter
    work = [dim for dim in zip(src.shape, src.stride(), place.strides, strict=True) if dim[0] != 1]
    while work:
        size, step, stride = work.pop()
        axis = next((a for a, n in enumerate(meta.shape) if n > 1 and steps[a] == step), None)
        if step <= 0:
            raise NotReplayable(f"{meta.name} is repeated by the loader")
        if axis is not None and size > (length := meta.shape[axis]):  # rows that were read as one line
            if size % length:
                raise NotReplayable(f"{meta.name} is read across its rows' ends")
            work += [(length, step, stride), (size // length, step * length, stride * length)]
        elif axis is not None and sizes[axis] == 1:  # the view walks the axis item by item
            sizes[axis], strides[axis] = size, stride
        elif len(begins) * size > MOST_PIECES:  # the view jumps, as over every second row of a large tensor
            raise NotReplayable(f"{meta.name} is taken in too many pieces")
        else:
            begins = [(at + n * step, to + n * stride) for at, to in begins for n in range(size)]
    parts = list[Part]()
    for at, to in begins:
        start = tuple(at // step % n for step, n in zip(steps, meta.shape, strict=True))
        box = Box(start, tuple(first + size for first, size in zip(start, sizes, strict=True)))
        if not Box.whole(meta.shape).holds(box):
            raise NotReplayable(f"{meta.name} is taken across its rows' ends")
        parts.append(Part(tensor, box, place.param, to, tuple(strides)))
    return parts


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves([*values]) if isinstance(value, torch.Tensor))


def _find_written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for at, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info and argument.alias_info.is_write:
            yield from _tensors([args[at] if at < len(args) else kwargs.get(argument.name, ())])


def _memory(model: torch.nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: (param.data_ptr(), tuple(param.shape), param.dtype) for name, param in named}


def _tensor_attributes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {
        f"{path}.{name}": (value.data_ptr(), 0 if value.is_inference() else value._version)
        for path, module in model.named_modules()
        for name, value in [*vars(module).items(), *module._buffers.items()]
        if isinstance(value, torch.Tensor)
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
