"""The trainer's side: exact shards in, replayed routers out.

from r3channel.trainer import TrainerChannel

`TrainerChannel` is imported on first use, because parts of this room are used without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3channel.trainer.channel import TrainerChannel

__all__ = ["TrainerChannel"]


def __getattr__(name: str) -> Any:
    if name != "TrainerChannel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from r3channel.trainer.channel import TrainerChannel

    return TrainerChannel
