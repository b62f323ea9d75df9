"""Parameters of 8 GB become what is staged in host memory, beside a flat bucket on the device that is split and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from timeit import repeat

import torch

from r3channel.errors import WeightsError
from r3channel.weights import staged_copy
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.staged_copy import staged_bytes, staged_views
from tests.gpu.facts import Facts, words_of

PARAMS = 96


def seconds(device: str, call: Callable[[], object]) -> float:
    """The less of two, until the device has done it."""
    wait: Callable[[], None] = getattr(torch, device).synchronize
    return min(repeat(lambda: (call(), wait()), number=1, repeat=2))


def copied(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> None:
    for to, tensor in zip(new, old, strict=True):
        to.copy_(tensor, non_blocking=True)


def check(device: str, facts: Facts) -> None:
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    items = 2047, (85 << (10 if facts.small else 20)) - 1  # neither fills its last word
    names = [(f"p{at}", (items[at % 2],)) for at in range(PARAMS)]
    metas = [TensorMeta(name=name, dtype=torch.bfloat16, shape=shape) for name, shape in names]
    words = torch.randint(-(1 << 62), 1 << 62, (staged_bytes(metas) // 8,), device=where)
    bucket, gb = staged_views(metas, words.view(torch.uint8)), words.nbytes / 1e9
    params = [torch.zeros_like(part) for part in bucket]
    loaded_s = seconds(device, partial(copied, params, bucket))
    facts.note(f"flattened bucket of {gb:.3f} GB on the device, s", loaded_s)
    locked = staged_copy._lock_pages
    for way, most in {"two buffers": staged_copy._SLOT_BYTES, "locked": words.nbytes}.items():
        staged_copy._lock_pages = lambda owner, memory, most=most: (
            memory.nbytes <= most and locked(owner, memory)
        )
        copy = staged_copy.StagedCopy(metas, device=where)
        back_s = seconds(device, partial(copied, copy.views, bucket))
        facts.note(f"{way}: device to host, GB/s", gb / back_s)
        copy.seal()
        for param in params:
            param.zero_()
        pause_s = seconds(device, partial(copy.change_over, params))
        pairs = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(params, bucket, strict=True)]
        wrong = sum(not torch.equal(*pair) for pair in pairs)
        facts.expect(f"{way}: parameters with other bytes", wrong, wrong == 0, "0")
        facts.note(f"{way}: change-over, s", pause_s)
        facts.note(f"{way}: change-over, of the flattened load", pause_s / loaded_s)
        good = gb / pause_s >= 20 or way == "two buffers"
        facts.limit(f"{way}: change-over, GB/s", gb / pause_s, good, "at least 20")
        alone_s = seconds(device, partial(copied, params, copy.views))
        facts.note(f"{way}: host to device alone, GB/s", gb / alone_s)
        copy.views[1].view(torch.uint8)[-1] ^= 1
        told = words_of(partial(copy.change_over, params), WeightsError)
        facts.expect(f"{way}: a changed byte", told, bool(told), "an error")
    staged_copy._lock_pages = locked
