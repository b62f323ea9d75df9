"""A decoder layer's router as the replay driver sees it: its handle, and the book of what waits in it.

The handle is made by `r3channel.trainer.megatron`; this file imports no Megatron and knows nothing of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        """[rows] bool, True where the live router is to choose instead of the ids; None: nowhere."""
        ...

    def handed(self, microbatch: int, layer: int, ids_RK: torch.Tensor) -> None:
        """A router is about to use these ids. Raises `DigestMismatch` where they are not those that the engine hashed, on a GPU
        at the latest in `verified`."""
        ...

    def verified(self) -> None:
        """Raise `DigestMismatch` unless all that was handed out is what the engines hashed."""
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

Seen = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets (what the live router would choose, what was handed out), [rows, K], of int32 or int64 each."""


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

    @contextmanager
    def choosing(self, live_R: torch.Tensor | None, seen: Seen | None, *, mode: Mode) -> Iterator[None]:
        """Inside the block, put the live router's choice into the rows of `live_R`, and tell `seen` what it would choose.

        The choice made in the forward pass is what the recompute replays, so that both are identical whatever the kernels.
        What waits for a recompute during a `logprob` pass is another pass's.
        """
        waits = mode == "train" and self.keep_for_recompute()
        inner = self.handle.replay.get_replay_topk
        own = vars(self.handle.replay).get("get_replay_topk")

        def choose(
            scores: torch.Tensor,
            topk: int,
            num_groups: Any = None,
            group_topk: Any = None,
            compute: Any = None,
        ) -> Any:
            if self.action == "forward":
                self._choose(
                    scores, topk, num_groups, group_topk, compute, live_R=live_R, seen=seen, waits=waits
                )
            return inner(scores, topk, num_groups, group_topk, compute)

        self.handle.replay.get_replay_topk = choose
        try:
            yield
        finally:
            del self.handle.replay.get_replay_topk
            if own is not None:
                self.handle.replay.get_replay_topk = own

    def _choose(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: Any,
        group_topk: Any,
        compute: Any,
        *,
        live_R: torch.Tensor | None,
        seen: Seen | None,
        waits: bool,
    ) -> None:
        state = self.state
        ids = state.target_topk_idx
        assert ids is not None  # the driver's hook widened it a moment ago
        with torch.no_grad():
            _, natural = compute(scores, topk, num_groups, group_topk)
        if live_R is not None:
            mixed = torch.where(live_R[:, None], natural, ids)
            state.target_topk_idx = mixed
            if waits:
                entries = state.replay_backward_list
                entries[-1] = mixed.to(entries[-1].dtype)
        if seen is not None:
            seen(natural, ids)

    def keep_for_recompute(self) -> bool:
        return self.handle.recomputed and self.handle.module.training

    def promote(self, microbatch: int) -> None:
        """Put a micro-batch's waiting ids first, where Megatron's recompute takes them."""
        if microbatch in self.waiting and self.waiting[0] != microbatch:
            index, entries = self.waiting.index(microbatch), self.state.replay_backward_list
            entries.insert(0, entries.pop(index))
            self.waiting.remove(microbatch)
            self.waiting.appendleft(microbatch)
