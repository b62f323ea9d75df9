"""A tiny random-weight Qwen3-MoE checkpoint with a word-level tokenizer, written directly: no model class is built.

    python -m examples.embedded.model FOLDER --layers 4 --experts 128

Tensor names and layout are those of the published Qwen3-MoE checkpoints, read by transformers, SGLang and mbridge alike.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 32
_STD = 0.2  # wide enough that the routing varies from token to token
_MARK = "r3channel_model.json"
_FORMAT = 2  # raised when the same parameters give other files


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything that decides the bytes of the checkpoint."""

    layers: int = 4
    dense_layers: tuple[int, ...] = (0,)
    experts: int = 128
    top_k: int = 8
    hidden: int = 64
    seed: int = 0
    dtype: str = "float32"


def write_model(folder: str | os.PathLike[str], **sizes: Any) -> Path:
    """Write the checkpoint of `ModelShape(**sizes)` into `folder` unless it already holds that one; return the folder.

    Words of the tokenizer are "t4" .. "t511", ids 4 .. 511; 0..3 are <pad>, <s>, </s>, <unk>.
    """
    shape = ModelShape(**sizes)
    path, key = Path(folder), {"format": _FORMAT, **json.loads(json.dumps(asdict(shape)))}
    mark = path / _MARK
    if mark.is_file() and json.loads(mark.read_text()) == key:
        return path
    path.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    _write_weights(path, shape)
    _write_json(path / "config.json", config_of(shape))
    write_tokenizer(path)
    _write_json(mark, key)  # last: a folder with the mark is complete
    return path


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Its `config.json`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.hidden // 2,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(shape.dense_layers),
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "initializer_range": _STD,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": shape.dtype,
    }


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of the checkpoint, in the order in which the random numbers are drawn."""
    hidden = shape.hidden
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (_HEADS * _HEAD_DIM, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (_KV_HEADS * _HEAD_DIM, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (_KV_HEADS * _HEAD_DIM, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, _HEADS * _HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", (_HEAD_DIM,)
        yield f"{prefix}.self_attn.k_norm.weight", (_HEAD_DIM,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if layer in shape.dense_layers:
            yield from _mlp(f"{prefix}.mlp", hidden, width=2 * hidden)
        else:
            yield f"{prefix}.mlp.gate.weight", (shape.experts, hidden)
            for expert in range(shape.experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, width=hidden // 2)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)


def _mlp(prefix: str, hidden: int, *, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _write_weights(folder: Path, shape: ModelShape) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)
    tensors = {}
    for name, size in tensor_shapes(shape):
        if "norm" in name:
            values = torch.ones(size)
        else:
            values = torch.empty(size).normal_(std=_STD, generator=generator)
        tensors[name] = values.to(getattr(torch, shape.dtype))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = {**specials, **{f"t{index}": index for index in range(4, VOCAB_SIZE)}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": word, **flags} for word, index in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", names)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.embedded.model")
    parser.add_argument("folder")
    for name, size in asdict(ModelShape()).items():
        kind: dict[str, Any] = {"type": int, "nargs": "*"} if name == "dense_layers" else {"type": type(size)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=size, **kind)
    options = vars(parser.parse_args(argv))
    print(write_model(options.pop("folder"), **options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
