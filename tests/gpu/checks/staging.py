"""One staging object for all receivers of a relay: eight threads, a thousand buckets, a stream that is late.

And the host fills a bucket while another one is sent.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from r3channel.relay.send_buffers import BUCKETS_ALIVE, DeviceStaging
from tests.gpu.facts import Facts

THREADS, BUCKETS, NBYTES = 8, 1000, 1 << 20
LATE_CYCLES = 200_000
SLOW_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock."""


def send(staging: DeviceStaging, thread: int) -> int:
    """One receiver's buckets, two alive; how many arrived with another hash."""
    rng, wrong = np.random.default_rng(thread), 0
    for _ in range(BUCKETS // THREADS // BUCKETS_ALIVE):
        with staging.turn(lambda: None, every_s=1.0):
            buffers, sent = staging.buffers(NBYTES), []
            for slot, buffer_N in enumerate(buffers):
                buffer_N[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
                torch.cuda._sleep(LATE_CYCLES)
                sent.append(staging.stage(slot, NBYTES).clone())
            wanted = [xxh3_64_intdigest(buffer_N.tobytes()) for buffer_N in buffers]
            found = [xxh3_64_intdigest(one.cpu().numpy()) for one in sent]
            wrong += sum(one != two for one, two in zip(found, wanted, strict=True))
    return wrong


def check(device: str, facts: Facts) -> None:
    staging = DeviceStaging(0)
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = sum(pool.map(lambda thread: send(staging, thread), range(THREADS)))
    facts.expect("buckets with another hash", wrong, wrong == 0, "0")
    facts.expect("pinned buckets", len(staging._tensors), len(staging._tensors) == BUCKETS_ALIVE, "2")
    overlap(staging, facts)


def overlap(staging: DeviceStaging, facts: Facts) -> None:
    """A stream stands in for NCCL's kernels, ordered after the staging stream as ProcessGroupNCCL orders its own."""
    sending = torch.cuda.Stream()
    with staging.turn(lambda: None, every_s=1.0):
        for slot, buffer_N in enumerate(staging.buffers(NBYTES)):
            buffer_N[:] = slot + 1
            staging.stage(slot, NBYTES)  # makes its memory
        torch.cuda.synchronize()
        bucket_N = staging.stage(0, NBYTES)
        sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sending):
            torch.cuda._sleep(SLOW_CYCLES)
            sent_N = bucket_N.clone()
        staging.stage(1, NBYTES)
        waited = sending.query()
        sending.synchronize()
    facts.expect("the host waited for the send", waited, not waited, "false")
    facts.expect("bytes that were sent", sent_N.unique().tolist(), bool((sent_N == 1).all()), "[1]")
