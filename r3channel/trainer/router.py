"""A decoder layer's router as the replay driver sees it: its handle, and the book of what waits in it.

The handle is made by `r3channel.trainer.megatron`; this file imports no Megatron and knows nothing of steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch

Action = Literal["forward", "recompute", "natural"]
Mode = Literal["train", "logprob"]
PassName = Literal["forward", "recompute", "logprob", "natural"]


class StepRouting(Protocol):
    """What a step's replay consumes: this rank's rows, in its routers' order."""

    @property
    def num_microbatches(self) -> int: ...

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        """Ids [rows, K] of one micro-batch and global 0-based decoder layer, on the router's device, in the spec's
        id dtype; sequence-major, cut for sequence parallelism. The driver holds a reference until the backward pass.
        """
        ...


class ReplayState(Protocol):
    """The part of Megatron's RouterReplay instance that the driver uses."""

    target_topk_idx: torch.Tensor | None
    replay_backward_list: list[torch.Tensor]

    def set_target_indices(self, topk_indices: torch.Tensor) -> None: ...
    def clear_indices(self) -> None: ...


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
    def set_action(self, action: Action) -> None: ...


@dataclass(frozen=True, slots=True)
class RouterCall:
    """Which pass a router is running, or ran last. -1: outside of any step or micro-batch."""

    step: int
    microbatch: int
    pass_name: PassName


OUTSIDE = RouterCall(-1, -1, "natural")


@dataclass(slots=True)
class BoundRouter:
    """A handle with the driver's own book of what waits in its replay_backward_list."""

    handle: RouterHandle
    action: Action = "natural"
    waiting: deque[int] = field(default_factory=deque)
    call: RouterCall = OUTSIDE

    @property
    def name(self) -> str:
        return f"router of decoder layer {self.handle.layer} (chunk {self.handle.chunk})"

    @property
    def state(self) -> ReplayState:
        return cast(ReplayState, self.handle.replay)

    def act(self, action: Action) -> None:
        self.action = action
        self.handle.set_action(action)

    def clear(self) -> None:
        self.waiting.clear()
        self.state.clear_indices()
        self.act("natural")

    def keep_for_recompute(self) -> bool:
        return self.handle.recomputed and self.handle.module.training

    def promote(self, microbatch: int) -> None:
        """Put a micro-batch's waiting ids first, where Megatron's recompute takes them."""
        if microbatch in self.waiting and self.waiting[0] != microbatch:
            index, entries = self.waiting.index(microbatch), self.state.replay_backward_list
            entries.insert(0, entries.pop(index))
            self.waiting.remove(microbatch)
            self.waiting.appendleft(microbatch)
