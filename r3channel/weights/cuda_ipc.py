"""A staged copy in GPU memory that trainers of the same machine map (CUDA IPC). By torch's handles, without its pickles.

An engine rank makes one handle for each trainer. torch uses the memory for nothing else until each has let go of it, so that a
trainer that is late writes into nobody's. A trainer that was killed never lets go: its engine keeps that memory until it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from r3channel.errors import WeightsError

_UUID, _HANDLES = 0, (1, 4, 6)
"""Where a handle names its GPU, and where it has bytes."""


def lacks(nbytes: int, device: torch.device) -> str:
    """Why a copy of so many bytes cannot lie on this device; empty if it can."""
    if device.type != "cuda":
        return f'wire="cuda_ipc" stages in GPU memory, and this engine is on {device}: take "shared_memory" or "tcp"'
    torch.cuda.ipc_collect()  # of an earlier copy that its trainers have left
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    remedy = 'lower --mem-fraction-static, release the KV cache, or take wire="shared_memory"'
    return (
        f"a staged copy needs {nbytes:,} bytes, {free:,} are free on {device}: {remedy}"
        if nbytes > free
        else ""
    )


def handle(flat: torch.Tensor) -> list[Any]:
    """What one process needs to map this memory, as JSON. The GPU goes by its UUID: each process numbers those that it sees."""
    storage: Any = flat.untyped_storage()
    told = list(storage._share_cuda_())
    told[_UUID] = str(torch.cuda.get_device_properties(told[_UUID]).uuid)
    return [value.hex() if isinstance(value, bytes) else value for value in told]


def mapped(told: Sequence[Any]) -> torch.Tensor:
    """The memory behind a handle: flat, uint8. WeightsError where this process does not see its GPU."""
    seen = [str(torch.cuda.get_device_properties(at).uuid) for at in range(torch.cuda.device_count())]
    if told[_UUID] not in seen:
        raise WeightsError(
            f"an engine stages on GPU {told[_UUID]}, this trainer sees {seen}: let CUDA_VISIBLE_DEVICES show it all that its "
            'engines use (Ray: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), or take wire="shared_memory"'
        )
    torch.cuda.init()
    own = [bytes.fromhex(value) if at in _HANDLES else value for at, value in enumerate(told)]
    own[_UUID] = seen.index(told[_UUID])
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*own)
    except RuntimeError as error:
        raise WeightsError(f"the memory that an engine stages in could not be mapped: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
