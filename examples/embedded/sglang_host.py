"""SGLang plug-in of the embedded mode: what the host side of SGLang 0.5.23 needs changed on a machine without a GPU.

Does nothing unless R3DEMO_EMBEDDED=1. Names relied on: `mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS` (in 0.5.15.post1
`state_capturer.base.BaseHostCache`, which allocates by itself there),
`entrypoints.engine._set_envs_and_config` (which ends by choosing the start method of the server's processes),
`entrypoints.http_server._freeze_gc_after_server_warmup`, `managers.load_snapshot.shm_path_for`,
`managers.scheduler.Scheduler` (what its loop calls while paused,
and `maybe_sleep_on_idle`),
`layers.attention.torch_native_backend.TorchNativeAttnBackend`.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

_ENTRYPOINTS = "sglang.srt.entrypoints"
_PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    """Entry point `r3channel_embedded` of group `sglang.srt.plugins`, declared in shims/; called once in each SGLang process."""
    if os.environ.get("R3DEMO_EMBEDDED") != "1":
        return
    # Imported here: `make gpu` has the shims on its path too, and SGLang opens this module with the embedded mode off.
    from sglang.srt.managers import load_snapshot
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.state_capturer import base

    from examples.embedded import sglang_chains

    # Named by the engine's first process, as SGLang's other shared memory is: whoever kills the engine can unlink it.
    engine = os.environ.setdefault("R3DEMO_ENGINE_PID", str(os.getpid()))
    load_snapshot.shm_path_for = lambda name: f"/dev/shm/sgl_shm_loads_{engine}_{name}"
    if hasattr(base, "ALLOC_MEMORY_FUNCS"):
        # The entry is replaced and not the dict: state_capturer/base.py holds a reference to mem_cache's dict.
        base.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        sglang_chains.register()
        HookRegistry.register(_PAUSED, _sleep, HookType.AFTER)
    else:
        HookRegistry.register(
            "sglang.srt.state_capturer.base.BaseHostCache.__init__", _plain_cache, HookType.REPLACE
        )
        if os.environ.get("TRITON_INTERPRET") == "1":  # whoever drafts: it takes importing
            sglang_chains.register(older=True)
    HookRegistry.register(f"{_NATIVE}.__init__", _can_be_padded, HookType.AFTER)
    HookRegistry.register(f"{_ENTRYPOINTS}.engine._set_envs_and_config", _fork_workers, HookType.AFTER)
    HookRegistry.register(
        f"{_ENTRYPOINTS}.http_server._freeze_gc_after_server_warmup", _nothing, HookType.REPLACE
    )


def _plain_memory(dims: Any, dtype: Any, device: str, *_: Any, **__: Any) -> Any:
    """Host cache memory; SGLang always asks for pinned memory (`BaseHostCache`), which a CPU torch cannot give."""
    import torch

    return torch.zeros(dims, dtype=dtype, device=device)


def _plain_cache(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__` of 0.5.15.post1 without pinned memory."""
    import torch

    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def _sleep(result: Any, scheduler: Any) -> None:
    """A paused engine looks for requests without a break, also with --sleep-on-idle; a weight sync pauses it just when the
    trainers that share its cores must work."""
    scheduler.maybe_sleep_on_idle()


def _can_be_padded(result: Any, backend: Any, *_: Any, **__: Any) -> None:
    """DP attention pads batches and asks the backend, on a CPU, for a length that this one does not name."""
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1


def _fork_workers(result: Any, *_: Any, **__: Any) -> None:
    """Fork scheduler and detokenizer: each spares importing SGLang again, 6 s of CPU (2 cores of an AMD EPYC).

    Without a GPU there is no device state that a fork would break, and the launcher has computed nothing yet.
    """
    if os.environ.get("R3DEMO_EMBEDDED_SPAWN") != "1":
        multiprocessing.set_start_method("fork", force=True)


def _nothing(*_: Any, **__: Any) -> None:
    """Without a warm-up SGLang posts /freeze_gc before it listens, and prints three pages about the refusal."""
