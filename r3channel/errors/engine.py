"""Errors of an engine: what it sent, did not send, or answered."""

from __future__ import annotations

from r3channel.errors.peers import WeightUpdateFailed
from r3channel.errors.root import FrameError, R3Error, RoutingError, WeightsError


class RoutingMissing(RoutingError):
    """The reply holds no routing at all."""

    reason = "missing"
    remedy = (
        "Ask with `return_routed_experts` and start the server with `--enable-return-routed-experts`. To go on without "
        'it: `on_missing="live"`.'
    )


class ExpertIdOutOfRange(RoutingError):
    """An id is negative or >= the number of experts."""

    reason = "id_range"
    remedy = (
        "Drop the sample. If it happens again, check that engine and spec are of one model, and run `r3channel doctor "
        "--engine URL`."
    )


class DuplicateExpertId(RoutingError):
    """A row names the same expert twice."""

    reason = "id_duplicate"
    remedy = (
        "Drop the sample. If it happens again, run `r3channel doctor --engine URL`: rows may be of memory that nobody "
        "wrote."
    )


class RowsInvalid(RoutingError):
    """Rows are marked invalid by the engine and the policy is to refuse them."""

    reason = "rows_invalid"
    remedy = "Drop the sample, or set `invalid_rows` to `live` or `mask`."


class FrameTruncated(FrameError):
    """Fewer or more bytes than the header says."""

    reason = "truncated"
    remedy = "Ask again. Does a proxy between engine and relay cut long replies?"


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


class HeaderCorrupt(FrameError):
    """The header's hash does not match, or a bound in it is impossible."""

    reason = "header"
    remedy = "Ask again. If it happens again, look at memory and network of that engine's machine."


class PayloadCorrupt(FrameError):
    """The payload's hash does not match, or it does not decode to the declared size."""

    reason = "payload"
    remedy = "Ask again. If it happens again, look at memory and network of that engine's machine."


class EngineReported(FrameError):
    """The engine could not build the frame and sent the reason in its place."""

    reason = "engine"
    remedy = "Read the reason in the message; the engine's log has the whole traceback."


class ReceiptInvalid(FrameError):
    """A receipt or a parcel of directly delivered frames is damaged, or names another request."""

    reason = "receipt"
    remedy = "Ask again. Do two relays or two engines share a name or a token file?"


class FrameMissing(RoutingMissing):
    """A frame whose receipt came did not arrive in time. Names sample and engine."""

    reason = "frame_missing"
    remedy = (
        "Discard the samples that the error carries, or raise `frame_timeout_s`. Look at the engine's log: it gives "
        "frames up after `deliver_timeout_s`."
    )


class PluginNotApplied(R3Error):
    """An engine answers without frames: the plug-in is not loaded, or its hooks did not apply."""

    reason = "plugin"
    remedy = "Install r3channel in the engine's environment, set `R3CHANNEL_ENGINE=1`, and read the hook that its log names."


class EngineSilent(PluginNotApplied):
    """An engine did not say hello within its deadline, or its hello was refused. Names engine and reason."""

    reason = "engine_silent"
    remedy = (
        "Check `R3CHANNEL_RELAY_URL` and the token file of that engine, and that its model is the relay's."
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


class WeightsDiffer(WeightsError):
    """After an update an engine's own checksum of a tensor is not that of the bytes sent."""

    reason = "weights_differ"
    remedy = (
        "The update was not committed. Send it again; if the same tensor differs again, the engine's model lacks or "
        "changes it."
    )


class CannotStage(WeightsError):
    """An engine has not our half, or no room for a staged copy; nothing was changed. Says which."""

    reason = "cannot_stage"
    remedy = (
        "Start the engine with `R3CHANNEL_WEIGHTS=1`, give it memory for one more copy of its weights, or use "
        "`staged=False`."
    )


class NotReplayable(WeightsError):
    """A model's own loader does something that copies cannot repeat, so its dry run shows no map. Says what."""

    reason = "not_replayable"
    remedy = "Nothing: whole tensors are staged then, and the model's own loader places them. `report.loaded` says so."


class EngineLeftBehind(WeightUpdateFailed):
    """An update is committed, but engines did not take it or do not serve it; they are paused. Names them."""

    reason = "engine_left_behind"
    remedy = (
        "Fill the engine that is named with `update_one`, or restart it; the others serve the new version."
    )


class PrefixMissing(FrameError):
    """A frame refers to shared rows that are not here. Names the prefix and the rows."""

    reason = "prefix_missing"
    remedy = "Nothing with direct delivery: the engine sends those rows again. Elsewhere raise `kept_prefix_bytes`."
