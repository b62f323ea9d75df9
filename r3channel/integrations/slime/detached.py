"""slime 0.4.0, where a detached actor starts the engines, before the manager. The engines outlive the manager and the script.

slime's files were read; the code was run against a stand-in of them (`tests/dist/slime_040`), not with slime. Imported where
slime 0.4.0 is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray
import slime.backends.sglang_utils.engine_group as engine_group  # pyright: ignore[reportMissingImports]
import slime.data.batch_builder  # pyright: ignore[reportMissingImports]
import slime.ray.serving  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from slime.utils.types import Sample  # pyright: ignore[reportMissingImports]

from r3channel.errors import StepError
from r3channel.integrations.slime.engine_variables import engine_variables
from r3channel.integrations.slime.relay_manager import config_of, interface_of, node_count
from r3channel.integrations.slime.rollout import GROUPS, ChannelEngine, ChannelManager
from r3channel.integrations.slime.sample_rows import rows_of
from r3channel.transport.auth import obtain_token
from r3channel.transport.network import local_address


class DetachedServing(slime.ray.serving.ServingCluster.__ray_metadata__.modified_class):
    """Starts the engines, also after a failure."""

    def __init__(self, args: Namespace, restore_plan: Any) -> None:
        engine_group.SGLangEngine = ChannelEngine
        super().__init__(args, restore_plan)


class DetachedManager(ChannelManager):
    splits = slime.data.batch_builder

    def __init__(self, args: Namespace, pg: Any, **startup: Any) -> None:
        super().__init__(args, pg, **startup)
        self.batch_builder = SealingBuilder(self)
        counted = Sample.get_rollout_routed_experts_length

        def get_rollout_routed_experts_length(sample: Any) -> int:
            # A request for the rest of a sample names this number, because the relay already has the rows.
            rows = rows_of(sample)
            return len(rows.tokens) - 1 if rows else counted(sample)

        Sample.get_rollout_routed_experts_length = get_rollout_routed_experts_length

    def tell_engines(self, args: Namespace) -> None:
        """Open the relay's ingest if engines deliver there.

        The engines already run, and were told its address.
        """
        if token_file := args.r3_engine.get("R3CHANNEL_TOKEN_FILE"):
            self.relay.serve(token_file=token_file)


class SealingBuilder(slime.data.batch_builder.BatchBuilder):
    def __init__(self, manager: DetachedManager) -> None:
        super().__init__(manager.args, controller=manager.controller)
        self._manager = manager

    def convert(self, samples: Sequence[Any]) -> Any:
        # the relay has the rows; slime would miss them in each sample
        asked, self.args = self.args, Namespace(**vars(self.args) | {"use_rollout_routing_replay": False})
        try:
            return self._manager.convert(samples, super().convert(samples))
        finally:
            self.args = asked

    def split_by_dp(self, data: Any) -> list[Any]:
        return self._manager.seal(super().split_by_dp, data, self.rollout_id)

    def replay_converted(self, data: Any, batch_id: Any) -> list[Any]:
        """Replay what slime kept of a rollout when an actor died.

        The rows went with the samples, when slime's manager or its trainers died. So all tokens are left to the live router.

        Raises:
            StepError: If `--r3-on-missing` is not live.
        """
        if self._manager.relay.config.on_missing != "live":
            text = f"rollout {self.rollout_id} comes back from what slime converted, and its rows went with the process that "
            text += "died; expected --r3-on-missing live and --r3-max-live 1, or a start from a checkpoint before it"
            raise StepError(text)
        kept = zip(data["sample_indices"], data["tokens"], strict=True)
        lost = [SimpleNamespace(index=index, tokens=[*map(int, tokens)]) for index, tokens in kept]
        return super().replay_converted(self._manager.convert(lost, data), batch_id)


def remote_manager(args: Namespace) -> Any:
    """Return the class that replaces `slime.ray.rollout.RolloutManager`.

    The call also replaces `ServingCluster`, and sets the engines' variables in `args.r3_engine`. With direct delivery these name
    an address on this script's node, and the manager is bound to that node.
    """

    def serve(token_file: str) -> str:
        obtain_token(token_file)
        host = config.interface
        return f"http://{f'[{host}]' if ':' in host else host}:{args.r3_channel['ingest_port']}"

    if not ray.is_initialized():
        ray.init()  # as slime's first call of Ray would do
    remote: Any = ray.remote
    slime.ray.serving.ServingCluster = remote(DetachedServing)
    config = config_of(args, interface=local_address(interface_of(args)))
    args.r3_engine = engine_variables(SimpleNamespace(serve=serve, config=config), args, nodes=node_count())
    kind = remote(concurrency_groups=GROUPS)(DetachedManager)
    if args.r3_delivery != "direct":
        return kind
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return SimpleNamespace(options=lambda **options: kind.options(**options | {"scheduling_strategy": here}))
