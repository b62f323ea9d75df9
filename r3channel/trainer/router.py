"""A decoder layer's router as replay sees it, and what a step must bring for it.

The handle is made by `r3channel.trainer.adapters.megatron`; this file imports no Megatron and knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Mode = Literal["train", "logprob"]
PassName = Literal["forward", "recompute", "logprob", "natural"]


class StepRouting(Protocol):
    """What a step's replay consumes: this rank's rows, in its routers' order."""

    @property
    def num_microbatches(self) -> int: ...

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        """Ids [rows, K] of one micro-batch and global 0-based decoder layer, on the router's device, in the spec's
        id dtype; sequence-major, cut for sequence parallelism. Asked for in each pass.
        """
        ...

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        """[rows] bool, True where the live router is to choose instead of the ids; None: nowhere."""
        ...

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        """[rows] bool, True where no engine row is: padding, and the last token of each sample."""
        ...

    def check_digest(self, microbatch: int, layer: int, ids_RK: torch.Tensor, wide_RK: torch.Tensor) -> None:
        """Check ids that a router is about to use, and write them to `wide_RK`, contiguous [rows, K] int32 or int64.

        Raises `DigestMismatch` where the engine hashed others, on a GPU at the latest in `verified`."""
        ...

    def verified(self) -> None:
        """Raise `DigestMismatch` unless all that was handed out is what the engines hashed."""
        ...


class RouterHandle(Protocol):
    """One decoder layer's router."""

    @property
    def layer(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def replay(self) -> Any: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def recomputed(self) -> bool: ...
    @property
    def counts(self) -> torch.Tensor | None:
        """[experts], to which the router adds a call's tokens where gradients are on (expert bias); None: it does not count."""
        ...


@dataclass(frozen=True, slots=True)
class RouterCall:
    """Which pass a router is running, or ran last. -1: outside of any step or micro-batch."""

    step: int
    microbatch: int
    pass_name: PassName


OUTSIDE = RouterCall(-1, -1, "natural")


def name_of(handle: RouterHandle) -> str:
    """The router's name in errors."""
    return f"router of decoder layer {handle.layer} (chunk {handle.chunk})"


LiveTopk = Callable[[], torch.Tensor]
"""What the live router chooses for the rows of its call, [rows, K]."""

Seen = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets (what the live router would choose, what was handed out), [rows, K], of int32 or int64 each."""
