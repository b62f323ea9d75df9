"""Every error that r3channel raises: one class per remedy, below one root.

A message says what was seen, what was expected and the likely cause. `reason` is one word for one class, `remedy` what to do;
errors.md beside this file has the table of all of them. After the families come the errors that the caller can mend, then those
of an engine, then those of another process, the network or the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Self, TypeVar

_T = TypeVar("_T")


class R3Error(Exception):
    """Root of all errors of this package.

    An error that names samples, engines, ranks or a step carries all of them, however few its message lists: a loop can
    discard every one in a single call. They cross process borders with the error.

    >>> R3Error("two samples are lost", samples=["a", "b"], step=3).prefix("relay 1").samples
    ('a', 'b')
    """

    reason = "other"
    """A short word of a closed set: it labels the counter `r3channel_rejected_total` and never holds a sample or an address."""
    remedy = "Read the message: it says what was seen, what was expected and the likely cause."
    """What to do about it, for the page that is made of these classes."""

    def __init__(
        self, message: str = "", *, samples: Iterable[str] = (), engines: Iterable[str] = (),
        ranks: Iterable[tuple[int, ...]] = (), step: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.samples, self.engines, self.ranks, self.step = tuple(samples), tuple(engines), tuple(ranks), step

    def prefix(self, where: str) -> Self:
        """Return the same error, its message led by a place."""
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
    """A send or receive failed; the group must be abandoned. Names peer, connection and what was under way."""

    reason = "transport"
    remedy = (
        "The step is tried again by itself until `step_timeout_s`. If it ends there, look at the peer that is named: is "
        "it alive, is the address right?"
    )


class ReplayError(R3Error):
    """A router was handed other rows than it asks for, did not use them exactly once, or used others. Names router and pass."""

    reason = "replay"
    remedy = (
        "Compare your loop with `r3channel/trainer/README.md`: run the ticket's micro-batches with its padding and packing, "
        "enter `step.microbatch(i)` once around each forward pass, and run each backward pass inside the step's block. Where the "
        "audit finds it, do not train on, and report it with Megatron's version."
    )


class WeightsError(R3Error):
    """Root of the errors of publishing weights from the trainer to the engines."""

    reason = "weights"
    remedy = "The old version stays committed. The message says at which engine or tensor to look."


class ConfigError(R3Error):
    """A value of the configuration, a layout or an assignment cannot be used."""

    reason = "config"
    remedy = (
        "Set what the message names; `r3channel/tools/README.md` has every option, `r3channel/plan/README.md` every layout. A "
        "token file is one that `Relay.serve` makes, the same for all engines, mode 0600."
    )


class UsageError(R3Error):
    """A public call came at the wrong time: twice, out of order, or after close."""

    reason = "usage"
    remedy = "Change the order of your calls: the message says which came when."


class RowCountMismatch(RoutingError):
    """Too few or too many rows for the sample's tokens."""

    reason = "rows"
    remedy = "Give `tokens` as prompt and response together: n tokens have n-1 rows. What the loop appends goes to `add_live`."


class TurnMismatch(RoutingError):
    """A later turn does not go on where the sample ends: other tokens, or rows that leave a gap or come again."""

    reason = "turn"
    remedy = (
        "Add later turns with the whole sequence so far, unchanged (a re-tokenised prompt is another sample), and ask with "
        "`routed_experts_start_len` = `relay.rows_held(sample_id)`."
    )


class SpecMismatch(RoutingError):
    """The rows are of another model than the spec: other layers, experts, top-k or a width of ids."""

    reason = "spec"
    remedy = "Start engines and relay from one checkpoint; `RoutingSpec.from_hf_config` of it is the spec."


class SampleUnknown(StepError):
    """An assignment names a sample that the relay does not hold."""

    reason = "sample_unknown"
    remedy = (
        "Add the sample before you seal, and take discarded or expired ones (`expiry_s`) out of the assignment. The error "
        "carries them all."
    )


class SampleTwice(StepError):
    """A sample was added, assigned or sealed twice."""

    reason = "sample_twice"
    remedy = "Use a new name for each sample; give `append=True` for a later turn."


class TicketMismatch(StepError):
    """A ticket of another step, connection, spec or layout."""

    reason = "ticket"
    remedy = (
        "Give the trainer the ticket of this step and its own samples in the ticket's order. After a relay was restarted, "
        "seal anew."
    )


class RowsStale(StepError):
    """Rows were made by weights too far from the trainer's, and the policy is to refuse them. Names samples."""

    reason = "stale"
    remedy = 'Raise `max_staleness`, or choose `on_stale="accept"` or `"mask"`. The next step can follow.'


class RecordingInvalid(StepError):
    """What lies on disk is no recording that can be used, or not the one that is needed."""

    reason = "recording"
    remedy = "Give the folder that `--record` wrote, whole; `r3channel inspect` says what is in it."


class RouterUnsupported(ReplayError):
    """A router or its config would ignore, drop or never ask for replayed ids. Raised at attach."""

    reason = "router_unsupported"
    remedy = "Change the settings that are named; `r3channel/trainer/README.md` says why each cannot work."


class ManifestMismatch(WeightsError):
    """The tensors given cannot be laid out, differ from those of earlier updates, or do not fit those of another rank."""

    reason = "manifest"
    remedy = (
        "Send the same tensors in every update, and all parts of a fused one; start all ranks with the same code and layout. "
        "The message names the tensor or the shapes of both sides."
    )


class NonFiniteWeights(WeightsError):
    """A tensor holds NaN or Inf and the policy is to refuse it. Names tensor and bucket."""

    reason = "nonfinite"
    remedy = "Look at the training step: the tensor that is named holds NaN or Inf."


class RoutingMissing(RoutingError):
    """The reply holds no routing at all."""

    reason = "missing"
    remedy = (
        "Ask with `return_routed_experts` and start the server with `--enable-return-routed-experts`. To go on without "
        'it: `on_missing="live"`.'
    )


class FrameMissing(RoutingMissing):
    """A frame whose frame reference came did not arrive in time. Names sample and engine."""

    reason = "frame_missing"
    remedy = (
        "Discard the samples that the error carries, raise `frame_timeout_s`, or set `on_lost` to `live`. Look at the engine's "
        "log: it gives frames up after `deliver_timeout_s`."
    )


class ExpertIdInvalid(RoutingError):
    """An id is negative or >= the number of experts, or a row names the same expert twice."""

    reason = "expert_id"
    remedy = (
        "Drop the sample. If it happens again, check that engine and spec are of one model, and run `r3channel doctor "
        "--engine URL`: rows may be of memory that nobody wrote."
    )


class RowsInvalid(RoutingError):
    """Rows are marked invalid by the engine and the policy is to refuse them."""

    reason = "rows_invalid"
    remedy = "Drop the sample, or set `invalid_rows` to `live` or `mask`."


class FrameCorrupt(FrameError):
    """Header or payload do not match their hashes, sizes or bounds: bytes were damaged or cut."""

    reason = "corrupt"
    remedy = (
        "Ask again. If it happens again, look at memory and network of that engine's machine, and for a proxy that cuts long "
        "replies."
    )


class FrameMagicMismatch(FrameError):
    """The bytes are not a frame: stock int32 data, HTML, or text."""

    reason = "magic"
    remedy = (
        "Start the engine with `R3CHANNEL_ENGINE=1` in an environment that has r3channel; this reply has stock routing or "
        "none."
    )


class FrameVersionMismatch(FrameError):
    """A frame of another wire version or an unknown codec or kind."""

    reason = "wire_version"
    remedy = "Install the same r3channel for engines and relay."


class EngineReported(FrameError):
    """The engine could not build the frame and sent the reason in its place."""

    reason = "engine"
    remedy = "Read the reason in the message; the engine's log has the whole traceback."


class FrameReferenceInvalid(FrameError):
    """A frame reference or a parcel of directly delivered frames is damaged, or names another request."""

    reason = "frame_reference"
    remedy = "Ask again. Do two relays or two engines share a name or a token file?"


class PluginNotApplied(R3Error):
    """An engine answers without frames or says no hello in time, its hello is refused, or a hook did not apply. Says which."""

    reason = "plugin"
    remedy = (
        "Install r3channel in the engine's environment, set `R3CHANNEL_ENGINE=1`, and for direct delivery this relay's "
        "`R3CHANNEL_RELAY_URL` and token file; its model must be the relay's. The engine's log names a hook that failed."
    )


class EngineUnavailable(R3Error):
    """An engine does not answer, or answers with an error."""

    reason = "engine_unavailable"
    remedy = (
        "Is the engine up, and is this its address? The end of its log is in the message where it is known."
    )


class EngineRefused(WeightsError):
    """An engine answered a weight-update call with a failure. Names engine, route and its answer."""

    reason = "engine_refused"
    remedy = "Read the engine's own answer in the message."


class CannotStage(WeightsError):
    """An engine has not our half, or no room for a staged copy; nothing was changed. Says which."""

    reason = "cannot_stage"
    remedy = (
        "Start the engine with `R3CHANNEL_WEIGHTS=1`, give it memory for one more copy of its weights, or use "
        "`staged=False`."
    )


class WeightUpdateFailed(WeightsError):
    """An update was not committed. Says where it stopped and in which state it left each engine."""

    reason = "update_failed"
    remedy = "The message says where it stopped and in which state each engine is. Send the update again."


class EngineLeftBehind(WeightUpdateFailed):
    """An update is committed, but engines did not take it or do not serve it; they are paused. Names them."""

    reason = "engine_left_behind"
    remedy = (
        "Fill the engine that is named with `update_one`, or restart it; the others serve the new version."
    )


class WeightsCorrupt(WeightsError):
    """Bytes that arrived, or that an engine serves after an update, are not those that were sent. Names tensor and bucket."""

    reason = "weights_corrupt"
    remedy = (
        "The update was not committed. Send it again. If it happens again, look at the network between the ranks that are "
        "named; if the same tensor differs again, the engine's model lacks or changes it."
    )


class GiverChanged(WeightsCorrupt):
    """An engine that was to fill another one holds other weights than were committed. It is not routable any more."""

    reason = "giver_changed"
    remedy = (
        "Look at who writes to that engine's weights besides this trainer; `r3channel weights verify` names the parameters. "
        "`update_one` of it, or the next `update`, brings it back."
    )


class RegistryRefused(WeightsError):
    """An engine is not taken: it runs other versions of torch or NCCL than the trainer. Or no engine is left to update."""

    reason = "registry"
    remedy = (
        "Where the message names versions, install the same torch and NCCL on both sides, or leave the group to gloo. Else bring "
        "an engine back: `update_one`, `add_engine`."
    )


class TrainerRankLost(WeightsError):
    """A trainer rank is gone after a commit began. Says of each engine what it holds, where that is known."""

    reason = "trainer_rank"
    remedy = "Read which version each engine holds; start the trainer ranks again, and open a new session."


class StoreFull(StepError):
    """The frame store reached its configured ceiling."""

    reason = "store_full"
    remedy = "Raise `store_bytes` to twice a step's rows (`r3channel plan`), or discard samples that nobody will train on."


class BackgroundFailed(StepError):
    """A background thread or the relay's whole process died; its first exception is the cause."""

    reason = "background"
    remedy = "Read the cause below it; restart the relay, with `journal` as it was. If the cause is ours, please report it."


class DeadlineExceeded(TransportError):
    """A wait ended by its deadline. Names what was waited for and for how long."""

    reason = "deadline"
    remedy = (
        "Look at whom the message names: has it entered the step, is it alive? Then raise the limit that is named. Do not "
        "update weights while a step's routing is received in the same process."
    )


class BucketCorrupt(TransportError):
    """A bucket's header or hash does not match what the ticket announced."""

    reason = "bucket"
    remedy = "The bytes are asked for again. If it happens again, install one r3channel on both sides and look at the network."


class PeerFailed(TransportError):
    """TP0 failed to receive; the other ranks of the TP group learn it here."""

    reason = "peer"
    remedy = "Look at TP rank 0 of this group: its own error is the cause."


class DigestMismatch(ReplayError):
    """Rows that a router is handed are not those that the engine hashed. Carries the samples, and the rank."""

    reason = "digest"
    remedy = (
        "Receive the step again. If it happens again, look at that machine's memory; rows changed after they were "
        "checked."
    )


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close what a `with` block used, and keep the block's error.

    What closing finds is a note on the block's error. With a signal's error (SystemExit shows no note) it is logged, too.

    Args:
        error: The error of the block, which goes its own way; None where there was none.
        close: The call that closes.

    Raises:
        R3Error: What closing found, where the block had no error.
    """
    try:
        close()
    except R3Error as found:
        if error is None:
            raise
        error.add_note(said := f"r3channel, while closing: {type(found).__name__}: {found}")
        if not isinstance(error, Exception):
            logging.getLogger(__name__).error(said)


def expect(value: object, kind: type[_T]) -> _T:
    """Return the value if it is of the expected type.

    Args:
        value: The value.
        kind: The type.

    Raises:
        ConfigError: The value is of another type. The error comes at the call, and not from what breaks later.
    """
    if not isinstance(value, kind):
        made = f". Make one of text with {kind.__name__}.parse(text)" if hasattr(kind, "parse") else ""
        raise ConfigError(f"{value!r} is a {type(value).__name__}, expected {kind.__name__}{made}")
    return value


def nearest(name: str, known: Iterable[str], least: float = 0.7) -> str:
    """Return the words `; did you mean ...?` for a mistyped name.

    Args:
        name: The name.
        known: The names that are known.
        least: How near a known name must be, 0 to 1; more where all names begin alike.

    Returns:
        The words; empty where no known name is as near as `least`.
    """
    from difflib import get_close_matches

    found = get_close_matches(name, list(known), n=1, cutoff=least)
    return f"; did you mean {found[0]}?" if found else ""
