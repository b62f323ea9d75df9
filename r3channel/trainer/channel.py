"""What a training loop holds: attach once, enter the step with its ticket, enter each micro-batch.

    channel = TrainerChannel.attach(model_chunks, control, layout=layout)
    with channel.step(ticket) as step:
        for index in range(step.num_microbatches):
            with step.microbatch(index):
                output = model(...)

A facade over `Receiver` and `ReplayDriver`; all calls on the trainer's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import UsageError, close_after
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.trainer.adapters import megatron
from r3channel.trainer.logprobs import KeptLogprobs
from r3channel.trainer.mismatch import MismatchReport, RoutingAudit, measure, publish
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.transport.tp_fanout import TensorParallelFanout

log = logging.getLogger(__name__)
_DIGESTS = ("r3channel_digests_checked_total", "r3channel_digests_different_total")


class TrainerChannel:
    """ATTACHED -> step* -> CLOSED."""

    def __init__(self, driver: ReplayDriver, receiver: Receiver, config: ChannelConfig) -> None:
        self.driver, self.receiver, self.config = driver, receiver, config
        for name in (*_DIGESTS, "r3channel_live_rows_total"):
            receiver.metrics.measure(name)
        if config.audit_microbatches:
            measure(receiver.metrics)
        self.report: MismatchReport | None = None
        """The audit of the newest finished step; None where `audit_microbatches` is 0."""
        self.shard: RankShard | None = None
        """The step under way."""
        self.recording: str | Path | None = None
        """A recording's folder: log-probs that `step.compare_logprobs` is given lie beside its segments."""

    @classmethod
    def attach(
        cls,
        chunks: Sequence[torch.nn.Module],
        control: Control,
        *,
        layout: TrainerLayout,
        config: ChannelConfig | None = None,
        clock: StageClock | None = None,
        metrics: Metrics | None = None,
    ) -> TrainerChannel:
        """Bind to the routers of Megatron model chunks and connect to the relay (TP0).

        `control` is the relay's. Refuses a model whose configuration ignores replay, and a layout that is not Megatron's.
        Whatever is raised, nothing stays attached.
        """
        config = config or ChannelConfig()
        spec = megatron.spec_from_config(chunks)
        driver = ReplayDriver.attach(chunks, spec=spec, layout=layout)
        device = next(chunks[0].parameters()).device
        receiver = Receiver(
            control,
            spec=spec,
            layout=layout,
            coords=megatron.parallel_coords(),
            config=config,
            fanout=TensorParallelFanout(megatron.tp_group() if layout.tp > 1 else None, device=device),
            device=device,
            clock=clock,
            metrics=metrics,
        )
        channel = cls(driver, receiver, config)
        try:
            receiver.join()
        except BaseException:
            channel.close()
            raise
        return channel

    @contextmanager
    def step(
        self,
        ticket: Ticket | bytes,
        *,
        lengths: Sequence[Sequence[int]] | None = None,
        tokens: Sequence[Sequence[Sequence[int]]] | None = None,
        version: int | None = None,
    ) -> Iterator[ReplayStep]:
        """Receive this rank's shard and replay it inside the block; see `ReplayDriver.step` for what is verified at its end.

        One block per rollout: its optimizer steps are `ticket.plan.optimizer_steps`. `tokens` holds the token ids of each sample
        of each micro-batch that this trainer will run, `lengths` only their numbers; a difference from the ticket is refused
        before a row is handed on. Give `tokens`: samples of equal length that were exchanged have equal lengths.

        What routers are handed is held against the engines' digests (`DigestMismatch`): on a CPU before they use it, on a GPU by
        `step.verified()`, at the latest at the end of the block.

        `version` is the newest weight version that the trainer committed: `self.shard.lags` then tells each row's staleness,
        and `max_staleness` with `on_stale` is enforced (all ranks of the step decide alike). RowsStale comes after the bytes
        were taken and acknowledged, so the next step can follow. A bound without a version is a UsageError.
        """
        ticket = Ticket.from_bytes(ticket) if isinstance(ticket, bytes) else ticket
        if version is None and self.config.max_staleness >= 0:
            raise UsageError(f"max_staleness is {self.config.max_staleness}, but step() was given no version")
        shard = self.shard = self.receiver.receive(ticket, lengths=lengths, tokens=tokens)
        if version is not None:
            self._hold_against(shard, version)
        audit = RoutingAudit(
            step=ticket.step,
            microbatches=shard.num_microbatches,
            count=self.config.audit_microbatches,
            counted_rows=shard.counted_rows,
        )
        try:
            with self.driver.step(shard, step=ticket.step, audit=audit) as step:
                if self.recording is not None and shard.tp == 0:  # the others of its TP group have the same
                    step.logprobs = KeptLogprobs(ticket, shard.shard)
                yield step
            if shard.loss_mask_missed:
                log.warning(
                    "r3channel: step %d: tokens were to leave the loss, and shard.loss_mask(i) was never read; multiply your "
                    "loss by it: nothing else does",
                    ticket.step,
                )
            self._publish(shard, audit)
            self._record(step.logprobs)
        finally:
            for name, count in zip(_DIGESTS, (shard.digests.checked, shard.digests.different), strict=True):
                self.metrics.inc(name, count)
            self.shard = None

    def _hold_against(self, shard: RankShard, version: int) -> None:
        config, metrics = self.config, self.receiver.metrics
        staleness = shard.set_version(version, max_staleness=config.max_staleness, on_stale=config.on_stale)
        metrics.measure("r3channel_rows_by_staleness_total")
        metrics.set("r3channel_weight_version", version)
        for lag, rows in staleness.counts(shard.sample_ids).items():
            metrics.inc("r3channel_rows_by_staleness_total", rows, lag=lag)
        if config.on_stale == "mask":
            metrics.measure("r3channel_rows_masked_stale_total")
        if staleness.masks:
            masked = sum(staleness.stale_samples.get(name, 0) for name in shard.sample_ids)
            metrics.inc("r3channel_rows_masked_stale_total", masked)

    def prefetch(self, ticket: Ticket | bytes) -> None:
        """Begin to receive a step as soon as its ticket is known, while the one before trains or weights go out; see
        `Receiver.prefetch`. `step` begins it otherwise."""
        self.receiver.prefetch(Ticket.from_bytes(ticket) if isinstance(ticket, bytes) else ticket)

    def _publish(self, shard: RankShard, audit: RoutingAudit) -> None:
        metrics = self.receiver.metrics
        for cause, rows in shard.live_counts().items():
            metrics.inc("r3channel_live_rows_total", rows, cause=cause)
        if audit.chosen:
            self.report = audit.report()
            publish(self.report, metrics)
            spec = self.driver.spec
            chance = spec.top_k / spec.num_experts
            if self.report.is_at(chance):
                log.warning(
                    "r3channel: step %d: what was replayed agrees with the live router at chance level (mean overlap %.3f, "
                    "chance %.3f). Are samples in the ticket's order, and are these the engine's weights?",
                    self.report.step, self.report.mean_overlap, chance,
                )  # fmt: skip

    def _record(self, kept: KeptLogprobs | None) -> None:
        if kept is not None and not kept.write(Path(self.recording or "")):
            self.recording = None

    @property
    def metrics(self) -> Metrics:
        """This rank's; a `WeightSync` of the same process counts into them too."""
        return self.receiver.metrics

    def __enter__(self) -> TrainerChannel:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        close_after(error, self.close)

    def close(self) -> None:
        """Leave the group and unbind from the routers; idempotent."""
        self.receiver.close()
        self.driver.close()
