"""What a killed relay left on disk, given to a new one: its samples, and the steps that it had sealed and not delivered."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from r3channel.errors import RoutingError, SampleTwice, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.relay.journal import Remains, SavedSample, SavedStep, SavedTurn, dead_relays


@dataclass
class Recovery:
    """What a new relay took over."""

    pending: list[str] = field(default_factory=list)
    """Samples that wait for a step, those of `steps` included."""
    steps: dict[int, Assignment] = field(default_factory=dict)
    """Sealed and not delivered, with every sample here: to be sealed again, in this order."""
    damaged: list[str] = field(default_factory=list)
    """What was lost, by name."""
    unclaimed: int = 0
    """Frames that came directly and whose replies never did: nobody knows their samples."""


def take_over(
    root: Path, *, but: Path, keep: Callable[[SavedSample], int], keep_step: Callable[[int, SavedStep], None]
) -> tuple[Recovery, dict[int, set[ShardKey]]]:
    """Give `keep`, which returns a sample's tokens, what dead relays left in `root`, the folder `but` aside; and delete it. What
    `keep_step` is given is written elsewhere before that, so that a second kill forgets no acknowledgement.

    Returns the recovery, and for each step the receivers that had acknowledged it.
    """
    recovery, acked, tickets = Recovery(), dict[int, set[ShardKey]](), dict[int, Ticket]()
    with dead_relays(root, but=but) as found:
        for remains in found:
            recovery.damaged += remains.damaged
            recovery.unclaimed += remains.unclaimed
        here: dict[str, int] = {}
        for sample in _joined(found, recovery):
            _hand_over(sample, keep, here, recovery)
        recovery.pending = list(here)
        for remains in found:
            for step, saved in remains.steps.items():
                if (ticket := _sort_in(step, saved, here, recovery)) is not None:
                    tickets[step] = ticket
        for step in recovery.steps:
            acked[step] = {key for one in found if step in one.steps for key in one.steps[step].acked}
            keep_step(step, SavedStep(tickets[step].to_bytes(), acked[step]))
        for remains in found:
            shutil.rmtree(remains.folder)
    return recovery, acked


def _joined(found: list[Remains], recovery: Recovery) -> Iterator[SavedSample]:
    """Every sample with its turns in order; from a turn on that is not there, none."""
    samples: dict[str, dict[int, SavedTurn]] = {}
    for sample in (one for remains in found for one in remains.samples.values()):
        turns = samples.setdefault(sample.sample_id, {})
        if not turns:
            turns.update((turn.turn, turn) for turn in sample.turns)
        elif any(turns.get(turn.turn) != turn for turn in sample.turns):  # equal ones: a recovery was killed
            recovery.damaged.append(f"sample {sample.sample_id} was left by two relays; the older is taken")
    for name, turns in samples.items():
        whole = [turns[number] for number in itertools.takewhile(turns.__contains__, itertools.count())]
        if len(whole) < len(turns):
            recovery.damaged.append(f"sample {name}: turn {max(turns)} is here, turn {len(whole)} is not")
        if whole:
            yield SavedSample(name, whole)


def _sort_in(step: int, saved: SavedStep, here: dict[str, int], recovery: Recovery) -> Ticket | None:
    """`here`: tokens of the samples that were handed over; a sample that has lost turns is lost to its step."""
    try:
        ticket = Ticket.from_bytes(saved.ticket)
    except TicketMismatch as error:
        recovery.damaged.append(f"step {step}: {error}")
        return None
    lost = [s for s in ticket.samples if here.get(s.sample_id) != s.tokens and not _nobody_has(s)]
    if lost:
        names = [sample.sample_id for sample in lost]
        recovery.damaged.append(f"step {step}: its samples {names[:5]} are lost, {len(names)} in all")
    else:
        recovery.steps[step] = ticket.assignment
    return ticket


def _nobody_has(sample: TicketSample) -> bool:
    """Left to the live router whole."""
    return sample.invalid == ((0, sample.tokens - 1),)


def _hand_over(
    sample: SavedSample, keep: Callable[[SavedSample], int], here: dict[str, int], recovery: Recovery
) -> None:
    try:
        here[sample.sample_id] = keep(sample)
    except (RoutingError, SampleTwice) as error:
        recovery.damaged.append(str(error))
