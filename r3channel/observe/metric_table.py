"""The one table of metric names: the contract with dashboards and alerts. Counts and serves nothing.

A name is written in full wherever it is used, so that grep finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from r3channel.errors import RoutingError, SampleTwice
from r3channel.observe.stage_clock import STAGES


def _reasons(error: type[RoutingError]) -> Iterator[str]:
    yield error.reason
    for narrower in error.__subclasses__():
        yield from _reasons(narrower)


LABELS: dict[str, tuple[str, ...]] = {
    "role": ("engine", "relay", "trainer", "manager"),
    "stage": STAGES,
    "outcome": ("received", "delivered", "rejected", "duplicate", "live", "discarded", "expired"),
    "reason": (*sorted({*_reasons(RoutingError), SampleTwice.reason}), "other"),
    "cause": ("invalid", "padding"),
    "lag": ("ahead", "0", "1", "2", "3", "4_or_more"),
    "layer": tuple(str(layer) for layer in range(256)),
    "leg": ("engine_frame", "engine_http", "engine_direct", "wire_sent", "wire_received", "landed"),
    "way": ("inband", "overflowed", "direct", "given_up"),
    "result": ("committed", "failed", "unknown"),
    "fate": ("kept", "given_up"),
    "until": ("room", "rows"),
}
"""Every label and the closed set of its values. A reason that is not listed is counted as `other`."""


class Metric(NamedTuple):
    """One line of the table. Counters are born at 0 when somebody says that he measures them, gauges when they are first set."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    unit: str
    """Base unit of the value: seconds, bytes, or what is counted."""
    group: str
    """The dashboard row it belongs to."""
    roles: tuple[str, ...]
    """The processes that feed it."""
    labels: tuple[str, ...]
    help: str


_RELAY, _TRAINER, _ENGINE = ("relay",), ("trainer",), ("engine",)
_BOTH, _ALL = _RELAY + _TRAINER, LABELS["role"]
METRICS: dict[str, Metric] = {line[1]: Metric(*line) for line in (
    ("histogram", "r3channel_stage_seconds", "seconds", "stages", _ALL, ("role", "stage"),
        "Time of one span of a stage, inner spans taken out; wait_* is time a thread stood still."),
    ("counter", "r3channel_samples_total", "samples", "samples", _RELAY, ("outcome",),
        "Samples by what became of them: received is the sum of all other outcomes and of those in flight."),
    ("gauge", "r3channel_samples_in_flight", "samples", "samples", _RELAY, (), "Samples that wait for a step or are in one."),
    ("counter", "r3channel_rejected_total", "errors", "samples", _RELAY, ("reason",),
        "Refused replies, frames and steps by reason; a sample can be refused more than once."),
    ("counter", "r3channel_rows_total", "rows", "samples", _RELAY, (), "Rows of accepted samples; bytes / rows is B/token."),
    ("counter", "r3channel_steps_total", "steps", "samples", _BOTH, (), "Steps sealed by a relay or received by a trainer."),
    ("gauge", "r3channel_steps_in_flight", "steps", "samples", _RELAY, (), "Sealed steps that a trainer has not acknowledged."),
    ("gauge", "r3channel_frames_unclaimed", "frames", "samples", _RELAY, (),
        "Frames that came directly and whose replies have not come."),
    ("gauge", "r3channel_expiry_in_seconds", "seconds", "samples", _RELAY, (),
        "Time until the oldest sample that no step has taken expires; absent when there is none."),
    ("counter", "r3channel_bytes_total", "bytes", "bytes", _BOTH, ("leg",), "Routing bytes by the leg that they travelled."),
    ("counter", "r3channel_buckets_total", "buckets", "bytes", _BOTH, (), "Buckets sent by a relay or received by a trainer."),
    ("gauge", "r3channel_frames_in_store", "frames", "store", _RELAY, (), "Frames that the relay holds."),
    ("gauge", "r3channel_store_bytes", "bytes", "store", _RELAY, (), "Bytes of rows that the relay holds."),
    ("gauge", "r3channel_store_limit_bytes", "bytes", "store", _RELAY, (), "Ceiling of these; at it, replies wait."),
    ("gauge", "r3channel_staging_peak_bytes", "bytes", "store", _RELAY, (), "The most that was staged at once for one receiver."),
    ("gauge", "r3channel_shard_bytes", "bytes", "store", _TRAINER, (), "Rows that this rank's routers use, last step."),
    ("gauge", "r3channel_recording_lost_steps", "steps", "store", _RELAY, (), "Steps that a recording could not keep."),
    ("gauge", "r3channel_oldest_in_flight_seconds", "seconds", "store", _RELAY, (),
        "Age of the oldest sealed step that a trainer has not acknowledged; 0 when there is none."),
    ("gauge", "r3channel_background_thread_alive", "bool", "health", _RELAY, (), "1 while the relay's thread runs."),
    ("gauge", "r3channel_connection", "connection", "health", _BOTH, (),
        "Connections that one receiver has had; a failure starts the next."),
    ("gauge", "r3channel_engines_silent", "engines", "health", _RELAY, (),
        "Engines that were expected and have said no hello, or whose hello was refused."),
    ("gauge", "r3channel_engines_greeted", "engines", "health", _RELAY, (), "Engines that have said hello."),
    ("counter", "r3channel_group_resets_total", "resets", "health", _BOTH, (), "Connections that had to be given up."),
    ("counter", "r3channel_fallback_shards_total", "shards", "health", _TRAINER, (),
        "Shards received over TCP because their process group failed."),
    ("gauge", "r3channel_weight_version", "version", "weights", _ALL, ("role",), "Committed weight version."),
    ("counter", "r3channel_weight_updates_total", "updates", "weights", _TRAINER, ("result",),
        "Weight updates of all engines, by result; a failed one leaves the old version."),
    ("gauge", "r3channel_engines_routable", "engines", "weights", _TRAINER, (), "Engines with the committed version."),
    ("counter", "r3channel_rows_by_staleness_total", "rows", "weights", _TRAINER, ("lag",),
        "Rows of a rank's samples by how many weight updates lie between them and the trainer."),
    ("counter", "r3channel_rows_masked_stale_total", "rows", "weights", _TRAINER, (),
        "Rows of a rank's samples that left the loss because they were too stale."),
    ("counter", "r3channel_ids_compared_total", "ids", "audit", _TRAINER, (), "Ids compared: engine against router."),
    ("counter", "r3channel_ids_different_total", "ids", "audit", _TRAINER, (), "Ids that the router did not get; must stay 0."),
    ("counter", "r3channel_live_rows_total", "rows", "audit", _TRAINER, ("cause",),
        "Rows that the live router chose for, by cause: no engine routing, or padding under the live policy."),
    ("counter", "r3channel_audit_pairs_total", "pairs", "audit", _TRAINER, (),
        "(token, layer) pairs compared: live router, replay."),
    ("counter", "r3channel_audit_pairs_different_total", "pairs", "audit", _TRAINER, (),
        "Pairs in which the live router would choose other experts; a jump means a shift by a layer or token."),
    ("counter", "r3channel_audit_pairs_disjoint_total", "pairs", "audit", _TRAINER, (), "Pairs that share no expert at all."),
    ("counter", "r3channel_audit_tokens_total", "tokens", "audit", _TRAINER, (), "Tokens whose routing was audited."),
    ("counter", "r3channel_audit_tokens_different_total", "tokens", "audit", _TRAINER, (),
        "Audited tokens with at least one differing layer."),
    ("gauge", "r3channel_audit_layer_overlap", "ratio", "audit", _TRAINER, ("layer",),
        "Mean share of experts that live router and replay have in common, last audited step, the worst eight layers."),
    ("gauge", "r3channel_audit_layer_different", "ratio", "audit", _TRAINER, ("layer",),
        "Share of rows whose experts differ, last audited step, the worst eight layers."),
    ("gauge", "r3channel_audit_logprob_abs_diff", "nats", "audit", _TRAINER, (),
        "Mean |trainer - engine| log-prob of the last audited step."),
    ("gauge", "r3channel_audit_logprob_k3", "nats", "audit", _TRAINER, (), "Mean exp(d) - 1 - d of the same."),
    ("counter", "r3channel_engine_frames_total", "frames", "engine", _ENGINE, ("way",),
        "Frames by how they left: in the reply, in the reply as the queue was full, directly, or given up."),
    ("counter", "r3channel_engine_kept_rows_total", "rows", "engine", _ENGINE, ("fate",),
        "Rows of requests that were retracted: kept for the frame, or given up for want of room, and computed again."),
    ("counter", "r3channel_engine_capture_waits_total", "waits", "engine", _ENGINE, ("until",),
        "Waits of the scheduler for the copy of a pass: until the ring had room, or until a request's rows had come."),
    ("gauge", "r3channel_engine_queue_bytes", "bytes", "engine", _ENGINE, (), "Frames that wait to be sent to the relay."),
    ("gauge", "r3channel_engine_queue_limit_bytes", "bytes", "engine", _ENGINE, (), "Ceiling of these."),
    ("gauge", "r3channel_engine_greeted", "bool", "engine", _ENGINE, (), "1 once the relay has taken this engine's hello."),
)}  # fmt: skip
"""All names that this package exports, by full name."""
