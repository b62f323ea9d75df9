"""miles' rollout manager with a relay in it. Imported where miles is."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import miles.ray.rollout.rollout_manager as rollout_manager  # pyright: ignore[reportMissingImports]
import miles.ray.rollout.train_data_conversion as conversion  # pyright: ignore[reportMissingImports]
import ray

from r3channel.integrations import preflight
from r3channel.integrations.slime.arguments import memory_fault
from r3channel.integrations.slime.relay_manager import RelayManager, config_of


class ChannelManager(RelayManager, rollout_manager.RolloutManager.__ray_metadata__.modified_class):
    """miles' manager, an asyncio actor: it answers trainers while generate() waits for engines."""

    def __init__(self, args: Namespace, pg: Any) -> None:
        preflight.refuse([memory_fault(args)])
        # first: miles forks its router, which would keep the relay's ports
        super().__init__(args, pg)  # pyright: ignore[reportCallIssue]
        self.start_relay(args, config_of(args), conversion)
        self._split = conversion.split_train_data_by_dp_scheduled_raw
        conversion.split_train_data_by_dp_scheduled_raw = self._sealed_split

    def _sealed_split(self, args: Namespace, data: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        rows = data.get("rollout_routed_experts", [None] * len(data["tokens"]))
        each = zip(data["sample_indices"], data["tokens"], rows, strict=True)
        samples = [SimpleNamespace(index=i, tokens=t, rollout_routed_experts=r) for i, t, r in each]
        return self.seal(partial(self._split, args, **options), self.convert(samples, data), self.rollout_id)

    def put_beside(self, box: dict[str, Any], ticket: Any) -> None:
        """Put a step's ticket and the manager beside a rank's data.

        miles' trainers do not know the manager. The two are a pair, because miles averages other entries that it does not know.
        """
        box["r3_ticket"] = ray.get_runtime_context().current_actor, ticket
