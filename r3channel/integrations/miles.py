"""`r3channel miles`: refused, with the reason. The names that an adapter would stand on are in `seams.json`, and are tested.

In miles 31f1ca96 three decoders put rows into samples as arrays (rollout/sglang_rollout.py:255, rollout/generate_utils/
generate_endpoint_utils.py:108, rollout/session/samples/merge.py:119), which are cut and joined as such (utils/types.py:242,
rollout/generate_utils/sample_utils.py:164). Its routers ask `Replay` objects that its fork of Megatron registers, which is not
at hand. They need CUDA (utils/replay_base.py:22, :37), and so does every trainer (ray/train_actor.py:95): no CPU runs its loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from r3channel.errors import UsageError


def run(_argv: Sequence[str]) -> int:
    raise UsageError(
        "miles has no adapter yet: its samples hold the decoded ids as arrays, which it slices and joins in places that no hook "
        "reaches, and its replay lives in its own fork of Megatron. `r3channel patch` has hooks for its store and actors; "
        "give Relay and TrainerChannel a loop of your own, or use `r3channel slime`"
    )
