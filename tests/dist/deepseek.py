"""A DeepSeek-V3-like model on Megatron's own classes: MLA, sigmoid scores with bias and groups, a shared expert, MTP.

Weights depend only on a parameter's global name, so every layout holds shards of one model. It is exported under Hugging Face
names: every rank tells digests of what it was given; on one rank the folder is written whole, with the log-probs of a batch.
And with its replay driver, for whose routers there is routing of our making.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from r3channel.errors import R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.replay import ReplayDriver
from r3channel.weights.checksums import tensor_checksum
from r3channel.weights.convert import hf_weights

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 4, 128
PARALLEL = ("tensor_model", "expert_model", "expert_tensor", "pipeline_model")


def config(**changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from examples.embedded.megatron import LOCAL_CONFIG

    values: dict[str, Any] = {
        **LOCAL_CONFIG, "num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rope_type": "rope", "qk_layernorm": True,
        "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_ffn_hidden_size": 32,
        "moe_layer_freq": [0] + [1] * (LAYERS - 1), "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 32, "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0, "mtp_num_layers": 1, "add_bias_linear": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        **{f"{kind}_parallel_size": getattr(parallel_state, f"get_{kind}_parallel_world_size")() for kind in PARALLEL},
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "pipeline_dtype": torch.float32,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }  # fmt: skip
    return MLATransformerConfig(**{**values, **changes})


def build(*, tied: bool = False, **changes: Any) -> Any:
    """One rank's part of the one fixed model, in training mode. `tied`: its output layer has the embedding's weights."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    from examples.embedded.megatron_modules import use_local_modules

    own = config(**changes)
    spec = use_local_modules(get_gpt_decoder_block_spec(own, use_transformer_engine=False))
    mtp = use_local_modules(get_gpt_mtp_block_spec(own, spec, False)) if own.mtp_num_layers else None
    model = GPTModel(
        own, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="rope", mtp_block_spec=mtp,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip
    fill(model)
    return model.train()


def fill(model: torch.nn.Module) -> None:
    """Give this rank its shard of every parameter."""
    from megatron.core import parallel_state as ps

    tp: tuple[Any, Any] = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    etp: tuple[Any, Any] = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    first = ps.get_expert_model_parallel_rank() * EXPERTS // ps.get_expert_model_parallel_world_size()

    decoder: Any = model.decoder
    # of this stage, counted over the whole model
    numbers = [layer.layer_number - 1 for layer in decoder.layers]

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{numbers[int(match[1])]}."

    def expert(match: re.Match[str]) -> str:
        return f"local_experts.{int(match[1]) + first}."

    with torch.no_grad():
        for name, weight in model.named_parameters():
            name = re.sub(r"^decoder\.layers\.(\d+)\.", layer, name)
            name = re.sub(r"local_experts\.(\d+)\.", expert, name)
            rank, size = etp if "local_experts" in name else tp
            dim = vars(weight).get("partition_dim") if vars(weight).get("tensor_model_parallel") else None
            shape = list(weight.shape)
            if dim is not None:
                shape[dim] *= size
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            # norms about 1, or a wrong one would look right
            whole = torch.randn(shape, generator=seed) * 0.1 + ("norm" in name)
            weight.copy_(whole if dim is None else part(name, whole, dim, rank, size))
        for name, bias in model.named_buffers():
            if name.endswith("expert_bias"):
                name = re.sub(r"^decoder\.layers\.(\d+)\.", layer, name)
                seed = zlib.crc32(re.sub(r"\W", "", name).encode())
                bias.copy_(torch.rand(bias.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)


def part(name: str, whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    if "linear_fc1" in name:  # gate and up are sharded separately
        return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


# -- exported ----------------------------------------------------------------------------------------------------------


def hf_config() -> Any:
    from transformers import DeepseekV3Config

    values: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": EXPERTS, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": TOP_K, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "attention_bias": False, "architectures": ["DeepseekV3ForCausalLM"],
    }  # fmt: skip
    return DeepseekV3Config(**values)


def bridge_of(config: Any, own: Any) -> Any:
    """mbridge's names and formats; the model is the tests' own."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge  # after the CPU shim

    class Bridge(DeepseekV3Bridge):
        def _build_config(self) -> Any:
            return own

    return Bridge(config, dtype=torch.float32)


def whole_model(model: Any, config: Any, exported: dict[str, torch.Tensor], folder: Path) -> None:
    """What a reader of the folder needs, and the log-probs that Megatron gives."""
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in exported.items()}, folder / "model.safetensors")
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(16).expand_as(tokens), None)
    save_file(
        {"tokens": tokens, "logprobs": logits.float().log_softmax(-1).contiguous()}, folder / "expected.st"
    )


def export(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """What this rank was given of the model, and the tensors that bfloat16 leaves as they are."""
    config, model = hf_config(), build(mtp_num_layers=None)
    bridge = bridge_of(config, model.config)
    exported = {name: tensor.clone() for name, tensor in hf_weights(bridge, [model])}
    narrow = dict(hf_weights(bridge, [model], dtype=torch.bfloat16))
    if layout.world_size == 1:
        (folder := Path(job["out"]) / "hf").mkdir()
        whole_model(model, config, exported, folder)
    digests = {name: [list(tensor.shape), tensor_checksum(tensor)] for name, tensor in exported.items()}
    kept = sorted(name for name, tensor in narrow.items() if tensor.dtype == torch.float32)
    return {"digests": digests, "float32": kept}


# -- its replay driver, and routing ------------------------------------------------------------------------------------

SAMPLES, LENGTH, MICROBATCHES = 2, 16, 3
ROWS = SAMPLES * LENGTH
SPEC = RoutingSpec(num_layers=LAYERS, moe_layers=(1, 2, 3), num_experts=EXPERTS, top_k=TOP_K)


class Routing:
    """Ids of every micro-batch and layer, the same on all ranks; this one's samples and its SP slice. They can be spoilt."""

    num_microbatches = MICROBATCHES
    live: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def __init__(self, layout: TrainerLayout) -> None:
        self.layout, self.at = layout, megatron.parallel_coords()
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
        self.whole = {
            (index, layer): torch.from_numpy(random_rows(index, layer))
            for index in range(MICROBATCHES)
            for layer in range(LAYERS + 1)
        }

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        # row = position * samples + sample
        rows = self.whole[microbatch, layer][self.at.dp :: self.layout.dp]
        slots = self.layout.tp_slots
        return self.spoil((rows.chunk(slots)[self.at.tp] if slots > 1 else rows).contiguous())

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        return self.live

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        none = torch.zeros(len(self.layer_ids(microbatch, 1)), dtype=torch.bool)
        return none if self.padding is None else self.padding

    def check_digest(
        self, microbatch: int, layer: int, ids_RK: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return ids_RK.to(dtype)

    def verify(self) -> None: ...


def random_rows(index: int, layer: int) -> np.ndarray:
    scores = np.random.default_rng([index, layer]).random((ROWS, EXPERTS))
    return np.argsort(scores, axis=-1)[:, :TOP_K].astype(np.uint8)


class Bench:
    """One model with its driver."""

    def __init__(self, layout: TrainerLayout, **changes: Any) -> None:
        self.layout = layout
        self.model = build(**changes)
        self.driver = ReplayDriver.attach([self.model], spec=SPEC, layout=layout)
        self.routing = Routing(layout)

    def forward(self, index: int = 0, *, pads: int = 0, **given: Any) -> torch.Tensor:
        """The mean loss of a micro-batch; `pads` tokens behind each sample, which count for nothing."""
        rng = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=rng)
        tokens = tokens[self.routing.at.dp :: self.layout.dp]
        both = (torch.nn.functional.pad(each, (0, pads)) for each in (tokens, tokens.roll(-1, 1)))
        tokens, given["labels"] = both
        positions = torch.arange(LENGTH + pads).expand_as(tokens)
        return self.model(tokens, positions, None, **given)[:, :LENGTH].mean()

    def step(self, number: int = 1, **options: Any) -> AbstractContextManager[Any]:
        return self.driver.step(self.routing, step=number, **options)

    def whole_step(
        self, indices: Iterable[int] = range(MICROBATCHES), *, audit: RoutingAudit | None = None, **given: Any
    ) -> None:
        with self.step(audit=audit) as step:
            for index in indices:
                with step.microbatch(index):
                    loss = self.forward(index, **given)
                loss.backward()
                self.loss = loss.item()

    def train(self, *, audit: RoutingAudit | None = None) -> list[Any]:
        """A whole step with the gradients of all micro-batches; gives the tap's records."""
        self.model.zero_grad()
        with RouterTap(self.driver) as tap:
            self.whole_step(audit=audit)
        return tap.records

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: w.grad.clone() for n, w in self.model.named_parameters() if w.grad is not None}

    def natural(self) -> None:
        """Let the routing be what the live routers choose, as an engine with the same weights would record it."""
        with torch.no_grad(), RouterTap(self.driver) as tap:
            for index in range(MICROBATCHES):
                with self.driver.disable(microbatch=index):
                    self.forward(index)
        for record in tap.records:
            self.routing.whole[record.microbatch, record.layer] = torch.from_numpy(record.ids_RK)


@contextmanager
def bench(layout: TrainerLayout | None = None, **changes: Any) -> Iterator[Bench]:
    own = Bench(layout or TrainerLayout(), **changes)
    yield own
    own.driver.close()


def refused(kind: type[R3Error], *words: str) -> AbstractContextManager[Any]:
    """The error is of this kind, and says all of these."""
    return pytest.raises(kind, check=lambda error: all(word in str(error) for word in words))
