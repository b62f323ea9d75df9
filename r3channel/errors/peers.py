"""Errors of others: another process of ours, the network, the machine, an upstream; or of us."""

from __future__ import annotations

from r3channel.errors.root import R3Error, ReplayError, StepError, TransportError, WeightsError


class StoreFull(StepError):
    """The frame store reached its configured ceiling."""

    reason = "store_full"
    remedy = "Raise `store_bytes` to twice a step's rows (`r3channel plan`), or discard samples that nobody will train on."


class StoreBusy(StepError):
    """A frame store's folder belongs to a process that lives."""

    reason = "store_busy"
    remedy = "End the relay that owns the folder, or choose another `store_dir`."


class BackgroundFailed(StepError):
    """A background thread died; its first exception is the cause."""

    reason = "background"
    remedy = "Read the cause below it; restart the relay. If the cause is ours, please report it."


class DeadlineExceeded(TransportError):
    """A wait ended by its deadline. Names what was waited for and for how long."""

    reason = "deadline"
    remedy = "Look at whom the message names: has it entered the step, is it alive? Then raise the limit that is named."


class BucketCorrupt(TransportError):
    """A bucket's header or hash does not match what the ticket announced."""

    reason = "bucket"
    remedy = "The bytes are asked for again. If it happens again, install one r3channel on both sides and look at the network."


class PeerFailed(TransportError):
    """TP0 failed to receive; the other ranks of the TP group learn it here."""

    reason = "peer"
    remedy = "Look at TP rank 0 of this group: its own error is the cause."


class SlotBusy(R3Error):
    """A step's routing waited for a weight update of the same process, or the other way round, for too long. Names it."""

    reason = "slot_busy"
    remedy = "Do not update weights while a step's routing is received in the same process."


class WeightUpdateFailed(WeightsError):
    """An update was not committed. Says where it stopped and in which state it left each engine."""

    reason = "update_failed"
    remedy = "The message says where it stopped and in which state each engine is. Send the update again."


class TrainerRankLost(WeightsError):
    """A trainer rank is gone after a commit began. Says of each engine what it holds, where that is known."""

    reason = "trainer_rank"
    remedy = "Read which version each engine holds; start the trainer ranks again, and open a new session."


class WeightsCorrupt(WeightsError):
    """Bytes that arrived are not those that were sent. Names tensor and bucket."""

    reason = "weights_corrupt"
    remedy = (
        "Send the update again. If it happens again, look at the network between the ranks that are named."
    )


class GiverChanged(WeightsCorrupt):
    """An engine that was to fill another one holds other weights than were committed. It is not routable any more."""

    reason = "giver_changed"
    remedy = (
        "Look at who writes to that engine's weights besides this trainer; `r3channel weights verify` names the parameters. "
        "`update_one` of it, or the next `update`, brings it back."
    )


class RegistryRefused(WeightsError):
    """The registry of engines does not accept a call. Says what it knows."""

    reason = "registry"
    remedy = "Read the members again; an engine may have joined, left or let its lease end."


class VersionsDiffer(RegistryRefused):
    """Trainer and engine run other versions of torch or NCCL than each other. Names both values."""

    reason = "versions_differ"
    remedy = "Install the same torch and NCCL on both sides, or leave the group to gloo."


class DigestMismatch(ReplayError):
    """Rows that a router is handed are not those that the engine hashed. Carries the samples, and the rank."""

    reason = "digest"
    remedy = (
        "Receive the step again. If it happens again, look at that machine's memory; rows changed after they were "
        "checked."
    )


class AuditMismatch(ReplayError):
    """The experts that a router's map holds are not the ids that it was handed."""

    reason = "audit"
    remedy = "Do not train on: Megatron chose other experts than it was given. Please report it with Megatron's version."
