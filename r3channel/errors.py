"""Every error that r3channel raises, by whose fault it is.

One root, `R3Error`. A message says what was seen, what was expected and the likely cause. `reason` is a short word from a
closed set: it labels the counter `r3channel_rejected_total` and never holds a sample or an address.
"""

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


# -- our caller --------------------------------------------------------------------------------------------------------


class ConfigError(R3Error):
    """A value of the configuration, a layout or an assignment cannot be used."""

    reason = "config"


class UsageError(R3Error):
    """A public call came at the wrong time: twice, out of order, or after close."""

    reason = "usage"


class UnsupportedLayout(ConfigError):
    """A layout that a later version will support is refused instead of half supported."""

    reason = "layout"


# -- the data of one sample --------------------------------------------------------------------------------------------


class RoutingError(R3Error):
    """The routing of one sample cannot be used. Names sample and engine."""

    reason = "routing"


class RoutingMissing(RoutingError):
    """The reply holds no routing at all."""

    reason = "missing"


class RowCountMismatch(RoutingError):
    """Too few or too many rows for the sample's tokens."""

    reason = "rows"


class TopKMismatch(RoutingError):
    """The rows have another top-k than the spec."""

    reason = "top_k"


class LayerMismatch(RoutingError):
    """The rows have other MoE layers than the spec."""

    reason = "layers"


class ExpertCountMismatch(RoutingError):
    """The sender counts another number of experts than the spec."""

    reason = "experts"


class ExpertIdOutOfRange(RoutingError):
    """An id is negative or >= the number of experts."""

    reason = "id_range"


class DuplicateExpertId(RoutingError):
    """A row names the same expert twice."""

    reason = "id_duplicate"


class RowsInvalid(RoutingError):
    """Rows are marked invalid by the engine and the policy is to refuse them."""

    reason = "rows_invalid"


# -- bytes -------------------------------------------------------------------------------------------------------------


class FrameError(RoutingError):
    """The bytes of a frame cannot be trusted."""

    reason = "frame"


class FrameTruncated(FrameError):
    """Fewer or more bytes than the header says."""

    reason = "truncated"


class FrameMagicMismatch(FrameError):
    """The bytes are not a frame: stock int32 data, HTML, or text."""

    reason = "magic"


class FrameVersionMismatch(FrameError):
    """A frame of another wire version or an unknown codec or kind."""

    reason = "wire_version"


class HeaderCorrupt(FrameError):
    """The header's hash does not match, or a bound in it is impossible."""

    reason = "header"


class PayloadCorrupt(FrameError):
    """The payload's hash does not match, or it does not decode to the declared size."""

    reason = "payload"


class SpecMismatch(FrameError):
    """The frame was made for another model's spec, and no single field explains it."""

    reason = "spec"


class EngineReported(FrameError):
    """The engine could not build the frame and sent the reason in its place."""

    reason = "engine"


class ReceiptInvalid(FrameError):
    """A receipt or a parcel of directly delivered frames is damaged, or names another request."""

    reason = "receipt"


class FrameMissing(RoutingMissing):
    """A frame whose receipt came did not arrive in time. Names sample and engine."""

    reason = "frame_missing"


class RowGap(RowCountMismatch):
    """Rows of a later turn begin after the rows that are held: those between are nowhere."""

    reason = "row_gap"


class RowOverlap(RowCountMismatch):
    """Rows of a later turn begin before the end of the rows that are held."""

    reason = "row_overlap"


class TokensChanged(RoutingError):
    """A later turn's tokens do not begin with those that the held rows belong to."""

    reason = "tokens_changed"


# -- steps, tickets, ranks ---------------------------------------------------------------------------------------------


class StepError(R3Error):
    """A step cannot be sealed, sent or received."""

    reason = "step"


class SampleUnknown(StepError):
    """An assignment names a sample that the relay does not hold."""

    reason = "sample_unknown"


class SampleTwice(StepError):
    """A sample was added, assigned or sealed twice."""

    reason = "sample_twice"


class TicketMismatch(StepError):
    """A ticket of another step, epoch, spec or layout."""

    reason = "ticket"


class SampleChanged(StepError):
    """A sample grew by a later turn between the ticket that describes it and the step that takes it."""

    reason = "sample_changed"


class StoreFull(StepError):
    """The frame store reached its configured ceiling."""

    reason = "store_full"


class StoreBusy(StepError):
    """A frame store's folder belongs to a process that lives."""

    reason = "store_busy"


class BackgroundFailed(StepError):
    """A background thread died; its first exception is the cause."""

    reason = "background"


class RecordingInvalid(StepError):
    """What lies on disk is no recording that can be used, or not the one that is needed."""

    reason = "recording"


# -- moving bytes ------------------------------------------------------------------------------------------------------


class TransportError(R3Error):
    """A send or receive failed; the group must be abandoned. Names peer, epoch and what was under way."""

    reason = "transport"


class DeadlineExceeded(TransportError):
    """A wait ended by its deadline. Names what was waited for and for how long."""

    reason = "deadline"


class BucketCorrupt(TransportError):
    """A bucket's header or hash does not match what the ticket announced."""

    reason = "bucket"


class PeerFailed(TransportError):
    """TP0 failed to receive; the other ranks of the TP group learn it here."""

    reason = "peer"


class SlotBusy(R3Error):
    """A step's routing waited for a weight update of the same process, or the other way round, for too long. Names it."""

    reason = "slot_busy"


# -- engine room -------------------------------------------------------------------------------------------------------


class PluginNotApplied(R3Error):
    """An engine answers without frames: the plug-in is not loaded, or its hooks did not apply."""

    reason = "plugin"


class EngineSilent(PluginNotApplied):
    """An engine did not say hello within its deadline, or its hello was refused. Names engine and reason."""

    reason = "engine_silent"


class TokenError(ConfigError):
    """The bearer token of direct delivery is missing, too short, or readable by others."""

    reason = "token"


class EngineUnavailable(R3Error):
    """An engine does not answer, or answers with an error."""

    reason = "engine_unavailable"


# -- trainer room ------------------------------------------------------------------------------------------------------


class ReplayError(R3Error):
    """The replay cannot be bound or did not happen as planned. Names router, pass and counts."""

    reason = "replay"


# -- weights room ------------------------------------------------------------------------------------------------------


class WeightsError(R3Error):
    """Root of the errors of publishing weights from the trainer to the engines."""

    reason = "weights"


class ManifestMismatch(WeightsError):
    """The tensors given cannot be laid out, or differ from those of the earlier updates. Names the tensor."""

    reason = "manifest"


class EngineRefused(WeightsError):
    """An engine answered a weight-update call with a failure. Names engine, route and its answer."""

    reason = "engine_refused"


class WeightsDiffer(WeightsError):
    """After an update an engine's own checksum of a tensor is not that of the bytes sent."""

    reason = "weights_differ"


class WeightVersionRegressed(WeightsError):
    """A version older than the committed one; versions only grow within one session."""

    reason = "version_regressed"


class WeightUpdateFailed(WeightsError):
    """An update was not committed. Says where it stopped and in which state it left each engine."""

    reason = "update_failed"


class PlanInvalid(WeightsError):
    """Source and target shards do not fit together: a tensor, a shape, or part of one is missing or held ambiguously."""

    reason = "plan"


class PlanMismatch(WeightsError):
    """Two ranks computed different plans; nothing was sent. Names both hashes."""

    reason = "plan_hash"


class WeightsCorrupt(WeightsError):
    """Bytes that arrived are not those that were sent. Names tensor and bucket."""

    reason = "weights_corrupt"


class NotReplayable(WeightsError):
    """A model's own loader does something that copies cannot repeat, so its dry run shows no map. Says what."""

    reason = "not_replayable"


class CannotStage(WeightsError):
    """An engine has not our half, or no room for a staged copy; nothing was changed. Says which."""

    reason = "cannot_stage"


class RegistryRefused(WeightsError):
    """The registry of engines does not accept a call. Says what it knows."""

    reason = "registry"


class StaleEpoch(RegistryRefused):
    """The caller acts on an older membership; it must read the registry again. Names both epochs."""

    reason = "stale_epoch"


class VersionsDiffer(RegistryRefused):
    """Trainer and engine run other versions of torch or NCCL than each other. Names both values."""

    reason = "versions_differ"


class EngineLeftBehind(WeightUpdateFailed):
    """An update is committed, but engines did not take it or do not serve it; they are paused. Names them."""

    reason = "engine_left_behind"


class NonFiniteWeights(WeightsError):
    """A tensor holds NaN or Inf and the policy is to refuse it. Names tensor and bucket."""

    reason = "nonfinite"


# -- trainer room: replay and audit --------------------------------------------------------------------------------------


class RouterUnsupported(ReplayError):
    """A router or its config would ignore, drop or never ask for replayed ids. Raised at attach."""

    reason = "router_unsupported"


class LayoutMismatch(ReplayError):
    """The layout given differs from what Megatron was started with. Names both values."""

    reason = "layout_mismatch"


class ReplayRowMismatch(ReplayError):
    """A router sees another number of tokens than it was given rows, or rows of another width or dtype."""

    reason = "replay_rows"


class ReplayCountMismatch(ReplayError):
    """A router consumed a micro-batch's rows not exactly once in a pass."""

    reason = "replay_count"


class DigestMismatch(ReplayError):
    """Rows that a router is handed are not those that the engine hashed. Carries the samples, and the rank."""

    reason = "digest"


class AuditMismatch(ReplayError):
    """The experts that a router's map holds are not the ids that it was handed."""

    reason = "audit"


# -- wire: rows that another frame carries --------------------------------------------------------------------------------


class PrefixMissing(FrameError):
    """A frame refers to shared rows that are not here. Names the prefix and the rows."""

    reason = "missing"


# -- trainer room: staleness --------------------------------------------------------------------------------------------


class RowsStale(StepError):
    """Rows were made by weights too far from the trainer's, and the policy is to refuse them. Names samples."""

    reason = "stale"


# -- relay room: several relays ----------------------------------------------------------------------------------------------


class RelayLost(StepError):
    """One of several relays does not answer. Names it and carries the samples that it holds; the others go on."""

    reason = "relay_lost"
