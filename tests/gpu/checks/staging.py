"""One staging object for all receivers of a relay: eight threads, a thousand buckets, a stream that is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from r3channel.relay.send_buffers import BUCKETS_ALIVE, DeviceStaging
from tests.gpu.facts import Facts

THREADS, BUCKETS, NBYTES = 8, 1000, 1 << 20
LATE_CYCLES = 200_000


def send(staging: DeviceStaging, thread: int) -> int:
    """One receiver's buckets, two alive; how many arrived with another hash."""
    rng, wrong = np.random.default_rng(thread), 0
    for _ in range(BUCKETS // THREADS // BUCKETS_ALIVE):
        with staging.turn(lambda: None, every_s=1.0):
            buffers, sent = staging.buffers(NBYTES), []
            for slot, buffer_N in enumerate(buffers):
                buffer_N[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
                torch.cuda._sleep(LATE_CYCLES)
                sent.append(staging.staged(slot, NBYTES).clone())
            wanted = [xxh3_64_intdigest(buffer_N.tobytes()) for buffer_N in buffers]
            wrong += sum(
                xxh3_64_intdigest(one.cpu().numpy()) != two for one, two in zip(sent, wanted, strict=True)
            )
    return wrong


def check(device: str, facts: Facts) -> None:
    staging = DeviceStaging(0)
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = sum(pool.map(lambda thread: send(staging, thread), range(THREADS)))
    facts.expect("buckets with another hash", wrong, wrong == 0, "0")
    facts.expect("pinned buckets", len(staging._tensors), len(staging._tensors) == BUCKETS_ALIVE, "2")
