"""Patches that let the real Megatron-core 0.16.1 run on a CPU torch with gloo. It knows nothing of models or routing.

Nothing happens on import: `install()` patches this process, once, before megatron.core is imported. A process without a
GPU that trains for real is the only place for it: it renames CPU tensors "cuda" for Megatron's optimizers, and a
transformers model loaded after it fills its buffers wrongly.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from r3channel.errors import UsageError

_MARK = "_r3channel_megatron_shim"
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


class _Event:
    """A CUDA event that is always over."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> _Event:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """All streams are equal, so the token dispatcher sees no side stream."""

    def wait_stream(self, *_args: Any) -> None:
        pass

    def wait_event(self, *_args: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an upstream module or class that its type stubs call constant."""
    setattr(owner, name, value)


def _no_op(*_args: Any, **_kwargs: Any) -> None:
    return None


def _current_device() -> None:
    # Read as device= and in .to() by rotary embeddings, routers, mappings and p2p.
    _put(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _streams() -> None:
    # The alltoall dispatcher and shared-expert overlap make streams and events.
    _put(torch.cuda, "Stream", _Stream)
    _put(torch.cuda, "Event", _Event)
    _put(torch.cuda, "current_stream", lambda *_args, **_kwargs: _Stream())
    _put(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    _put(torch.cuda, "synchronize", _no_op)  # after batched p2p
    _put(torch.cuda.nvtx, "range_push", _no_op)
    _put(torch.cuda.nvtx, "range_pop", _no_op)


def _factories() -> None:
    # device="cuda" is written out in the schedules and the aux-loss tracker; pin_memory in rotary embeddings.
    for name in _FACTORIES:
        _put(torch, name, _on_cpu(getattr(torch, name)))
    _put(torch.Tensor, "pin_memory", lambda self, *_args, **_kwargs: self)
    _put(torch.Tensor, "cuda", lambda self, *_args, **_kwargs: self)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return make


def _tensor_type() -> None:
    # optimizer, distrib_optimizer and clip_grads compare tensor.type() with "torch.cuda.FloatTensor".
    inner = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = inner(self, *args, **kwargs)
        if isinstance(name, str) and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    _put(torch.Tensor, "type", cuda_name)


def _cpu_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _rng() -> None:
    # The RNG tracker's fork() and activation checkpointing save and restore "the CUDA state".
    _put(torch.cuda, "get_rng_state", _cpu_rng_state)
    _put(torch.cuda.random, "get_rng_state", _cpu_rng_state)
    _put(torch.cuda, "manual_seed", torch.manual_seed)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    _put(random, "_get_cuda_rng_state", _cpu_rng_state)
    _put(random, "_set_cuda_rng_state", _set_cpu_rng_state)


def _as_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    del record_stream
    return value.cpu().numpy() if torch.is_tensor(value) and as_numpy else value


def _splits() -> None:
    # Split sizes must reach all_to_all as numbers; upstream converts CUDA tensors only.
    for name in ("token_dispatcher", "moe_utils"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        _put(module, "maybe_move_tensor_to_cpu", _as_host)


def name_te_general_gemm() -> None:
    """0.16.1 leaves this name undefined without Transformer Engine, and no setting keeps its routers from asking for it
    (moe_utils.py:1192). None, as it is with an old engine: torch multiplies."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        _put(module, "te_general_gemm", None)


def _engine_types() -> None:
    # Multi-latent attention asks isinstance(x, TELinear), which is None without Transformer Engine.
    module = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    for name, value in list(vars(module).items()):
        if name.startswith(("TE", "Linear")) and not isinstance(value, type):
            _put(module, name, type(name, (), {}))


def _model_types() -> None:
    # mbridge 0.15.1 compares with a kind of model that megatron-core has no more since 0.17.
    kinds = importlib.import_module("megatron.core.transformer.enums").ModelType
    if not hasattr(kinds, "encoder_and_decoder"):
        _put(kinds, "encoder_and_decoder", object())


def declare_torchvision_operators() -> None:
    # Importing mbridge's vision models imports torchvision, whose CUDA wheel cannot register its operators beside a CPU
    # torch. The sitecustomize of the embedded engines does the same when it is active.
    if any(type(finder).__name__ == "_DeclareTorchvisionOperators" for finder in sys.meta_path):
        return
    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []  # a library's operators live as long as it does


# What it lacks without Transformer Engine, with a GPU or without.
_ANYWHERE: tuple[Callable[[], None], ...] = (name_te_general_gemm, _engine_types, _model_types)
# In this order: the first four before megatron.core is imported, the others import the module that they patch.
_PATCHES: tuple[Callable[[], None], ...] = (
    _current_device,
    _streams,
    _factories,
    _tensor_type,
    _rng,
    _splits,
    *_ANYWHERE,
    declare_torchvision_operators,
)


def install(device: str = "cpu") -> None:
    """Patch this process for Megatron-core without a GPU, and without Transformer Engine alone on `cuda`; a second call does
    nothing.

    Raises:
        UsageError: megatron.core was imported before, and some of its modules hold unpatched names.
    """
    if installed():
        return
    if "megatron.core" in sys.modules:
        raise UsageError(
            "megatron.core is imported already; expected the CPU shim to be installed first. "
            "Call examples.embedded.megatron_shim.install() at the start of the trainer process."
        )
    # On a CPU the fallbacks are what we want: each import would say so.
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    for words in ("Apex", "Transformer Engine", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=f".*{words}", category=UserWarning)
    _no_compiler()
    for patch in _PATCHES if device == "cpu" else _ANYWHERE:
        patch()
    _put(torch, _MARK, True)


def installed() -> bool:
    """Whether this process is patched."""
    return bool(getattr(torch, _MARK, False))


def _no_compiler() -> None:
    """Megatron's jit_fuser is torch.compile, which would call a C++ compiler for each small function."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "torch._dynamo" in sys.modules:
        _put(importlib.import_module("torch._dynamo.config"), "disable", True)
