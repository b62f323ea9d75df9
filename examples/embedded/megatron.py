"""A real Megatron-core 0.16.1 trainer on a CPU, over gloo, or on a GPU, over NCCL: a Qwen3-MoE model from a Hugging Face folder.

Read against megatron-core 0.16.1 and mbridge 0.15.1. mbridge knows the Transformer Engine layer spec only, so a subclass
builds the local one. Importing this module installs nothing and imports no Megatron; `init_distributed()` and `build()` do.
Nothing here reads arguments or the rank from the environment, so it works inside a Ray actor. It knows nothing of routing.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from examples.embedded import megatron_shim
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.row_order import Microbatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

LOCAL_CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    # Fusions and grouped GEMM need Transformer Engine or Apex.
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    # An asynchronous gloo send may still read the output that this would free.
    "deallocate_pipeline_outputs": False,
    "moe_enable_routing_replay": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """One rank's part of a trainer, ready to step."""

    chunks: list[torch.nn.Module]
    """Model chunks of this pipeline stage, each wrapped in DDP (and Float16Module for bfloat16)."""
    optimizer: Any
    """Megatron's optimizer; with float32 main parameters for bfloat16. `step()` gives (done, gradient norm, zeros)."""
    config: TransformerConfig
    bridge: Any
    """The mbridge bridge: names and formats for `r3channel.weights.convert.hf_weights(bridge, chunks)`."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before; call before each train step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()

    def run(
        self,
        forward_step: Callable[..., Any],
        *,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        data: Iterable[Any] = (),
    ) -> list[Any]:
        """Megatron's own schedule (1F1B when pipelined); on the last stage the reduced losses, elsewhere [].

        `forward_step(iterator, chunk)` gives (output, loss function); each chunk has its own iterator over `data`.
        Gradients are reduced when this returns.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        iterators = [iter(data) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )


def init_distributed(
    *,
    rank: int = 0,
    world_size: int = 1,
    init_method: str = "",
    layout: TrainerLayout,
    seed: int = 1234,
    timeout_s: float = 300.0,
    device: str = "cpu",
) -> None:
    """Install the shim, join the default group and make Megatron's groups.

    Args:
        device: `cpu`, over gloo; `cuda`, over NCCL, each rank of a machine on a GPU of its own.
        init_method: `file:///path` (an absent file on a shared disk) or `tcp://127.0.0.1:port`; empty for one process.
        timeout_s: deadline of the rendezvous and of each collective.

    Raises:
        ConfigError: the layout needs another world size.
        UsageError: megatron.core was imported before the shim.
    """
    if layout.world_size != world_size:
        raise ConfigError(f"{layout} needs {layout.world_size} processes; world_size is {world_size}")
    megatron_shim.install(device)
    # gloo binds to the address of the host name by default, which need not exist on a machine without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    meeting: dict[str, Any] = {"init_method": init_method} if init_method else {"store": HashStore()}
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **meeting)
    _init_megatron(layout, seed=seed, timeout_s=timeout_s)


def _init_megatron(layout: TrainerLayout, *, seed: int, timeout_s: float) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        # Without expert parallelism Megatron reduces expert gradients over DP only (the `allreduce` attribute that
        # ColumnParallelLinear sets), so whole experts on each TP rank would drift apart: shard them with TP instead.
        expert_tensor_parallel_size=1 if layout.ep > 1 else layout.tp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,  # the groups are gloo already
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def close_distributed() -> None:
    """Leave Megatron's groups and the default group; a second call does nothing."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(
    model_dir: str | os.PathLike[str],
    layout: TrainerLayout,
    *,
    dtype: str = "bfloat16",
    lr: float = 1e-4,
    config_changes: dict[str, Any] | None = None,
) -> TrainerModel:
    """This rank's part of the checkpoint in `model_dir`, with DDP and optimizer. Collective over all ranks.

    Router replay is on, sequence parallelism as the layout says, full activation recompute by layer.

    Args:
        dtype: of the parameters; "bfloat16" adds float32 main parameters to the optimizer.
        config_changes: fields of Megatron's TransformerConfig that win over all others.

    Raises:
        ConfigError: the folder holds no Qwen3-MoE checkpoint, or the dtype is another.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {sorted(_DTYPES)}")
    hf_config = _read_config(Path(model_dir))
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    changes |= {"sequence_parallel": layout.sequence_parallel, "moe_layer_freq": _layer_pattern(hf_config)}
    changes |= _pipeline_changes(layout) | (config_changes or {})
    bridge = _bridge_class()(hf_config, changes, dtype=_DTYPES[dtype])
    chunks = _load(bridge, model_dir, dtype=dtype)
    optimizer = _optimizer(chunks, dtype=dtype, lr=lr)
    _connect(bridge.config, chunks, optimizer)
    return TrainerModel(chunks=chunks, optimizer=optimizer, config=bridge.config, bridge=bridge)


def _pipeline_changes(layout: TrainerLayout) -> dict[str, Any]:
    """What the schedules need over gloo; sizes of an uneven pipeline."""
    if layout.cp > 1 and layout.cp_split != "zigzag":
        raise ConfigError(
            f"the embedded attention and Megatron-core's rotary embedding are zigzag; layout has cp_split={layout.cp_split}"
        )
    changes: dict[str, Any] = {"variable_seq_lengths": layout.pp > 1 and not layout.one_length}
    if layout.vpp > 1:  # batched p2p of two chunks to one peer cross-matches on gloo, silently
        changes |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if layout.first_layers is not None:
        changes["num_layers_in_first_pipeline_stage"] = layout.first_layers
    if layout.last_layers is not None:
        changes["num_layers_in_last_pipeline_stage"] = layout.last_layers
    return changes


def packed_params(batch: Microbatch, *, device: str = "cpu") -> Any:
    """Megatron's PackedSeqParams of a packed micro-batch, its tail as a sequence of its own; None for a padded one."""
    if not batch.packed:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [*batch.padded, batch.tail] if batch.tail else list(batch.padded)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "qwen3_moe":
        raise ConfigError(
            f"{folder}: model type {config.model_type!r}; the embedded trainer builds qwen3_moe"
        )
    if not hasattr(config, "rope_theta"):  # transformers 5 moved it; mbridge 0.15.1 reads the old place
        config.rope_theta = config.rope_parameters["rope_theta"]
    return config


def _layer_pattern(hf_config: Any) -> list[int]:
    """Megatron's `moe_layer_freq`: 1 for each MoE layer."""
    moe = RoutingSpec.from_hf_config(hf_config).moe_layers
    return [int(layer in moe) for layer in range(hf_config.num_hidden_layers)]


def _bridge_class() -> Callable[..., Any]:
    """mbridge's Qwen3-MoE bridge, for the local layer spec and for dense layers among the MoE ones."""
    from mbridge.models.qwen3moe import Qwen3MoEBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from examples.embedded.megatron_modules import use_local_modules

    class LocalQwen3MoE(Qwen3MoEBridge):
        _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
            **Qwen3MoEBridge._MLP_MAPPING,
            "mlp.linear_fc1.weight": [
                "model.layers.{layer_number}.mlp.gate_proj.weight",
                "model.layers.{layer_number}.mlp.up_proj.weight",
            ],
            "mlp.linear_fc2.weight": ["model.layers.{layer_number}.mlp.down_proj.weight"],
        }

        def __init__(self, hf_config: Any, changes: dict[str, Any], *, dtype: torch.dtype) -> None:
            self._changes = changes
            super().__init__(hf_config, dtype=dtype)

        def _build_config(self) -> Any:
            self.extra_args = {**LOCAL_CONFIG, **self._changes, **self.extra_args}
            return super()._build_config()

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)
            return use_local_modules(spec)

    return LocalQwen3MoE


def _load(bridge: Any, model_dir: str | os.PathLike[str], *, dtype: str) -> list[torch.nn.Module]:
    from r3channel.weights.convert import NamedView

    with contextlib.redirect_stdout(io.StringIO()):  # it prints a line per model-parallel rank
        chunks = bridge.get_model(
            bf16=dtype == "bfloat16",
            wrap_with_ddp=True,
            ddp_config={"use_distributed_optimizer": False, "grad_reduce_in_fp32": True},
            data_parallel_random_init=False,  # every replica reads the same checkpoint
        )
    with torch.no_grad():
        bridge.load_weights([NamedView(chunk) for chunk in chunks], os.fspath(model_dir))
    return chunks


def _optimizer(chunks: Sequence[torch.nn.Module], *, dtype: str, lr: float) -> Any:
    """Made after the weights are loaded: it copies them into float32 main parameters."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        bf16=dtype == "bfloat16",
        params_dtype=_DTYPES[dtype],
        weight_decay=0.0,
    )
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)  # type: ignore[arg-type]


def _connect(config: Any, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """What Megatron's schedules call at the end of a step."""
    from megatron.core.distributed import finalize_model_grads

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    for chunk in chunks:
        chunk.train()
