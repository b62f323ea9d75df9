"""The routing shapes of known models, by name. Nothing is downloaded: the numbers are facts with a status.

A checkpoint's own `config.json` always wins (`hf_config`); this table is for planning and benchmarks.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from r3channel.errors import ConfigError, nearest
from r3channel.model.spec import RoutingSpec


@dataclass(frozen=True, slots=True)
class Model:
    """One model's routing."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    status: str
    """Where the numbers come from: `read` in training scripts or in transformers' defaults, `quoted` by a vendor or a report, or
    `unverified`."""
    _: KW_ONLY
    first_dense: int = 0
    """Leading dense layers; all others have a router, unless `moe_every` or `moe_layers` says otherwise."""
    moe_every: int = 1
    """Every n-th layer is MoE, the last one of each group of n."""
    moe_layers: int | None = None
    """Number of MoE layers where their places are not known: they are taken as the last ones."""
    groups: tuple[int, int] | None = None
    """Expert groups and how many of them one token may use."""
    aliases: tuple[str, ...] = ()

    @property
    def spec(self) -> RoutingSpec:
        start = self.first_dense if self.moe_layers is None else self.num_layers - self.moe_layers
        layers = (layer for layer in range(start, self.num_layers) if (layer + 1) % self.moe_every == 0)
        return RoutingSpec(
            num_layers=self.num_layers,
            moe_layers=tuple(layers),
            num_experts=self.num_experts,
            top_k=self.top_k,
        )


_TABLE = (
    Model("qwen3-30b-a3b", 48, 128, 8, "read"),
    Model("qwen3-235b-a22b", 94, 128, 8, "read"),
    Model("qwen3-next", 48, 512, 10, "read", aliases=("qwen3-next-80b-a3b",)),
    Model("qwen3.5-35b-a3b", 40, 256, 8, "read", aliases=("qwen3.6-35b-a3b",)),
    Model("qwen3.5-122b-a10b", 48, 256, 8, "quoted"),
    Model("qwen3.5-397b-a17b", 60, 512, 10, "quoted"),
    Model(
        "deepseek-v3", 61, 256, 8, "read", first_dense=3, groups=(8, 4), aliases=("deepseek-r1", "deepseek-v3.2")
    ),
    Model("deepseek-v4-flash", 43, 256, 6, "read"),
    Model("deepseek-v4-pro", 61, 384, 6, "read"),
    Model("glm-4.5-air", 46, 128, 8, "read", first_dense=1),
    Model("glm-4.5", 92, 160, 8, "read", first_dense=3, aliases=("glm-4.6", "glm-4.7")),
    Model("glm-4.7-flash", 47, 64, 4, "read", first_dense=1),
    Model("glm-5", 78, 256, 8, "read", first_dense=3, aliases=("glm-5.1", "glm-5.2")),
    Model("kimi-k2", 61, 384, 8, "read", first_dense=1, aliases=("kimi-k2.5",)),
    Model("moonlight-16b-a3b", 27, 64, 6, "read", first_dense=1),
    Model("minimax-m2", 62, 256, 8, "read", aliases=("minimax-m2.5",)),
    Model("gpt-oss-20b", 24, 32, 4, "read"),
    Model("gpt-oss-120b", 36, 128, 4, "read"),
    Model("mixtral-8x7b", 32, 8, 2, "read"),
    Model("llama-4-scout", 48, 16, 1, "read"),
    Model("llama-4-maverick", 48, 128, 1, "unverified", moe_every=2),
    Model("step-3.5-flash", 45, 288, 8, "quoted", first_dense=3),
    Model("ling-1t", 80, 256, 8, "unverified", first_dense=4, groups=(8, 4), aliases=("ring-1t",)),
    Model("mimo-v2-flash", 48, 256, 8, "quoted", first_dense=1),
    Model("nemotron-3-super-120b", 88, 512, 22, "unverified", moe_layers=40),
)  # fmt: skip

MODELS: dict[str, Model] = {model.name: model for model in _TABLE}
"""Models by their main name. Three layers of the DeepSeek-V4 models route by hash: SGLang captures no ids for them."""

_BY_ANY_NAME = MODELS | {alias: model for model in _TABLE for alias in model.aliases}


def model_named(name: str) -> Model:
    """Return the model of this name or alias, in any case.

    Raises:
        ConfigError: no model has this name; the text lists what is known.

    >>> model_named("DeepSeek-R1").spec.num_moe_layers
    58
    """
    model = _BY_ANY_NAME.get(name.lower())
    if model is None:
        known = ", ".join(sorted(_BY_ANY_NAME)) + nearest(name.lower(), _BY_ANY_NAME)
        raise ConfigError(f"model {name!r} is not in the built-in table; known are {known}")
    return model
