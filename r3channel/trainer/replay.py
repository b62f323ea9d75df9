"""Replays a step's ids in Megatron's routers: one wrapper per router, keyed by the pass that runs.

This module works on `RouterHandle`s (made by an adapter), so it imports no Megatron. Of a router's RouterReplay it uses
`get_replay_topk` alone. The targets, actions and class-level registry of RouterReplay are left alone, so other models in the
process are not touched. The driver does not know where ids come from; the step decides what a pass may consume.

Megatron's own replay keeps action and ids as state of each router and leaves the order of recomputes to the caller. There, three
faults are silent: right losses with wrong gradients (1F1B), rows without an expert, and entries that shift every later recompute.

    IDLE -> step -> (microbatch -> backward)* -> verified -> IDLE
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from r3channel.errors import ConfigError, UsageError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.model_tokens import say_once
from r3channel.trainer.router import OUTSIDE, Adapter, RouterCall, RouterHandle, StepRouting, name_of
from r3channel.trainer.step import ReplayStep

__all__ = ["ReplayDriver", "ReplayStep", "RouterHandle", "StepRouting"]


class ReplayDriver:
    """Replay for the routers of one rank's model. One thread; not reentrant. `close` takes its wrappers away.

    with driver.step(step_routing, step=3) as step:
        for index in range(step_routing.num_microbatches):
            with step.microbatch(index):
                output = model(...)
            loss(output).backward()
    """

    def __init__(
        self, handles: Mapping[int, RouterHandle], chunks: Sequence[torch.nn.Module], *, spec: RoutingSpec,
        input_ids: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.handles = dict(handles)
        """The bound routers by global 0-based layer."""
        self._chunks = tuple(chunks)
        self._step: ReplayStep | None = None
        self._off: RouterCall | None = None
        self.tap: object | None = None
        """The `RouterTap` that reads what the routers use, outside the wrappers; one at a time."""
        self._calls = dict.fromkeys(handles, OUTSIDE)
        with ExitStack() as undo:
            for handle in handles.values():
                _check_spec(handle, spec)
                undo.callback(_put_before(handle, self._replay_topk))
            for index, chunk in enumerate(chunks):
                undo.callback(chunk.register_forward_hook(partial(self._watch_output, index)).remove)
            if input_ids is not None:  # the first chunk of the first stage
                before = partial(self._check_input, input_ids)
                undo.callback(chunks[0].register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo = undo.pop_all()

    @classmethod
    def attach(
        cls, chunks: Sequence[torch.nn.Module], *, spec: RoutingSpec, layout: TrainerLayout,
        adapter: Adapter = megatron,
    ) -> ReplayDriver:  # fmt: skip
        """Bind to the routers of this rank's model chunks.

        Args:
            chunks: This rank's model chunks.
            spec: The model's routing shape.
            layout: The trainer's layout.
            adapter: Knows the training framework.

        Raises:
            RouterUnsupported: The model's config would ignore, drop or outlive replayed ids.
            ConfigError: The layout or the spec is not this model's.
        """
        handles = adapter.routers(chunks, layout)
        pp, input_ids = adapter.parallel_coords().pp, getattr(adapter, "input_ids", None)
        for chunk in range(max(len(chunks), layout.vpp)):
            found = tuple(layer for layer, handle in handles.items() if handle.chunk == chunk)
            if found != (planned := layout.chunk_layers(spec, pp=pp, chunk=chunk)):
                raise ConfigError(
                    f"pipeline stage {pp}, chunk {chunk} has routers of decoder layers {found}; the layout plans {planned}. "
                    "Is the split of layers over stages uneven? Then give first_layers and last_layers"
                )
        if input_ids is None:
            say_once("the adapter has no input_ids()")
        return cls(handles, chunks, spec=spec, input_ids=None if pp else input_ids)

    def call_of(self, layer: int) -> RouterCall:
        """Return the pass that a layer's router runs now, or ran last."""
        return self._calls[layer]

    @contextmanager
    def step(
        self, routing: StepRouting, *, step: int, audit: RoutingAudit | None = None
    ) -> Iterator[ReplayStep]:
        """Replay a step inside the block; verify its counts at the end.

        One block holds a whole rollout step: log-prob passes and all its optimizer steps.

        Args:
            routing: The rows to replay.
            step: The step's number.
            audit: Looks at its own sample of the micro-batches.

        Raises:
            ReplayError: A router did not consume every micro-batch's rows exactly once in each pass that was run.
            UsageError: A step is open already.
        """
        if self._step is not None:
            raise UsageError(
                f"step {step} was entered while step {self._step.number} is open; leave that one first"
            )
        self._step = ReplayStep(self.handles.values(), self._chunks, routing, number=step, audit=audit)
        try:
            yield self._step
            self._step.verify()
        finally:
            self._step.close()
            self._step = None

    @contextmanager
    def disable(self, *, microbatch: int = -1) -> Iterator[None]:
        """Let the routers choose for themselves inside the block.

        Args:
            microbatch: Only labels the calls for an audit.

        Raises:
            UsageError: Called inside a micro-batch, or with gradients inside a step (its recompute would take replayed ids).
        """
        step = self._step
        if step is not None and (step.active or torch.is_grad_enabled()):
            raise UsageError(
                f"replay switched off inside {'a micro-batch' if step.active else 'a step with gradients on'} of step "
                f"{step.number}; leave it first, or run the comparison under torch.no_grad()"
            )
        before = self._off
        self._off = RouterCall(-1 if step is None else step.number, microbatch, "natural")
        try:
            yield
        finally:
            self._off = before

    def close(self) -> None:
        """Take wrappers and hooks away; a second call does nothing."""
        self._undo.close()

    # -- what the routers and the model chunks call -----------------------------------------------------------------------

    def _replay_topk(
        self, handle: RouterHandle, inner: Callable[..., Any], scores: torch.Tensor, topk: int, num_groups: Any = None,
        group_topk: Any = None, default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if self._step is None or self._off is not None:
            self._calls[handle.layer] = self._off or OUTSIDE
            return inner(scores, topk, num_groups, group_topk, default_compute_topk)

        def live_topk() -> torch.Tensor:
            with torch.no_grad():
                return default_compute_topk(scores, topk, num_groups, group_topk)[1]

        self._calls[handle.layer], ids_RK = self._step.router_ids(handle, len(scores), live_topk)
        return scores.gather(1, ids_RK), ids_RK

    def _check_input(
        self, input_ids: Callable[..., Any], _module: Any, arguments: tuple[Any, ...], words: dict[str, Any]
    ) -> None:
        step = self._step
        if step is None or step.tokens is None or step.active is None or self._off is not None:
            return
        if (ids := input_ids(*arguments, **words)) is not None:
            step.tokens.check(step.active.microbatch, ids)
        else:
            say_once("it is given embeddings")

    def _watch_output(self, chunk: int, _module: Any, _inputs: Any, output: Any) -> None:
        if self._step is not None:
            self._step.watch_backward(chunk, output)


def _put_before(handle: RouterHandle, call: Callable[..., Any]) -> Callable[[], object]:
    own = vars(handle.replay)
    if "get_replay_topk" in own:
        raise UsageError(f"{name_of(handle)} is attached to already; close the other driver first")
    own["get_replay_topk"] = partial(call, handle, handle.replay.get_replay_topk)
    return lambda: own.pop("get_replay_topk", None)


def _check_spec(handle: RouterHandle, spec: RoutingSpec) -> None:
    ours = (spec.top_k, spec.num_experts, handle.layer in spec.moe_layers or handle.layer >= spec.num_layers)
    if ours != (handle.top_k, handle.num_experts, True):
        raise ConfigError(
            f"{name_of(handle)}: top-{handle.top_k} of {handle.num_experts} experts; the spec says top-{spec.top_k} of "
            f"{spec.num_experts} on layers {spec.moe_layers}"
        )
