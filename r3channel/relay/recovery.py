"""What a relay that was killed left on disk, given to a new one: its samples, and the steps that it had sealed and not delivered."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from r3channel.errors import RoutingError, SampleTwice, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.relay.durable import SavedSample, SavedStep, dead_relays


@dataclass
class Recovery:
    """What a new relay took over."""

    pending: list[str] = field(default_factory=list)
    """Samples that wait for a step, those of `steps` included."""
    steps: dict[int, Assignment] = field(default_factory=dict)
    """Sealed and not delivered, with every sample here: to be sealed again, in this order."""
    shared: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """Sealed over several relays: step -> relay -> its samples that are not here. No relay can seal such a step alone: recover all of
    its relays' folders, or generate these again."""
    damaged: list[str] = field(default_factory=list)
    """What was lost, by name."""
    unclaimed: int = 0
    """Frames that came directly and whose replies never did: nobody knows their samples."""


def take_over(
    root: Path, *, but: Path, keep: Callable[[SavedSample], None]
) -> tuple[Recovery, dict[int, set[ShardKey]]]:
    """Give `keep` what dead relays left in `root`, the folder `but` aside, and delete what was given.

    Returns the recovery, and for each step the receivers that had acknowledged it.
    """
    recovery, acked = Recovery(), dict[int, set[ShardKey]]()
    with dead_relays(root, but=but) as found:
        for remains in found:
            recovery.damaged += remains.damaged
            recovery.unclaimed += remains.unclaimed
            for sample in remains.samples.values():
                _hand_over(sample, keep, recovery)
        for remains in found:
            for step, saved in remains.steps.items():
                _sort_in(step, saved, recovery)
                acked.setdefault(step, set()).update(saved.acked)
        for remains in found:
            shutil.rmtree(remains.folder)
    return recovery, acked


def _sort_in(step: int, saved: SavedStep, recovery: Recovery) -> None:
    """Once every sample is handed over: relays may have shared a folder."""
    try:
        ticket = Ticket.from_bytes(saved.ticket)
    except TicketMismatch as error:
        recovery.damaged.append(f"step {step}: {error}")
        return
    here = set(recovery.pending)
    lost = [sample for sample in ticket.samples if sample.sample_id not in here and not _nobody_has(sample)]
    by_relay: dict[int, tuple[str, ...]] = {}
    for sample in lost:
        relay = sample.segments[0][1]
        by_relay[relay] = (*by_relay.get(relay, ()), sample.sample_id)
    whole = {
        relay: tuple(s.sample_id for s in ticket.samples if s.segments[0][1] == relay) for relay in by_relay
    }
    if not lost:
        recovery.steps[step] = ticket.assignment
    elif by_relay == whole and len(lost) < len(ticket.samples):
        recovery.shared[step] = by_relay
    else:
        names = [sample.sample_id for sample in lost]
        recovery.damaged.append(f"step {step}: its samples {names[:5]} are lost, {len(names)} in all")


def _nobody_has(sample: TicketSample) -> bool:
    """Left to the live router whole."""
    return sample.invalid == ((0, sample.tokens - 1),)


def _hand_over(sample: SavedSample, keep: Callable[[SavedSample], None], recovery: Recovery) -> None:
    try:
        keep(sample)
    except RoutingError as error:
        recovery.damaged.append(str(error))
    except SampleTwice as error:
        recovery.damaged.append(f"{error} (left by two relays)")
    else:
        recovery.pending.append(sample.sample_id)
