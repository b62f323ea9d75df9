"""The root of all errors of this package, and its families by what they are about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class R3Error(Exception):
    """Root of all errors of this package.

    An error that names samples, engines, ranks or a step carries all of them, however few its message lists: a loop can
    discard every one in a single call. They cross process borders with the error.

    >>> R3Error("two samples are lost", samples=["a", "b"], step=3).within("relay 1").samples
    ('a', 'b')
    """

    reason = "other"
    """A short word of a closed set: it labels the counter `r3channel_rejected_total` and never holds a sample or an address."""
    remedy = "Read the message: it says what was seen, what was expected and the likely cause."
    """What to do about it, for the page that is made of these classes."""

    def __init__(
        self,
        message: str = "",
        *,
        samples: Iterable[str] = (),
        engines: Iterable[str] = (),
        ranks: Iterable[tuple[int, ...]] = (),
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.samples, self.engines, self.ranks, self.step = tuple(samples), tuple(engines), tuple(ranks), step

    def within(self, where: str) -> Self:
        """The same error, its message led by a place."""
        return type(self)(
            f"{where}: {self}", samples=self.samples, engines=self.engines, ranks=self.ranks, step=self.step
        )


class RoutingError(R3Error):
    """The routing of one sample cannot be used. Names sample and engine."""

    reason = "routing"
    remedy = "Drop the sample, or ask for it again; the message has the sample and the engine."


class FrameError(RoutingError):
    """The bytes of a frame cannot be trusted."""

    reason = "frame"
    remedy = (
        "Ask for the sample again. If it happens again, look at what stands between engine and relay: a proxy, a router, "
        "another version."
    )


class StepError(R3Error):
    """A step cannot be sealed, sent or received."""

    reason = "step"
    remedy = "The message says what the step lacks. `relay.status()` shows where every sample is."


class TransportError(R3Error):
    """A send or receive failed; the group must be abandoned. Names peer, epoch and what was under way."""

    reason = "transport"
    remedy = (
        "The step is tried again by itself until `step_timeout_s`. If it ends there, look at the peer that is named: is "
        "it alive, is the address right?"
    )


class ReplayError(R3Error):
    """The replay cannot be bound or did not happen as planned. Names router, pass and counts."""

    reason = "replay"
    remedy = "The message names router, pass and micro-batch. Compare your loop with `r3channel/trainer/README.md`."


class WeightsError(R3Error):
    """Root of the errors of publishing weights from the trainer to the engines."""

    reason = "weights"
    remedy = "The old version stays committed. The message says at which engine or tensor to look."
