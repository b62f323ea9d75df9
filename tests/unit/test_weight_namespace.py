"""Megatron's fused shards to an engine's fused parameters: one namespace, few pieces, the engine's dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from r3channel.errors import ConfigError
from r3channel.transport.base import Transport
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.namespace import (
    Converter,
    FusedNames,
    MegatronNames,
    ModelShape,
    RankOf,
    convert_all,
    converter,
    register,
    regroup_qkv,
    report,
)
from r3channel.weights.reshard import plan_reshard
from r3channel.weights.resharder import Resharder
from r3channel.weights.shardmap import ShardMap
from tests.reshard_cases import on_threads

HIDDEN, WIDTH, VOCABULARY, TIMEOUT_S = 12, 8, 32, 20.0
SHAPE = ModelShape(heads=8, kv_heads=4, head_dim=3, experts=4)
LAYER = "model.layers.0"
Named = dict[str, torch.Tensor]


def hf_model() -> Named:
    """One layer with whole Hugging Face tensors; small integers, which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=generator).float()

    model = {
        "model.embed_tokens.weight": numbers(VOCABULARY, HIDDEN),
        f"{LAYER}.input_layernorm.weight": numbers(HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": numbers(HIDDEN, SHAPE.heads * SHAPE.head_dim),
        f"{LAYER}.mlp.gate.weight": numbers(SHAPE.experts, HIDDEN),
    }
    for member, heads in (("q", SHAPE.heads), ("k", SHAPE.kv_heads), ("v", SHAPE.kv_heads)):
        model[f"{LAYER}.self_attn.{member}_proj.weight"] = numbers(heads * SHAPE.head_dim, HIDDEN)
    for expert in range(SHAPE.experts):
        for member, shape in (
            ("gate", (WIDTH, HIDDEN)),
            ("up", (WIDTH, HIDDEN)),
            ("down", (HIDDEN, WIDTH)),
        ):
            model[f"{LAYER}.mlp.experts.{expert}.{member}_proj.weight"] = numbers(*shape)
    return model


def part(tensor: torch.Tensor, axis: int, rank: int, parts: int) -> torch.Tensor:
    return tensor.chunk(parts, dim=axis)[rank].clone()


def megatron_rank(model: Named, tp: int, tp_size: int) -> Named:
    """What a trainer rank holds: qkv interleaved per group, gate and up halves per rank, experts over the ranks."""
    attention = f"{LAYER}.self_attn"
    q, k, v = (model[f"{attention}.{m}_proj.weight"] for m in "qkv")
    grouped = [tensor.view(SHAPE.kv_heads, -1, SHAPE.head_dim, HIDDEN) for tensor in (q, k, v)]
    qkv = torch.cat(grouped, dim=1)
    held = {
        "model.embed_tokens.weight": part(model["model.embed_tokens.weight"], 0, tp, tp_size),
        f"{LAYER}.input_layernorm.weight": model[f"{LAYER}.input_layernorm.weight"],
        f"{attention}.qkv.weight": part(qkv, 0, tp, tp_size).reshape(-1, HIDDEN),
        f"{attention}.o_proj.weight": part(model[f"{attention}.o_proj.weight"], 1, tp, tp_size),
        f"{LAYER}.mlp.gate.weight": model[f"{LAYER}.mlp.gate.weight"],
    }
    for expert in range(tp * SHAPE.experts // tp_size, (tp + 1) * SHAPE.experts // tp_size):
        one = f"{LAYER}.mlp.experts.{expert}"
        halves = [model[f"{one}.{m}_proj.weight"] for m in ("gate", "up")]
        held[f"{one}.fc1.weight"] = torch.cat(halves)
        held[f"{one}.fc2.weight"] = model[f"{one}.down_proj.weight"]
    return held


def engine_rank(model: Named, rank: RankOf, *, fill: bool) -> Named:
    """What an engine rank holds, fused, in bfloat16 with a float32 router; values, or room for them."""
    attention, tp = f"{LAYER}.self_attn", rank.tp_size
    kv = [model[f"{attention}.{m}_proj.weight"].view(SHAPE.kv_heads, SHAPE.head_dim, HIDDEN) for m in "kv"]
    copies = max(1, tp // SHAPE.kv_heads)
    shared = [t.repeat_interleave(copies, dim=0).chunk(tp)[rank.tp].reshape(-1, HIDDEN) for t in kv]
    per_ep = SHAPE.experts // rank.ep_size
    within, cuts = rank.tp % (tp // rank.ep_size), tp // rank.ep_size
    mine = [f"{LAYER}.mlp.experts.{e}" for e in range(rank.ep * per_ep, (rank.ep + 1) * per_ep)]
    q = part(model[f"{attention}.q_proj.weight"], 0, rank.tp, tp)
    held = {
        "model.embed_tokens.weight": part(model["model.embed_tokens.weight"], 0, rank.tp, tp),
        f"{LAYER}.input_layernorm.weight": model[f"{LAYER}.input_layernorm.weight"],
        f"{attention}.qkv_proj.weight": torch.cat([q, *shared]),
        f"{attention}.o_proj.weight": part(model[f"{attention}.o_proj.weight"], 1, rank.tp, tp),
        f"{LAYER}.mlp.experts.w13_weight": torch.stack(
            [
                torch.cat([part(model[f"{e}.{m}_proj.weight"], 0, within, cuts) for m in ("gate", "up")])
                for e in mine
            ]
        ),
        f"{LAYER}.mlp.experts.w2_weight": torch.stack(
            [part(model[f"{e}.down_proj.weight"], 1, within, cuts) for e in mine]
        ),
    }
    held = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    held[f"{LAYER}.mlp.gate.weight"] = model[f"{LAYER}.mlp.gate.weight"].clone()
    return held if fill else {name: torch.zeros_like(tensor) for name, tensor in held.items()}


def reshard(sources: list[tuple[Converter, Named]], targets: list[tuple[Converter, Named]]) -> None:
    """Every rank plans by itself, and what the trainers hold is written into the engines' tensors."""
    source_map = ShardMap.gathered({i: report(c, held.items()) for i, (c, held) in enumerate(sources)})
    target_map = ShardMap.gathered({i: report(c, held.items()) for i, (c, held) in enumerate(targets)})

    def work(transport: Transport) -> None:
        plan = plan_reshard(source_map, target_map.shifted(len(sources)), rank=transport.rank)
        resharder = Resharder(plan, transport)
        resharder.agree(timeout_s=TIMEOUT_S)
        mine = [{}, {}]
        is_engine = transport.rank >= len(sources)
        names, held = (sources + targets)[transport.rank]
        mine[is_engine] = convert_all(names, held.items())
        resharder.run(mine[0], mine[1], timeout_s=TIMEOUT_S)

    world = len(sources) + len(targets)
    assert on_threads(world, work) == [None] * world


@pytest.mark.parametrize(("trainers", "engines", "ep"), [(2, 4, 2), (1, 2, 1), (4, 8, 4), (2, 1, 1)])
def test_awex_conversion_layer_brings_fused_shards_of_both_sides_together(
    trainers: int, engines: int, ep: int
) -> None:
    """TP 8 has more ranks than kv heads; the sender casts float32 to the engine's bfloat16, the router stays float32."""
    model = hf_model()
    sources: list[tuple[Converter, Named]] = [
        (MegatronNames(SHAPE, RankOf(tp=t, tp_size=trainers)), megatron_rank(model, t, trainers))
        for t in range(trainers)
    ]
    ranks = [RankOf(tp=t, tp_size=engines, ep=t // (engines // ep), ep_size=ep) for t in range(engines)]
    targets: list[tuple[Converter, Named]] = [
        (FusedNames(SHAPE, rank), engine_rank(model, rank, fill=False)) for rank in ranks
    ]
    reshard(sources, targets)
    for rank, (_, held) in zip(ranks, targets, strict=True):
        for name, tensor in engine_rank(model, rank, fill=True).items():
            assert torch.equal(held[name], tensor), (rank, name)


def per_group(
    qkv: torch.Tensor, shape: ModelShape, *, tp: int, tp_size: int
) -> Iterator[tuple[TensorMeta, Box]]:
    """The same rank's qkv without regrouping: one piece per group and member."""
    per = shape.heads // shape.kv_heads
    groups = shape.kv_heads // tp_size
    for group in range(tp * groups, (tp + 1) * groups):
        for member, heads, total in (
            ("q", per, shape.heads),
            ("k", 1, shape.kv_heads),
            ("v", 1, shape.kv_heads),
        ):
            rows = heads * shape.head_dim
            meta = TensorMeta(
                name=f"{LAYER}.self_attn.{member}_proj.weight",
                dtype=qkv.dtype,
                shape=(total * shape.head_dim, *qkv.shape[1:]),
            )
            yield meta, Box((group * rows, 0), ((group + 1) * rows, qkv.shape[1]))


@pytest.mark.parametrize("kv_heads", [8, 16, 32])
def test_awex_regrouped_attention_keeps_the_pieces_of_a_layer_bounded(kv_heads: int) -> None:
    """Trainer TP 2 to engine TP 4: 3 members x 2 engine parts per trainer rank, however many groups there are."""
    shape = ModelShape(heads=2 * kv_heads, kv_heads=kv_heads, head_dim=2)
    rows = (shape.heads + 2 * kv_heads) * 2
    qkv = torch.zeros(rows // 2, 4)
    name = f"{LAYER}.self_attn.qkv.weight"
    regrouped, cut_per_group, engine = {}, {}, {}
    for tp in range(2):
        regrouped[tp] = report(MegatronNames(shape, RankOf(tp=tp, tp_size=2)), [(name, qkv)])
        cut_per_group[tp] = list(per_group(qkv, shape, tp=tp, tp_size=2))
    fused = torch.zeros(rows // 4, 4)
    for tp in range(4):
        names = FusedNames(shape, RankOf(tp=tp, tp_size=4))
        engine[2 + tp] = report(names, [(f"{LAYER}.self_attn.qkv_proj.weight", fused)])
    target = ShardMap.gathered(engine)
    pieces = [
        len(plan_reshard(ShardMap.gathered(source), target, rank=0).ops)
        for source in (regrouped, cut_per_group)
    ]
    assert pieces == [6, 3 * kv_heads // 2]


def test_regrouping_undoes_megatrons_interleaving() -> None:
    model = hf_model()
    qkv = megatron_rank(model, 0, 1)[f"{LAYER}.self_attn.qkv.weight"]
    for member, tensor in zip("qkv", regroup_qkv(qkv, SHAPE, groups=SHAPE.kv_heads), strict=True):
        assert torch.equal(tensor, model[f"{LAYER}.self_attn.{member}_proj.weight"])


def test_engine_pieces_are_views_of_the_engines_own_memory() -> None:
    rank = RankOf(tp=1, tp_size=2)
    held = engine_rank(hf_model(), rank, fill=True)
    for parts in convert_all(FusedNames(SHAPE, rank), held.items()).values():
        for _, tensor in parts:
            tensor.fill_(3)
    assert all(bool((tensor == 3).all()) for tensor in held.values())


def test_rows_that_cannot_be_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 7 rows; 4 groups of 2 \+ 2 heads of 3 need 48"):
        regroup_qkv(torch.zeros(7, 2), SHAPE, groups=4)
    with pytest.raises(ConfigError, match="3 experts x EP 2; the model has 4"):
        FusedNames(SHAPE, RankOf(tp=0, tp_size=2, ep_size=2)).pieces(
            "x.experts.w2_weight", torch.zeros(3, 2, 2)
        )


def test_converters_are_registered_per_model_family() -> None:
    rank = RankOf(tp=0, tp_size=1)
    assert isinstance(converter("qwen3_moe", "engine", SHAPE, rank), FusedNames)
    with pytest.raises(ConfigError, match=r"'gpt2': no converter registered; known are .*qwen3_moe"):
        converter("gpt2", "engine", SHAPE, rank)
    with pytest.raises(ConfigError, match="already"):
        register("qwen3_moe", trainer=MegatronNames, engine=FusedNames)


def test_the_model_shape_is_read_from_the_hugging_face_config() -> None:
    config = {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_size": 2048,
        "head_dim": 128,
        "num_experts": 128,
    }
    assert ModelShape.from_hf_config(config) == ModelShape(heads=32, kv_heads=4, head_dim=128, experts=128)


def test_every_piece_is_that_part_of_the_tensor_that_its_name_and_box_say() -> None:
    model, rank = hf_model(), RankOf(tp=1, tp_size=4, ep=0, ep_size=2)
    sides = [
        (MegatronNames(SHAPE, RankOf(tp=1, tp_size=2)), megatron_rank(model, 1, 2)),
        (FusedNames(SHAPE, rank), engine_rank(model, rank, fill=True)),
    ]
    for names, parameters in sides:
        for name, parts in convert_all(names, parameters.items()).items():
            for box, tensor in parts:
                assert torch.equal(model[name][box.within(Box.whole(model[name].shape))], tensor.float()), (
                    name
                )


# -- DeepSeek-V3: latent attention, shared experts, a correction bias ----------------------------------------------------

LATENT = ModelShape(heads=4, kv_heads=4, head_dim=3, experts=4, latent=(6, 5))
SHARED = f"{LAYER}.mlp.shared_experts"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
COLUMNS = ("self_attn.q_b_proj", "self_attn.kv_b_proj")


def deepseek_model() -> Named:
    """One MoE layer under Hugging Face names; the bias holds fractions that bfloat16 cannot."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=generator).float()

    experts = {name: t for name, t in hf_model().items() if ".experts." in name}
    return experts | {
        f"{LAYER}.self_attn.q_a_proj.weight": numbers(6, HIDDEN),
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": numbers(5, HIDDEN),
        f"{LAYER}.self_attn.q_a_layernorm.weight": numbers(6),
        f"{LAYER}.self_attn.kv_a_layernorm.weight": numbers(4),
        f"{LAYER}.self_attn.q_b_proj.weight": numbers(4 * 4, 6),
        f"{LAYER}.self_attn.kv_b_proj.weight": numbers(4 * 6, 4),
        f"{LAYER}.self_attn.o_proj.weight": numbers(HIDDEN, 4 * 3),
        f"{LAYER}.mlp.gate.weight": numbers(4, HIDDEN),
        BIAS: numbers(4) / 3,
        f"{SHARED}.gate_proj.weight": numbers(WIDTH, HIDDEN),
        f"{SHARED}.up_proj.weight": numbers(WIDTH, HIDDEN),
        f"{SHARED}.down_proj.weight": numbers(HIDDEN, WIDTH),
    }


def deepseek_megatron(model: Named, tp: int, tp_size: int) -> Named:
    """What a trainer rank holds: down-projections whole, up-projections and shared experts cut, experts over the ranks."""
    held = {name: t for name, t in model.items() if ".experts." not in name and "shared" not in name}
    for module in COLUMNS:
        held[f"{LAYER}.{module}.weight"] = part(model[f"{LAYER}.{module}.weight"], 0, tp, tp_size)
    held[f"{LAYER}.self_attn.o_proj.weight"] = part(model[f"{LAYER}.self_attn.o_proj.weight"], 1, tp, tp_size)
    halves = [part(model[f"{SHARED}.{m}_proj.weight"], 0, tp, tp_size) for m in ("gate", "up")]
    held[f"{SHARED}.fc1.weight"] = torch.cat(halves)
    held[f"{SHARED}.fc2.weight"] = part(model[f"{SHARED}.down_proj.weight"], 1, tp, tp_size)
    for expert in range(tp * 4 // tp_size, (tp + 1) * 4 // tp_size):
        one = f"{LAYER}.mlp.experts.{expert}"
        held[f"{one}.fc1.weight"] = torch.cat([model[f"{one}.{m}_proj.weight"] for m in ("gate", "up")])
        held[f"{one}.fc2.weight"] = model[f"{one}.down_proj.weight"]
    return held


def deepseek_engine(model: Named, rank: RankOf) -> Named:
    """What an engine rank holds: bfloat16, but for the router and its bias; experts over EP = TP."""
    tp, size = rank.tp, rank.tp_size
    down = [model[f"{LAYER}.self_attn.{m}.weight"] for m in ("q_a_proj", "kv_a_proj_with_mqa")]
    halves = [part(model[f"{SHARED}.{m}_proj.weight"], 0, tp, size) for m in ("gate", "up")]
    mine = [f"{LAYER}.mlp.experts.{e}" for e in range(tp * 4 // size, (tp + 1) * 4 // size)]
    held = {
        f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.cat(down),
        f"{LAYER}.self_attn.q_a_layernorm.weight": model[f"{LAYER}.self_attn.q_a_layernorm.weight"],
        f"{LAYER}.self_attn.kv_a_layernorm.weight": model[f"{LAYER}.self_attn.kv_a_layernorm.weight"],
        f"{LAYER}.self_attn.o_proj.weight": part(model[f"{LAYER}.self_attn.o_proj.weight"], 1, tp, size),
        f"{SHARED}.gate_up_proj.weight": torch.cat(halves),
        f"{SHARED}.down_proj.weight": part(model[f"{SHARED}.down_proj.weight"], 1, tp, size),
        f"{LAYER}.mlp.experts.w13_weight": torch.stack(
            [torch.cat([model[f"{e}.{m}_proj.weight"] for m in ("gate", "up")]) for e in mine]
        ),
        f"{LAYER}.mlp.experts.w2_weight": torch.stack([model[f"{e}.down_proj.weight"] for e in mine]),
    }
    for module in COLUMNS:
        held[f"{LAYER}.{module}.weight"] = part(model[f"{LAYER}.{module}.weight"], 0, tp, size)
    held = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    return held | {name: model[name].clone() for name in (f"{LAYER}.mlp.gate.weight", BIAS)}


@pytest.mark.parametrize(("trainers", "engines"), [(1, 2), (2, 4), (4, 1)])
def test_awex_deepseek_latent_attention_shared_experts_and_bias_reach_the_engines_parameters(
    trainers: int, engines: int
) -> None:
    model = deepseek_model()
    sources: list[tuple[Converter, Named]] = []
    targets: list[tuple[Converter, Named]] = []
    for t in range(trainers):
        rank = RankOf(tp=t, tp_size=trainers)
        held = deepseek_megatron(model, t, trainers)
        sources.append((converter("deepseek_v3", "trainer", LATENT, rank), held))
    ranks = [RankOf(tp=t, tp_size=engines, ep=t, ep_size=engines) for t in range(engines)]
    for rank in ranks:
        room = {name: torch.zeros_like(t) for name, t in deepseek_engine(model, rank).items()}
        targets.append((converter("deepseek_v3", "engine", LATENT, rank), room))
    reshard(sources, targets)
    for rank, (_, held) in zip(ranks, targets, strict=True):
        for name, tensor in deepseek_engine(model, rank).items():
            assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), (rank, name)
        assert torch.equal(held[BIAS], model[BIAS]) and held[BIAS].dtype == torch.float32
        assert not torch.equal(model[BIAS], model[BIAS].bfloat16().float())


def test_latent_rows_that_cannot_be_are_refused() -> None:
    name = f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa.weight"
    for shape in (LATENT, SHAPE):
        with pytest.raises(ConfigError, match=f"{name}: 12 rows; expected"):
            FusedNames(shape, RankOf(tp=0, tp_size=1)).pieces(name, torch.zeros(12, 2))


def test_the_latent_shape_is_read_from_the_hugging_face_config() -> None:
    config = {"num_attention_heads": 128, "hidden_size": 7168, "n_routed_experts": 256}
    config |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    found = ModelShape.from_hf_config(config)
    assert found.latent == (1536, 576) and found.experts == 256
    assert ModelShape.from_hf_config(config | {"q_lora_rank": None}).latent is None
