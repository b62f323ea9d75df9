"""How many bytes a step moves, where they lie meanwhile, and how long that takes: this package beside the default path.

Bytes come from the planner itself, run on the given lengths; times are bytes over bandwidths, and CPU times per token that
were measured (see `Machines`). The default path is slime's of August 2026: base64 int32 of all layers in the reply, decoded
by one thread, one object per DP rank that every process of the rank fetches whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment, names_of
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Plan, Shard, plan_shards
from r3channel.plan.token_tensors import tensors_in
from r3channel.wire.token_tensors import TokenTensor

_INT32, _INT64 = 4, 8
_BASE64 = 4 / 3
_ORDINARY_BYTES_PER_TOKEN = 24
"""Token id, log-prob and loss mask, 8 bytes each (seed 003)."""
_STEPS_HELD = _SHARDS_HELD = 2
_FRAME_BYTES, SPAN_BYTES, RANGE_BYTES = 1400, 200, 140
"""Memory in Python of a frame that is kept, of a provenance span and of a range of invalid rows, without rows and digests."""
_CONTEXT_BYTES, _PAIR_BYTES = 600 << 20, 48 << 20
"""On a GPU: a process's CUDA context, and NCCL's buffers for a pair at four thread blocks. Not measured between two GPUs."""
_RELAY_US_PER_TOKEN = {1: 0.65, 2: 0.98}
"""Bytes of an id -> the relay's CPU for a token of 48 x top-8 ids: frames that come directly (0.53 in replies), and 9-bit ids.
`r3channel bench relay`, 2 cores; relay/README.md has the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines on which the predicted times rest. The defaults of bandwidths are those of seed 003."""

    http_gbit_s: float = 10.0
    """Engines to relay, all together."""
    wire_gbyte_s: float = 50.0
    """Relay to trainers: one NIC (NDR InfiniBand)."""
    connection_gbyte_s: float = 2.2
    """One TCP connection: a core at each end (measured over loopback, 2 cores)."""
    gather_gbyte_s: float = 3.0
    """Rows of a stage's layers into buckets by one core of the relay, as nccl needs them; 9 with all layers (measured). Less than
    from pinned memory to a GPU: 55 on an H100."""
    object_store_gbyte_s: float = 3.0
    """Ray's object store into one process: 2 to 4 (seed 003)."""
    relay_us_per_token: float = 0.71
    """CPU from a reply's body in memory to placed rows, a token of 48 x top-8 (measured: `bench relay`)."""
    manager_us_per_token: float = 7.1
    """CPU of the default path's manager for such a body: JSON, base64, checks and put (measured in the same run)."""
    bucket_bytes: int = ChannelConfig().bucket_bytes
    """Staged at once for a receiver, two over a process group; the channel's own default."""
    store_bytes: int = ChannelConfig().store_bytes
    """Ceiling of the rows that the relay holds."""
    step_s: float = 300.0
    """Time from one step to the next; what the relay takes in and sends is spread over it."""
    node_bytes: float = 512e9
    """Memory of the relay's node."""
    node_cores: float = 16.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, expected a positive, finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The bytes and seconds of one rollout step."""

    layout: str
    samples: int
    tokens: int
    """Sum of the lengths."""
    padded_tokens: int
    """Rows that routers consume, padding included."""
    bytes_per_token: int
    """Bytes of expert ids."""
    tensor_bytes_per_token: dict[str, int]
    """Bytes of each tensor that tokens bring beside them, as declared; all sums below have them for each token, prompts too."""
    frame_bytes: int
    """From engines to relay, as frames of one byte (or two) per id; the lossless codecs send fewer."""
    http_bytes: int
    """The same in base64, inside the JSON reply."""
    wire_bytes: int
    """From the relay to all TP0s: every row once for each stage, with the stage's layers and tensors; no padding."""
    received_bytes_tp0: int
    """The most that one TP0 receives."""
    placed_bytes_tp0: int
    """The largest shard of one TP0, padding included, before the scatter over TP: `expected_shard_bytes`."""
    held_bytes_tp0: int
    """Two shards where the routers are, the one in use and the next, with the tensors beside them in host memory. A GPU has two
    more buckets and their index, a host two pinned buckets; over nccl no shard comes ahead."""
    landed_bytes_per_rank: int
    """The most that one process keeps after the scatter over TP."""
    landed_bytes_all_ranks: int
    widened_bytes_per_rank: int
    """Ids of the largest micro-batch as a GPU widens them, all layers of a rank at once; kept for the backward pass where nothing
    is recomputed. A CPU widens one layer at a time."""
    relay_staging_bytes: int
    """The most that is staged for one receiver, whatever the tokens; nothing over tcp with one pipeline stage."""
    relay_gpu_bytes: int
    """Memory that a relay takes of a GPU over nccl."""
    store_needed_bytes: int
    """Rows of two steps and what lies beside them, one step off: a step that receivers have not acknowledged, and the next that
    engines generate meanwhile."""
    store_fits: bool
    """Whether `store_needed_bytes` are within `store_bytes`. Else engines wait while a step is delivered, and a step larger than
    `store_bytes` never seals."""
    relay_needs: dict[str, float]
    """What the relay asks of its node, with a step each `step_s`: bytes of memory, cores, and Gbit/s in and out."""
    node_lacks: tuple[str, ...]
    """What one node, with `http_gbit_s` in and `wire_gbyte_s` out, has too little of."""
    ordinary_bytes_per_dp: int
    """Tokens, log-probs and masks of the fullest DP rank, through the object store."""
    http_s: float
    place_s: float
    wire_s: float
    tcp_s: float
    """All receivers at once, a core for each connection."""
    nccl_s: float
    """One receiver after another, from one core and one GPU of the relay; trainers' cores are left alone."""
    default_http_bytes: int
    default_bytes_per_rank: int
    default_bytes_all_ranks: int
    default_host_bytes: int
    default_http_s: float
    default_manager_s: float
    default_fetch_s: float
    ratio: float
    """Bytes kept per rank, divided by those of the default path."""


def relay_gpu_bytes(bucket_bytes: int, *, receivers: int) -> int:
    """Return about how many bytes an NCCL relay takes of its GPU.

    These are two buckets, CUDA's context, and NCCL's buffers for each receiver, whatever the tokens.

    Args:
        bucket_bytes: Bytes of one bucket.
        receivers: The number of receivers.
    """
    return 2 * bucket_bytes + _CONTEXT_BYTES + receivers * _PAIR_BYTES


def beside_bytes(spec: RoutingSpec, *, spans: int, ranges: int = 0) -> int:
    """Return the bytes that the relay keeps beside a frame's rows.

    The store counts these bytes with the rows; else small frames would fill memory.

    Args:
        spec: The model's spec.
        spans: Provenance spans of the frame.
        ranges: Ranges of invalid rows.
    """
    return _FRAME_BYTES + 8 * spec.num_moe_layers + SPAN_BYTES * spans + RANGE_BYTES * ranges


def plan_of(
    lengths: Sequence[int],
    *,
    spec: RoutingSpec,
    layout: TrainerLayout,
    microbatch_size: int = 1,
    max_tokens: int | None = None,
) -> Plan:
    """Return a balanced plan of samples that have nothing but lengths.

    Args:
        lengths: Tokens of each sample.
        spec: The model's spec.
        layout: How the trainer is cut.
        microbatch_size: Samples of each micro-batch, without `max_tokens`.
        max_tokens: The token budget of each micro-batch, where it is given.
    """
    tokens = names_of(lengths)
    if max_tokens is None:
        assignment = Assignment.balanced(tokens, dp=layout.dp, microbatch_size=microbatch_size)
    else:
        assignment = Assignment.dynamic(tokens, dp=layout.dp, max_tokens=max_tokens)
    return plan_shards(assignment, tokens=tokens, spec=spec, layout=layout)


def add_up(plan: Plan, *, machines: Machines, tensors: Sequence[TokenTensor] = ()) -> Capacity:
    """Sum up all bytes and times of one plan.

    Args:
        plan: The plan of a step.
        machines: What the times rest on.
        tensors: Tensors that tokens bring beside expert ids.
    """
    spec, layout = plan.spec, plan.layout
    per_dp = [sum(sum(batch.tokens) for batch in rank) for rank in plan.microbatches]
    padded = [sum(batch.rows for batch in rank) for rank in plan.microbatches]
    rows = sum(plan.lengths) - len(plan.lengths)
    whole = [tensor.reshape(spec.num_moe_layers, spec.top_k) for tensor in tensors]
    beside = {tensor.name: tensor.bytes_per_token for tensor in whole}
    came = [
        [tensor.bytes_per_token for tensor in tensors_in(shard, tensors, stages=layout.pp)]
        for shard in plan.shards
    ]
    tensor_bytes = [_rows_of(shard) * sum(each) for shard, each in zip(plan.shards, came, strict=True)]
    received = [_received_bytes(shard) + more for shard, more in zip(plan.shards, tensor_bytes, strict=True)]
    default_row = spec.num_layers * spec.top_k * _INT32
    default_rank = max(padded) * default_row
    frame = rows * (spec.bytes_per_token + sum(beside.values()))
    held = _STEPS_HELD * (frame + len(plan.lengths) * beside_bytes(spec, spans=2))
    work = spec.num_moe_layers * spec.top_k / (48 * 8)  # the measured token had 48 x 8 ids
    gbit_s, cpu_s = 8e-9 / machines.step_s, rows * _RELAY_US_PER_TOKEN[spec.id_dtype.itemsize] * work * 1e-6
    needs = {"memory": held, "cores": cpu_s / machines.step_s}
    needs |= {"network in": frame * _BASE64 * gbit_s, "network out": sum(received) * gbit_s}
    has = (machines.node_bytes, machines.node_cores, machines.http_gbit_s, machines.wire_gbyte_s * 8)
    return Capacity(
        layout=str(layout), samples=len(plan.lengths), tokens=sum(plan.lengths), padded_tokens=sum(padded),
        bytes_per_token=spec.bytes_per_token, tensor_bytes_per_token=beside, frame_bytes=frame,
        http_bytes=round(frame * _BASE64), wire_bytes=sum(received), received_bytes_tp0=max(received),
        placed_bytes_tp0=max(shard.nbytes for shard in plan.shards), held_bytes_tp0=_SHARDS_HELD
        * max(shard.nbytes + more for shard, more in zip(plan.shards, tensor_bytes, strict=True)),
        landed_bytes_per_rank=max(shard.slot_bytes for shard in plan.shards),
        landed_bytes_all_ranks=layout.tp * sum(shard.slot_bytes for shard in plan.shards),
        widened_bytes_per_rank=max(map(_widened_bytes, plan.shards)), relay_staging_bytes=2 * machines.bucket_bytes,
        store_needed_bytes=held, relay_gpu_bytes=relay_gpu_bytes(machines.bucket_bytes, receivers=len(plan.shards)),
        store_fits=held <= machines.store_bytes, relay_needs=needs,
        node_lacks=tuple(name for name, most in zip(needs, has, strict=True) if needs[name] > most),
        ordinary_bytes_per_dp=max(per_dp) * _ORDINARY_BYTES_PER_TOKEN,
        http_s=frame * _BASE64 * 8 / (machines.http_gbit_s * 1e9),
        place_s=sum(padded) * machines.relay_us_per_token * work * 1e-6,
        wire_s=sum(received) / (machines.wire_gbyte_s * 1e9), tcp_s=max(
            max(received) / (machines.connection_gbyte_s * 1e9),
            sum(received) / (min(machines.wire_gbyte_s, machines.node_cores * machines.connection_gbyte_s) * 1e9),
        ), nccl_s=sum(received) / (min(machines.wire_gbyte_s, machines.gather_gbyte_s) * 1e9),
        default_http_bytes=round(rows * default_row * _BASE64),
        default_bytes_per_rank=default_rank,
        default_bytes_all_ranks=sum(padded) * default_row * layout.world_size // layout.dp,
        default_host_bytes=rows * default_row,
        default_http_s=rows * default_row * _BASE64 * 8 / (machines.http_gbit_s * 1e9),
        default_manager_s=rows * machines.manager_us_per_token * work * 1e-6,
        default_fetch_s=default_rank / (machines.object_store_gbyte_s * 1e9),
        ratio=max(shard.slot_bytes for shard in plan.shards) / default_rank,
    )  # fmt: skip


def _received_bytes(shard: Shard) -> int:
    # every row counts as one with routing; an MTP layer shares the rows of the layer that it replays
    return _rows_of(shard) * len(set(shard.sources)) * shard.spec.top_k * shard.spec.id_dtype.itemsize


def _widened_bytes(shard: Shard) -> int:
    rows = max(map(shard.slot_rows, range(len(shard.microbatches))), default=0)
    return rows * len(shard.layers) * shard.spec.top_k * _INT64


def _rows_of(shard: Shard) -> int:
    return int(shard.table.of_rank(shard.cp).real.sum())
