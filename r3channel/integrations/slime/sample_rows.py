"""Which rows of the relay belong to a framework's sample object. Knows neither slime nor Ray.

A sample may be copied, fed back into a buffer, finished two rollouts later, filtered or simply forgotten; nobody tells. So a
sample holds its rows as an object, and when the last sample that holds them is gone, the relay discards them.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from r3channel.errors import RoutingError, StepError
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.wire.frame import encode_frame

log = logging.getLogger(__name__)

_FIELD = "routed_experts"
_ATTRIBUTE = "r3_rows"


class Rows:
    """The relay's rows of one sample, by name. Copies of the sample share it."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        """Tokens that the rows belong to; the last one has none."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Rows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.name,)  # in a dump of samples, or in another process, no relay knows it


class SampleRows:
    """Takes the rows out of replies, and seals those of the samples that are trained on.

    `take` runs on the thread of the framework's event loop, `seal` on its main thread.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._serial = itertools.count()
        self._gone: deque[str] = deque()

    def take(self, sample: Any, meta_info: Mapping[str, Any], *, trained: bool = True) -> dict[str, Any]:
        """Keep what a reply says of a sample's routing, and give the rest of `meta_info`.

        `sample.tokens` is the whole sequence, this reply's tokens included. A reply replaces the rows of the one before, because
        it holds those of all tokens; with `routed_experts_start_len` it adds to them. Rows of a sample that is not `trained` on
        (an evaluation) are discarded at once, also those that are still on their way here.

        Raises:
            RoutingError: named by sample. What an aborted request brought may be unusable: the sample is then without rows
                until it is continued.
        """
        self.tidy()
        rest = {name: value for name, value in meta_info.items() if name != _FIELD}
        aborted = (meta_info.get("finish_reason") or {}).get("type") == "abort"
        if aborted and meta_info.get(_FIELD) is None:
            return rest
        held: Rows | None = rows_of(sample)
        more = held is not None and bool(meta_info.get(f"{_FIELD}_start_len"))
        name = held.name if held is not None and more else f"{sample.index}.{next(self._serial)}"
        try:
            self.relay.add(name, {"meta_info": meta_info}, sample.tokens, append=more)
        except RoutingError as error:
            if trained and not aborted:
                raise
            log.info(
                "r3channel: rows of sample %s, which ended early or is not trained on: %s",
                sample.index,
                error,
            )
            return rest
        if not trained:
            self.relay.discard([name])
        elif held is not None and more:
            held.tokens = len(sample.tokens)
        else:
            self._give(sample, name)
        return rest

    def seal(
        self,
        step: int,
        samples: Sequence[Any],
        ranks: Sequence[Sequence[Sequence[int]]],
        *,
        steps: Sequence[int],
    ) -> Ticket:
        """Seal a step. `ranks[dp][microbatch]` are places in `samples`, `steps` the micro-batches of each optimizer step.

        Raises `RoutingMissing` for a sample that came without rows (unless `on_missing` is `live`), `StepError` for one whose
        tokens are not those of its rows, and what `Relay.seal` raises.
        """
        self.tidy()
        names = {place: self._checked(samples[place]) for rank in ranks for batch in rank for place in batch}
        assignment = Assignment.given(
            [[[names[place] for place in batch] for batch in rank] for rank in ranks], steps=steps
        )
        return self.relay.seal(step, assignment)

    def tidy(self) -> None:
        """Discard the rows of samples that are gone. Not done at the moment they go, which may be inside any lock."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if gone:
            self.relay.discard(gone)

    def _checked(self, sample: Any) -> str:
        held = rows_of(sample) or self._without_reply(sample)
        if held.tokens != len(sample.tokens):
            raise StepError(
                f"sample {sample.index} has {len(sample.tokens)} tokens, and the routing of {held.tokens} came with its last "
                "reply. "
                "Was it cut, or did tokens follow the last reply? Replay needs the engine's rows for every token but the last",
                samples=[str(sample.index)],
            )
        return held.name

    def _without_reply(self, sample: Any) -> Rows:
        """Rows that the framework decoded itself (a dump that it loaded), or none: then the relay says what that means."""
        name = f"{sample.index}.{next(self._serial)}"
        decoded = getattr(sample, "rollout_routed_experts", None)
        if decoded is None:
            self.relay.add(name, {}, sample.tokens)
        else:
            spec = self.relay.spec
            ids_TLK = np.asarray(decoded)[:, list(spec.moe_layers)].astype(spec.id_dtype)
            self.relay.add_frame(name, encode_frame(spec, expert_ids_TLK=ids_TLK), sample.tokens)
        return self._give(sample, name)

    def _give(self, sample: Any, name: str) -> Rows:
        rows = Rows(name, len(sample.tokens))
        weakref.finalize(rows, self._gone.append, name).atexit = False
        setattr(sample, _ATTRIBUTE, rows)
        return rows


def rows_of(sample: Any) -> Rows | None:
    """The rows that a sample of this process holds."""
    held = getattr(sample, _ATTRIBUTE, None)
    return held if isinstance(held, Rows) else None
