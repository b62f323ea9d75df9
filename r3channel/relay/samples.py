"""Keeps the samples that a relay holds: their table behind its one lock, the memory of their rows, and what becomes of them.

`Intake` puts rows in, `Steps` takes them out; neither calls the other. `Samples` calls the table, the store, the journal, the
registry of engines and the recorder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.recordings.recorder import Recorder
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.journal import Journal
from r3channel.relay.memory import Store
from r3channel.relay.sample_table import Sample, SampleTable, Turn
from r3channel.relay.verify import VerifiedRows
from r3channel.typed import Json
from r3channel.wire.routing import Ids, as_tokens, hash_tokens
from r3channel.wire.token_tensors import tensors_of

log = logging.getLogger(__name__)

_GONE_S, _LOOK_S = 3.0, 0.2
"""Seconds to wait for an engine whose connection has ended (a living one connects again within two), and between two looks."""
NAMED = 1000
"""Most expired samples that `status` still names, and most samples that one message names."""


Tokens = Sequence[int] | Ids


class Samples:
    """The samples of one relay.

    States: OPEN -> CLOSED. Any thread may call.
    """

    def __init__(
        self, spec: RoutingSpec, config: ChannelConfig, *, clock: StageClock, metrics: Metrics,
        recorder: Recorder | None,
    ) -> None:  # fmt: skip
        self.spec, self.config, self.clock, self.metrics = spec, config, clock, metrics
        self.closed = False
        self.broken: BaseException | None = None
        """The error that ended a background thread of the relay. The next public call raises it."""
        self.changed = threading.Condition()
        """Guards the table and the steps, and is notified of every event."""
        self.table, self.engines = SampleTable(), EngineRegistry(spec, pages=metrics.others)
        self.store = Store(config.store_bytes)
        self.journal = Journal(config.journal) if config.journal else None
        self.tensors = tensors_of(config.token_tensors, spec)
        """The declared tensors that a sample's tokens bring beside expert ids."""
        self.recorder = recorder
        """The recorder may be set, exchanged and removed while the relay runs."""
        for name in ("r3channel_samples_total", "r3channel_rejected_total"):
            metrics.measure(name)
        self._expired: list[str] = []

    def check_open(self) -> None:
        """Check that the relay is open and its threads live.

        Raises:
            UsageError: The relay is closed.
            BackgroundFailed: A thread of the relay has died.
        """
        if self.closed:
            raise errors.UsageError("this relay is closed")
        if (error := self.broken) is not None:
            raise errors.BackgroundFailed(f"a background thread of the relay died: {error!r}") from error

    def close(self) -> None:
        """Delete what survives a kill, and end every wait for memory.

        The call may be repeated.
        """
        if self.journal is not None:
            self.journal.close()
        self.store.close()

    def rows_held(self, sample_id: str, tokens: Tokens | None = None) -> int:
        """Return how many rows are held, as `Relay.rows_held` does."""
        with self.changed:
            held, sample = self.table.rows_announced(sample_id), self.table.samples.get(sample_id)
            if tokens is None or sample is None:
                return held
            wanted = sample.last.prefix_hash
            unsound = sample.step is not None or sample.error or sample.live_rows
        same = held <= len(tokens) and hash_tokens(as_tokens(tokens[:held])) == wanted
        return held if same and not unsound else 0

    # -- waiting ---------------------------------------------------------------------------------------------------

    def await_frames(self, names: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Wait until all frames of these samples have come.

        An engine that has gone is waited for `_GONE_S`, within which one that lives would have come again. Where `on_lost` is
        `live`, frames that have not come are left to the live router, and the log says so.

        Args:
            names: The samples' names.
            step: The step's number, for errors.
            timeout_s: Seconds to wait.

        Raises:
            FrameMissing: Frames did not come, and `on_lost` is not `live`.
            UsageError: The relay was closed meanwhile.
        """
        self.expire()
        with self.clock.span("wait_generation", step=step), self.changed:
            late = self.table.outstanding(names)
            heard_s = dict.fromkeys((turn.name[0] for turn in late), begun_s := time.monotonic())
            while late and (now_s := time.monotonic()) < begun_s + timeout_s:
                self.check_open()
                heard_s |= {boot_id: now_s for boot_id in heard_s if self.engines.hears(boot_id)}
                # at each event look at the last frame alone, not at thousands
                if not self.table.is_awaited(late[-1]) or now_s >= heard_s[late[-1].name[0]] + _GONE_S:
                    late.pop()
                else:
                    self.changed.wait(min(begun_s + timeout_s - now_s, _LOOK_S))
            late = self.table.outstanding(names)
            if self.config.on_lost == "live":
                self.table.leave_live(late)
        if late:
            missing = self._missing(late, step=step, waited_s=min(timeout_s, time.monotonic() - begun_s))
            if self.config.on_lost != "live":
                raise missing
            self.reject(missing)
            log.warning("r3channel: left to the live router: %s", missing)

    def _missing(self, late: Sequence[Turn], *, step: int, waited_s: float) -> errors.FrameMissing:
        told = [f"sample {turn.sample_id} from {self.engines.late(turn)}" for turn in late[:5]]
        text = "; ".join(told) + (f"; and {len(late) - 5} more" if len(late) > 5 else "")
        text += f". The store holds {self.store.live_bytes} of {self.store.ceiling_bytes} bytes"
        return errors.FrameMissing(
            f"step {step}: waited {waited_s:.1f} s for {len(late)} frames whose frame references came: {text}",
            samples=dict.fromkeys(turn.sample_id for turn in late),
            engines=dict.fromkeys(turn.engine for turn in late),
            step=step,
        )

    # -- away ------------------------------------------------------------------------------------------------------

    def drop(self, sample_ids: Iterable[str], *, outcome: str) -> int:
        """Remove samples of no step, and ignore others.

        Args:
            sample_ids: The samples' names.
            outcome: The outcome to count them under.

        Returns:
            How many samples were removed.
        """
        with self.changed:
            gone = self.table.remove([name for name in sample_ids if not self.table.unknown([name])])
            self.changed.notify_all()
        self.let_go(gone, outcome=outcome)
        return len(gone)

    def let_go(self, samples: Sequence[Sample], *, outcome: str) -> None:
        """Free what samples held that have left the table.

        Args:
            samples: The samples.
            outcome: The outcome to count them under. A sample with an error counts as rejected, and a delivered one with live
                rows as live, else one whose tokens were cut as cut.
        """
        self.free(*(rows for sample in samples for rows in sample.held))
        for sample in samples:
            for held in sample.tensors:
                held.block.free()
            if (recorder := self.recorder) is not None:
                recorder.forget(sample.name)
            how = "live" if sample.live_rows else "cut" if any(turn.cut for turn in sample.turns) else outcome
            self.count("rejected" if sample.error else how if outcome == "delivered" else outcome)

    def free(self, *what: VerifiedRows | errors.R3Error | None) -> None:
        """Free the memory of rows, and delete them from the journal.

        The journal goes first: after a kill nothing may be found whose memory was given away.
        """
        rows = [one for one in what if isinstance(one, VerifiedRows)]
        if self.journal is not None:
            self.journal.delete_frames([one.ref for one in rows])
        for one in rows:
            one.block.free()

    def expire(self) -> None:
        """Drop samples and frames that nobody wanted in time.

        Samples are dropped that no assignment named `expiry_s` after they came, and frames that no reply claimed within
        `unclaimed_timeout_s`. The log says so once.
        """
        now_s, config = time.monotonic(), self.config
        with self.changed:
            samples, unclaimed = self.table.expire(
                before_s=now_s - config.expiry_s, unclaimed_s=now_s - config.unclaimed_timeout_s
            )
            names = [sample.name for sample in samples]
            self._expired = (self._expired + names)[-NAMED:]
        if samples or unclaimed:
            self.let_go(samples, outcome="expired")
            self.free(*unclaimed.values())
            frames = [f"{self.engines.name_of(boot_id)}: {serial}" for boot_id, serial in unclaimed]
            log.warning(
                "r3channel: dropped: %d samples that no step took within %.0f s: %s; %d frames without a reply for %.0f s: %s",
                len(names), config.expiry_s, names, len(frames), config.unclaimed_timeout_s, frames[:NAMED],
            )  # fmt: skip

    def reject(self, error: errors.R3Error) -> None:
        """Count a refused reply, frame or step by its error's reason."""
        self.metrics.inc("r3channel_rejected_total", reason=error.reason)

    def count(self, outcome: str, samples: int = 1) -> None:
        self.metrics.inc("r3channel_samples_total", samples, outcome=outcome)

    def expiry_in_s(self) -> float:
        """Return seconds until the oldest sample of no step is dropped.

        Raises:
            LookupError: No sample waits for a step.
        """
        with self.changed:
            for sample in self.table.samples.values():
                if sample.step is None:
                    return sample.since_s + self.config.expiry_s - time.monotonic()
        raise LookupError("no sample waits for a step")

    def status(self) -> Json:
        """Return where the samples are that no step has taken.

        The caller holds the condition.
        """
        samples = [sample for sample in self.table.samples.values() if sample.step is None]
        return {
            "pending": sorted(sample.name for sample in samples if not sample.awaited and not sample.error),
            "waiting": sorted(sample.name for sample in samples if sample.awaited and not sample.error),
            "failed": {sample.name: str(sample.error) for sample in samples if sample.error},
            "expired": list(self._expired),
            "unclaimed": {"frames": self.table.unclaimed},
        }
