"""What a weight session is told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from r3channel.errors import ConfigError
from r3channel.observe.metrics import Metrics
from r3channel.weights.engine import EngineHandle, PauseMode
from r3channel.weights.staged_copy import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """What holds for all updates of a session."""

    engines: Sequence[EngineHandle | str]
    """Addresses, or handles where an engine has a key. Their ranks are asked of them."""
    staged: Literal["auto"] | bool = "auto"
    """Receive in our half in the engine (R3CHANNEL_ENGINE=1 or R3CHANNEL_WEIGHTS=1), beside the parameters, and change over under
    a short pause. `auto`: where every engine has it and memory for one more copy; else, and with False, SGLang itself loads
    flattened buckets in place."""
    bucket_bytes: int = 256 << 20
    """Cap of one bucket: one leaves while the next is read. A broadcast holds two buffers of this size."""
    host: str = "127.0.0.1"
    """This machine's address that the engines and the other trainer ranks reach; we listen there and nowhere else."""
    backend: str = "gloo"
    """What carries broadcasts."""
    pause: PauseMode = "retract"
    """What happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it."""
    verify: bool = False
    """Also have each rank tell what the engine's own checksum of each parameter will be (`held`). No broadcast can. Staged bytes
    are verified in any case."""
    expected: Literal["engine"] | None = "engine"
    """What every update must give: what the `engine` has parameters for; None does not look."""
    engine_timeout_s: float = 30.0
    """How long one engine may take for one bucket of a broadcast, one record (1 MiB) of staged bytes, to say that all are placed,
    to verify or change over (each at least a second for each GB of a rank), to pause or resume, before it counts as lost. The
    others stay paused meanwhile."""
    token_file: str = ""
    """The run's token, where the engines were started with R3CHANNEL_TOKEN_FILE."""
    metrics: Metrics | None = None
    """What updates count into: `TrainerChannel.metrics` where both are in one process."""
    wire: Wire = "tcp"
    """How staged bytes reach an engine's ranks: over `tcp`, or put by trainers on its machine (colocated) into
    `shared_memory`, or by `cuda_ipc` into memory of its GPUs, as much as its parameters take: no byte travels. `nccl`: from GPU
    to GPU in one group of all trainer ranks and engines' ranks, while the engines are paused (`gloo`: the same on hosts)."""

    def __post_init__(self) -> None:
        if self.verify and self.staged is False:
            raise ConfigError("verify=True tells what staged parameters will hold; staged=False stages none")
        if self.backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend {self.backend!r}: expected gloo or nccl")
