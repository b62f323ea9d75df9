"""The reverse path: weights from the trainer to the engines, versioned and transactional. README.md beside this has one page.

    convert    Megatron's shards -> checkpoint tensors: gathered (`hf_weights`) or each rank's own (`hf_shards`)
    manifest   names, dtypes, shapes; units; flat buckets          sources    the caller's tensors, or another engine's
    checksums  what is in a tensor's bytes: digests, NaN           store      checkpoints, the file of what is held
    geometry   boxes, who holds them; the plan, byte-balanced      memory     for a staged copy: room, layout, mapping
    rank_link  a link to an engine's rank                          send_planner   all links: who connects, what is sent to whom
    loader_map, hold, receiver   the half inside the engine        engine     one engine: routes, state, links; who may serve
    ranks      what trainer ranks agree on                         config     what a session is told once
    transaction   what an update does when: states, no I/O         executor   carries it out
    staged     a staged update's calls, by all trainer ranks
    broadcast, group   without our half                            session    `WeightSync`
    progress   deadlines, stages, reports

Nothing is imported here, so that each place loads only what it uses.
"""

from __future__ import annotations
