"""Drives Megatron's per-router replay through a step, and counts that each row is consumed exactly once per pass.

Works on `RouterHandle`s (made by `r3channel.trainer.megatron`), so it imports no Megatron and never uses the class-level
registry of `RouterReplay`: other models in the process are not touched. It does not know where ids come from.

Why a driver: Megatron keeps action and ids as state of each router. Left on REPLAY_FORWARD, a recompute under 1F1B uses
the newest micro-batch's ids, with right losses and wrong gradients; too few rows leave tokens without an expert; an entry
that nothing popped shifts every later recompute. All three are silent there and errors, or impossible, here.

What replay does not change (Megatron-core 0.16.1): weights are gathered from the live scores at the replayed ids, so gradients
reach the router; the group limit is not applied to replayed ids; expert-bias counts follow the replayed ids; auxiliary
losses (aux_loss, seq_aux_loss, global_aux_loss) count the router's own unbiased top-k, and padding rows too; z loss is untouched.

    IDLE -> step -> (microbatch -> backward)* -> verified, cleared -> IDLE
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from r3channel.errors import LayoutMismatch, ReplayError, UsageError
from r3channel.plan.layout import TrainerLayout
from r3channel.spec import RoutingSpec
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.router import (
    OUTSIDE,
    Action,
    BoundRouter,
    ReplayState,
    RouterCall,
    RouterHandle,
    StepRouting,
)
from r3channel.trainer.step import ReplayStep

__all__ = ["ReplayDriver", "ReplayState", "ReplayStep", "RouterHandle", "StepRouting"]


class ReplayDriver:
    """Replay for the routers of one rank's model. One thread; not reentrant. Close it to take its hooks away.

    with driver.step(step_routing, step=3) as step:
        for index in range(step_routing.num_microbatches):
            with step.microbatch(index):
                output = model(...)
            loss(output).backward()
    """

    def __init__(
        self, handles: Mapping[int, RouterHandle], chunks: Sequence[torch.nn.Module], *, spec: RoutingSpec
    ) -> None:
        self.spec = spec
        self._chunks = tuple(chunks)
        self._routers = {layer: BoundRouter(handle) for layer, handle in handles.items()}
        self._step: ReplayStep | None = None
        self._off_label: RouterCall | None = None
        for router in self._routers.values():
            _check_spec(router, spec)
        self._hooks = ExitStack()
        self._add_hooks(chunks)

    @classmethod
    def attach(
        cls, chunks: Sequence[torch.nn.Module], *, spec: RoutingSpec, layout: TrainerLayout
    ) -> ReplayDriver:
        """Bind to the routers of this rank's Megatron model chunks.

        Raises:
            RouterUnsupported: the model's config would ignore, drop or outlive replayed ids.
            LayoutMismatch: the layout or the spec is not this model's.
        """
        from r3channel.trainer import megatron

        config = megatron.config_of(chunks)
        megatron.check_layout(layout, config=config)
        handles = megatron.routers_by_layer(chunks, mtp_layers=len(layout.mtp))
        pp = megatron.parallel_coords().pp
        for chunk in range(max(len(chunks), layout.vpp)):
            found = tuple(layer for layer, handle in handles.items() if handle.chunk == chunk)
            _check_chunk(found, layout.chunk_layers(spec, pp=pp, chunk=chunk), pp=pp, chunk=chunk)
        return cls(handles, chunks, spec=spec)

    @property
    def handles(self) -> dict[int, RouterHandle]:
        """The bound routers by global 0-based layer."""
        return {layer: router.handle for layer, router in self._routers.items()}

    def call_of(self, layer: int) -> RouterCall:
        """The pass that a layer's router runs now, or ran last."""
        return self._routers[layer].call

    @contextmanager
    def step(
        self, routing: StepRouting, *, step: int, audit: RoutingAudit | None = None
    ) -> Iterator[ReplayStep]:
        """Replay `routing` inside the block; on leaving it, verify the counts and clear every router.

        One block holds a whole rollout step: log-prob passes and all its optimizer steps. `audit` looks at its own sample
        of the micro-batches.

        Raises:
            ReplayCountMismatch: a router did not consume every micro-batch's rows exactly once in each pass that was run.
            UsageError: a step is open already.
        """
        if self._step is not None:
            raise UsageError(
                f"step {step} was entered while step {self._step.number} is open; leave that one first"
            )
        self._step = ReplayStep(self, routing, step, audit)
        for router in self._routers.values():
            router.act("recompute")  # so that a forward pass outside of a micro-batch is noticed
        try:
            yield self._step
            self._step.verify()
        finally:
            self._step = None
            for router in self._routers.values():
                router.clear()

    @contextmanager
    def off(self, *, microbatch: int = -1) -> Iterator[None]:
        """Inside the block the routers choose for themselves; `microbatch` only labels the calls for an audit.

        Raises:
            UsageError: inside a micro-batch, or with gradients inside a step (its recompute would take replayed ids).
        """
        step = self._step
        if step is not None and (step.active or torch.is_grad_enabled()):
            raise UsageError(
                f"replay switched off inside {'a micro-batch' if step.active else 'a step with gradients on'} of step "
                f"{step.number}; leave it first, or run the comparison under torch.no_grad()"
            )
        self._off_label = RouterCall(-1 if step is None else step.number, microbatch, "natural")
        before: dict[int, Action] = {layer: router.action for layer, router in self._routers.items()}
        try:
            for router in self._routers.values():
                router.act("natural")
            yield
        finally:
            self._off_label = None
            for layer, router in self._routers.items():
                router.act(before[layer])

    def close(self) -> None:
        """Clear the routers and remove every hook; a second call does nothing."""
        for router in self._routers.values():
            router.clear()
        self._hooks.close()

    # -- used by ReplayStep --------------------------------------------------------------------------------------------

    def is_open(self, step: ReplayStep) -> bool:
        return self._step is step

    def chunk_number(self, chunk: int | torch.nn.Module | None) -> int:
        """The number of a model chunk, given as such or as Megatron's schedule hands it over; None is the only chunk.

        Raises:
            UsageError: the model has several chunks and none was named, or the chunk is not one of this model.
        """
        if isinstance(chunk, torch.nn.Module):
            found = [index for index, module in enumerate(self._chunks) if module is chunk]
            if not found:
                raise UsageError(
                    f"a {type(chunk).__name__} that is none of the {len(self._chunks)} chunks attached to"
                )
            return found[0]
        if chunk is None and len(self._chunks) > 1:
            raise UsageError(f"the model has {len(self._chunks)} chunks; say microbatch(..., chunk=...)")
        if not 0 <= (chunk or 0) < len(self._chunks):
            raise UsageError(f"chunk {chunk} of a model with {len(self._chunks)}")
        return chunk or 0

    def routers_of(self, chunk: int) -> list[BoundRouter]:
        """The routers of one chunk; a chunk of dense layers has none."""
        return [router for router in self._routers.values() if router.handle.chunk == chunk]

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _add_hooks(self, chunks: Sequence[torch.nn.Module]) -> None:
        for router in self._routers.values():
            module = router.handle.module
            before = module.register_forward_pre_hook(
                lambda _module, args, kwargs, router=router: self._before_router(router, args, kwargs),
                with_kwargs=True,
            )
            after = module.register_forward_hook(lambda *_args, router=router: _after_router(router))
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        for index, chunk in enumerate(chunks):
            hook = chunk.register_forward_hook(
                lambda _m, _i, output, index=index: self._after_chunk(index, output)
            )
            self._hooks.callback(hook.remove)

    def _before_router(self, router: BoundRouter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if router.action == "natural" or self._step is None:
            router.call = self._off_label or OUTSIDE
            return
        tokens = (args[0] if args else kwargs["input"]).shape[:-1].numel()
        if router.action == "forward":
            self._step.before_forward(router, tokens)
        else:
            self._step.before_recompute(router, tokens)

    def _after_chunk(self, chunk: int, output: Any) -> None:
        """Learn when this output's backward begins: its micro-batch's ids must then be first in line.

        Raises:
            UsageError: no tensor with gradients is found in what the chunk returned, so its backward would begin unnoticed.
        """
        step = self._step
        if step is None or step.active is None or step.active.mode != "train":
            return
        microbatch = step.active.index
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not tensors and any(router.keep_for_recompute() for router in self.routers_of(chunk)):
            raise UsageError(
                f"micro-batch {microbatch} of step {step.number}: chunk {chunk} returned a {type(output).__name__}; expected "
                "tensors with gradients, alone or in lists, tuples and mappings. Its recompute could take other ids"
            )
        for tensor in tensors:
            tensor.register_hook(lambda _grad: self._backward_begins(step, chunk, microbatch))

    def _backward_begins(self, step: ReplayStep, chunk: int, microbatch: int) -> None:
        routers = [router for router in self.routers_of(chunk) if router.keep_for_recompute()]
        if routers and step is not self._step:
            raise ReplayError(
                f"the backward pass of micro-batch {microbatch} began after its step {step.number} was left; "
                "expected it inside the step. Its recompute would route by itself.",
                step=step.number,
            )
        for router in routers:
            router.promote(microbatch)
            router.act("recompute")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, however it is nested."""
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        items: Any = output.values() if isinstance(output, Mapping) else output
        for item in items:
            yield from _tensors(item)


def _after_router(router: BoundRouter) -> None:
    """Drop the widened ids; a second call finds none and is refused."""
    if router.action == "forward":
        router.state.target_topk_idx = None


def _check_spec(router: BoundRouter, spec: RoutingSpec) -> None:
    handle = router.handle
    ours = (spec.top_k, spec.num_experts, handle.layer in spec.moe_layers or handle.layer >= spec.num_layers)
    if ours != (handle.top_k, handle.num_experts, True):
        raise LayoutMismatch(
            f"{router.name}: top-{handle.top_k} of {handle.num_experts} experts; the spec says top-{spec.top_k} of "
            f"{spec.num_experts} on layers {spec.moe_layers}"
        )


def _check_chunk(found: tuple[int, ...], planned: tuple[int, ...], *, pp: int, chunk: int) -> None:
    if found != planned:
        raise LayoutMismatch(
            f"pipeline stage {pp}, chunk {chunk} has routers of decoder layers {found}; the layout plans {planned}. "
            "Is the split of layers over stages uneven? Then give first_layers and last_layers"
        )
