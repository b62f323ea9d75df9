"""Drives Megatron's per-router replay through a step, and counts that each row is consumed exactly once per pass.

Works on `RouterHandle`s (made by `r3channel.trainer.megatron`), so it imports no Megatron and never uses the class-level
registry of `RouterReplay`: other models in the process are not touched. It does not know where ids come from.

Why a driver: Megatron keeps action and ids as state of each router. Left on REPLAY_FORWARD, a recompute under 1F1B uses
the newest micro-batch's ids, with right losses and wrong gradients; too few rows leave tokens without an expert; an entry
that nothing popped shifts every later recompute. All three are silent there and errors, or impossible, here.

    IDLE -> step -> (microbatch -> backward)* -> verified, cleared -> IDLE
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from r3channel.errors import (
    LayoutMismatch,
    ReplayCountMismatch,
    ReplayError,
    ReplayRowMismatch,
    UsageError,
)
from r3channel.plan.layout import TrainerLayout
from r3channel.spec import RoutingSpec
from r3channel.trainer.router import (
    OUTSIDE,
    Action,
    BoundRouter,
    Mode,
    ReplayState,
    RouterCall,
    RouterHandle,
    StepRouting,
)

__all__ = ["ReplayDriver", "ReplayState", "ReplayStep", "RouterHandle", "StepRouting"]

_ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


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
        self._routers = {layer: BoundRouter(handle) for layer, handle in handles.items()}
        self._num_chunks = len(chunks)
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

        handles = megatron.routers_by_layer(chunks)
        config = next(iter(handles.values())).module.config if handles else None
        megatron.check_layout(layout, config=config)
        _check_stage(tuple(handles), layout.stage_layers(spec, pp=megatron.parallel_coords().pp))
        return cls(handles, chunks, spec=spec)

    @property
    def handles(self) -> dict[int, RouterHandle]:
        """The bound routers by global 0-based layer."""
        return {layer: router.handle for layer, router in self._routers.items()}

    def call_of(self, layer: int) -> RouterCall:
        """The pass that a layer's router runs now, or ran last."""
        return self._routers[layer].call

    @contextmanager
    def step(self, routing: StepRouting, *, step: int) -> Iterator[ReplayStep]:
        """Replay `routing` inside the block; on leaving it, verify the counts and clear every router.

        Raises:
            ReplayCountMismatch: a router did not consume every micro-batch's rows exactly once in each pass that was run.
            UsageError: a step is open already.
        """
        if self._step is not None:
            raise UsageError(
                f"step {step} was entered while step {self._step.number} is open; leave that one first"
            )
        self._step = ReplayStep(self, routing, step)
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

    def routers_of(self, chunk: int | None) -> list[BoundRouter]:
        """The routers of one chunk; None stands for the only chunk.

        Raises:
            UsageError: the model has several chunks and none was named, or the chunk does not exist.
        """
        if chunk is None and self._num_chunks > 1:
            raise UsageError(f"the model has {self._num_chunks} chunks; say microbatch(..., chunk=...)")
        if not 0 <= (chunk or 0) < self._num_chunks:
            raise UsageError(f"chunk {chunk} of a model with {self._num_chunks}")
        return [router for router in self._routers.values() if router.handle.chunk == (chunk or 0)]

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
        """Learn when this output's backward begins: its micro-batch's ids must then be first in line."""
        step = self._step
        if step is None or step.active is None or step.active.mode != "train":
            return
        microbatch = step.active.index
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: self._backward_begins(step, chunk, microbatch))

    def _backward_begins(self, step: ReplayStep, chunk: int, microbatch: int) -> None:
        routers = [router for router in self.routers_of(chunk) if router.keep_for_recompute()]
        if routers and step is not self._step:
            raise ReplayError(
                f"the backward pass of micro-batch {microbatch} began after its step {step.number} was left; "
                "expected it inside the step. Its recompute would route by itself."
            )
        for router in routers:
            router.promote(microbatch)
            router.act("recompute")


@dataclass(frozen=True, slots=True)
class _Active:
    """The micro-batch that is open now."""

    index: int
    mode: Mode
    routers: list[BoundRouter]


class ReplayStep:
    """One open step of a driver."""

    def __init__(self, driver: ReplayDriver, routing: StepRouting, number: int) -> None:
        self.number = number
        self.active: _Active | None = None
        self._driver = driver
        self._routing = routing
        self._calls: Counter[tuple[str, int, int]] = Counter()  # (pass, layer, micro-batch)
        self._expected: Counter[tuple[str, int, int]] = Counter()
        self._rows: Counter[str] = Counter()
        self._passes: set[str] = set()  # a pipeline stage may have no router at all

    @property
    def rows(self) -> dict[str, int]:
        """Rows that routers consumed so far, by pass, summed over layers."""
        return dict(self._rows)

    @contextmanager
    def microbatch(self, index: int, *, mode: Mode = "train", chunk: int | None = None) -> Iterator[None]:
        """Replay micro-batch `index` for the one forward pass of the model (chunk) that runs inside the block.

        `train` (gradients on): its ids also wait for the recompute, in whatever order the backward passes come.
        `logprob` (no gradients): nothing of it stays behind.

        Raises:
            ReplayRowMismatch: ids of another width, dtype or row count than the router asks for.
            ReplayCountMismatch: a router of the chunk was not called exactly once.
            UsageError: nested, closed or unknown micro-batch, or a mode that the gradient switch contradicts.
        """
        self._check_enter(index, mode)
        routers = self._driver.routers_of(chunk)
        self.active = _Active(index, mode, routers)
        self._passes.add("forward" if mode == "train" else "logprob")
        try:
            for router in routers:
                self._load(router, index, mode)
            yield
            self._check_called(routers, index, mode)
        finally:
            self.active = None
            for router in routers:
                router.state.target_topk_idx = None
                router.act("recompute")

    def verify(self) -> None:
        """Raise `ReplayCountMismatch` unless every pass that was run consumed every micro-batch exactly once."""
        if not self._passes:
            raise ReplayCountMismatch(f"step {self.number}: left without running any micro-batch")
        wanted = dict(self._expected)
        for name in self._passes:
            for layer in self._driver.handles:
                for index in range(self._routing.num_microbatches):
                    wanted[name, layer, index] = 1
        wrong = {key for key in {*wanted, *self._calls} if self._calls[key] != wanted.get(key, 0)}
        if wrong:
            raise ReplayCountMismatch(f"step {self.number}: {self._describe(wrong, wanted)}")
        left = {layer: len(h.replay.replay_backward_list) for layer, h in self._driver.handles.items()}
        if any(left.values()):
            raise ReplayCountMismatch(
                f"step {self.number}: entries left in replay_backward_list by layer {left}"
            )

    def _describe(self, wrong: set[tuple[str, int, int]], wanted: Mapping[tuple[str, int, int], int]) -> str:
        lines = [
            f"{name} pass of decoder layer {layer}, micro-batch {index}: consumed {self._calls[name, layer, index]} times, "
            f"expected {wanted.get((name, layer, index), 0)}"
            for name, layer, index in sorted(wrong)[:4]
        ]
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        return (
            "; ".join(lines) + more + ". Was a micro-batch skipped, run twice, or a backward pass left out?"
        )

    # -- entering a micro-batch ----------------------------------------------------------------------------------------

    def _check_enter(self, index: int, mode: Mode) -> None:
        if self._driver._step is not self:
            raise UsageError(f"micro-batch {index} of step {self.number}: the step is closed")
        if self.active is not None:
            raise UsageError(
                f"micro-batch {index} was entered inside micro-batch {self.active.index}; leave that first"
            )
        if not 0 <= index < self._routing.num_microbatches:
            raise UsageError(f"micro-batch {index}: this rank's step has {self._routing.num_microbatches}")
        if mode not in ("train", "logprob"):
            raise UsageError(f"mode {mode!r}: expected 'train' or 'logprob'")
        if torch.is_grad_enabled() != (mode == "train"):
            raise UsageError(f"mode {mode!r} with gradients {'on' if mode == 'logprob' else 'off'}")

    def _load(self, router: BoundRouter, index: int, mode: Mode) -> None:
        ids = self._routing.layer_ids(index, router.handle.layer)
        if ids.dim() != 2 or ids.shape[1] != router.handle.top_k or ids.dtype not in _ID_DTYPES:
            raise ReplayRowMismatch(
                f"{router.name}: ids of micro-batch {index} are {tuple(ids.shape)} {ids.dtype}; expected "
                f"[rows, {router.handle.top_k}] of an integer type. Is the spec that of this model?"
            )
        name = "forward" if mode == "train" else "logprob"
        self._expected[name, router.handle.layer, index] += 1
        if mode == "train" and router.keep_for_recompute():
            router.state.set_target_indices(ids)  # also appends to replay_backward_list
            router.waiting.append(index)
            self._expected["recompute", router.handle.layer, index] += 1
        else:
            router.state.target_topk_idx = ids
        router.act("forward")

    def _check_called(self, routers: Sequence[BoundRouter], index: int, mode: Mode) -> None:
        name = "forward" if mode == "train" else "logprob"
        keys = {(name, router.handle.layer, index) for router in routers}
        wrong = {key for key in keys if self._calls[key] != self._expected[key]}
        if wrong:
            raise ReplayCountMismatch(f"step {self.number}: {self._describe(wrong, self._expected)}")

    # -- inside a router's call ----------------------------------------------------------------------------------------

    def before_forward(self, router: BoundRouter, tokens: int) -> None:
        assert self.active is not None
        name = "forward" if self.active.mode == "train" else "logprob"
        ids = router.state.target_topk_idx
        if ids is None:
            raise ReplayCountMismatch(
                f"{router.name}: called a second time in the {name} pass of micro-batch {self.active.index}, step "
                f"{self.number}; expected one model call per block"
            )
        router.call = RouterCall(self.number, self.active.index, name)
        self._check_rows(router, ids, tokens)
        router.state.target_topk_idx = (
            ids.long()
        )  # gather takes int64; only the running layer is ever widened
        self._count(router, tokens)

    def before_recompute(self, router: BoundRouter, tokens: int) -> None:
        if not router.waiting or not torch.is_grad_enabled():
            raise ReplayCountMismatch(
                f"{router.name}: called in step {self.number} outside of a micro-batch, {len(router.waiting)} waiting for "
                f"recompute, gradients {'on' if torch.is_grad_enabled() else 'off'}; expected a recompute. Wrap forward "
                "passes in step.microbatch() or driver.off(); was backward run twice?"
            )
        router.call = RouterCall(self.number, router.waiting.popleft(), "recompute")
        entries = router.state.replay_backward_list
        self._check_rows(router, entries[0], tokens)
        entries[0] = entries[0].long()
        self._count(router, tokens)

    def _check_rows(self, router: BoundRouter, ids: torch.Tensor, tokens: int) -> None:
        if len(ids) != tokens:
            call = router.call
            raise ReplayRowMismatch(
                f"{router.name}, {call.pass_name} pass of micro-batch {call.microbatch}, step {call.step}: {len(ids)} rows "
                f"of ids for {tokens} tokens. Is the padded length, the sequence-parallel cut or the micro-batch another "
                "than planned?"
            )

    def _count(self, router: BoundRouter, tokens: int) -> None:
        self._calls[router.call.pass_name, router.handle.layer, router.call.microbatch] += 1
        self._rows[router.call.pass_name] += tokens


def _after_router(router: BoundRouter) -> None:
    """Drop the widened ids; a second call finds none and is refused."""
    if router.action == "forward":
        router.state.target_topk_idx = None


def _check_spec(router: BoundRouter, spec: RoutingSpec) -> None:
    handle = router.handle
    ours = (spec.top_k, spec.num_experts, handle.layer in spec.moe_layers)
    if ours != (handle.top_k, handle.num_experts, True):
        raise LayoutMismatch(
            f"{router.name}: top-{handle.top_k} of {handle.num_experts} experts; the spec says top-{spec.top_k} of "
            f"{spec.num_experts} on layers {spec.moe_layers}"
        )


def _check_stage(found: tuple[int, ...], planned: tuple[int, ...]) -> None:
    if found != planned:
        raise LayoutMismatch(
            f"this pipeline stage has routers of decoder layers {found}; the layout plans {planned}. "
            "Is the split of layers over stages uneven?"
        )
