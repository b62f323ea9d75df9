"""The table of samples and their replies, from the reply to delivery. It has rules only: no I/O, no threads, no clock.

    turn     EXPECTED -> HELD                rows came, or are left to the live router
                 \\-> FAILED -> HELD          its direct frame cannot be used; a good copy came
    sample   waits -> taken by a step (`step`) -> gone (delivered)

A sample is an ordered list of turns, one per reply; turns are never joined. A frame may come before its reply: the table keeps
the frame by its name until a reply claims it. Events come in as calls, with the time where it matters; a call returns what must
be freed. The caller holds one lock around each call. A call's time grows with its arguments, not with the table.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import takewhile

import numpy as np

from r3channel import errors
from r3channel.errors import R3Error
from r3channel.plan.ticket import PackedSample, TicketSample, pack_sample
from r3channel.relay.verify import HeldTensors, VerifiedRows
from r3channel.wire.digest import fold
from r3channel.wire.parcel import FrameName, FrameReference

EXPECTED, HELD, FAILED = "EXPECTED", "HELD", "FAILED"
_REMEMBERED = 1 << 16
"""Most names of used frames that are remembered, to know a frame that is sent again."""
_MOST_FAILED = 1 << 12
"""Most unusable frames that are kept until their replies come. Each takes 1 to 5 kB, which no store counts."""

Cut = Callable[..., VerifiedRows]
"""`relay.verify.FrameVerifier.cut`."""


@dataclass(slots=True, eq=False)
class Turn:
    """A reply of a sample, from the call that brings it to the sample's delivery, with its tokens as two hashes."""

    sample_id: str
    engine: str = "?"
    append: bool = False
    """The sample is here already."""
    cut: bool = False
    """Before the rows are read: whether the tokens may be fewer than were generated. Afterwards: whether they are."""
    key: int | None = None
    """The request's key, which its frame carries too; None where the reply names none."""
    tokens: int = 0
    """The sample's tokens, those of the turns before included."""
    tokens_hash: int = 0
    """The hash of all these tokens."""
    prefix_hash: int = 0
    """The hash of those with rows: a later turn begins with them."""
    first_row: int = 0
    """Rows of the sample that were here before."""
    held_hash: int | None = None
    """The hash of the first `first_row` tokens; None where they are not compared."""
    reference: FrameReference | None = None
    """It stands for a frame that comes directly; None where the reply held its rows, or has none."""
    rows: VerifiedRows | None = None
    tensors: HeldTensors | None = None
    live: bool = False
    """The rows did not come, and are left to the live router."""
    error: R3Error | None = None

    @property
    def end_row(self) -> int:
        return self.tokens - 1

    @property
    def name(self) -> FrameName:
        """Return the name of the direct frame; zeros where there is none."""
        return self.reference.name if self.reference else (0, 0)

    @property
    def where(self) -> str:
        return f"sample {self.sample_id} from engine {self.engine}"

    @property
    def state(self) -> str:
        return FAILED if self.error else HELD if self.rows or self.live else EXPECTED


@dataclass(slots=True)
class Sample:
    """A trained sequence, as far as it is known. There is no sample without a turn."""

    name: str
    since_s: float = 0.0
    turns: list[Turn] = field(default_factory=list[Turn])
    step: int | None = None
    """The step that has taken it."""
    held: tuple[VerifiedRows, ...] = ()
    """The rows of its turns that are here, in the turns' order. The tuple never changes: another turn makes another tuple."""
    packed: PackedSample | None = None
    """The finished ticket entry of a sample of one turn, made when its rows come so that `seal` need not; None for others."""

    @property
    def last(self) -> Turn:
        """Return the newest turn, whose tokens are the sample's."""
        return self.turns[-1]

    @property
    def error(self) -> R3Error | None:
        return next((turn.error for turn in self.turns if turn.error), None)

    @property
    def live_rows(self) -> int:
        """Return how many rows are left to the live router."""
        return sum(turn.end_row - turn.first_row for turn in self.turns if turn.live and not turn.rows)

    @property
    def tensors(self) -> list[HeldTensors]:
        """Return what the turns brought beside their rows, turn by turn."""
        return [turn.tensors for turn in self.turns if turn.tensors is not None]

    @property
    def awaited(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.state == EXPECTED]

    def hold(self, turn: Turn, rows: VerifiedRows | None) -> None:
        """Keep these rows as a turn's."""
        turn.rows = rows
        self.held = tuple([one.rows for one in self.turns if one.rows])
        self.packed = self.pack() if rows and len(self.turns) == 1 else None

    def pack(self) -> PackedSample:
        """Return what the ticket says of the sample."""
        held, invalid = self.held, list[tuple[int, int]]()
        for turn in self.turns:
            rows = turn.rows
            # the last token has no row
            missing = [(turn.first_row, turn.end_row)] if turn.first_row < turn.end_row else []
            for start, end in missing if rows is None else rows.invalid:  # rows that nobody has are invalid
                if invalid and invalid[-1][1] == start:  # ranges that touch are one
                    start = invalid.pop()[0]
                invalid.append((start, end))
        digest = fold(reduce(np.add, [rows.digests_L for rows in held])) if held else 0
        spans = tuple(span for rows in held for span in rows.provenance)
        tokens = self.last.tokens, self.last.tokens_hash
        return pack_sample(TicketSample(self.name, *tokens, digest, spans, tuple(invalid)))

    def cut(
        self, tokens: int, hashes: tuple[int, int], rows: VerifiedRows | None
    ) -> list[VerifiedRows | None]:
        """Keep the first tokens, with `rows` in their last turn.

        Args:
            tokens: How many tokens are left.
            hashes: The hash of all of these, and of those with rows.
            rows: The rows that are left of the last turn; None where it is live.

        Returns:
            The rows of the turns behind, which the caller frees.
        """
        end_row, turns = tokens - 1, self.turns
        self.turns = [turn for turn in turns if turn.first_row < end_row]
        last = self.last
        last.tokens, (last.tokens_hash, last.prefix_hash), last.cut = tokens, hashes, True
        self.hold(last, rows)
        return [turn.rows for turn in turns if turn.first_row >= end_row]


@dataclass(slots=True)
class _Unclaimed:
    what: VerifiedRows | R3Error
    since_s: float


class SampleTable:
    """The table of samples and their replies. Not thread safe."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        """The samples in the order of their newest replies."""
        self._awaited: dict[FrameName, Turn] = {}
        self._unclaimed: dict[FrameName, _Unclaimed] = {}
        self._failed: deque[FrameName] = deque()
        """Unclaimed frames that cannot be used, the oldest first, and some that have gone since."""
        self._used: OrderedDict[FrameName, None] = OrderedDict()
        self._incomplete: dict[str, Sample] = {}
        """Samples with turns that are not HELD: a step of thousands looks at these alone."""

    # -- replies ---------------------------------------------------------------------------------------------------

    def rows_announced(self, name: str) -> int:
        """Return how many rows of a sample are here or promised.

        A frame reference promises the rows of its frame.
        """
        sample = self.samples.get(name)
        return sample.last.end_row if sample else 0

    def reply(self, turn: Turn, *, now_s: float, cut: Cut | None = None) -> None:
        """Take a reply with rows, a frame reference, or neither.

        The frame of a frame reference is here or will come. After an error nothing has changed, and the rows are still the
        caller's, who sets the names that the error carries.

        Args:
            turn: The reply.
            now_s: The time.
            cut: `FrameVerifier.cut`, for the direct frame of a turn whose tokens were cut.

        Raises:
            SampleTwice: The sample is here, and the reply is no further turn or a step has taken it.
            SampleUnknown: The sample has no turn to append to.
            TurnMismatch: The rows or the tokens do not continue the turns before.
            RowCountMismatch: The rows do not fit the reply's tokens.
            FrameCorrupt: The frame belongs to another request, or was damaged on its way.
            FrameReferenceInvalid: The frame reference is for another request, or its frame is another reply's.
        """
        sample, rows, reference, kept = self._check_name(turn), turn.rows, turn.reference, None
        turn.first_row = self.rows_announced(turn.sample_id)
        if reference is not None:
            if turn.key not in (None, reference.sample_key):
                raise errors.FrameReferenceInvalid(
                    f"{turn.where}: the frame reference is for request key {reference.sample_key:#x}, the reply for "
                    f"{turn.key:#x}; were replies swapped?"
                )
            turn.key, kept = reference.sample_key, self._unclaimed.get(turn.name)
            if kept is not None and isinstance(kept.what, R3Error):
                raise _of_sample(kept.what, turn.sample_id)
        if (source := rows or reference) is not None:
            _check_fit(turn, source)
        other = sample is not None and turn.held_hash not in (None, sample.last.prefix_hash)
        if other or turn.end_row < turn.first_row:
            raise errors.TurnMismatch(
                f"{turn.where}: the first {turn.first_row} tokens differ from those that the held rows were made for, or none "
                "follows; expected the same and more. Was the conversation tokenized anew? Append token ids, not text"
            )
        if reference is not None and (turn.name in self._used or turn.name in self._awaited):
            raise errors.FrameReferenceInvalid(
                f"{turn.where}: frame {reference.serial} is another reply's, or went with a refused one. Was a reply added twice?"
            )
        if kept is not None:
            rows = _of_turn(turn, kept.what, cut)
            if isinstance(rows, R3Error):
                raise rows
        sample = self.samples.pop(turn.sample_id, None) or Sample(turn.sample_id)
        self.samples[sample.name] = sample  # at the end, where the newest are
        sample.since_s = now_s
        sample.turns.append(turn)
        sample.hold(turn, rows)
        if kept is not None:
            del self._unclaimed[turn.name]
            self._use(turn.name)
        elif reference is not None:
            self._awaited[turn.name] = turn
            self._incomplete[sample.name] = sample

    def _check_name(self, turn: Turn) -> Sample | None:
        sample = self.samples.get(turn.sample_id)
        if sample is not None and (not turn.append or sample.step is not None):
            where = "waits for a step" if sample.step is None else f"is in step {sample.step}"
            raise errors.SampleTwice(
                f"sample {turn.sample_id} was added twice; the first {where}. Was a request retried?"
            )
        if sample is None and turn.append:
            raise errors.SampleUnknown(
                f"sample {turn.sample_id} has no turn to append to; rejected, discarded, expired or sealed before?"
            )
        return sample

    # -- frames that come directly ---------------------------------------------------------------------------------

    def wants(self, name: FrameName) -> bool:
        """Return whether a frame with this name is still needed.

        False for a frame that is here undamaged, or was used: what comes now is a second copy. False, too, where a step has the
        sample and goes on without the frame.
        """
        kept, turn = self._unclaimed.get(name), self._awaited.get(name)
        if turn is not None and self.samples[turn.sample_id].step is not None:
            return False
        return name not in self._used and (kept is None or isinstance(kept.what, R3Error))

    def owner(self, name: FrameName) -> Turn | None:
        """Return the turn that waits for a frame."""
        return self._awaited.get(name)

    def frame(self, name: FrameName, what: VerifiedRows | R3Error, *, now_s: float, cut: Cut) -> bool:
        """Take a direct frame: its rows, or why it cannot be used.

        Returns:
            False if nobody wants the frame (any more), or if its rows do not fit its turn: the caller frees it.
        """
        if not self.wants(name):
            return False
        if (turn := self._awaited.get(name)) is None:
            self._unclaimed.pop(name, None)  # put it at the end: frames lie in the order in which they came
            self._unclaimed[name] = _Unclaimed(what, now_s)
            if isinstance(what, R3Error):
                self._bound_failed(name)
            return True
        sample, rows = self.samples[turn.sample_id], _of_turn(turn, what, cut)
        if isinstance(rows, R3Error):
            turn.error = rows
            return False
        turn.error = None
        sample.hold(turn, rows)
        del self._awaited[name]
        self._use(name)
        self._look_again(sample)
        return True

    def _bound_failed(self, name: FrameName) -> None:
        self._failed.append(name)
        if len(self._failed) > _MOST_FAILED:
            kept = self._unclaimed.get(oldest := self._failed.popleft())
            if kept is not None and isinstance(kept.what, R3Error):
                del self._unclaimed[oldest]  # from now on it is a frame that never came

    def refuse(self, name: FrameName) -> VerifiedRows | R3Error | None:
        """Drop the frame of a refused reply, now or when it comes.

        Returns:
            The frame's rows, which the caller frees, or its error; None where it is not here, or is another reply's.
        """
        if name in self._awaited or name in self._used:  # another reply waits for it or has used it
            return None
        self._use(name)
        kept = self._unclaimed.pop(name, None)
        return kept and kept.what

    def leave_live(self, late: Iterable[Turn]) -> None:
        """Leave turns whose frames have not come to the live router."""
        for turn in late:
            turn.live = True
            self._look_again(self.samples[turn.sample_id])

    def _look_again(self, sample: Sample) -> None:
        if all(turn.state == HELD for turn in sample.turns):
            self._incomplete.pop(sample.name, None)

    def _use(self, name: FrameName) -> None:
        self._used[name] = None
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    # -- to a step, or away ----------------------------------------------------------------------------------------

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the samples that no step can take.

        They were never here, are gone, or are another step's.
        """
        samples = self.samples
        return [name for name in names if name not in samples or samples[name].step is not None]

    def outstanding(self, names: Iterable[str]) -> list[Turn]:
        """Return the turns of these samples whose frames have not come.

        Samples that are not here have none.
        """
        late = [self._incomplete[name] for name in names if name in self._incomplete]
        return [turn for sample in late for turn in sample.awaited]

    def is_awaited(self, turn: Turn) -> bool:
        """Return whether a turn's frame is still to come.

        The frame of a sample that has gone meanwhile is not.
        """
        return turn.state == EXPECTED and turn.name in self._awaited

    def take(self, names: Sequence[str], *, step: int) -> list[Sample]:
        """Give whole samples to a step: all, or none.

        Raises:
            SampleUnknown: A sample is not here, or is another step's.
            R3Error: A frame cannot be used. The error has the type of the first such frame's, and names all such samples.
            StepError: A frame is still to come.
        """
        known = map(self.samples.get, names)
        samples = [sample for sample in known if sample is not None and sample.step is None]
        if len(samples) < len(names):
            unknown = self.unknown(names)
            raise errors.SampleUnknown(
                f"step {step}: {len(unknown)} of {len(names)} assigned samples are not here: {unknown[:5]}. Rejected, discarded, "
                "expired, or sealed before?",
                samples=unknown,
                step=step,
            )
        incomplete = [self._incomplete[name] for name in names if name in self._incomplete]
        failed = [sample for sample in incomplete if sample.error is not None]
        if failed:
            first, more = failed[0].error, f" (and {len(failed) - 1} more samples)" if len(failed) > 1 else ""
            assert first is not None
            raise type(first)(
                f"step {step}: {first}{more}", samples=[sample.name for sample in failed], step=step
            )
        late = [sample.name for sample in incomplete if sample.awaited]
        if late:
            raise errors.StepError(
                f"step {step}: while it was sealed, {len(late)} samples got another turn whose frame is to come: {late[:5]}",
                samples=late,
                step=step,
            )
        for sample in samples:
            sample.step = step
        return samples

    def give_back(self, samples: Iterable[Sample], *, now_s: float | None = None) -> None:
        """Make samples wait for a step again.

        Args:
            samples: The samples.
            now_s: The time, for samples of a step that was sealed: they wait anew, behind all others.
        """
        for sample in samples:
            sample.step = None
            if now_s is not None:  # the step kept it from expiring, for as long as it took
                sample.since_s, self.samples[sample.name] = now_s, self.samples.pop(sample.name)

    def remove(self, names: Iterable[str]) -> list[Sample]:
        """Remove samples, whatever their state, and return them.

        Unknown ones are ignored. A frame that is still to come will be refused.
        """
        gone = [self.samples.pop(name) for name in dict.fromkeys(names) if name in self.samples]
        for sample in gone:
            self._incomplete.pop(sample.name, None)
            for turn in sample.turns:
                if turn.reference and self._awaited.pop(turn.name, None):
                    self._use(turn.name)
        return gone

    def expire(
        self, *, before_s: float, unclaimed_s: float
    ) -> tuple[list[Sample], dict[FrameName, VerifiedRows | R3Error]]:
        """Remove old samples and old unclaimed frames, and return them.

        Args:
            before_s: Samples of no step whose newest reply came before this time are removed.
            unclaimed_s: Frames that came before this time and that no reply claimed are removed.
        """
        # Samples and frames lie in the order in which they came. This is called at every frame, and looks at the old ones only.
        aged = takewhile(lambda sample: sample.since_s < before_s, self.samples.values())
        names = [sample.name for sample in aged if sample.step is None]
        old = list(takewhile(lambda name: self._unclaimed[name].since_s < unclaimed_s, self._unclaimed))
        return self.remove(names), {name: self._unclaimed.pop(name).what for name in old}

    @property
    def unclaimed(self) -> int:
        """Return how many frames have no reply yet."""
        return len(self._unclaimed)


def _of_turn(turn: Turn, what: VerifiedRows | R3Error, cut: Cut | None) -> VerifiedRows | R3Error:
    """Return a direct frame's rows, or why its turn cannot have them."""
    if isinstance(what, R3Error):
        return _of_sample(what, turn.sample_id)
    if what.sample_key != turn.key:
        return _swap_error(turn, what.sample_key)
    if cut is not None and turn.cut and what.end_row > turn.end_row:
        try:
            what = cut(what, turn.end_row, where=turn.where)
        except R3Error as error:
            return error
    if (what.first_row, what.end_row) != (turn.first_row, turn.end_row):
        return errors.RowCountMismatch(
            f"{turn.where}: the frame has rows {what.first_row}..{what.end_row}, its frame reference said "
            f"{turn.first_row}..{turn.end_row}",
            samples=[turn.sample_id],
        )
    return what


def _of_sample(error: R3Error, name: str) -> R3Error:
    return type(error)(f"sample {name}: {error}", samples=[name], engines=error.engines)


def _swap_error(turn: Turn, key: int) -> errors.FrameCorrupt:
    text = f"{turn.where}: the frame belongs to request key {key:#x}, expected the reply's {turn.key:#x}; were replies swapped?"
    return errors.FrameCorrupt(text, samples=[turn.sample_id])


def _check_fit(turn: Turn, source: VerifiedRows | FrameReference) -> None:
    held, key, first, end = turn.first_row, source.sample_key, source.first_row, source.end_row
    if turn.key not in (None, key):
        raise _swap_error(turn, key)
    if held and first != held:
        what = "the rows between are missing" if first > held else "sent again"
        raise errors.TurnMismatch(
            f"{turn.where}: rows from {first} on, but rows 0..{held} are held; expected to begin at row {held} ({what}). Set "
            "routed_experts_start_len to what `relay.rows_held(sample_id)` returns"
        )
    if first != held or (end != turn.end_row and not turn.cut):
        raise errors.RowCountMismatch(
            f"{turn.where}: rows {first}..{end} for {turn.tokens} tokens; expected {held}..{turn.end_row}. Is "
            "`tokens` the whole sequence, prompt and response? Was a start offset set without append (a later turn that was put "
            "on a new Sample, not on the one that has the rows before), or the text cut after generation? If your loop appended "
            "tokens itself, add them next: `add_live(..., append=True)`"
        )
