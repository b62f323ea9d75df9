"""Trainer weights as Hugging Face tensors: gathered over TP, EP and PP, or apart, named and split by mbridge.

Read against mbridge 0.15.1 and megatron-core 0.16.1. Relied on, of a bridge: `mpu`, `config`,
`_weight_name_mapping_mcore_local_to_global`, `_weight_name_mapping_mcore_to_hf`, `_weight_merge_across_tp`,
`_weight_to_hf_format`. The gathering is ours: mbridge's `export_weights` sends two pickled objects per tensor, and
refuses expert tensor parallelism 1 under tensor parallelism. Nothing here knows about engines or buckets.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from r3channel.errors import ConfigError
from r3channel.weights.geometry import MOST_PIECES, Box
from r3channel.weights.geometry import Part as Place
from r3channel.weights.manifest import Named, TensorMeta

_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight")
_LOCAL_NORM = re.compile(r"(layers\.\d+)\.input_layernorm\.weight")
_LATENT_NORM = re.compile(r"self_attention\.(q|kv)_layernorm\.weight")
_LATENT = "self_attention.linear_kv_down_proj."
_ROUTER = ".mlp.router."
_EXPERT = ".mlp.experts.linear_fc"
Chunks = Sequence[torch.nn.Module]
"""A rank's model chunks, wrapped or not."""


class NamedView:
    """One model chunk seen with the parameter names of the Transformer Engine layer spec, which mbridge expects.

    Names of that spec pass unchanged, so the view serves both specs. It holds references, not copies.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):  # DDP, Float16Module
            chunk = inner
        self.model: Any = chunk
        self.decoder = self.model.decoder
        latent = any(_LATENT in name for name, _ in self.model.named_parameters())
        self._name = partial(te_name, latent=latent)
        # Kept: mbridge's load_weights asks once per tensor. The tensors alias the parameters.
        state = self.model.state_dict().items()
        self._state = {self._name(name): value for name, value in state if torch.is_tensor(value)}

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(self._name(name), weight) for name, weight in self.model.named_parameters()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state


def te_name(name: str, *, latent: bool = False) -> str:
    """Return a local-spec parameter name in the Transformer Engine spec.

    Args:
        name: the name in the local spec. Other names are returned unchanged.
        latent: whether the model has multi-latent attention, where other norms are fused than in a model with q, k and v.

    >>> te_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
    'decoder.layers.1.mlp.experts.linear_fc1.weight3'
    >>> te_name("decoder.layers.1.self_attention.kv_layernorm.weight", latent=True)
    'decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight'
    >>> [te_name("decoder.layers.1.input_layernorm.weight", latent=latent) for latent in (True, False)]
    ['decoder.layers.1.input_layernorm.weight', 'decoder.layers.1.self_attention.linear_qkv.layer_norm_weight']
    """
    name = _LOCAL_EXPERT.sub(r"experts.\2.weight\1", name)
    if latent:
        return _LATENT_NORM.sub(r"self_attention.linear_\1_up_proj.layer_norm_weight", name)
    return _LOCAL_NORM.sub(r"\1.self_attention.linear_qkv.layer_norm_weight", name)


_Shard = tuple[int, TensorMeta, int]
"""What the other pipeline stages must know of a parameter to receive it: its stage; name (with the global layer number, and the
expert number local to its EP rank), dtype and shape; the dimension that TP splits, -1 where it is replicated."""


def hf_weights(
    bridge: Any, chunks: Chunks, *, dtype: torch.dtype | None = None, source: bool | None = None, experts: bool | None = None
) -> Iterator[Named]:  # fmt: skip
    """Yield every whole tensor of the model under its Hugging Face name.

    The order is the same on every rank. The call is collective: every rank of the TP, EP and PP groups must iterate to the end,
    and in step with the others. Data-parallel replicas are independent of each other.

    Args:
        bridge: an mbridge bridge for this model (its names and formats are used, not its transport).
        chunks: this rank's model chunks, wrapped or not.
        dtype: cast every tensor, but never a router's weight or bias to fewer bits: rounding those changes the experts that
            are chosen (prime-rl#3524). None keeps the trainer's dtypes.
        source: whether this rank sends its stage. If it is given, each pipeline stage gathers its own tensors alone, without the
            PP group. They are yielded where `source` is True, on one rank of a stage (TP 0 and DP 0); other ranks of the stage
            yield none. `WeightSync.whole` with a group takes this form. None yields all of the model on every rank.
        experts: whether this rank sends the experts that it holds. If it is given beside `source`, nothing is gathered over EP:
            experts are yielded by ranks that hold them, where `experts` is True, on one of those that hold the same (expert TP 0,
            expert DP 0). Each of these then has a group of its own with all engines' ranks. None yields experts where `source` is
            True.

    Yields:
        (name, tensor). Tensors may alias the parameters or one another's memory: copy before the next optimizer step, or before
        writing.

    Raises:
        ConfigError: the chunks have a parameter that mbridge cannot name.
    """
    mpu = bridge.mpu
    everywhere = source is None and mpu.pp_size > 1
    with torch.no_grad():
        local = list(_local(bridge, chunks))
        device = local[0][1].device
        yielded = set[str]()
        mine = [(mpu.pp_rank, TensorMeta.of(name, weight), _partition_dim(weight)) for name, weight in local]
        for stage, meta, dim in _all_stages(mine, group=mpu.pp_group, device=device) if everywhere else mine:
            # a stage's shards come in the order in which the stage listed them
            is_here = stage == mpu.pp_rank
            weight = local.pop(0)[1] if is_here else torch.empty(meta.shape, dtype=meta.dtype, device=device)
            if everywhere:
                dist.broadcast(weight.detach(), dist.get_global_rank(mpu.pp_group, stage), group=mpu.pp_group)
            gives = source if experts is None or _EXPERT not in meta.name else experts
            for name, tensor in _convert(bridge, meta.name, weight.detach(), dim, apart=experts is not None):
                if name not in yielded and gives is not False:  # the last stage has tied embeddings too
                    yielded.add(name)
                    yield name, tensor.to(_sent_dtype(meta.name, tensor.dtype, dtype))


def _sent_dtype(name: str, kept: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return kept if wanted is None or (_ROUTER in name and wanted.itemsize < kept.itemsize) else wanted


def _local(bridge: Any, chunks: Chunks) -> Iterator[Named]:
    for view in map(NamedView, chunks):
        names = bridge._weight_name_mapping_mcore_local_to_global(view, consider_ep=False)
        # Megatron keeps the experts' biases as buffers
        biases = [(name, value) for name, value in view.state_dict().items() if name.endswith("expert_bias")]
        for name, weight in [*view.named_parameters(), *biases]:
            if name not in names:
                raise ConfigError(f"{name}: not known to {type(bridge).__name__}; is it this model's bridge?")
            yield names[name], weight


def _partition_dim(weight: torch.Tensor) -> int:
    return getattr(weight, "partition_dim", -1) if getattr(weight, "tensor_model_parallel", False) else -1


def _all_stages(mine: Sequence[_Shard], *, group: Any, device: torch.device) -> list[_Shard]:
    told = json.dumps([(stage, meta.row(), dim) for stage, meta, dim in mine]).encode()
    rows = [row for text in gathered_bytes(told, group=group, device=device) for row in json.loads(text)]
    return [(stage, TensorMeta.from_row(meta), dim) for stage, meta, dim in rows]


def gathered_bytes(raw: bytes, *, group: Any, device: torch.device) -> list[bytes]:
    """Gather every rank's bytes, of any length, by rank.

    Raises:
        RuntimeError: a rank is gone (torch's own error).
    """
    lengths = _gather(torch.tensor([len(raw)], device=device), group=group)
    longest = max(1, *(int(length) for length in lengths))
    mine = torch.frombuffer(bytearray(raw.ljust(longest)), dtype=torch.uint8).to(device)
    rows = _gather(mine, group=group)
    return [row.cpu().numpy()[: int(n)].tobytes() for row, n in zip(rows, lengths, strict=True)]


def _convert(bridge: Any, name: str, weight: torch.Tensor, dim: int, *, apart: bool) -> Iterator[Named]:
    """Yield the whole checkpoint tensors of a parameter.

    With `apart` only this EP rank's experts are yielded.
    """
    mpu, parts = bridge.mpu, [(name, weight)]
    group, size = mpu.tp_group, mpu.tp_size
    if _EXPERT in name:
        group, size = mpu.etp_group, mpu.etp_size
        if mpu.ep_size > 1:  # the same local expert of every EP rank, under its global number
            held = {mpu.ep_rank: weight} if apart else dict(enumerate(_gather(weight, group=mpu.ep_group)))
            parts = [(_global_expert(bridge, name, rank), part) for rank, part in held.items()]
    for named, whole in parts:
        if size > 1 and dim >= 0:
            whole = _merge(bridge, name, _gather(whole, group=group), dim)
        yield from _hf_names(bridge, named, whole)


def _global_expert(bridge: Any, name: str, ep_rank: int) -> str:
    prefix, number = name.split(".weight")
    per_rank = bridge.config.num_moe_experts // bridge.mpu.ep_size
    return f"{prefix}.weight{ep_rank * per_rank + int(number)}"


def _merge(bridge: Any, name: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    marked: Any = torch.empty(0)  # mbridge reads from a parameter's attributes how it is split
    marked.tensor_model_parallel, marked.partition_dim = True, dim
    return bridge._weight_merge_across_tp(name, parts, marked)


def _gather(weight: torch.Tensor, *, group: Any) -> list[torch.Tensor]:
    mine = weight.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return parts


def _hf_names(bridge: Any, name: str, whole: torch.Tensor) -> Iterator[Named]:
    return zip(*bridge._weight_to_hf_format(name, whole), strict=True)


# -- what a rank holds, without gathering ------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A box of a whole checkpoint tensor, as a view of this rank's own memory."""

    meta: TensorMeta
    """The whole tensor's name and shape, and the dtype that is sent."""
    box: Box
    tensor: torch.Tensor


class Part(NamedTuple):
    """A parameter as one tensor-parallel rank holds it."""

    name: str
    """Megatron's name, with the layer's and the expert's numbers in the whole model."""
    tensor: torch.Tensor
    partition_dim: int  # -1: replicated over TP
    rank: int
    size: int
    """Number of ranks in the group whose ranks hold other parts of the parameter. `rank` is this rank's number there."""


def parts_of(named: Iterable[Named], *, dense: tuple[int, int], expert: tuple[int, int]) -> Iterator[Part]:
    """Yield Megatron's parameters as parts of the whole model's parameters.

    Args:
        named: parameters under their names in the whole model.
        dense: (rank, size) in the group that splits all parameters but the experts.
        expert: (rank, size) in the group that splits the experts.
    """
    for name, weight in named:
        dim = _partition_dim(weight) if getattr(weight, "parallel_mode", "") != "duplicated" else -1
        yield Part(name, weight, dim, *(expert if ".experts." in name else dense))


def merged_tp(name: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Merge Megatron's parts of a parameter into one.

    Each rank has a part of the gate and one of the up projection. Grouped experts name the wrong dimension of the down
    projection.

    Args:
        name: Megatron's name.
        parts: the parts of all ranks.
        dim: the dimension that is split.
    """
    if "linear_fc1." in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim)
    return torch.cat(parts, 1 if "linear_fc2.weight" in name else dim)


Merge = Callable[[str, list[torch.Tensor], int], torch.Tensor]
"""Takes a name, the parts of all ranks and the dimension that is split. Returns the whole parameter."""
Convert = Callable[[str, torch.Tensor], Iterable[Named]]
"""Takes a name and a whole parameter. Returns checkpoint tensors by name."""


def hf_shards(bridge: Any, chunks: Chunks, *, dtype: torch.dtype | None = None) -> list[Shard]:
    """Return this rank's part of every checkpoint tensor.

    It is for `WeightSync.sharded`. There is no communication and no copy; see `shards_of`.

    Args:
        bridge: as of `hf_weights`.
        chunks: as of `hf_weights`.
        dtype: as of `hf_weights`.
    """
    mpu, named = bridge.mpu, _local(bridge, chunks)
    whole = ((_global_expert(bridge, n, mpu.ep_rank) if _EXPERT in n else n, weight) for n, weight in named)
    parts = parts_of(whole, dense=(mpu.tp_rank, mpu.tp_size), expert=(mpu.etp_rank, mpu.etp_size))
    return shards_of(parts, partial(_merge, bridge), partial(_hf_names, bridge), dtype=dtype, owner=bridge)


_learned = WeakKeyDictionary[Any, dict[Any, Any]]()
"""What `shards_of` knows, by owner, then by kind of parameter and by parameter."""


@torch.no_grad()
def shards_of(
    parts: Iterable[Part], merge: Merge, convert: Convert, *, dtype: torch.dtype | None = None, owner: Any = None,
) -> list[Shard]:  # fmt: skip
    """Return what parts become in the checkpoint, as views of them.

    Where a parameter's elements go is learned from `merge` and `convert` themselves: once per kind of parameter (its name without
    numbers, its shape and cut) they move tensors that hold each element's index along one axis. The result depends on no value
    and no memory.

    Args:
        parts: this rank's parts.
        merge: joins all ranks' parts of a parameter.
        convert: makes checkpoint tensors of a whole parameter.
        dtype: the dtype that is sent, as of `hf_weights`.
        owner: keeps what was learned. A later call with the same owner, and functions that do the same, learns only kinds that
            are new. What was learned is forgotten with the owner.

    Raises:
        ConfigError: `merge` or `convert` computes instead of moving.
    """
    known: dict[Any, Any] = {} if owner is None else _learned.setdefault(owner, {})
    shards: list[Shard] = []
    for part in parts:
        weight = part.tensor.detach().contiguous()
        sent = _sent_dtype(part.name, weight.dtype, dtype)
        cut = weight.shape, part.partition_dim, part.rank, part.size
        if (key := (part.name, sent, *cut)) not in known:
            if (kind := (re.sub(r"\d+", "#", part.name), *cut)) not in known:
                known[kind] = _places(part, merge, convert)
            whole, shapes, places = known[kind]
            named = convert(part.name, whole)
            metas = [TensorMeta(name=name, dtype=sent, shape=tuple(made.shape)) for name, made in named]
            if [meta.shape for meta in metas] != shapes:  # this parameter is not of that kind after all
                places = _places(part, merge, convert)[2]
            known[key] = [(metas[place.tensor], place) for place in places]
        shards += [Shard(meta, place.box, place.view(weight)) for meta, place in known[key]]
    return shards


def _places(part: Part, merge: Merge, convert: Convert) -> tuple[torch.Tensor, list[Any], list[Place]]:
    """Return where our part of a parameter goes in the checkpoint.

    The result is the whole parameter without values, the shapes that `convert` makes of it, and our part's places.
    """
    shape, size = part.tensor.shape, 1 if part.partition_dim < 0 else part.size
    passes = [[torch.tensor(size == 1 or rank == part.rank).expand(shape) for rank in range(size)]]
    for axis, n in enumerate(shape):
        index = torch.arange(n).view(n, *[1] * (len(shape) - axis - 1)).expand(shape)
        passes.append([index] * size)
    came, whole = list[list[torch.Tensor]](), passes[0][0]
    for parts in passes:
        with _Moving(part.name):
            whole = parts[0] if size == 1 else merge(part.name, parts, part.partition_dim)
            came.append([tensor for _, tensor in convert(part.name, whole)])
    numbered = enumerate(zip(*came, strict=True))
    places = [place for number, made in numbered for place in _boxes(number, part, *made)]
    return torch.empty_like(whole, device="meta"), [tuple(tensor.shape) for tensor in came[0]], places


_MOVES = {"stack", "index", "index_select", "flip", "roll", "repeat", "copy_", "empty", "empty_like"}
"""Operators that move or make memory, beside views."""


class _Moving(TorchDispatchMode):
    """Lets views and copies pass, and nothing else.

    An axis along which a tensor repeats stays a view of one item when the tensor is copied: the whole indexes of a large
    parameter would not fit into memory.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch would import dynamo, which takes 2 s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = func.overloadpacket.__name__, func._schema.returns
        if name == "cat":
            return _join(*args)
        if name == "clone":
            axes = range(args[0].dim())
            return _thin(args[0], axes).clone(memory_format=torch.contiguous_format).expand(args[0].shape)
        if name in ("view", "_unsafe_view"):
            return args[0].reshape(args[1])
        if name in _MOVES or all(value.alias_info and not value.alias_info.is_write for value in returns):
            return func(*args, **(kwargs or {}))
        raise ConfigError(f"{self._name} is computed ({func}), not moved; give whole tensors (hf_weights)")


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first, *others = tensors
    shape, dim = list(first.shape), dim % first.dim()
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    where = first.data_ptr(), first.stride()
    if first.stride(dim) == 0 and all((other.data_ptr(), other.stride()) == where for other in others):
        return first.narrow(dim, 0, 1).expand(shape)
    axes = [axis for axis in range(first.dim()) if axis != dim and not any(t.stride(axis) for t in tensors)]
    return torch.cat([_thin(tensor, axes) for tensor in tensors], dim).expand(shape)


def _thin(tensor: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
    """Keep one item of each of these axes that only repeats."""
    return tensor[tuple(slice(1 if a in axes and not s else None) for a, s in enumerate(tensor.stride()))]


def _boxes(tensor: int, part: Part, ours: torch.Tensor, *along: torch.Tensor) -> Iterator[Place]:
    """Yield our elements of a tensor as boxes.

    Each box steps evenly through the part. `ours` says which elements come from our part, `along` their index along each axis of
    it.
    """
    axes, offset = range(ours.dim()), 0
    if not ours.numel():
        yield Place(tensor, Box.whole(ours.shape), 0, 0, (1,) * ours.dim())
    mine = _thin(ours, axes).numpy()
    if not mine.any():
        return
    lines = [mine.any(axis=tuple(other for other in axes if other != axis)) for axis in axes]
    at = [np.flatnonzero(np.broadcast_to(line, n)) for line, n in zip(lines, ours.shape, strict=True)]
    even, values = mine.sum() == math.prod(int(line.sum()) for line in lines), [0 * line for line in at]
    for index, step in zip(along, torch.empty(part.tensor.shape, device="meta").stride(), strict=True):
        rest = _thin(index, axes).numpy()
        rest = rest[np.ix_(*(line if n > 1 else [0] for line, n in zip(at, rest.shape, strict=True)))]
        first = rest[(0,) * rest.ndim]
        offset, rest = offset + step * int(first), rest - first
        for axis in axes:
            line = rest[tuple(slice(None if a == axis else 1) for a in axes)]
            values[axis], rest = values[axis] + step * line.ravel(), rest - line
        even = even and not rest.any()
    most = MOST_PIECES + 1
    pieces = [list(itertools.islice(_runs(*line), most)) for line in zip(at, values, strict=True)]
    if not even or math.prod(map(len, pieces)) >= most:
        raise ConfigError(f"{part.name} is regrouped as no box can express; give whole tensors (hf_weights)")
    for runs in itertools.product(*pieces):
        starts, stops, offsets, strides = zip(*runs, strict=True) if runs else ((),) * 4
        yield Place(tensor, Box(starts, stops), 0, offset + sum(offsets), strides)


def _runs(at: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Yield neighbours whose values step evenly upwards.

    Each run is (first, end, first's value, step).
    """
    steps, begin = np.where(np.diff(at) == 1, np.diff(values), -1), 0
    while begin < len(at):
        step, end = 1, begin + 1
        if end < len(at) and steps[begin] >= 0:
            step, same = int(steps[begin]), steps[begin:] == steps[begin]
            end += len(same) if same.all() else int(np.argmin(same))
        yield int(at[begin]), int(at[begin]) + end - begin, int(values[begin]), step
        begin = end
