"""The reverse path: weights from the trainer to the engines, versioned and transactional. README.md beside this has one page.

    convert    Megatron's shards -> checkpoint tensors: gathered (`hf_weights`) or each rank's own (`hf_shards`)
    quantise   float8 by blocks, as the engine's checkpoint has them
    manifest   names, dtypes, shapes; units; flat buckets          pack       a bucket's bytes: NaN, digests, names checked
    geometry   boxes, layouts, who holds what                      plan       the exact plan, byte-balanced
    wires      the broadcasts' group; links to engines' ranks; shared memory
    dryrun, receiver   the half inside the engine                  sglang     the HTTP contract of one engine
    member     one engine's states and calls                       executor   one update, either way
    exact      one update by all trainer ranks together            session    `WeightSync`
    store      host copy, checkpoint, the file of what is held     registry   engines, leases, versions; who may serve
    progress   deadlines, stages, reports

Nothing is imported here, so that each place loads only what it uses.
"""

from __future__ import annotations
