"""What slime's rollout managers and miles' have of ours: a relay, and the split that is sealed. Knows no version of either."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import ray

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError
from r3channel.integrations.preflight import LOOPBACK
from r3channel.integrations.slime.arguments import layout_of, spec_of
from r3channel.integrations.slime.sample_rows import SampleRows
from r3channel.recordings.recorder import recorder_of
from r3channel.relay.ray_host import RelayHost
from r3channel.relay.relay import Relay
from r3channel.transport.network import AUTO


class RelayManager(RelayHost):
    """Stands before a framework's own manager among the bases of a class. Seals what its split makes, and nothing else."""

    args: Namespace
    """The framework's."""
    _samples: Sequence[Any] = ()
    _schedule: Any = None

    def start_relay(self, args: Namespace, config: ChannelConfig, module: Any) -> None:
        """`module` is the one whose split calls `build_dp_schedule`: the schedule is kept there, and the boxes that slime returns
        are in Ray's store, so that to read it there would fetch the whole batch."""
        self.relay = Relay(spec_of(args), layout_of(args), config, recorder=recorder_of(args, prefix="r3_"))
        self.rows = SampleRows(self.relay)
        schedule_of = module.build_dp_schedule

        @wraps(schedule_of)
        def build_dp_schedule(*given: Any, **options: Any) -> Any:
            self._schedule = schedule_of(*given, **options)
            return self._schedule

        module.build_dp_schedule = build_dp_schedule

    def converted(self, samples: Sequence[Any], data: dict[str, Any]) -> dict[str, Any]:
        """What the framework made of samples, without the routing that it decoded itself; that goes the channel's way too."""
        self._samples = list(samples)
        data.pop("rollout_routed_experts", None)
        return data

    def sealed(self, split: Callable[[Any], list[Any]], data: dict[str, Any], step: int) -> list[Any]:
        """What `split` makes for each rank. Without tickets while only a critic trains, on what its own router chooses."""
        samples, self._samples = self._samples, ()
        if len(samples) != (made := len(data["tokens"])):
            raise ConfigError(f"{made} samples were made of {len(samples)}; expected one for each, in order")
        self._schedule = None  # an old one would fit no longer
        boxes = split(data)
        partitions, microbatches, steps, _ = self._schedule
        if self.args.use_critic and step < self.args.num_critic_only_steps:
            return boxes
        cuts = zip(partitions, microbatches, strict=True)
        ranks = [[[partition[at] for at in batch] for batch in rank] for partition, rank in cuts]
        ticket = ray.put(self.rows.seal(step, samples, ranks, steps=steps).to_bytes())
        for box in boxes:
            self.put_beside(box, ticket)
        return boxes

    def put_beside(self, box: Any, ticket: Any) -> None:
        """A step's ticket beside the data of a rank."""
        box.r3_ticket = ticket

    def dispose(self, *limit: Any) -> None:
        super().dispose(*limit)  # pyright: ignore[reportAttributeAccessIssue]
        self.relay.close()


def config_of(args: Namespace, **here: Any) -> ChannelConfig:
    """The channel's settings in this process, and what is known only `here`."""
    return ChannelConfig(**args.r3_channel | {"interface": interface_of(args)} | here)


def interface_of(args: Namespace) -> str:
    """What this process binds: `--r3-interface`; Ray's own address of the node for `auto`, and in the place of loopback, which
    reaches no other node, where there are several."""
    given = args.r3_channel["interface"]
    several = given == LOOPBACK and node_count() > 1
    return ray.util.get_node_ip_address() if several or given == AUTO else given


def node_count() -> int:
    return sum(node["Alive"] for node in ray.nodes())
