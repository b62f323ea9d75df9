"""The trainer's channel: attach once, enter each step with its ticket, enter each micro-batch.

    channel = TrainerChannel.attach(model_chunks, control, layout=layout)
    with channel.step(ticket) as step:
        for index in range(step.num_microbatches):
            with step.microbatch(index):
                output = model(...)

`TrainerChannel` is a facade over `Receiver` and `ReplayDriver`. All calls are on the trainer's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import UsageError, close_after, expect
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import ROUTING_WAITS, StageClock
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.logprobs import KeptLogprobs
from r3channel.trainer.adapters import megatron
from r3channel.trainer.mismatch import MismatchReport, RoutingAudit, measure, publish
from r3channel.trainer.model_tokens import Batches, ModelTokens
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.trainer.router import Adapter
from r3channel.trainer.staleness import label
from r3channel.transport.tp_fanout import TensorParallelFanout

log = logging.getLogger(__name__)
DIGESTS = ("r3channel_digests_checked_total", "r3channel_digests_different_total")

_WAY = ("recv", "verify", "place")
"""Stages of the thread on which a step's rows come over TCP."""
_WIRE = "wire_received"


class TrainerChannel:
    """The channel of one trainer rank.

    ATTACHED -> step* -> CLOSED.
    """

    def __init__(self, driver: ReplayDriver, receiver: Receiver, config: ChannelConfig) -> None:
        self.driver, self.receiver, self.config = driver, receiver, config
        for name in (*DIGESTS, "r3channel_live_rows_total"):
            receiver.metrics.measure(name)
        if config.audit_microbatches:
            measure(receiver.metrics)
        self.report: MismatchReport | None = None
        """The audit of the newest finished step; None where `audit_microbatches` is 0."""
        self.shard: RankShard | None = None
        """The shard of the step under way, else None."""
        self.recording: str | Path | None = None
        """Folder of a recording. Log-probs given to `step.compare_logprobs` are written beside its segments."""
        self._spent_before: dict[str, float] = {}
        self._figures: dict[str, float] = {}

    @classmethod
    def attach(
        cls, chunks: Sequence[torch.nn.Module], control: Control, *, layout: TrainerLayout,
        config: ChannelConfig | None = None, clock: StageClock | None = None, metrics: Metrics | None = None,
        adapter: Adapter = megatron,
    ) -> TrainerChannel:  # fmt: skip
        """Bind to this rank's routers and connect to the relay.

        TP rank 0 alone connects. If anything is raised, nothing stays attached.

        Args:
            chunks: This rank's model chunks. The routers' device is that of their parameters.
            control: The relay's.
            layout: The trainer's layout.
            config: The channel's settings; the defaults without it.
            clock: Takes the times of the stages; a new one without it.
            metrics: Takes the counts; without it this rank makes and serves its own.
            adapter: Knows the training framework.

        Raises:
            RouterUnsupported: The model's configuration ignores replay.
            ConfigError: The layout is not the framework's.
        """
        config, layout = expect(config or ChannelConfig(), ChannelConfig), expect(layout, TrainerLayout)
        spec = adapter.spec_from_config(chunks)
        with ExitStack() as undo:
            driver = ReplayDriver.attach(chunks, spec=spec, layout=layout, adapter=adapter)
            undo.callback(driver.close)
            device = next(chunks[0].parameters()).device
            receiver = Receiver(
                control, spec=spec, layout=layout, coords=adapter.parallel_coords(), config=config,
                fanout=TensorParallelFanout(adapter.tp_group() if layout.tp > 1 else None, device=device), device=device,
                clock=clock, metrics=metrics,
            )  # fmt: skip
            undo.callback(receiver.close)
            channel = cls(driver, receiver, config)
            receiver.join()
            channel._take_spent()  # so that time before the first step is not counted as its waits
            undo.pop_all()
        return channel

    @contextmanager
    def step(
        self, ticket: Ticket | bytes, *, tokens: Batches | None = None,
        samples: Sequence[Sequence[str]] | None = None, version: int | None = None,
    ) -> Iterator[ReplayStep]:  # fmt: skip
        """Receive this rank's shard and replay it inside the block.

        Use one block per rollout: its optimizer steps are `ticket.plan.optimizer_steps`. `ReplayDriver.step` says what is
        verified at the end of the block.

        The rows that routers are handed are compared with the engines' digests: on a CPU before a router uses them, on a GPU by
        `step.verify_rows()`, at the latest at the end of the block. The first pipeline stage compares the model's input ids with
        the ticket's tokens, too: on a CPU at once, on a GPU in `step.verify_rows()`.

        Args:
            ticket: The step's ticket, or its bytes.
            tokens: Token ids of each sample of each micro-batch that this trainer will run. A difference is refused before a row
                is handed on.
            samples: The names of those samples, which are checked likewise. Give both: samples of equal tokens may have other
                experts.
            version: The newest weight version that the trainer committed. `self.shard.lags` then tells each row's staleness, and
                `max_staleness` with `on_stale` is enforced. All ranks of the step decide alike.

        Raises:
            TicketMismatch: Batch or model input is not the ticket's. Names sample and cause (left padding, another order or cut).
            DigestMismatch: Rows that a router was handed are not those that the engine hashed.
            RowsStale: The policy refuses the rows. The bytes were taken and acknowledged before, so the next step can follow.
            UsageError: `max_staleness` has a bound and no version was given, or another step is open.
        """
        ticket = Ticket.from_bytes(ticket) if isinstance(ticket, bytes) else ticket
        if version is None and self.config.max_staleness >= 0:
            raise UsageError(f"max_staleness is {self.config.max_staleness}, but step() was given no version")
        if self.shard is not None:
            raise UsageError(f"step {ticket.step} inside step {self.shard.ticket.step}; leave that one first")
        shard = self.receiver.receive(ticket, tokens=tokens, samples=samples)
        spent, trace = self._take_spent(), self.receiver.clock.trace
        if trace is not None and (shard.tp, shard.shard.pp, shard.shard.cp) == (0, 0, 0):
            for name in shard.sample_ids:
                trace.sample(name)
        if version is not None:
            self._hold_against(shard, version)
        audit = RoutingAudit(
            step=ticket.step, microbatches=shard.num_microbatches, count=self.config.audit_microbatches,
            counted_rows=shard.counted_rows,
        )  # fmt: skip
        self.shard = shard
        try:
            with self.driver.step(shard, step=ticket.step, audit=audit) as step:
                step.tokens = ModelTokens(shard, tokens)
                if self.recording is not None and shard.tp == 0:  # other TP ranks have the same log-probs
                    step.logprobs = KeptLogprobs(ticket, shard.shard)
                yield step
            if shard.loss_mask_missed:
                said = "r3channel: step %d: tokens were to leave the loss, and shard.loss_mask(i) was never read; multiply your "
                log.warning(said + "loss by it: nothing else does", ticket.step)
            self._publish(shard, audit)
            self._figures = self._figures_of(shard, spent)
            if trace is not None:
                audited = self.report.to_dict() if audit.chosen and self.report else {}
                trace.note("step", audited | self._figures | {"step": ticket.step})
            if step.logprobs is not None and not step.logprobs.write(Path(self.recording or "")):
                self.recording = None
        finally:
            for name, count in zip(DIGESTS, (shard.digests.checked, shard.digests.different), strict=True):
                self.metrics.inc(name, count)
            self.shard = None

    def _hold_against(self, shard: RankShard, version: int) -> None:
        config, metrics = self.config, self.receiver.metrics
        staleness = shard.set_version(version, max_staleness=config.max_staleness, on_stale=config.on_stale)
        metrics.measure("r3channel_rows_by_staleness_total")
        metrics.set("r3channel_weight_version", version)
        for lag, rows in staleness.counts(shard.sample_ids).items():
            metrics.inc("r3channel_rows_by_staleness_total", rows, lag=label(lag))
        if config.on_stale == "mask":
            masked = sum(staleness.stale_samples.get(name, 0) for name in shard.sample_ids)
            metrics.inc("r3channel_rows_masked_stale_total", masked)

    def prefetch(self, ticket: Ticket | bytes) -> None:
        """Begin to receive a step as soon as its ticket is known.

        Call it while the step before trains, or while weights go out; see `Receiver.prefetch`. Without this call `step` begins
        the receive.
        """
        self.receiver.prefetch(Ticket.from_bytes(ticket) if isinstance(ticket, bytes) else ticket)

    def _publish(self, shard: RankShard, audit: RoutingAudit) -> None:
        metrics = self.receiver.metrics
        for cause, rows in shard.live_counts().items():
            metrics.inc("r3channel_live_rows_total", rows, cause=cause)
        if audit.chosen:
            self.report = audit.report()
            publish(self.report, metrics)
            chance = self.driver.spec.top_k / self.driver.spec.num_experts
            if self.report.is_at(chance):
                log.warning(
                    "r3channel: step %d: what was replayed agrees with the live router at chance level (mean overlap %.3f, "
                    "chance %.3f). Are samples in the ticket's order, and are these the engine's weights?",
                    self.report.step, self.report.mean_overlap, chance,
                )  # fmt: skip

    def log_dict(self) -> dict[str, float]:
        """Return the numbers of this rank's newest finished step.

        The numbers are for the loop's own logger (W&B, TensorBoard). The dict is empty before the first finished step.
        Each name begins with `r3channel/`:
            wait_s          seconds that training stood still for the rows
            hand_on_s       seconds of the rows' hand-on over the TP group; training stood still then, too
            hidden_share    share of the rows' way from the relay, 0 to 1, that training did not wait for; TP rank 0 only
            wire_bytes      bytes from the relay, those of attempts that failed too; TP rank 0 only
            landed_bytes    bytes of ids that this rank's routers replay
            live_rows       rows that were left to the live router, padding included
            staleness, staleness_max    weight updates between a row and the trainer; where `step` is given a version
            disagreement    share of (token, layer), 0 to 1, for which the live router would have chosen other experts; where
                            `audit_microbatches` is not 0
            logprob_abs_diff, logprob_k3    nats a token between engine and trainer, and the k3 estimate of their KL divergence;
                            where the loop calls `step.compare_logprobs`
        """
        return {f"r3channel/{name}": float(value) for name, value in self._figures.items()}

    def _figures_of(self, shard: RankShard, spent: dict[str, float]) -> dict[str, float]:
        waited = sum(spent.get(stage, 0.0) for stage in ROUTING_WAITS)
        figures = {
            "wait_s": waited, "hand_on_s": spent.get("rebroadcast", 0.0), "landed_bytes": len(shard.data_N),
            "live_rows": sum(shard.live_counts().values()),
        }  # fmt: skip
        if shard.tp == 0:
            way_s = sum(spent.get(stage, 0.0) for stage in _WAY)
            # over a process group no rows come ahead of their step
            figures["hidden_share"] = 0.0 if self.config.grouped else 1 - waited / max(way_s, waited, 1e-9)
            figures["wire_bytes"] = spent[_WIRE]
        if shard.staleness is not None and (lags := shard.staleness.counts(shard.sample_ids)):
            figures["staleness"] = sum(lag * rows for lag, rows in lags.items()) / lags.total()
            figures["staleness_max"] = max(lags)
        if self.report is not None:
            figures |= {"disagreement": self.report.different_fraction, **self.report.logprobs.means()}
        return figures

    def _take_spent(self) -> dict[str, float]:
        """Return seconds by stage, and the relay's bytes, since the last call.

        Between two steps only one step's rows come.
        """
        metrics, before = self.receiver.metrics, self._spent_before
        wire = metrics.value("r3channel_bytes_total", leg=_WIRE)
        self._spent_before = self.receiver.clock.totals() | {_WIRE: wire}
        return {name: value - before.get(name, 0.0) for name, value in self._spent_before.items()}

    @property
    def metrics(self) -> Metrics:
        """Return this rank's metrics.

        A `WeightSync` of the same process counts into them, too.
        """
        return self.receiver.metrics

    def __enter__(self) -> TrainerChannel:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        close_after(error, self.close)

    def close(self) -> None:
        """Unbind from the routers and leave the group; idempotent."""
        self.driver.close()
        self.receiver.close()
