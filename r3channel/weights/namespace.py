"""One namespace for both sides: what a rank holds, as parts of Hugging Face tensors. Pure torch; no Megatron, no SGLang.

Engines fuse (q, k and v; gate and up; all experts of a layer), Megatron interleaves q, k and v per group and halves gate
and up per rank. A *converter* takes one parameter of a rank and returns its *pieces*: whole tensor's meta, box, and the
values. On the engine's side pieces are views, so that what is received lands in the engine's own memory; the dtype is the
engine's, so that the sender casts. On the trainer's side q, k and v are regrouped once per layer: cut per group instead,
a layer would have three pieces per group, and a plan as many operations.

    register("qwen3_moe", trainer=MegatronNames, engine=FusedNames)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from r3channel.errors import ConfigError
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta

Side = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a whole tensor, and its values."""

    meta: TensorMeta
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers that tell fused tensors apart."""

    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    latent: tuple[int, int] | None = None
    """MLA: (rows of `q_a_proj`, rows of `kv_a_proj_with_mqa`, which are latent and rotary); None without a query latent."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        heads = config["num_attention_heads"]
        return cls(
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            experts=config.get("num_experts") or config.get("n_routed_experts") or 0,
            latent=_latent(config),
        )


def _latent(config: Mapping[str, Any]) -> tuple[int, int] | None:
    if not config.get("q_lora_rank"):
        return None
    return config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOf:
    """Where a rank stands within its side."""

    tp: int
    tp_size: int
    ep: int = 0
    ep_size: int = 1


class Converter(Protocol):
    """Of one rank of one side."""

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        """One of the rank's own parameters, by the side's own name. Raises ConfigError for a shape that cannot be."""
        ...


Factory = Callable[[ModelShape, RankOf], Converter]
_factories: dict[tuple[str, Side], Factory] = {}


def register(model_type: str, *, trainer: Factory, engine: Factory) -> None:
    """Make a model family known by its Hugging Face `model_type`. Raises ConfigError when it is known already."""
    if (model_type, "trainer") in _factories:
        raise ConfigError(f"model type {model_type!r} has converters already")
    _factories[model_type, "trainer"] = trainer
    _factories[model_type, "engine"] = engine


def converter(model_type: str, side: Side, shape: ModelShape, rank: RankOf) -> Converter:
    """The converter of a rank; ConfigError names the families that are known."""
    factory = _factories.get((model_type, side))
    if factory is None:
        known = sorted({name for name, _ in _factories})
        raise ConfigError(f"model type {model_type!r}: no converter registered; known are {', '.join(known)}")
    return factory(shape, rank)


def convert_all(
    names: Converter, parameters: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, list[tuple[Box, torch.Tensor]]]:
    """All pieces of a rank, as a `Resharder` takes them. See `report` for the metadata."""
    shards: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, tensor in parameters:
        for piece in names.pieces(name, tensor):
            shards.setdefault(piece.meta.name, []).append((piece.box, piece.tensor))
    return shards


def report(names: Converter, parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[TensorMeta, Box]]:
    """What a rank tells the registry that it holds."""
    return [(p.meta, p.box) for name, tensor in parameters for p in names.pieces(name, tensor)]


# -- how a parameter is cut --------------------------------------------------------------------------------------------


def replicated(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(TensorMeta.of(name, tensor), Box.whole(tensor.shape), tensor)


def cut(name: str, tensor: torch.Tensor, *, axis: int, part: int, parts: int) -> Piece:
    """Part `part` of `parts` equal ones along `axis`."""
    whole = list(tensor.shape)
    start = [0] * tensor.dim()
    whole[axis] *= parts
    start[axis] = part * tensor.shape[axis]
    return _piece(name, tuple(whole), tuple(start), tensor)


def regroup_qkv(
    qkv: torch.Tensor, shape: ModelShape, *, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's (groups, q_per_group + 2, head_dim, ...) rows as three tensors in Hugging Face order, copied once.

    `groups`: the key/value heads in this tensor. Raises ConfigError when the rows do not fit.
    """
    per_group = shape.heads // shape.kv_heads
    rows = groups * (per_group + 2) * shape.head_dim
    if qkv.shape[0] != rows:
        raise ConfigError(
            f"fused qkv has {qkv.shape[0]} rows; {groups} groups of {per_group} + 2 heads of {shape.head_dim} need {rows}"
        )
    rest = qkv.shape[1:]
    grouped = qkv.view(groups, per_group + 2, shape.head_dim, *rest)
    q, k, v = grouped.split([per_group, 1, 1], dim=1)
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def split_qkv(name: str, qkv: torch.Tensor, shape: ModelShape, rank: RankOf) -> list[Piece]:
    """An engine rank's [q rows | k rows | v rows], as views. With more ranks than kv heads, neighbours share a head."""
    q_heads = shape.heads // rank.tp_size
    kv_heads = max(1, shape.kv_heads // rank.tp_size)
    kv_part = rank.tp * shape.kv_heads // rank.tp_size if shape.kv_heads < rank.tp_size else rank.tp
    rows = [heads * shape.head_dim for heads in (q_heads, kv_heads, kv_heads)]
    if qkv.shape[0] != sum(rows):
        raise ConfigError(f"{name}: {qkv.shape[0]} rows; expected {rows} for TP {rank.tp_size}")
    pieces = []
    for member, part, heads, view in zip(
        "qkv",
        (rank.tp, kv_part, kv_part),
        (shape.heads, shape.kv_heads, shape.kv_heads),
        qkv.split(rows),
        strict=True,
    ):
        whole = (heads * shape.head_dim, *qkv.shape[1:])
        start = (part * view.shape[0], *([0] * (qkv.dim() - 1)))
        pieces.append(_piece(name.replace("qkv_proj", f"{member}_proj"), whole, start, view))
    return pieces


def split_gate_up(name: str, fused: torch.Tensor, *, fused_name: str, part: int, parts: int) -> list[Piece]:
    """A rank's [gate rows | up rows], as views."""
    halves = zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True)
    return [
        cut(name.replace(fused_name, member), half, axis=0, part=part, parts=parts) for member, half in halves
    ]


def split_latent(name: str, fused: torch.Tensor, shape: ModelShape) -> list[Piece]:
    """MLA's [q_a rows | kv_a rows] of an engine, as views; every rank holds both whole."""
    if shape.latent is None or fused.shape[0] != sum(shape.latent):
        raise ConfigError(
            f"{name}: {fused.shape[0]} rows; expected {shape.latent} (query, key-value and rotary)"
        )
    members = zip(("q_a_proj", "kv_a_proj_with_mqa"), fused.split(list(shape.latent)), strict=True)
    return [replicated(name.replace("fused_qkv_a_proj_with_mqa", member), view) for member, view in members]


def _piece(name: str, whole: tuple[int, ...], start: tuple[int, ...], tensor: torch.Tensor) -> Piece:
    stop = tuple(a + n for a, n in zip(start, tensor.shape, strict=True))
    return Piece(TensorMeta(name=name, dtype=tensor.dtype, shape=whole), Box(start, stop), tensor)


# -- the families that are known ---------------------------------------------------------------------------------------

_ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj)\.weight$")
_COLUMN_PARALLEL = re.compile(
    r"(embed_tokens|lm_head|\.(q_proj|k_proj|v_proj|gate_proj|up_proj|q_b_proj|kv_b_proj))\.(weight|bias)$"
)


class FusedNames:
    """An engine that fuses as SGLang 0.5.23 does: `qkv_proj`, `gate_up_proj`, `experts.w13_weight`, `experts.w2_weight`,
    and for DeepSeek-V3 `fused_qkv_a_proj_with_mqa`.

    Expert weights are (local experts, rows, columns), gate before up; experts are cut over EP, and over TP within. Shared
    experts are cut over TP: start the engine with them apart (`--disable-shared-experts-fusion`), else their number does
    not fit and they are refused.
    """

    def __init__(self, shape: ModelShape, rank: RankOf) -> None:
        self._shape, self._rank = shape, rank

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        rank = self._rank
        tensor = tensor.detach()
        if ".qkv_proj." in name:
            return split_qkv(name, tensor, self._shape, rank)
        if ".fused_qkv_a_proj_with_mqa." in name:
            return split_latent(name, tensor, self._shape)
        if name.endswith(("experts.w13_weight", "experts.w2_weight")):
            return self._experts(name, tensor)
        if ".gate_up_proj." in name:
            return split_gate_up(name, tensor, fused_name="gate_up_proj", part=rank.tp, parts=rank.tp_size)
        return [_plain(name, tensor, rank)]

    def _experts(self, name: str, stacked: torch.Tensor) -> list[Piece]:
        rank = self._rank
        parts = max(1, rank.tp_size // rank.ep_size)
        within = rank.tp % parts
        if len(stacked) * rank.ep_size != self._shape.experts:
            raise ConfigError(
                f"{name}: {len(stacked)} experts x EP {rank.ep_size}; the model has {self._shape.experts}"
            )
        prefix = name.removesuffix("w2_weight").removesuffix("w13_weight")
        pieces = []
        for local, expert in enumerate(stacked):
            one = f"{prefix}{rank.ep * len(stacked) + local}"
            if name.endswith("w2_weight"):
                pieces.append(cut(f"{one}.down_proj.weight", expert, axis=1, part=within, parts=parts))
            else:
                pieces += split_gate_up(
                    f"{one}.w13.weight", expert, fused_name="w13", part=within, parts=parts
                )
        return pieces


class MegatronNames:
    """Megatron-core's shards under Hugging Face module names: `self_attn.qkv`, `mlp.fc1`, `mlp.experts.N.fc1`, `...fc2`.

    The renaming itself is the trainer's business (`convert`); here only fused and cut tensors are taken apart.
    Experts are whole on their rank (expert tensor parallelism 1). MLA keeps Hugging Face's own tensors: the two
    down-projections whole on every rank, the up-projections cut by heads.
    """

    def __init__(self, shape: ModelShape, rank: RankOf) -> None:
        self._shape, self._rank = shape, rank

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        rank = self._rank
        tensor = tensor.detach()
        whole = ".experts." in name
        part, parts = (0, 1) if whole else (rank.tp, rank.tp_size)
        if ".self_attn.qkv." in name:
            return self._attention(name, tensor)
        if ".fc1." in name:
            return split_gate_up(name, tensor, fused_name="fc1", part=part, parts=parts)
        if ".fc2." in name:
            return [cut(name.replace("fc2", "down_proj"), tensor, axis=1, part=part, parts=parts)]
        return [_plain(name, tensor, rank)]

    def _attention(self, name: str, qkv: torch.Tensor) -> list[Piece]:
        groups, uneven = divmod(self._shape.kv_heads, self._rank.tp_size)
        if uneven:
            raise ConfigError(
                f"{name}: {self._shape.kv_heads} kv heads do not divide by the trainer's TP {self._rank.tp_size}"
            )
        regrouped = regroup_qkv(qkv, self._shape, groups=groups)
        return [
            cut(name.replace(".qkv.", f".{m}_proj."), t, axis=0, part=self._rank.tp, parts=self._rank.tp_size)
            for m, t in zip("qkv", regrouped, strict=True)
        ]


def _plain(name: str, tensor: torch.Tensor, rank: RankOf) -> Piece:
    if rank.tp_size > 1 and _ROW_PARALLEL.search(name):
        return cut(name, tensor, axis=1, part=rank.tp, parts=rank.tp_size)
    if rank.tp_size > 1 and _COLUMN_PARALLEL.search(name):
        return cut(name, tensor, axis=0, part=rank.tp, parts=rank.tp_size)
    return replicated(name, tensor)


for _family in ("qwen3_moe", "qwen3", "qwen2_moe", "deepseek_v3"):
    register(_family, trainer=MegatronNames, engine=FusedNames)
