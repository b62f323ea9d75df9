"""The part that slime's and miles' rollout managers share: a relay, and a split that is sealed. Knows no version of either."""

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
from r3channel.integrations.slime.sample_rows import SampleRows, by_microbatch
from r3channel.recordings.recorder import recorder_of
from r3channel.relay.ray_host import RelayHost
from r3channel.relay.relay import Relay
from r3channel.transport.network import AUTO


class RelayManager(RelayHost):
    """Stands before a framework's own manager among the bases of a class. It seals what the manager's split makes, and nothing
    else.
    """

    args: Namespace
    """The framework's arguments."""
    _samples: Sequence[Any] = ()
    _schedule: Any = None

    def start_relay(self, args: Namespace, config: ChannelConfig, module: Any) -> None:
        """Start the relay, and keep each schedule that the split builds.

        The schedule is kept at its call, because the boxes that slime returns are in Ray's store: to read the schedule there
        would fetch the whole batch.

        Args:
            args: Prepared arguments.
            config: The channel's settings.
            module: The module whose split calls `build_dp_schedule`.
        """
        self.relay = Relay(spec_of(args), layout_of(args), config, recorder=recorder_of(args, prefix="r3_"))
        self.rows = SampleRows(self.relay)
        schedule_of = module.build_dp_schedule

        @wraps(schedule_of)
        def build_dp_schedule(*given: Any, **options: Any) -> Any:
            self._schedule = schedule_of(*given, **options)
            return self._schedule

        module.build_dp_schedule = build_dp_schedule

    def convert(self, samples: Sequence[Any], data: dict[str, Any]) -> dict[str, Any]:
        """Keep the samples, and return their data without routing.

        The framework decoded that routing itself. The channel carries it, too.

        Args:
            samples: The samples.
            data: What the framework made of them, in order.
        """
        self._samples = list(samples)
        data.pop("rollout_routed_experts", None)
        return data

    def seal(self, split: Callable[[Any], list[Any]], data: dict[str, Any], step: int) -> list[Any]:
        """Split the data by rank, seal the step and add its ticket.

        No ticket is added while only a critic trains, which uses what its own router chooses.

        Args:
            split: The framework's own split.
            data: What the framework made of the samples.
            step: Number of the step.

        Returns:
            What `split` returns, for each rank.

        Raises:
            ConfigError: If the data does not have one entry for each sample.
        """
        samples, self._samples = self._samples, ()
        if len(samples) != (made := len(data["tokens"])):
            raise ConfigError(f"{made} samples were made of {len(samples)}; expected one for each, in order")
        self._schedule = None  # a schedule of an earlier step would not fit
        boxes = split(data)
        partitions, microbatches, steps, _ = self._schedule
        if self.args.use_critic and step < self.args.num_critic_only_steps:
            return boxes
        ranks = [by_microbatch(*cut) for cut in zip(partitions, microbatches, strict=True)]
        ticket = ray.put(self.rows.seal(step, samples, ranks, steps=steps).to_bytes())
        for box in boxes:
            self.put_beside(box, ticket)
        return boxes

    def put_beside(self, box: Any, ticket: Any) -> None:
        """Put a step's ticket beside the data of a rank."""
        box.r3_ticket = ticket

    def dispose(self, *limit: Any) -> None:
        super().dispose(*limit)  # pyright: ignore[reportAttributeAccessIssue]
        self.relay.close()


def config_of(args: Namespace, **here: Any) -> ChannelConfig:
    """Return the channel's settings in this process.

    Args:
        args: Prepared arguments.
        here: Settings that are known only in this process.
    """
    return ChannelConfig(**args.r3_channel | {"interface": interface_of(args)} | here)


def interface_of(args: Namespace) -> str:
    """Return the address that this process binds: `--r3-interface`.

    For `auto` it is Ray's own address of the node. Loopback reaches no other node, so with several nodes it is replaced by that
    address, too.
    """
    given = args.r3_channel["interface"]
    several = given == LOOPBACK and node_count() > 1
    return ray.util.get_node_ip_address() if several or given == AUTO else given


def node_count() -> int:
    return sum(node["Alive"] for node in ray.nodes())
