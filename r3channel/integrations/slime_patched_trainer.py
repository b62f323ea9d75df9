"""--train-actor-path in a patched slime (`slime_patched`). Imported where slime and Megatron are."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray

from r3channel.integrations.slime_patched import RELAY
from r3channel.integrations.slime_trainer import ChannelActor
from r3channel.report.slime_arguments import with_channel


class PatchedActor(ChannelActor):
    def init(self, args: Namespace, role: str, *rest: Any, **options: Any) -> Any:
        return super().init(with_channel(args), role, *rest, **options)

    def _relay_actor(self) -> Any:
        return ray.get_actor(RELAY)
