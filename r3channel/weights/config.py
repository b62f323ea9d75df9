"""The settings of a weight session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from r3channel.errors import ConfigError
from r3channel.observe.metrics import Metrics
from r3channel.weights.engine import EngineHandle, PauseMode
from r3channel.weights.staged_copy import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Settings that hold for all updates of a session."""

    engines: Sequence[EngineHandle | str]
    """Addresses, or handles where an engine has an API key. Each engine is asked for its number of ranks."""
    staged: Literal["auto"] | bool = "auto"
    """Whether our half in the engine (R3CHANNEL_ENGINE=1 or R3CHANNEL_WEIGHTS=1) receives updates beside the parameters, and
    changes over under a short pause. `auto`: if every engine has our half, and memory for one more copy. Otherwise, and with
    False, SGLang itself loads flattened buckets in place."""
    bucket_bytes: int = 256 << 20
    """Most bytes of one bucket: one bucket leaves while the next is read. A broadcast holds two buffers of this size."""
    host: str = "127.0.0.1"
    """This machine's address that the engines and the other trainer ranks reach; we listen there and nowhere else."""
    backend: str = "gloo"
    """What carries broadcasts."""
    pause: PauseMode = "retract"
    """What happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it."""
    verify: bool = False
    """Whether each rank also computes what the engine's own checksum of each parameter will be (`held`). A broadcast cannot.
    Staged bytes are verified in any case."""
    expected: Literal["engine"] | None = "engine"
    """What every update must give: with `engine` all that the engine has parameters for; None checks nothing."""
    engine_timeout_s: float = 30.0
    """Seconds before one engine counts as lost. They hold for each of these: one bucket of a broadcast; one record (1 MiB) of
    staged bytes; the answer that all bytes are placed; verifying and changing over (each at least a second for each GB of a
    rank); pausing and resuming. The other engines stay paused meanwhile."""
    token_file: str = ""
    """The run's token, where the engines were started with R3CHANNEL_TOKEN_FILE."""
    metrics: Metrics | None = None
    """What updates count into: `TrainerChannel.metrics` where both are in one process."""
    wire: Wire = "tcp"
    """How staged bytes reach an engine's ranks. `tcp`: over links. `shared_memory`, and `cuda_ipc` for memory of the engine's
    GPUs: trainers on the engine's machine (colocated) put the bytes there, as much as its parameters take; no byte travels.
    `nccl`: from GPU to GPU in one group of all trainer ranks and engines' ranks, while the engines are paused (`gloo`: the same
    on hosts)."""

    def __post_init__(self) -> None:
        if self.verify and self.staged is False:
            raise ConfigError("verify=True tells what staged parameters will hold; staged=False stages none")
        for name, known in (("backend", ("gloo", "nccl")), ("wire", get_args(Wire))):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r}: expected {' or '.join(known)}")
