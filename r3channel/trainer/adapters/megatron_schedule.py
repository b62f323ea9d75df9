"""Megatron's schedules with a step's replay in them: each forward pass of a micro-batch runs in its own context.

    forward_backward = with_replay(get_forward_backward_func(), lambda: step)

This module knows Megatron's calling convention (keywords `forward_step_func`, `forward_only`) and imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from r3channel.trainer.step import ReplayStep


def with_replay(
    run: Callable[..., Any],
    step_of: Callable[[], ReplayStep | None],
    *,
    index_of: Callable[[Any], int] = attrgetter("offset"),
) -> Callable[..., Any]:
    """Return the schedule `run` with a step's replay in it.

    When the schedule returns, the rows that routers got are known to be those that the engines hashed (`ReplayStep.verify_rows`),
    so no optimizer uses other gradients. Call it on the trainer's main thread.

    Args:
        run: Megatron's schedule.
        step_of: Gives the open step; where it gives None, `run` runs as it is.
        index_of: Gives from a chunk's data iterator the micro-batch that comes next; slime's iterators count through all
            optimizer steps of a rollout. A count of calls would fail with interleaved chunks or several runs of the schedule.
    """

    def schedule(*, forward_step_func: Callable[..., Any], forward_only: bool = False, **options: Any) -> Any:
        step = step_of()
        if step is None:
            return run(forward_step_func=forward_step_func, forward_only=forward_only, **options)

        def forward_step(iterator: Any, chunk: Any, *rest: Any) -> Any:
            with step.microbatch(
                index_of(iterator), mode="logprob" if forward_only else "train", chunk=chunk
            ):
                return forward_step_func(iterator, chunk, *rest)

        result = run(forward_step_func=forward_step, forward_only=forward_only, **options)
        step.verify_rows()
        return result

    return schedule
