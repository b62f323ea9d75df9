"""Which rows of the relay belong to a framework's sample object. Knows neither slime nor Ray.

A sample may be copied, fed back into a buffer, finished two rollouts later, filtered or simply forgotten, and nothing reports it.
So a sample holds its rows as an object, and the relay discards the rows when the last sample that holds them is gone. A fault of
the rows matters only once a step names the sample.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from operator import eq
from typing import Any, TypeVar

import numpy as np

from r3channel.errors import FrameMissing, R3Error, RoutingError, SampleUnknown, StepError, StoreFull
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame
from r3channel.wire.parcel import REFERENCE_BYTES

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIELD = "routed_experts"
START = f"{_FIELD}_start_len"
"""A field of requests, and of a reply's `meta_info`, into which SGLang does not put it."""
_ATTRIBUTE = "r3_rows"
_BACKLOG = 32
"""Replies that may wait to be kept before requests wait for them. Far fewer wait while there is room."""
_LOOK_S = 0.05
_REFERENCE_CHARACTERS = 4 * -(-REFERENCE_BYTES // 3)


_KEPT: Future[R3Error | None] = Future()
_KEPT.set_result(None)


class Rows:
    """The relay's rows of one sample, by name. Copies of the sample share this object."""

    def __init__(self, name: str) -> None:
        self.name, self.fault = name, _KEPT
        self.tokens: list[int] = []
        """Tokens that the rows belong to; the last token has no row. `fault` is that of the last reply, once the reply is kept:
        None, or why it could not be kept."""

        self.copied = False
        """Whether copies of the sample share the rows: another turn that is added would then be the copies', too."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Rows:
        self.copied = True
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.name,)  # in a dump of samples, or in another process, no relay knows it


def by_microbatch(values: Sequence[_T], batches: Sequence[Sequence[int]]) -> list[list[_T]]:
    """Return the values of each micro-batch, which holds places in `values`."""
    return [[values[place] for place in batch] for batch in batches]


def names_at(ticket: Ticket, dp: int, batches: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the names of the samples of a DP rank's micro-batches.

    Several samples may have one index, or None. So a name is the ticket's name at the same place, if that name has the index.

    Args:
        ticket: The step's ticket.
        dp: The DP rank.
        batches: slime's index of each sample, by micro-batch.
    """
    planned = itertools.chain.from_iterable(ticket.assignment.ranks[dp])
    found = [[(f"{index}.", next(planned, "")) for index in batch] for batch in batches]
    return [[name if name.startswith(begin) else begin for begin, name in batch] for batch in found]


class SampleRows:
    """Takes the rows out of replies, and seals the rows of the samples that are trained on.

    `take` and `room` run on the thread of the framework's event loop, `seal` on its main thread. A thread of this object verifies
    and keeps what was taken, in that order. Only that thread waits for room in the store, until the relay is closed.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._serial = itertools.count()
        self._gone: deque[str] = deque()
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="r3channel-keep")
        self._handed: deque[Future[R3Error | None]] = deque()

    def take(self, sample: Any, meta_info: Mapping[str, Any], *, trained: bool = True) -> dict[str, Any]:
        """Keep what a reply says of a sample's routing.

        The call waits for nothing and refuses nothing: `seal` reports what could not be kept of its samples. A reply replaces the
        rows of the reply before, because it holds the rows of all tokens; with `routed_experts_start_len` it adds to them.

        Args:
            sample: The framework's sample. `sample.tokens` is the whole sequence, this reply's tokens included.
            meta_info: The reply's `meta_info`.
            trained: Whether the sample is trained on. Rows of any other sample (an evaluation) are discarded at once, also rows
                that are still on their way here.

        Returns:
            The rest of `meta_info`.
        """
        self.tidy()
        rest = {name: value for name, value in meta_info.items() if name != _FIELD}
        aborted = (meta_info.get("finish_reason") or {}).get("type") == "abort"
        if not aborted or meta_info.get(_FIELD) is not None:
            more = rows_of(sample) is not None and bool(meta_info.get(START))
            self._hand(sample, self.relay.add, {"meta_info": meta_info}, more=more, trained=trained)
        return rest

    async def room(self) -> None:
        """Wait while the store is full; call it before each request.

        Requests wait so that replies do not pile up here. The wait takes `step_timeout_s` at most; discards go on meanwhile.
        """
        deadline_s = time.monotonic() + self.relay.config.step_timeout_s
        while self._backlog() > _BACKLOG and time.monotonic() < deadline_s:
            self.tidy()
            await asyncio.sleep(_LOOK_S)

    async def request(self, sample: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request that asks only for rows that are not here.

        The rows that are here then stay those of the pass that made them. The request asks for all rows if none of its first
        `input_ids` has a row here, or if copies of the sample hold the rows, too. A request with a `routed_experts_start_len` of
        its own is not changed. The call waits up to `step_timeout_s` until the sample's last reply is kept.

        Args:
            sample: The framework's sample.
            payload: A request for the sample's next tokens.

        Returns:
            The payload to send, a new dictionary.
        """
        rows, ids = rows_of(sample), payload.get("input_ids")
        if not payload.get(f"return_{_FIELD}") or not ids or START in payload or rows is None or rows.copied:
            return dict(payload)
        deadline_s = time.monotonic() + self.relay.config.step_timeout_s
        kept = asyncio.wrap_future(rows.fault)
        while not kept.done() and time.monotonic() < deadline_s:
            self.tidy()
            await asyncio.wait([kept], timeout=_LOOK_S)
        held = self.relay.rows_held(rows.name, ids) if kept.done() else 0
        return {**payload, START: held} if held else dict(payload)

    def seal(
        self, step: int, samples: Sequence[Any], ranks: Sequence[Sequence[Sequence[int]]], *, steps: Sequence[int]
    ) -> Ticket:  # fmt: skip
        """Seal a step.

        The call waits up to `step_timeout_s` until the replies that were taken are kept.

        Args:
            step: Number of the step.
            samples: The framework's samples.
            ranks: `ranks[dp][microbatch]` are places in `samples`.
            steps: Number of micro-batches of each optimizer step.

        Returns:
            The step's ticket.

        Raises:
            StoreFull: With the samples for which there was no room.
            R3Error: One error, of the first one's kind, for all samples that cannot be used and that no policy leaves to the live
                router. `on_missing` is the policy for samples that came without rows or whose rows were refused, `on_changed` the
                one for samples whose tokens are not those of their rows. Also what `Relay.seal` raises.
        """
        places = [place for rank in ranks for batch in rank for place in batch]
        named = {place: rows_of(samples[place]) or self._without_reply(samples[place]) for place in places}
        self._settle(step, [rows for rows in named.values() if not rows.fault.done()])
        left = self._judge(step, samples, named)
        self.tidy()  # frames of this step may wait for the room of what is gone
        cut = [[[named[place].name for place in batch] for batch in rank] for rank in ranks]
        assignment = Assignment.given(cut, steps=steps)
        try:
            return self.relay.seal(step, assignment)
        except RoutingError as error:  # frames that came directly cannot be used
            if isinstance(error, FrameMissing) or self.relay.config.on_missing != "live":
                raise
            for place in (place for place, rows in named.items() if rows.name in error.samples):
                self._leave_live(samples[place], named[place])
            left.append(error)
            return self.relay.seal(step, assignment)
        finally:
            if left:
                counts = dict(Counter(type(error).__name__ for error in left))
                said = "r3channel: step %d: left to the live router: %s; the first: %s"
                log.warning(said, step, counts, left[0])

    def tidy(self) -> None:
        """Discard the rows of samples that are gone.

        This is not done at the moment when they go, because that may be inside any lock.
        """
        gone = list[str]()
        with suppress(IndexError):  # in a fully asynchronous rollout another thread tidies, too
            gone.extend(self._gone.popleft() for _ in range(len(self._gone)))
        if gone:
            self.relay.discard(gone)

    # -- what a step finds -----------------------------------------------------------------------------------------

    def _settle(self, step: int, late: list[Rows]) -> None:
        config, begun_s = self.relay.config, time.monotonic()
        while late and time.monotonic() < begun_s + config.step_timeout_s:
            self.tidy()  # the thread may wait for the room of what is gone
            wait([late[-1].fault], _LOOK_S)
            late = [rows for rows in late if not rows.fault.done()]
        if late:
            text = f"step {step}: waited {config.step_timeout_s:.1f} s for room for the rows of {len(late)} samples: "
            names = [rows.name for rows in late]
            text += f"{names}; store_bytes is {config.store_bytes}. Is the step before delivered? A store holds two steps"
            raise StoreFull(text, samples=names, step=step)

    def _judge(self, step: int, samples: Sequence[Any], named: Mapping[int, Rows]) -> list[R3Error]:
        """Leave samples to the live router where a policy allows it.

        Return why each of them was left, and raise for all others that cannot be replayed.
        """
        bad, left = list[R3Error](), list[R3Error]()
        for place, rows in named.items():
            error, policy = self._fault(step, samples[place], rows)
            if error is not None and policy == "live":
                self._leave_live(samples[place], rows, behind=rows.fault.result() is None)
            if error is not None:
                (left if policy == "live" else bad).append(error)
        if bad:
            names = [name for error in bad for name in error.samples]
            text = f"step {step}: {len(bad)} of {len(named)} samples cannot be replayed: {names}. The first: {bad[0]}"
            raise type(bad[0])(text, samples=names, step=step)
        return left

    def _fault(self, step: int, sample: Any, rows: Rows) -> tuple[R3Error | None, str]:
        """Return why a sample cannot be replayed, or None, and the policy.

        If the sample's last tokens were cut off, their rows are dropped.
        """
        error, config = rows.fault.result(), self.relay.config
        if error is not None or rows.tokens == (tokens := list(sample.tokens)):
            return error, config.on_missing
        same = [*map(eq, rows.tokens, tokens), False].index(False)
        if same == len(tokens):
            try:
                self.relay.cut(rows.name, rows.tokens, same, step=step)
                rows.tokens = tokens
                return None, config.on_missing
            except FrameMissing:  # `on_lost` has been asked
                raise
            except RoutingError as cannot:
                return cannot, config.on_missing
        text = f"sample {sample.index} has {len(tokens)} tokens, and the routing of {len(rows.tokens)} came with its last reply, "
        text += f"of which the first {same} are the same. Was it cut, or edited, or did tokens follow it? Replay needs the "
        text += "engine's rows for every token but the last"
        return StepError(text, samples=[rows.name]), config.on_changed

    def _leave_live(self, sample: Any, rows: Rows, *, behind: bool = False) -> None:
        """Leave a sample's rows to the live router.

        With `behind` these are the rows after its last reply, or all rows if earlier tokens changed.
        """
        try:
            if not behind:
                self.relay.discard([rows.name])
            self.relay.add_live(rows.name, sample.tokens, append=behind)
        except (RoutingError, SampleUnknown):
            if not behind:
                raise
            self._leave_live(sample, rows)
        rows.tokens, rows.fault = list(sample.tokens), _KEPT

    def _without_reply(self, sample: Any) -> Rows:
        """Take the rows that the framework decoded itself, if any.

        A dump that the framework loaded has such rows. Without rows the relay decides what that means.
        """
        decoded, spec = getattr(sample, "rollout_routed_experts", None), self.relay.spec
        if decoded is None:
            return self._hand(sample, self.relay.add, {"meta_info": {}})
        wide_TLK = np.asarray(decoded)[:, list(spec.moe_layers)]
        ids_TLK = wide_TLK.astype(spec.id_dtype)
        # An id that wraps around would pass for another one. What stands instead is refused: no expert, or one that stands twice.
        ids_TLK[(ids_TLK != wide_TLK).any(-1)] = np.iinfo(spec.id_dtype).max
        return self._hand(sample, self.relay.add_frame, encode_frame(spec, expert_ids_TLK=ids_TLK))

    # -- to the thread that keeps ----------------------------------------------------------------------------------

    def _hand(
        self, sample: Any, add: Callable[..., Any], what: Any, *, more: bool = False, trained: bool = True
    ) -> Rows:
        """Hand rows to the thread that keeps them.

        The thread asks whether a sample still holds the rows.
        """
        rows = rows_of(sample) if more else None
        if rows is None:
            rows = Rows(f"{sample.index}.{next(self._serial)}")
            weakref.finalize(rows, self._gone.append, rows.name).atexit = False
        tokens = list(sample.tokens)  # a copy: the sample may grow meanwhile
        whose: Callable[[], Rows | None] = weakref.ref(rows) if trained else lambda: None
        fault = self._keeper.submit(self._keep, whose, partial(add, rows.name, what, tokens, append=more))
        self._handed.append(fault)
        if trained:
            rows.tokens, rows.fault = tokens, fault
            setattr(sample, _ATTRIBUTE, rows)
        return rows

    def _keep(self, whose: Callable[[], Rows | None], add: partial[Any]) -> R3Error | None:
        # While `held` refers to the rows, they are not discarded: the relay has to get them first.
        while (held := whose()) is not None:
            try:
                add()
                return None
            except (RoutingError, StepError) as error:
                error.__cause__ = error.__context__ = None
                # The error is kept; without its traceback the refused rows are not.
                told = error.with_traceback(None)
            del held
            if not isinstance(told, StoreFull):
                return told
            log.warning("r3channel: the store is full, and requests wait: %s", told)
        name, what, tokens = add.args
        text = what["meta_info"].get(_FIELD) or "" if isinstance(what, dict) else ""  # a frame has none
        with suppress(RoutingError, StepError):  # nobody holds the sample, so its rows need no room
            if 0 < len(text) <= _REFERENCE_CHARACTERS:  # a reference: its frame has to be refused
                self.relay.add(name, what, tokens)
            else:
                self.relay.add_live(name, tokens)
        self.relay.discard([name])
        return None

    def _backlog(self) -> int:
        while self._handed and self._handed[0].done():
            self._handed.popleft()
        return len(self._handed)


def rows_of(sample: Any) -> Rows | None:
    """Return the rows that a sample of this process holds, or None."""
    held = getattr(sample, _ATTRIBUTE, None)
    return held if isinstance(held, Rows) else None
