"""Errors that the caller can mend: a value, an order of calls, data that do not belong together."""

from __future__ import annotations

from r3channel.errors.root import FrameError, R3Error, ReplayError, RoutingError, StepError, WeightsError


class ConfigError(R3Error):
    """A value of the configuration, a layout or an assignment cannot be used."""

    reason = "config"
    remedy = "Set what the message names; `r3channel/tools/README.md` has every option."


class UsageError(R3Error):
    """A public call came at the wrong time: twice, out of order, or after close."""

    reason = "usage"
    remedy = "Change the order of your calls: the message says which came when."


class UnsupportedLayout(ConfigError):
    """A layout that a later version will support is refused instead of half supported."""

    reason = "layout"
    remedy = "Use a layout of the table in `r3channel/plan/README.md`."


class RowCountMismatch(RoutingError):
    """Too few or too many rows for the sample's tokens."""

    reason = "rows"
    remedy = "Give `tokens` as prompt and response together: n tokens have n-1 rows."


class TopKMismatch(RoutingError):
    """The rows have another top-k than the spec."""

    reason = "top_k"
    remedy = "Start engines and relay from one checkpoint."


class LayerMismatch(RoutingError):
    """The rows have other MoE layers than the spec."""

    reason = "layers"
    remedy = "Start engines and relay from one checkpoint."


class ExpertCountMismatch(RoutingError):
    """The sender counts another number of experts than the spec."""

    reason = "experts"
    remedy = "Start engines and relay from one checkpoint."


class SpecMismatch(FrameError):
    """The frame was made for another model's spec, and no single field explains it."""

    reason = "spec"
    remedy = "Start engines and relay from one checkpoint; `RoutingSpec.from_hf_config` of it is the spec."


class RowGap(RowCountMismatch):
    """Rows of a later turn begin after the rows that are held: those between are nowhere."""

    reason = "row_gap"
    remedy = "Ask with `routed_experts_start_len` = `relay.rows_held(sample_id)`."


class RowOverlap(RowCountMismatch):
    """Rows of a later turn begin before the end of the rows that are held."""

    reason = "row_overlap"
    remedy = (
        "Ask with `routed_experts_start_len` = `relay.rows_held(sample_id)`. SGLang 0.5.9 always sends all rows: add "
        "without `append`."
    )


class TokensChanged(RoutingError):
    """A later turn's tokens do not begin with those that the held rows belong to."""

    reason = "tokens_changed"
    remedy = (
        "Add later turns with the whole sequence so far, unchanged; a re-tokenised prompt is another sample."
    )


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
    """A ticket of another step, epoch, spec or layout."""

    reason = "ticket"
    remedy = (
        "Give the trainer the ticket of this step and its own samples in the ticket's order. After a relay was restarted, "
        "seal anew."
    )


class SampleChanged(StepError):
    """A sample grew by a later turn between the ticket that describes it and the step that takes it."""

    reason = "sample_changed"
    remedy = "Seal after the last turn of a sample was added, or take it out of the assignment."


class RecordingInvalid(StepError):
    """What lies on disk is no recording that can be used, or not the one that is needed."""

    reason = "recording"
    remedy = "Give the folder that `--record` wrote, whole; `r3channel inspect` says what is in it."


class TokenError(ConfigError):
    """The bearer token of direct delivery is missing, too short, or readable by others."""

    reason = "token"
    remedy = "Let `Relay.serve` make the file, and give engines the same one, mode 0600."


class ManifestMismatch(WeightsError):
    """The tensors given cannot be laid out, or differ from those of the earlier updates. Names the tensor."""

    reason = "manifest"
    remedy = "Send the same tensors in every update, and all parts of a fused one."


class WeightVersionRegressed(WeightsError):
    """A version older than the committed one; versions only grow within one session."""

    reason = "version_regressed"
    remedy = "Count versions up; open a new session to begin again."


class PlanInvalid(WeightsError):
    """Source and target shards do not fit together: a tensor, a shape, or part of one is missing or held ambiguously."""

    reason = "plan"
    remedy = "Compare the shapes that both sides report; the tensor that is named does not fit."


class PlanMismatch(WeightsError):
    """Two ranks computed different plans; nothing was sent. Names both hashes."""

    reason = "plan_hash"
    remedy = "Start all ranks with the same code, layout and tensors."


class NonFiniteWeights(WeightsError):
    """A tensor holds NaN or Inf and the policy is to refuse it. Names tensor and bucket."""

    reason = "nonfinite"
    remedy = "Look at the training step: the tensor that is named holds NaN or Inf."


class RouterUnsupported(ReplayError):
    """A router or its config would ignore, drop or never ask for replayed ids. Raised at attach."""

    reason = "router_unsupported"
    remedy = "Change the settings that are named; `r3channel/trainer/README.md` says why each cannot work."


class LayoutMismatch(ReplayError):
    """The layout given differs from what Megatron was started with. Names both values."""

    reason = "layout_mismatch"
    remedy = "Give `TrainerLayout` the sizes that Megatron was started with."


class ReplayRowMismatch(ReplayError):
    """A router sees another number of tokens than it was given rows, or rows of another width or dtype."""

    reason = "replay_rows"
    remedy = "Run the micro-batches of the ticket, with its padding and packing: the layout says which."


class ReplayCountMismatch(ReplayError):
    """A router consumed a micro-batch's rows not exactly once in a pass."""

    reason = "replay_count"
    remedy = "Enter `step.microbatch(i)` once around each forward pass, and run each backward pass inside the step's block."


class RowsStale(StepError):
    """Rows were made by weights too far from the trainer's, and the policy is to refuse them. Names samples."""

    reason = "stale"
    remedy = 'Raise `max_staleness`, or choose `on_stale="accept"` or `"mask"`. The next step can follow.'
