"""slime's split of a rollout over its trainers, sealed. Knows no version of slime: each has its split in another class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import ray

from r3channel.errors import ConfigError
from r3channel.integrations.slime.sample_rows import SampleRows


class SealedSplit:
    """Seals what slime's own split makes, and nothing else; the ticket travels beside each rank's data."""

    def __init__(self, rows: SampleRows, module: Any) -> None:
        """`module` is the one whose split calls `build_dp_schedule`: slime keeps the schedule to itself, and the boxes that it
        returns are in Ray's store, so that to read it there would fetch the whole batch."""
        self._rows, self._samples = rows, list[Any]()
        self._schedule: Any = None
        schedule_of = module.build_dp_schedule

        @wraps(schedule_of)
        def build_dp_schedule(*given: Any, **options: Any) -> Any:
            self._schedule = schedule_of(*given, **options)
            return self._schedule

        module.build_dp_schedule = build_dp_schedule

    def converted(self, samples: Sequence[Any], data: dict[str, Any]) -> dict[str, Any]:
        """What slime made of samples, without their routing: of rollouts that slime loaded; it goes the channel's way too."""
        self._samples = list(samples)
        data.pop("rollout_routed_experts", None)
        return data

    def sealed(
        self, split: Callable[[Any], list[Any]], data: dict[str, Any], *, step: int, critic_only: bool
    ) -> list[Any]:
        """Slime's boxes, one for each rank. Without tickets while only a critic trains, on what its own router chooses."""
        samples, self._samples = self._samples, []
        if len(samples) != (made := len(data["tokens"])):
            raise ConfigError(f"{made} samples were made of {len(samples)}; expected one for each, in order")
        self._schedule = None  # an old one would fit no longer
        boxes = split(data)
        partitions, microbatches, steps, _ = self._schedule
        if critic_only:
            return boxes
        ranks = [
            [[partition[at] for at in batch] for batch in rank]
            for partition, rank in zip(partitions, microbatches, strict=True)
        ]
        ticket = ray.put(self._rows.seal(step, samples, ranks, steps=steps).to_bytes())
        for box in boxes:
            box.r3_ticket = ticket
        return boxes
