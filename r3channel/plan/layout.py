"""How the trainer is cut into processes. Knows Megatron's rank order; knows nothing about samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from r3channel.errors import ConfigError, UnsupportedLayout
from r3channel.spec import RoutingSpec

_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RankCoords:
    """Where one trainer process sits in the layout."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """DP x PP x CP x TP, with expert parallelism inside DP.

    >>> layout = TrainerLayout.parse("dp=2,tp=2")
    >>> layout.world_size, layout.sequence_parallel, layout.coords(3)
    (4, True, RankCoords(dp=1, pp=0, cp=0, tp=1))
    """

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool | None = None
    """Sequence parallelism; None means on where tp > 1 (Megatron refuses to train MoE with tp > 1 without it)."""
    packing: str = "padded"
    pad_policy: str = "spread"
    """Ids of rows that no engine computed (the last token, padding): `spread` cycles through the experts."""

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "vpp", "cp", "tp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout: {name}={getattr(self, name)}, expected at least 1")
        if self.cp > 1 or self.vpp > 1:
            raise UnsupportedLayout(
                f"layout {self}: cp and vpp above 1 are not supported yet; use cp=1,vpp=1"
            )
        if self.packing != "padded":
            raise UnsupportedLayout(
                f"layout: packing={self.packing!r} is not supported yet; use packing=padded"
            )
        if self.pad_policy != "spread":
            raise UnsupportedLayout(
                f"layout: pad policy {self.pad_policy!r} is not supported yet; use spread"
            )
        if self.sp and self.tp == 1:
            raise ConfigError("layout: sp=1 with tp=1; sequence parallelism needs tp > 1")
        if (self.dp * self.tp) % self.ep:
            raise ConfigError(f"layout: ep={self.ep} does not divide dp*tp = {self.dp * self.tp}")

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def tp_slots(self) -> int:
        """Parts into which a micro-batch's rows are cut over TP: tp with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def coords(self, rank: int) -> RankCoords:
        """Megatron's default order tp-cp-ep-dp-pp: tp changes fastest, pp slowest."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoords(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, coords: RankCoords) -> int:
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    def stage_layers(self, spec: RoutingSpec, *, pp: int) -> tuple[int, ...]:
        """Global MoE layers of one pipeline stage: equal contiguous parts of all decoder layers."""
        if spec.num_layers % self.pp:
            raise UnsupportedLayout(f"{spec.num_layers} layers do not divide into pp={self.pp} equal stages")
        size = spec.num_layers // self.pp
        return tuple(layer for layer in spec.moe_layers if pp * size <= layer < (pp + 1) * size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, text: str) -> TrainerLayout:
        """From `dp=2,tp=2,pp=1,cp=1`; keys dp, pp, vpp, cp, tp, ep, sp (0/1) and packing."""
        values: dict[str, Any] = {}
        known = {field.name for field in fields(cls)}
        for part in filter(None, text.split(",")):
            key, _, value = part.strip().partition("=")
            if key not in known:
                raise ConfigError(f"layout key {key!r} in {text!r}, expected one of {sorted(known)}")
            values[key] = _parse_value(key, value, text=text)
        return cls(**values)

    def __str__(self) -> str:
        cut = ",".join(f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep", "vpp"))
        return f"{cut},sp={int(self.sequence_parallel)},packing={self.packing}"


def _parse_value(key: str, value: str, *, text: str) -> Any:
    if key in ("packing", "pad_policy"):
        return value
    if key == "sp" and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    if not value.isdigit():
        raise ConfigError(f"layout value {key}={value!r} in {text!r} is not a number")
    return int(value)
