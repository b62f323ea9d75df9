"""The reverse path: weights from the trainer to the engines, versioned and transactional.

    convert   Megatron's shards -> Hugging Face names and tensors (collective over the trainer's ranks)
    buckets   tensors -> flat buckets in the layout that the receiver needs
    group     the process group that the engines join
    sglang    the HTTP contract of one engine
    session   one update as a transaction over all of them

Nothing is imported here, so that each place loads only what it uses.
"""

from __future__ import annotations
