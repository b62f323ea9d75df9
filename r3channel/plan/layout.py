"""How the trainer is cut into processes. Knows Megatron's rank and layer order; knows nothing about samples."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.typed import Json

_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_COUNTS = ("dp", "pp", "vpp", "cp", "tp", "ep", "pad_multiple", "first_layers", "last_layers")
_CHOICES = {
    "packing": ("padded", "thd"),
    "cp_split": ("zigzag", "contiguous"),
    "pad_policy": ("spread", "live"),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RankCoords:
    """Where one trainer process sits in the layout."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """DP x PP (x VPP) x CP x TP, with expert parallelism beside it: ids follow a rank's tokens, not who owns an expert.

    >>> layout = TrainerLayout.parse("dp=2,tp=2")
    >>> layout.world_size, layout.sequence_parallel, layout.coords(3)
    (4, True, RankCoords(dp=1, pp=0, cp=0, tp=1))
    """

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool | None = None
    """Sequence parallelism; None means on where tp > 1 (Megatron refuses to train MoE with tp > 1 without it)."""
    packing: str = "padded"
    """`padded`: a micro-batch is [b, s]. `thd`: its sequences lie one after another in [1, t]."""
    cp_split: str = "zigzag"
    """`zigzag`: CP rank r holds chunks r and 2*cp-1-r of each sequence (Megatron's own). `contiguous`: the r-th part of the
    padded sequence, or of the whole pack (attention that gathers keys and values)."""
    pad_multiple: int = 1
    """Tokens that one CP and TP rank holds of a micro-batch are a multiple of this."""
    pad_policy: str = "spread"
    """Experts of rows that no engine computed (the last token, padding): `spread` cycles through the experts, `live`
    lets the live router choose."""
    uniform: bool | None = None
    """All micro-batches of an optimizer step have one padded length; None means where pp > 1, because Megatron's schedules
    exchange activations of one shape (unless `variable_seq_lengths` is set: then give uniform=0)."""
    first_layers: int | None = None
    """Decoder layers of the first pipeline stage (Megatron's num_layers_in_first_pipeline_stage)."""
    last_layers: int | None = None
    """Decoder layers of the last pipeline stage."""
    mtp: tuple[int, ...] = ()
    """For each MTP layer the decoder layer whose routing it replays; empty: MTP routers choose for themselves."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._set(name, _count(name, getattr(self, name)))
        for name in ("sp", "uniform"):
            flag = getattr(self, name)
            if flag not in (None, True, False):
                raise ConfigError(f"layout: {name}={flag!r}, expected None, True or False")
            self._set(name, None if flag is None else bool(flag))
        self._set("mtp", tuple(_whole_number("mtp", layer) for layer in self.mtp))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"layout: {name}={getattr(self, name)!r}, expected one of {choices}")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"layout: vpp={self.vpp} with pp=1; interleaving needs pp > 1")
        if self.sp and self.tp == 1:
            raise ConfigError("layout: sp=1 with tp=1; sequence parallelism needs tp > 1")
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ConfigError(
                f"layout: ep={self.ep} does not divide dp*cp*tp = {self.dp * self.cp * self.tp}"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the fields are frozen, and numpy's integers become plain ones

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def tp_slots(self) -> int:
        """Return the number of parts that TP cuts rows into.

        This is tp with sequence parallelism, else 1; the rows are those of a micro-batch.
        """
        return self.tp if self.sequence_parallel else 1

    @property
    def one_length(self) -> bool:
        """Return whether micro-batches of an optimizer step share one padded length."""
        return self.pp > 1 if self.uniform is None else self.uniform

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def coords(self, rank: int) -> RankCoords:
        """Return the place of a rank in Megatron's default order.

        The order is tp-cp-ep-dp-pp: tp changes fastest, pp slowest.

        Args:
            rank: The global rank.

        Raises:
            ConfigError: The layout has no such rank.
        """
        inside("rank", rank, self.world_size)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoords(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, coords: RankCoords) -> int:
        for name in ("dp", "pp", "cp", "tp"):
            inside(name, getattr(coords, name), getattr(self, name))
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    # -- layers ---------------------------------------------------------------------------------------------------------

    def stage_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Return the decoder layers per pipeline stage, dense ones included.

        Args:
            num_layers: Decoder layers of the model.

        Raises:
            ConfigError: The layers do not divide over the stages.
        """
        given = {0: self.first_layers, self.pp - 1: self.last_layers}
        fixed = {stage: size for stage, size in given.items() if size is not None}
        rest, middle = num_layers - sum(fixed.values()), self.pp - len(fixed)
        if self.vpp > 1 and not middle:
            raise ConfigError(
                f"first_layers={self.first_layers} and last_layers={self.last_layers} with vpp={self.vpp} leave no stage between "
                f"at pp={self.pp}: Megatron-core 0.16.1 divides by zero there. Give one of the two; it determines the other"
            )
        if rest < middle or (rest % middle if middle else rest):
            hint = "" if fixed else self._shorter_end(num_layers)
            raise ConfigError(
                f"{num_layers} layers do not divide into pp={self.pp} stages with first_layers={self.first_layers}, "
                f"last_layers={self.last_layers}: {rest} layers remain for {middle} equal stages{hint}"
            )
        sizes = tuple(fixed.get(stage, rest // max(middle, 1)) for stage in range(self.pp))
        if any(size % self.vpp for size in sizes):
            raise ConfigError(f"stages of {sizes} layers do not divide into vpp={self.vpp} chunks each")
        return sizes

    def _shorter_end(self, num_layers: int) -> str:
        # a last stage of this size lets the layers divide
        each = -(-num_layers // self.pp)
        last = num_layers - each * (self.pp - 1)
        fits = last > 0 and not (each % self.vpp or last % self.vpp)
        return f". Give last_layers={last}: the other stages have {each}" if fits else ""

    def chunk_layers(self, spec: RoutingSpec, *, pp: int, chunk: int) -> tuple[int, ...]:
        """Return the replayed layers of one model chunk, ascending.

        These are global numbers of layers with a replayed router; there may be none. Chunks interleave as in Megatron: chunk c of
        all stages comes before chunk c + 1 of any. A mapped MTP layer i counts as layer `num_layers + i` of the last stage's last
        chunk.

        Args:
            spec: The model's spec.
            pp: The pipeline stage.
            chunk: The chunk of the stage.

        Raises:
            ConfigError: The layout has no such stage or chunk, or the layers do not divide.
        """
        inside("pp", pp, self.pp)
        inside("chunk", chunk, self.vpp)
        sizes = [size // self.vpp for size in self.stage_sizes(spec.num_layers)]
        start = chunk * sum(sizes) + sum(sizes[:pp])
        first, last = (bisect_left(spec.moe_layers, edge) for edge in (start, start + sizes[pp]))
        layers = spec.moe_layers[first:last]
        if (pp, chunk) == (self.pp - 1, self.vpp - 1):
            layers += tuple(range(spec.num_layers, spec.num_layers + len(self.mtp)))
        return layers

    def stage_layers(self, spec: RoutingSpec, *, pp: int) -> tuple[int, ...]:
        """Return the replayed layers of one pipeline stage, ascending.

        These are global numbers of layers with a replayed router, of all chunks of the stage.

        Args:
            spec: The model's spec.
            pp: The pipeline stage.
        """
        return tuple(
            layer for chunk in range(self.vpp) for layer in self.chunk_layers(spec, pp=pp, chunk=chunk)
        )

    # -- text -----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> Json:
        return {**asdict(self), "mtp": list(self.mtp)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerLayout:
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"layout: fields {unknown[:5]} are unknown")
        return cls(**dict(values, mtp=tuple(values.get("mtp", ()))))

    @classmethod
    def from_megatron_args(cls, args: Any, *, world_size: int, **rest: Any) -> TrainerLayout:
        """Build a layout from Megatron's command line.

        This imports nothing.

        Args:
            args: An object with the names of Megatron's command line.
            world_size: The number of trainer ranks.
            **rest: What the command line does not say (packing, padding).

        Raises:
            ConfigError: The ranks do not divide by TP, PP and CP.
        """
        tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
        pp = args.pipeline_model_parallel_size
        if world_size < 1 or world_size % (tp * pp * cp):
            raise ConfigError(f"{world_size} trainer ranks do not divide by tp={tp} x pp={pp} x cp={cp}")
        return cls(
            dp=world_size // (tp * pp * cp),
            pp=pp,
            vpp=args.virtual_pipeline_model_parallel_size or 1,
            cp=cp,
            tp=tp,
            ep=args.expert_model_parallel_size,
            sp=bool(args.sequence_parallel),
            first_layers=args.decoder_first_pipeline_num_layers,
            last_layers=args.decoder_last_pipeline_num_layers,
            **rest,
        )

    @classmethod
    def parse(cls, text: str) -> TrainerLayout:
        """Parse a layout such as `dp=2,tp=2,pp=1,cp=1`.

        Every field is a key, flags are 0/1, and `mtp=3+3` maps two MTP layers to layer 3.

        Args:
            text: Keys and values.

        Raises:
            ConfigError: A key is unknown or stands twice, or a value does not fit.
        """
        values: Json = {}
        known = {field.name for field in fields(cls)}
        for part in filter(None, text.split(",")):
            key, _, value = part.strip().partition("=")
            if key not in known:
                raise ConfigError(f"layout key {key!r} in {text!r}, expected one of {sorted(known)}")
            if key in values:
                raise ConfigError(f"layout key {key!r} stands twice in {text!r}, expected once")
            values[key] = _parse_value(key, value, text=text)
        return cls(**values)

    def __str__(self) -> str:
        mine, plain = asdict(self), asdict(TrainerLayout())
        cut = [f"{name}={mine[name]}" for name in ("dp", "tp", "pp", "cp", "ep", "vpp")]
        names = ("cp_split", "pad_multiple", "pad_policy", "first_layers", "last_layers", "mtp")
        rest = [f"{name}={mine[name]}" for name in names if mine[name] != plain[name]]
        return ",".join([*cut, f"sp={int(self.sequence_parallel)},packing={self.packing}", *rest])


def inside(name: str, value: int, count: int) -> int:
    """Return a number of a layout, after checking its range.

    A negative number would silently count from the end.

    Args:
        name: Names the number in the error text.
        value: The number.
        count: The number must be in 0..count - 1.

    Raises:
        ConfigError: The number is outside of its range.
    """
    if not 0 <= value < count:
        raise ConfigError(f"{name}={value}: expected 0..{count - 1}. Is it a number of another layout?")
    return value


def _count(name: str, value: Any) -> int | None:
    if value is None and name in ("first_layers", "last_layers"):
        return None
    if _whole_number(name, value) < 1:
        raise ConfigError(f"layout: {name}={value}, expected at least 1")
    return _whole_number(name, value)


def _whole_number(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise ConfigError(f"layout: {name}={value!r}, expected a whole number") from error


def _parse_value(key: str, value: str, *, text: str) -> Any:
    if key in _CHOICES:
        return value
    if key in ("sp", "uniform") and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    numbers = value.split("+") if key == "mtp" else [value]
    if not all(number.isdigit() for number in numbers):
        raise ConfigError(f"layout value {key}={value!r} in {text!r} is not a number")
    return tuple(map(int, numbers)) if key == "mtp" else int(value)
