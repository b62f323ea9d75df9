"""The one table of metric names: the contract with dashboards and alerts. It counts and serves nothing.

A name is written in full wherever it is used, so that grep finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import r3channel
from r3channel.errors import RoutingError, SampleTwice
from r3channel.observe.stage_clock import STAGES


def _reasons(error: type[RoutingError]) -> Iterator[str]:
    yield error.reason
    for narrower in error.__subclasses__():
        yield from _reasons(narrower)


LABELS: dict[str, tuple[str, ...]] = {
    "role": ("engine", "relay", "trainer", "manager"),
    "stage": STAGES,
    "outcome": ("received", "delivered", "rejected", "duplicate", "live", "cut", "discarded", "expired"),
    "reason": (*sorted({*_reasons(RoutingError), SampleTwice.reason}), "other"),
    "cause": ("invalid", "padding"),
    "lag": ("ahead", "0", "1", "2", "3", "4_or_more"),
    "layer": tuple(str(layer) for layer in range(256)),
    "leg": ("engine_frame", "engine_http", "engine_direct", "wire_sent", "wire_received", "landed"),
    "tensor": (),  # `wire.token_tensors` declares them
    "way": ("inband", "overflowed", "direct", "given_up"),
    "result": ("committed", "failed", "unknown"),
    "fate": ("kept", "given_up"),
    "until": ("room", "rows"),
    "version": (r3channel.__version__,),
}
"""Every label and the closed set of its values. A reason that is not listed is counted as `other`."""


class Metric(NamedTuple):
    """One line of the table. A counter begins at 0 with `Metrics.measure`, a gauge when it is first set."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    unit: str
    """Base unit of the value: seconds, bytes, or what is counted."""
    roles: tuple[str, ...]
    """The processes that feed it."""
    labels: tuple[str, ...]
    help: str


_RELAY, _TRAINER, _ENGINE = ("relay",), ("trainer",), ("engine",)
_BOTH, _ALL = _RELAY + _TRAINER, LABELS["role"]
METRICS: dict[str, Metric] = {line[1]: Metric(*line) for line in (
    ("histogram", "r3channel_stage_seconds", "seconds", _ALL, ("role", "stage"),
        "Time of one span of a stage, inner spans taken out; wait_* is time a thread stood still."),
    ("gauge", "r3channel_stage_open_seconds", "seconds", _ALL, ("role", "stage"),
        "How long the oldest span of a stage that has not ended lasts, inner spans too; absent where none is open."),
    ("gauge", "r3channel_build_info", "info", _ALL, ("role", "version"), "1, with the version of r3channel."),
    ("counter", "r3channel_samples_total", "samples", _RELAY, ("outcome",),
        "Samples by what became of them: received is the sum of all other outcomes and of those in flight."),
    ("gauge", "r3channel_samples_in_flight", "samples", _RELAY, (), "Samples that wait for a step or are in one."),
    ("counter", "r3channel_rejected_total", "errors", _RELAY, ("reason",),
        "Refused replies, frames and steps by reason; a sample can be refused more than once."),
    ("counter", "r3channel_rows_total", "rows", _RELAY, (), "Rows of accepted samples; bytes / rows is B/token."),
    ("counter", "r3channel_cut_rows_total", "rows", _RELAY, (), "Rows of tokens that were cut off after they were generated."),
    ("counter", "r3channel_steps_total", "steps", _BOTH, (), "Steps sealed by a relay or received by a trainer."),
    ("gauge", "r3channel_step", "step", _BOTH, (), "Newest step that a relay sealed or a trainer received."),
    ("gauge", "r3channel_steps_in_flight", "steps", _RELAY, (), "Sealed steps that a trainer has not acknowledged."),
    ("gauge", "r3channel_frames_unclaimed", "frames", _RELAY, (),
        "Frames that came directly and whose replies have not come."),
    ("gauge", "r3channel_expiry_in_seconds", "seconds", _RELAY, (),
        "Time until the oldest sample that no step has taken expires; absent when there is none."),
    ("counter", "r3channel_bytes_total", "bytes", _BOTH, ("leg",), "Routing bytes by the leg that they travelled."),
    ("counter", "r3channel_tensor_bytes_total", "bytes", _BOTH, ("tensor",),
        "Bytes, by name, of what tokens bring beside expert ids, as they came to this process."),
    ("counter", "r3channel_buckets_total", "buckets", _BOTH, (), "Buckets sent by a relay or received by a trainer."),
    ("gauge", "r3channel_frames_in_store", "frames", _RELAY, (), "Frames that the relay holds."),
    ("gauge", "r3channel_store_bytes", "bytes", _RELAY, (), "Bytes of rows that the relay holds."),
    ("gauge", "r3channel_store_limit_bytes", "bytes", _RELAY, (), "Ceiling of these; at it, replies wait."),
    ("gauge", "r3channel_staging_peak_bytes", "bytes", _RELAY, (), "The most that was staged at once for one receiver."),
    ("gauge", "r3channel_shard_bytes", "bytes", _TRAINER, (), "Rows that this rank's routers use, last step."),
    ("gauge", "r3channel_recording_lost_steps", "steps", _RELAY, (), "Steps that a recording could not keep."),
    ("gauge", "r3channel_oldest_in_flight_seconds", "seconds", _RELAY, (),
        "Age of the oldest sealed step that a trainer has not acknowledged; 0 when there is none."),
    ("gauge", "r3channel_background_thread_alive", "bool", _RELAY, (), "1 while the relay's thread runs."),
    ("gauge", "r3channel_connection", "connection", _BOTH, (),
        "Connections that one receiver has had; a failure starts the next."),
    ("gauge", "r3channel_engines_silent", "engines", _RELAY, (),
        "Engines that were expected and have said no hello, or whose hello was refused."),
    ("gauge", "r3channel_engines_greeted", "engines", _RELAY, (), "Engines that have said hello."),
    ("counter", "r3channel_group_resets_total", "resets", _BOTH, (), "Connections that had to be given up."),
    ("counter", "r3channel_fallback_shards_total", "shards", _TRAINER, (),
        "Shards received over TCP because their process group failed."),
    ("gauge", "r3channel_weight_version", "version", _ALL, ("role",), "Committed weight version."),
    ("counter", "r3channel_weight_updates_total", "updates", _TRAINER, ("result",),
        "Weight updates of all engines, by result; a failed one leaves the old version."),
    ("counter", "r3channel_weight_pause_seconds_total", "seconds", _TRAINER, (),
        "Time for which committed updates kept engines paused, from the first call to the last answer."),
    ("counter", "r3channel_weight_bytes_total", "bytes", _TRAINER, (),
        "Weight bytes that this rank sent to engines, staged; of a broadcast the model's, once."),
    ("counter", "r3channel_engine_evictions_total", "engines", _TRAINER, (), "Engines that updates went on without."),
    ("gauge", "r3channel_engines_routable", "engines", _TRAINER, (), "Engines with the committed version."),
    ("counter", "r3channel_rows_by_staleness_total", "rows", _TRAINER, ("lag",),
        "Rows of a rank's samples by how many weight updates lie between them and the trainer."),
    ("counter", "r3channel_rows_masked_stale_total", "rows", _TRAINER, (),
        "Rows of a rank's samples that left the loss because they were too stale."),
    ("counter", "r3channel_digests_checked_total", "digests", _TRAINER, (),
        "Digests of what routers are handed, one for each sample, layer and pass, held against the engines'."),
    ("counter", "r3channel_digests_different_total", "digests", _TRAINER, (), "Of these, not the engine's: 0 is well."),
    ("counter", "r3channel_live_rows_total", "rows", _TRAINER, ("cause",),
        "Rows that the live router chose for, by cause: no engine routing, or padding under the live policy."),
    ("counter", "r3channel_audit_pairs_total", "pairs", _TRAINER, (),
        "(token, layer) pairs compared: live router, replay."),
    ("counter", "r3channel_audit_pairs_different_total", "pairs", _TRAINER, (),
        "Pairs in which the live router would choose other experts; a jump means a shift by a layer or token."),
    ("counter", "r3channel_audit_pairs_disjoint_total", "pairs", _TRAINER, (), "Pairs that share no expert at all."),
    ("counter", "r3channel_audit_tokens_total", "tokens", _TRAINER, (), "Tokens whose routing was audited."),
    ("counter", "r3channel_audit_tokens_different_total", "tokens", _TRAINER, (),
        "Audited tokens with at least one differing layer."),
    ("gauge", "r3channel_audit_layer_overlap", "ratio", _TRAINER, ("layer",),
        "Mean share of experts that live router and replay have in common, last audited step, the worst eight layers."),
    ("gauge", "r3channel_audit_layer_different", "ratio", _TRAINER, ("layer",),
        "Share of rows whose experts differ, last audited step, the worst eight layers."),
    ("gauge", "r3channel_audit_logprob_abs_diff", "nats", _TRAINER, (),
        "Mean |trainer - engine| log-prob of the last audited step."),
    ("gauge", "r3channel_audit_logprob_k3", "nats", _TRAINER, (), "Mean exp(d) - 1 - d of the same."),
    ("counter", "r3channel_engine_frames_total", "frames", _ENGINE, ("way",),
        "Frames by how they left: in the reply, in the reply as the queue was full, directly, or given up."),
    ("counter", "r3channel_engine_kept_rows_total", "rows", _ENGINE, ("fate",),
        "Rows of requests that were retracted: kept for the frame, or given up for want of room, and computed again."),
    ("counter", "r3channel_engine_capture_waits_total", "waits", _ENGINE, ("until",),
        "Waits of the scheduler for the copy of a pass: until the ring had room, or until a request's rows had come."),
    ("gauge", "r3channel_engine_queue_bytes", "bytes", _ENGINE, (), "Frames that wait to be sent to the relay."),
    ("gauge", "r3channel_engine_queue_limit_bytes", "bytes", _ENGINE, (), "Ceiling of these."),
    ("gauge", "r3channel_engine_greeted", "bool", _ENGINE, (), "1 once the relay has taken this engine's hello."),
)}  # fmt: skip
"""All names that this package exports, by full name."""
