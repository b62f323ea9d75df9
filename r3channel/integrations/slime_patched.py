"""The channel in a slime that has `patches/slime-624b824a.patch`: by arguments of slime's own, under slime's own command.

    --rollout-data-transport r3channel.integrations.slime_patched.ChannelTransport
    --rollout-routed-experts-decoder-path r3channel.integrations.slime_patched.decode
    --train-actor-path r3channel.integrations.slime_patched_trainer.PatchedActor

Options are read from `R3CHANNEL_*` in the job's environment, or as `r3_...` from slime's `--custom-config-path`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from slime.utils.misc import Box  # pyright: ignore[reportMissingImports]

from r3channel.errors import UsageError
from r3channel.integrations import slime as adapter
from r3channel.recordings.options import values_of
from r3channel.relay.actor import FarRelay
from r3channel.relay.placement import RelayActor
from r3channel.relay.relay import Relay
from r3channel.relay.samples import SampleRows
from r3channel.report.slime_arguments import layout_of, with_channel
from r3channel.spec import RoutingSpec

RELAY = "r3channel-relay"
_SPARE_CALLS = 8
"""Of the manager, beside one long poll of every trainer."""


class ChannelTransport:
    """--rollout-data-transport: a ticket beside each rank's data, which slime itself split.

    The relay is in an actor of its own, started before the engines: the manager's one thread is generate()'s.
    """

    rows: SampleRows | None = None

    def __init__(self, args: Namespace) -> None:
        self.args, spec = with_channel(args), RoutingSpec.from_hf_config(args.hf_checkpoint)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        calls = args.actor_num_nodes * args.actor_num_gpus_per_node + _SPARE_CALLS
        made: Any = ray.remote(RelayActor)
        made = made.options(name=RELAY, num_cpus=0, max_concurrency=calls, scheduling_strategy=here)
        channel = {**args.r3_channel, "interface": adapter.interface_of(args)}
        actor = made.remote(spec.to_dict(), layout_of(args).to_dict(), channel, values_of(args, prefix="r3_"))
        self.relay = cast(Relay, FarRelay(actor, spec))
        self.relay.status()  # what is wrong with its start is raised here
        ChannelTransport.rows = SampleRows(self.relay)
        adapter.tell_engines(self.relay, args)

    def put(
        self, rollout_id: int, samples: Sequence[Any], rollout_data: Sequence[dict[str, Any]]
    ) -> list[Any]:
        for part in rollout_data:
            part.pop("rollout_routed_experts", None)  # of rollouts that slime loaded
        boxes = [Box(ray.put(part)) for part in rollout_data]
        assert self.rows is not None
        return adapter.with_ticket(boxes, rollout_data, samples, self.rows, self.args, rollout_id)


def decode(_args: Namespace, sample: Any, meta_info: dict[str, Any]) -> None:
    """--rollout-routed-experts-decoder-path: the rows go to the relay, and none of them into the sample."""
    if ChannelTransport.rows is None:
        raise UsageError(
            "the decoder without its transport: --rollout-data-transport is not ChannelTransport"
        )
    if meta_info.get("routed_experts") is not None or meta_info.get("finish_reason"):
        ChannelTransport.rows.take(sample, meta_info)
