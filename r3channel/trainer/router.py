"""A decoder layer's router as replay sees it, and what a step must provide for it.

An adapter makes the handles: `r3channel.trainer.adapters.megatron`, or one of a loop's own. This file knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import RankCoords, TrainerLayout

Mode = Literal["train", "logprob"]
PassName = Literal["forward", "recompute", "logprob", "natural"]


class StepRouting(Protocol):
    """The rows of this rank that a step's replay consumes, in its routers' order."""

    @property
    def num_microbatches(self) -> int: ...

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        """Return one layer's ids of a micro-batch.

        Each pass calls it.

        Args:
            microbatch: The index of the micro-batch.
            layer: The global 0-based decoder layer.

        Returns:
            [rows, K] on the router's device, in the spec's id dtype; sequence-major, cut for sequence parallelism.
        """
        ...

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        """Return where the live router is to choose.

        Returns:
            [rows] bool, True where the live router chooses instead of the ids; None: nowhere.
        """
        ...

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        """Return where no engine row is.

        Returns:
            [rows] bool, True for padding and for the last token of each sample.
        """
        ...

    def check_digest(
        self, microbatch: int, layer: int, ids_RK: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Check ids that a router is about to use, and widen them.

        Args:
            microbatch: The index of the micro-batch.
            layer: The global 0-based decoder layer.
            ids_RK: The ids.
            dtype: int32 or int64.

        Returns:
            The ids as `dtype`, contiguous [rows, K].

        Raises:
            DigestMismatch: The engine hashed other ids. On a GPU the error comes at the latest in `verify`.
        """
        ...

    def verify(self) -> None:
        """Raise `DigestMismatch` unless all that was handed out is what engines hashed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHandle:
    """One decoder layer's router."""

    layer: int
    """Global 0-based decoder layer."""
    chunk: int = 0
    """Index of the model chunk that holds it."""
    module: torch.nn.Module
    replay: Any
    """The object whose `get_replay_topk(scores_RE, top_k, groups, group_top_k, live_topk)` the router calls in each forward pass,
    and takes (weights_RK, ids_RK) from. Replay sets that function on this object, and gathers the weights out of the scores."""
    top_k: int
    num_experts: int
    recomputed: bool = False
    """Whether this router runs again in the backward pass."""
    counts: Callable[[], torch.Tensor | None] = field(default=lambda: None)
    """Gives [experts], to which the router adds a call's tokens where gradients are on (expert bias). None: the router does not
    count."""


class Adapter(Protocol):
    """A training framework as the channel sees it. All calls come from the thread that attaches."""

    def spec_from_config(self, chunks: Sequence[torch.nn.Module]) -> RoutingSpec: ...

    def parallel_coords(self) -> RankCoords:
        """Return where this process is in the layout."""
        ...

    def tp_group(self) -> Any:
        """Return the process group over which TP rank 0 hands rows on.

        The channel calls it with tp > 1 alone.
        """
        ...

    def routers(self, chunks: Sequence[torch.nn.Module], layout: TrainerLayout) -> Mapping[int, RouterHandle]:
        """Return this rank's routers by global 0-based layer.

        Raises:
            RouterUnsupported: A router would ignore or drop replayed ids.
            ConfigError: The layout is not the model's.
        """
        ...

    def input_ids(self, *arguments: Any, **words: Any) -> torch.Tensor | None:
        """Return the token ids of a forward call of the first chunk.

        The arguments are just those of that forward call. An adapter without this method leaves what the model is given
        unchecked, which is logged once.

        Returns:
            [b, s / cp] ([1, t / cp] for a pack), or [rows] in the routers' order; None where the model is given embeddings.
        """
        ...


@dataclass(frozen=True, slots=True)
class RouterCall:
    """The pass that a router is running, or ran last. -1: outside of any step or micro-batch."""

    step: int
    microbatch: int
    pass_name: PassName

    def __str__(self) -> str:
        return f"{self.pass_name} pass of micro-batch {self.microbatch}, step {self.step}"


OUTSIDE = RouterCall(-1, -1, "natural")


def name_of(handle: RouterHandle) -> str:
    """Return the router's name in errors."""
    return f"router of decoder layer {handle.layer} (chunk {handle.chunk})"


LiveTopk = Callable[[], torch.Tensor]
"""Gives what the live router chooses for the rows of its call, [rows, K]."""

Seen = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes (what the live router would choose, what was handed out), each [rows, K] of int32 or int64."""
