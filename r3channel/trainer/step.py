"""One open step: which pass each model chunk runs, which ids a router then gets, and which router consumed what.

A step counts each call, and says at the end which router, pass and micro-batch went wrong. It knows neither Megatron nor where
ids come from; wrappers and hooks are the driver's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from r3channel.errors import ReplayError, UsageError
from r3channel.recordings.logprobs import KeptLogprobs
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.model_tokens import ModelTokens
from r3channel.trainer.router import LiveTopk, Mode, RouterCall, RouterHandle, StepRouting, name_of

_Key = tuple[str, int, int]
"""Pass, layer, micro-batch."""
_ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@cache
def index_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to which ids are widened, int32 or int64.

    The dtype is int32 where torch gathers and scatters by int32, as 2.13.0 does on a CPU: half the bytes to write per layer. Each
    device is asked once, because older releases refuse int32 in scatter.
    """
    values, index = torch.zeros(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    try:
        values.gather(1, index)
        values.scatter(1, index, 1.0)
    except RuntimeError:
        return torch.int64
    return torch.int32


class ReplayStep:
    """One open step. OPEN -> CLOSED.

    `router_ids` gives a router its ids; everything else decides which ids the router may get.
    """

    def __init__(
        self, handles: Iterable[RouterHandle], chunks: Sequence[torch.nn.Module], routing: StepRouting, *,
        number: int, audit: RoutingAudit | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.audit = audit
        self.tokens: ModelTokens | None = None
        """Compares the model's token ids with the ticket, where they can be seen; else None."""
        self.logprobs: KeptLogprobs | None = None
        """Collects log-probs where the step is recorded, else None."""
        self.active: RouterCall | None = None
        """The micro-batch whose block is open."""
        self._handles, self._chunks, self._routing = tuple(handles), tuple(chunks), routing
        self._open = True
        self._running: dict[int, RouterCall] = {}
        """By chunk: the pass that its routers run next."""
        self._padding: tuple[int, torch.Tensor | None] = -1, None
        """The micro-batch whose routers counted last, and for each of its ids 1 in a padding row, else 0."""
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        """By (micro-batch, layer): ids that contain live choices. The recompute repeats them, whatever its kernels choose."""
        self._calls: Counter[_Key] = Counter()
        self._expected: Counter[_Key] = Counter()
        self._passes: set[str] = set()  # a pipeline stage may have no router at all

    def close(self) -> None:
        """Close the step: a backward pass that begins later is refused."""
        self._open = False
        self._kept.clear()

    @contextmanager
    def microbatch(
        self, index: int, *, mode: Mode = "train", chunk: int | torch.nn.Module | None = None
    ) -> Iterator[None]:
        """Replay one micro-batch for the forward pass inside the block.

        Run the model (chunk) forward exactly once inside the block.

        Args:
            index: The micro-batch.
            mode: `train` (gradients on): its ids also wait for the recompute, in whatever order the backward passes come.
                `logprob` (no gradients): nothing is kept.
            chunk: The model chunk that runs, by number or as the module that Megatron's schedule hands over. It may be left out
                where there is only one.

        Raises:
            ReplayError: Ids have another width, dtype or row count than the router asks for, or a router of the chunk was not
                called exactly once.
            UsageError: The micro-batch is nested or unknown, its step is closed, or the gradient switch contradicts the mode.
        """
        self._check_enter(index, mode)
        number = self._chunk_number(chunk)
        call = RouterCall(self.number, index, "forward" if mode == "train" else "logprob")
        self._expect(call, number)
        self.active = self._running[number] = call
        try:
            yield
            keys = {(call.pass_name, handle.layer, index) for handle in self._routers_of(number)}
            self._check(keys, self._expected)
        finally:
            self.active = None
            self._running.pop(number, None)

    def compare_logprobs(
        self, microbatch: int, ours: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, *,
        natural: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Give both sides' log-probs of a micro-batch to audit and recording.

        The call does nothing for micro-batches that are neither audited nor recorded, so make it wherever log-probs are at hand.

        Args:
            microbatch: The index of the micro-batch.
            ours: The trainer's log-probs. All tensors of this call have equal shapes.
            engine: The engine's log-probs.
            mask: Above 0 where the output is of a response token.
            natural: The trainer's log-probs with replay off, where a loop has them.
        """
        if self.audit is not None and self.audit.wants(microbatch):
            self.audit.add_logprobs(ours, engine, mask)
        if self.logprobs is not None:
            self.logprobs.add(microbatch, mask, engine=engine, trainer=ours, natural=natural)

    def verify_rows(self) -> None:
        """Check every row handed out so far against the engines' digests.

        On a CPU the rows are checked before a router uses them. On a GPU this call is the step's one synchronisation with the
        host: call it before the optimizer's step, or leave it to the end of the block.

        Raises:
            DigestMismatch: Rows are not those that the engines hashed. Names samples and rank.
            TicketMismatch: The model was given other tokens.
        """
        self._routing.verify()
        if self.tokens is not None:
            self.tokens.verify()

    def verify(self) -> None:
        """Check that each pass consumed every micro-batch exactly once.

        Only passes that were run are checked. `verify_rows` is called first.

        Raises:
            ReplayError: A pass consumed a micro-batch never or more than once, or no micro-batch was run.
        """
        self.verify_rows()
        if not self._passes:
            raise ReplayError(f"step {self.number}: left without running any micro-batch", step=self.number)
        indices = range(self._routing.num_microbatches)
        once = itertools.product(self._passes, [handle.layer for handle in self._handles], indices)
        wanted = {**self._expected, **dict.fromkeys(once, 1)}
        self._check({*wanted, *self._calls}, wanted)

    def _check(self, keys: Iterable[_Key], wanted: Mapping[_Key, int]) -> None:
        wrong = sorted({key for key in keys if self._calls[key] != wanted.get(key, 0)})
        lines = [
            f"{name} pass of decoder layer {layer}, micro-batch {index}: consumed {self._calls[name, layer, index]} times, "
            f"expected {wanted.get((name, layer, index), 0)}"
            for name, layer, index in wrong[:4]
        ]
        if wrong:
            more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
            raise ReplayError(
                f"step {self.number}: {'; '.join(lines)}{more}. Was a micro-batch skipped, run twice, or a backward pass left "
                "out?", step=self.number,
            )  # fmt: skip

    # -- entering a micro-batch ----------------------------------------------------------------------------------------

    def _check_enter(self, index: int, mode: Mode) -> None:
        if not self._open:
            raise UsageError(f"micro-batch {index} of step {self.number}: the step is closed")
        if self.active is not None:
            raise UsageError(
                f"micro-batch {index} was entered inside micro-batch {self.active.microbatch}; leave that first"
            )
        if not 0 <= index < self._routing.num_microbatches:
            raise UsageError(f"micro-batch {index}: this rank's step has {self._routing.num_microbatches}")
        if mode not in ("train", "logprob"):
            raise UsageError(f"mode {mode!r}: expected 'train' or 'logprob'")
        if torch.is_grad_enabled() != (mode == "train"):
            raise UsageError(f"mode {mode!r} with gradients {'on' if mode == 'logprob' else 'off'}")

    def _chunk_number(self, chunk: int | torch.nn.Module | None) -> int:
        # Megatron's schedule hands over the module.
        if isinstance(chunk, torch.nn.Module):
            if chunk not in self._chunks:
                raise UsageError(
                    f"a {type(chunk).__name__} that is none of the {len(self._chunks)} chunks attached to"
                )
            return self._chunks.index(chunk)
        if chunk is None and len(self._chunks) > 1:
            raise UsageError(f"the model has {len(self._chunks)} chunks; say microbatch(..., chunk=...)")
        if not 0 <= (chunk or 0) < len(self._chunks):
            raise UsageError(f"chunk {chunk} of a model with {len(self._chunks)}")
        return chunk or 0

    def _routers_of(self, chunk: int) -> list[RouterHandle]:
        return [handle for handle in self._handles if handle.chunk == chunk]

    def _expect(self, call: RouterCall, chunk: int) -> None:
        self._passes.add(call.pass_name)
        for handle in self._routers_of(chunk):
            self._expected[call.pass_name, handle.layer, call.microbatch] += 1
            if call.pass_name == "forward" and _is_recomputed(handle):
                self._expected["recompute", handle.layer, call.microbatch] += 1

    # -- the backward pass ---------------------------------------------------------------------------------------------

    def watch_backward(self, chunk: int, output: Any) -> None:
        """Register a hook for the start of this output's backward pass.

        When the backward pass starts, the chunk's routers recompute its micro-batch.

        Args:
            chunk: The number of the chunk that returned.
            output: What it returned.

        Raises:
            UsageError: The output holds no tensor with gradients, so the start of its backward pass would go unnoticed.
        """
        call, recomputed = self.active, any(map(_is_recomputed, self._routers_of(chunk)))
        if call is None or call.pass_name != "forward" or not recomputed:
            return
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not tensors:
            raise UsageError(
                f"micro-batch {call.microbatch} of step {self.number}: chunk {chunk} returned a {type(output).__name__}; "
                "expected tensors with gradients, alone or in lists, tuples and mappings. Its recompute could take other ids"
            )
        for tensor in tensors:
            tensor.register_hook(lambda _grad: self._backward_begins(chunk, call.microbatch))

    def _backward_begins(self, chunk: int, microbatch: int) -> None:
        if not self._open:
            raise ReplayError(
                f"the backward pass of micro-batch {microbatch} began after its step {self.number} was left; "
                "expected it inside the step. Its recompute would route by itself.",
                step=self.number,
            )
        self._running[chunk] = RouterCall(self.number, microbatch, "recompute")

    # -- inside a router's call ----------------------------------------------------------------------------------------

    def router_ids(
        self, handle: RouterHandle, tokens: int, live_topk: LiveTopk
    ) -> tuple[RouterCall, torch.Tensor]:
        """Return the pass that a router runs now, and its ids.

        The call is counted.

        Args:
            handle: The router.
            tokens: The rows of its call.
            live_topk: Gives what the live router chooses for these rows.

        Returns:
            The pass, and ids [rows, K], widened to `index_dtype`.

        Raises:
            ReplayError: No pass runs, the router was called in it before, or the rows are not those of this call.
            DigestMismatch: The rows are not those that the engine hashed.
        """
        call = self._call(handle)
        at = call.microbatch, handle.layer
        kept = self._kept.pop(at, None) if call.pass_name == "recompute" else None
        ids_RK = self._routing.layer_ids(*at) if kept is None else kept
        _check_rows(handle, call, ids_RK, tokens)
        # The widened ids are new memory of this pass, because autograd keeps them.
        wide_RK = self._routing.check_digest(*at, ids_RK, index_dtype(ids_RK.device))
        self._calls[call.pass_name, handle.layer, call.microbatch] += 1
        if call.pass_name != "recompute":
            wide_RK = self._beside_live(handle, call, wide_RK, live_topk)
        counts_E = handle.counts()
        if counts_E is not None and torch.is_grad_enabled():  # the call in which the router counts
            self._uncount(counts_E, wide_RK, call.microbatch)
        return call, wide_RK

    def _uncount(self, counts_E: torch.Tensor, ids_RK: torch.Tensor, microbatch: int) -> None:
        """Remove from the counts what the router will count for padding rows.

        The router's own padding mask does not fit its counts (`_apply_expert_bias` up to 0.19.2).
        """
        of, padding_N = self._padding
        if padding_N is None or of != microbatch:
            padding_N = self._routing.padding_rows(microbatch)[:, None].expand_as(ids_RK).flatten().float()
            self._padding = microbatch, padding_N
        # Megatron's `Float16Module` casts the counts, too, and bfloat16 has no 511: there each -1 alone would be lost.
        counts_E.copy_(counts_E.float().index_add_(0, ids_RK.flatten(), padding_N, alpha=-1))

    def _call(self, handle: RouterHandle) -> RouterCall:
        call = self._running.get(handle.chunk)
        if call is None or (call.pass_name == "recompute" and not torch.is_grad_enabled()):
            raise ReplayError(
                f"{name_of(handle)}: called in step {self.number} outside of a micro-batch and of its backward pass, gradients "
                f"{'on' if torch.is_grad_enabled() else 'off'}. Wrap forward passes in step.microbatch() or driver.disable()",
                step=self.number,
            )
        key = (call.pass_name, handle.layer, call.microbatch)
        if self._calls[key] >= self._expected[key]:
            raise ReplayError(
                f"{name_of(handle)}: called {'a second time' if self._calls[key] else 'at all'} in the {call}; expected "
                f"{self._expected[key]} calls. Was the model called twice in one block, or outside of one, or was backward run "
                "twice?",
                step=self.number,
            )
        return call

    def _beside_live(
        self, handle: RouterHandle, call: RouterCall, wide_RK: torch.Tensor, live_topk: LiveTopk
    ) -> torch.Tensor:
        """Return the ids, with live choices in the rows that have none."""
        live_R = self._routing.live_rows(call.microbatch)
        seen = self.audit.observer(handle.layer, call.microbatch) if self.audit is not None else None
        if live_R is None and seen is None:
            return wide_RK
        live_RK = live_topk()
        if seen is not None:
            seen(live_RK, wide_RK)
        if live_R is None:
            return wide_RK
        mixed_RK = torch.where(live_R[:, None], live_RK, wide_RK)
        if call.pass_name == "forward" and _is_recomputed(handle):
            narrow = self._routing.layer_ids(call.microbatch, handle.layer).dtype
            self._kept[call.microbatch, handle.layer] = mixed_RK.to(narrow)
        return mixed_RK


def _is_recomputed(handle: RouterHandle) -> bool:
    return handle.recomputed and handle.module.training


def _check_rows(handle: RouterHandle, call: RouterCall, ids_RK: torch.Tensor, tokens: int) -> None:
    if ids_RK.shape != (tokens, handle.top_k) or ids_RK.dtype not in _ID_DTYPES:
        raise ReplayError(
            f"{name_of(handle)}, {call}: {len(ids_RK)} rows of ids for {tokens} tokens, {tuple(ids_RK.shape)} "
            f"{ids_RK.dtype} for top-{handle.top_k} and an integer type. Is the padded length, the sequence-parallel "
            "cut or the micro-batch another than planned, or the spec another model's?",
            step=call.step,
        )


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        items: Any = output.values() if isinstance(output, Mapping) else output
        for item in items:
            yield from _tensors(item)
