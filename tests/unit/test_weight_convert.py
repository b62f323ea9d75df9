"""Trainer weights as an engine's checkpoint has them: float8 by blocks, whole or by shards; parameters box by box."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.float8_blocks import float8_blocks, quantise
from r3channel.errors import ConfigError
from r3channel.weights.convert import Part, Shard, merged_tp, shards_of
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from tests.support.fake_engine import FakeEngine
from tests.support.weights import give, refused, session

BLOCK = (128, 128)
WEIGHT, ROUTER = "model.layers.0.mlp.experts.0.down_proj.weight", "model.layers.0.mlp.gate.weight"
SHAPE = (320, 200)  # neither side is a multiple of a block


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise) * 10.0 ** torch.randint(-3, 3, shape, generator=noise)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values, scales = quantise(random(*SHAPE), BLOCK)
    tensors = {WEIGHT: values, f"{WEIGHT}_scale_inv": scales, ROUTER: torch.zeros(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_every_value_comes_back_within_e4m3s_rounding() -> None:
    weight = random(*SHAPE)
    weight[128:256, :128] = 0.0
    values, scales = quantise(weight, BLOCK)
    assert values.dtype == torch.float8_e4m3fn and values.shape == SHAPE and scales.shape == (3, 2)
    assert scales[1, 0] == 1.0
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: SHAPE[0], : SHAPE[1]]
    off = (values.float() * spread - weight).abs()
    # three bits after the point: half of the last is 2^-4 of the value; below 2^-6 steps are 2^-9 (OCP 8-bit floating point)
    assert bool((off <= torch.maximum(weight.abs() * 2**-4, spread * 2**-10) * 1.0001).all())
    assert values.float().abs().max() == torch.finfo(torch.float8_e4m3fn).max


def test_shards_that_end_with_blocks_give_what_the_whole_tensor_gives(checkpoint: Path) -> None:
    weight = random(*SHAPE)
    meta = TensorMeta.of(WEIGHT, weight)
    (_, whole), (_, scales) = float8_blocks([(WEIGHT, weight)], like=checkpoint)
    cuts = [Box((0, 0), (256, 200)), Box((256, 0), (320, 200))]
    shards = (Shard(meta, box, weight[box.start[0] : box.stop[0]]) for box in cuts)
    found = list(float8_blocks(shards, like=checkpoint))
    for name, wanted in ((WEIGHT, whole), (f"{WEIGHT}_scale_inv", scales)):
        parts = [shard for shard in found if shard.meta.name == name]
        assert all(shard.meta == TensorMeta.of(name, wanted) for shard in parts)
        assert torch.equal(torch.cat([shard.tensor for shard in parts]).float(), wanted.float())
        assert [shard.box.start[0] for shard in parts] == ([0, 256] if wanted is whole else [0, 2])
    with pytest.raises(ConfigError, match="cuts blocks of"):
        list(float8_blocks([Shard(meta, Box((0, 0), (100, 200)), weight[:100])], like=checkpoint))


def test_an_engine_of_float8_weights_is_filled_from_float32_ones(checkpoint: Path) -> None:
    engine = FakeEngine(receives=load_file(checkpoint / "model.safetensors"))
    new = {WEIGHT: random(*SHAPE, seed=9), ROUTER: torch.ones(4, 4)}
    with session(engine, bucket_bytes=1 << 20) as sync:
        report = give(sync, 1, float8_blocks(new.items(), like=checkpoint))
    assert report.tensors == 3 and not report.skipped
    values, scales = quantise(new[WEIGHT], BLOCK)
    assert torch.equal(engine.tensors[WEIGHT].float(), values.float())
    assert torch.equal(engine.tensors[f"{WEIGHT}_scale_inv"], scales)
    assert torch.equal(engine.tensors[ROUTER], new[ROUTER])
    engine.die()


def test_another_float8_format_is_refused_by_what_the_folder_says(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"weight_block_size \[\]; expected 'fp8' and two numbers"):
        float8_blocks([(WEIGHT, random(*SHAPE))], like=checkpoint)  # now, not when the first tensor is taken


def test_scales_of_a_ue8m0_checkpoint_are_powers_of_two_and_cut_no_value(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (checkpoint / "config.json").write_text(json.dumps(config))
    (_, values), (_, scales) = float8_blocks([(WEIGHT, random(*SHAPE))], like=checkpoint)
    plain = quantise(random(*SHAPE), BLOCK)[1]
    assert torch.equal(scales.log2(), scales.log2().round()) and bool((scales >= plain).all())
    assert bool((scales < 2 * plain * 1.0001).all()) and values.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_of_another_form_are_refused_by_their_dtype(dtype: torch.dtype, checkpoint: Path) -> None:
    values = torch.zeros(*SHAPE).to(torch.float8_e4m3fn)
    held = {WEIGHT: values, f"{WEIGHT}_scale_inv": torch.ones(3, 2).to(dtype)}
    save_file(held, checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{WEIGHT}_scale_inv of .* is \w+; expected F32"):
        float8_blocks([(WEIGHT, random(*SHAPE))], like=checkpoint)


def test_an_engines_parameter_that_no_tensor_can_be_sent_to_is_named() -> None:
    scales = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    held = {"a.weight": torch.zeros(256, 256), "a.weight_scale_inv": scales}
    engine = FakeEngine(receives=held)
    with session(engine) as sync:
        said = r"'a\.weight_scale_inv' is float8_e8m0fnu \[2, 2\]; expected one of float64.*A UE8M0 scale"
        refused(sync, 1, said, {"a.weight": held["a.weight"]}.items())
    engine.die()


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(("dtype", "columns"), [(torch.uint8, 2), (torch.int32, 2), (torch.int32, 1)])
def test_float_scales_never_become_the_integers_that_an_engine_keeps(
    dtype: torch.dtype, columns: int, staged: bool
) -> None:
    name, kept = f"{WEIGHT}_scale_inv", torch.ones(2, columns, dtype=dtype)
    engine = FakeEngine(receives={name: kept.clone()})
    with session(engine, staged=staged) as sync:
        said = rf"{name} {kept.dtype}".replace("torch.", "") + rf"\[2, {columns}\].*(bytes|UE8M0)"
        refused(sync, 1, said, {name: torch.full((2, 2), 0.003)}.items())
    assert torch.equal(engine.tensors[name], kept) and not engine.paused
    engine.die()


# -- where a parameter's elements go in the checkpoint: learned from functions that move, refused where they compute ---

Made = list[torch.Tensor]
ROWS, COLUMNS = 8, 6
NAME = "decoder.layers.3.x.weight"


def qkv(w: torch.Tensor) -> Made:
    """Query and key heads by group, as Megatron interleaves them."""
    groups = w.view(2, -1, 2, COLUMNS)
    return [part.reshape(-1, COLUMNS) for part in groups.split([groups.shape[1] - 1, 1], dim=1)]


MOVES: dict[str, Callable[[torch.Tensor], Made]] = {
    "whole, padded, twice": lambda w: [w, w[: ROWS - 1], torch.stack([w, w])], "qkv": qkv,
    "gate and up by row or column": lambda w: [w[0::2], w[1::2], w[:, 0::2], w[:, 1::2]],
    "halves swapped": lambda w: [torch.cat([w[:, 3:], w[:, :3]], 1), torch.cat([w[4:], w[:4]])],
    "transposed, flat": lambda w: [w.T.contiguous(), w.reshape(-1)],
    "by expert": lambda w: [w.view(4, -1, COLUMNS), w.view(-1, 2, COLUMNS).permute(1, 0, 2)],
    "any order": lambda w: [w[torch.tensor([3, 1, 2, 7, 0, 4, 6, 5])]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "dim"), [("x", 1, 0), ("x", 4, 0), ("x", 2, 1), ("linear_fc1", 2, 0)]
)
@pytest.mark.parametrize("moved", MOVES)
def test_the_shards_of_all_ranks_together_are_what_the_functions_make_of_the_whole(
    moved: str, kind: str, size: int, dim: int
) -> None:
    name, values = f"decoder.layers.3.{kind}.weight", [torch.randn(ROWS, COLUMNS) for _ in range(size)]
    truth = MOVES[moved](values[0] if size == 1 else merged_tp(name, values, dim))
    made, convert = [torch.zeros_like(tensor) for tensor in truth], MOVES[moved]
    for rank, value in enumerate(values):
        part = Part(name, value, dim if size > 1 else -1, rank, size)
        for shard in shards_of([part], merged_tp, lambda _, w: zip("012345", convert(w), strict=False)):
            made[int(shard.meta.name)][shard.box.slices_in(Box.whole(shard.meta.shape))] += shard.tensor
    assert all(map(torch.equal, made, truth))


MIXED = torch.randperm(9000)


@pytest.mark.parametrize(("made", "word"), [
    (lambda w: w + 1, "computed"), (lambda w: 2 * w, "computed"), (lambda w: w.to(torch.bfloat16), "computed"),
    (lambda w: torch.nn.functional.pad(w, (0, 1)), "computed"), (lambda w: w[:, torch.randperm(9000)], "computed"),
    (lambda w: w[:, MIXED], "regrouped"), (lambda w: w.reshape(-1).roll(1).view(w.shape), "regrouped"),
])  # fmt: skip
def test_what_is_not_moved_box_by_box_is_refused_by_name(
    made: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    with pytest.raises(ConfigError, match=f"{NAME} is {word}"):
        shards_of([Part(NAME, torch.zeros(4, 9000), -1, 0, 1)], merged_tp, lambda n, w: [(n, made(w))])


def test_an_embedding_of_600_million_elements_takes_no_memory_and_is_learned_once_by_an_owner() -> None:
    """Each element's index would be 5 GB. Other memory of the same shape needs no learning, another shape does."""
    learned, owner = list[torch.Size](), torch.nn.Module()

    def convert(name: str, w: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        learned.extend([] if w.is_meta else [w.shape])
        return [(name, w[:151_900])]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rows, times in ((37_984, 3), (37_984, 3), (8, 6), (37_984, 6)):
        part = Part(NAME, torch.zeros(rows, 4096, device="meta"), 0, 1, 4)
        (shard,) = shards_of([part], merged_tp, convert, owner=owner)
        assert len(learned) == times and shard.box.start == (rows, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
    moved = torch.ones(8, 4096)
    (shard,) = shards_of([Part(NAME, moved, 0, 1, 4)], merged_tp, convert, owner=owner)
    assert len(learned) == 6 and shard.tensor.data_ptr() == moved.data_ptr()
