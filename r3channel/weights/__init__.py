"""The reverse path: weights from the trainer to the engines, versioned and transactional.

    convert   Megatron's shards -> Hugging Face names and tensors (collective over the trainer's ranks)
    buckets   tensors -> flat buckets in the layout that the receiver needs
    group     the process group that the engines join
    sglang    the HTTP contract of one engine
    session   updates of all of them, and of one alone
    contents, transaction, enrolment   its parts: what is sent; the stages of one update; its side of the registry
    checkpoint, kept   a folder on disk, and the host copy from which one engine is filled

Beside the broadcast, the exact way, where each rank sends what another rank needs and no more:

    namespace   fused parameters of both sides -> parts of Hugging Face tensors
    manifest    names, dtypes, shapes and places of tensors; its digest     geometry    boxes and layouts
    shardmap    who holds what, over all ranks of a side                    survey      gathers it over the group
    registry    engines, leases, epochs, versions; who may serve
    reshard     the plan: source map + target map -> operations             senders     balanced by bytes
    schedule    who meets whom in which round                               messages    operations -> buckets
    resharder   runs a plan over a transport                                hierarchy   once per node, then inside it
    push        runs a plan one-sided, without replies                      pipeline    every rank feeds its share to all
    colocated, lending, refit   through memory that trainer and engine share
    agreement, finite, receiver   plan hashes and votes; NaN and Inf; into an engine's parameters

Nothing is imported here, so that each place loads only what it uses.
"""

from __future__ import annotations
