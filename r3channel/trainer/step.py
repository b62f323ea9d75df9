"""One open step of a replay driver: which micro-batch is running, and who has consumed what.

It loads ids into the routers, counts each call, and says at the end which router, pass and micro-batch went wrong. It
knows neither Megatron nor where ids come from; hooks and router binding are the driver's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from r3channel.errors import ReplayCountMismatch, ReplayRowMismatch, UsageError
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.router import BoundRouter, Mode, RouterCall, RouterHandle, StepRouting

_ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@cache
def index_dtype(device: torch.device) -> torch.dtype:
    """What ids are widened to: int32 where torch gathers and scatters by it, as 2.13.0 does on a CPU, else int64.

    Half the bytes to write per layer. Asked of the device once, because older releases refuse int32 in scatter.
    """
    values, index = torch.zeros(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    try:
        values.gather(1, index)
        values.scatter(1, index, 1.0)
    except RuntimeError:
        return torch.int64
    return torch.int32


class Driver(Protocol):
    """What a step asks of its driver."""

    @property
    def handles(self) -> dict[int, RouterHandle]: ...
    def is_open(self, step: ReplayStep) -> bool: ...
    def chunk_number(self, chunk: int | torch.nn.Module | None) -> int: ...
    def routers_of(self, chunk: int) -> list[BoundRouter]: ...


@dataclass(frozen=True, slots=True)
class _Active:
    """The micro-batch that is open now."""

    index: int
    mode: Mode
    routers: list[BoundRouter]


class ReplayStep:
    """One open step of a driver."""

    def __init__(
        self, driver: Driver, routing: StepRouting, number: int, audit: RoutingAudit | None = None
    ) -> None:
        self.number = number
        self.audit = audit
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
    def microbatch(
        self, index: int, *, mode: Mode = "train", chunk: int | torch.nn.Module | None = None
    ) -> Iterator[None]:
        """Replay micro-batch `index` for the one forward pass of the model (chunk) that runs inside the block.

        `train` (gradients on): its ids also wait for the recompute, in whatever order the backward passes come.
        `logprob` (no gradients): nothing of it stays behind. `chunk` is the model chunk that runs, by number or as the module
        that Megatron's schedule hands over; it may be left out where there is only one.

        Raises:
            ReplayRowMismatch: ids of another width, dtype or row count than the router asks for.
            ReplayCountMismatch: a router of the chunk was not called exactly once.
            UsageError: nested, closed or unknown micro-batch, or a mode that the gradient switch contradicts.
        """
        self._check_enter(index, mode)
        routers = self._driver.routers_of(self._driver.chunk_number(chunk))
        self.active = _Active(index, mode, routers)
        self._passes.add("forward" if mode == "train" else "logprob")
        try:
            with ExitStack() as choices:
                for router in routers:
                    self._load(router, index, mode)
                self._watch_choices(routers, index, mode, choices)
                yield
            self._check_called(routers, index, mode)
        finally:
            self.active = None
            for router in routers:
                router.state.target_topk_idx = None
                router.act("recompute")

    def compare_logprobs(
        self, microbatch: int, ours: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Hand the audit both sides' log-probs of a micro-batch, equal shapes, `mask` > 0 on response tokens.

        Does nothing for micro-batches that are not audited, so call it wherever log-probs are at hand.
        """
        if self.audit is not None and self.audit.wants(microbatch):
            self.audit.add_logprobs(ours, engine, mask)

    @contextmanager
    def optimizer_step(self, microbatches: Sequence[int]) -> Iterator[None]:
        """Around one optimizer step of several: on leaving it, its own micro-batches must have been trained once.

        Raises:
            ReplayCountMismatch: at once, and not only at the end of the rollout step.
        """
        yield
        keys = {(name, layer, index) for name, layer, index in self._expected if index in microbatches}
        keys |= {("forward", layer, index) for layer in self._driver.handles for index in microbatches}
        wanted = {key: 1 if key[0] == "forward" else self._expected[key] for key in keys}
        wrong = {key for key in keys if self._calls[key] != wanted[key]}
        if wrong:
            raise ReplayCountMismatch(
                f"step {self.number}: {self._describe(wrong, wanted)}", step=self.number
            )

    def verified(self) -> None:
        """Return once all rows that routers were handed so far are known to be those that the engines hashed.

        On a CPU they are known before a router uses them. On a GPU this is the step's one synchronisation with the host: call it
        before the optimizer's step, or leave it to the end of the block. Raises `DigestMismatch` with samples and rank.
        """
        self._routing.verified()

    def verify(self) -> None:
        """Raise `ReplayCountMismatch` unless every pass that was run consumed every micro-batch exactly once."""
        self.verified()
        if not self._passes:
            raise ReplayCountMismatch(
                f"step {self.number}: left without running any micro-batch", step=self.number
            )
        wanted = dict(self._expected)
        for name in self._passes:
            for layer in self._driver.handles:
                for index in range(self._routing.num_microbatches):
                    wanted[name, layer, index] = 1
        wrong = {key for key in {*wanted, *self._calls} if self._calls[key] != wanted.get(key, 0)}
        if wrong:
            raise ReplayCountMismatch(
                f"step {self.number}: {self._describe(wrong, wanted)}", step=self.number
            )
        left = {layer: len(h.replay.replay_backward_list) for layer, h in self._driver.handles.items()}
        if any(left.values()):
            raise ReplayCountMismatch(
                f"step {self.number}: entries left in replay_backward_list by layer {left}", step=self.number
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
        if not self._driver.is_open(self):
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

    def _watch_choices(
        self, routers: Sequence[BoundRouter], index: int, mode: Mode, choices: ExitStack
    ) -> None:
        """Where rows are left to the live router, or the audit samples this micro-batch, see what it would choose."""
        live_R = self._routing.live_rows(index)
        audit = self.audit if self.audit is not None and self.audit.wants(index) else None
        if live_R is None and audit is None:
            return
        for router in routers:
            seen = None if audit is None else audit.observer(router.handle.layer, index)
            choices.enter_context(router.choosing(live_R, seen, mode=mode))

    def _check_called(self, routers: Sequence[BoundRouter], index: int, mode: Mode) -> None:
        name = "forward" if mode == "train" else "logprob"
        keys = {(name, router.handle.layer, index) for router in routers}
        wrong = {key for key in keys if self._calls[key] != self._expected[key]}
        if wrong:
            raise ReplayCountMismatch(
                f"step {self.number}: {self._describe(wrong, self._expected)}", step=self.number
            )

    # -- inside a router's call ----------------------------------------------------------------------------------------

    def before_forward(self, router: BoundRouter, tokens: int) -> None:
        assert self.active is not None
        name = "forward" if self.active.mode == "train" else "logprob"
        ids = router.state.target_topk_idx
        if ids is None:
            raise ReplayCountMismatch(
                f"{router.name}: called a second time in the {name} pass of micro-batch {self.active.index}, step "
                f"{self.number}; expected one model call per block",
                step=self.number,
            )
        router.call = RouterCall(self.number, self.active.index, name)
        self._check_rows(router, ids, tokens)
        self._routing.handed(self.active.index, router.handle.layer, ids)
        router.state.target_topk_idx = ids.to(
            index_dtype(ids.device)
        )  # only the running layer is ever widened
        self._count(router, tokens)

    def before_recompute(self, router: BoundRouter, tokens: int) -> None:
        if not router.waiting or not torch.is_grad_enabled():
            raise ReplayCountMismatch(
                f"{router.name}: called in step {self.number} outside of a micro-batch, {len(router.waiting)} waiting for "
                f"recompute, gradients {'on' if torch.is_grad_enabled() else 'off'}; expected a recompute. Wrap forward "
                "passes in step.microbatch() or driver.off(); was backward run twice?",
                step=self.number,
            )
        router.call = RouterCall(self.number, router.waiting.popleft(), "recompute")
        entries = router.state.replay_backward_list
        self._check_rows(router, entries[0], tokens)
        self._routing.handed(router.call.microbatch, router.handle.layer, entries[0])
        entries[0] = entries[0].to(index_dtype(entries[0].device))
        self._count(router, tokens)

    def _check_rows(self, router: BoundRouter, ids: torch.Tensor, tokens: int) -> None:
        if len(ids) != tokens:
            call = router.call
            raise ReplayRowMismatch(
                f"{router.name}, {call.pass_name} pass of micro-batch {call.microbatch}, step {call.step}: {len(ids)} rows "
                f"of ids for {tokens} tokens. Is the padded length, the sequence-parallel cut or the micro-batch another "
                "than planned?",
                step=call.step,
            )

    def _count(self, router: BoundRouter, tokens: int) -> None:
        self._calls[router.call.pass_name, router.handle.layer, router.call.microbatch] += 1
        self._rows[router.call.pass_name] += tokens
