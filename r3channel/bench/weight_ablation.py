"""What each step of packed refit saves (NeMo-RL): per tensor -> packed -> per-receiver arguments -> cached metadata.

Real processes, one per tensor-parallel rank; every round interleaves all modes. Control bytes are those of an update after
the first, which is what a training run pays from then on. Depth 1 against 2 is measured in `weight_pair`.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import torch

from r3channel.bench.weight_pair import EngineProcess, manifest_of
from r3channel.bench.weight_peer import TIMEOUT_S
from r3channel.bench.weight_wire import weights_of
from r3channel.errors import WeightsDiffer
from r3channel.weights.buckets import pack
from r3channel.weights.digests import payload_digest
from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.refit import MODES, RefitReport, RefitSender, Share

RECEIVERS = 4
BUCKET_BYTES = 4 << 20


def measure(*, total_bytes: int, rounds: int) -> dict[str, Any]:
    """By mode: median wall seconds of an update of all receivers, and control bytes per receiver."""
    named = {
        name: tensor[: len(tensor) // RECEIVERS].clone() for name, tensor in weights_of(total_bytes)
    }  # one rank's rows
    metas = [TensorMeta.of(name, tensor) for name, tensor in named.items()]
    manifest = manifest_of(metas, cap_bytes=BUCKET_BYTES)
    receivers = [f"tp{rank}" for rank in range(RECEIVERS)]
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(contextlib.closing(EngineProcess())) for name in receivers}
        shares = {name: Share(manifest, engine.call) for name, engine in engines.items()}
        for engine in engines.values():
            engine.do("prepare", manifest=manifest.to_dict(), raw_bytes=0)
        senders = {
            mode: stack.enter_context(
                contextlib.closing(RefitSender(shares, device=torch.device("cpu"), mode=mode))
            )
            for mode in MODES
        }
        seen: dict[str, list[RefitReport]] = {mode: [] for mode in MODES}
        for _ in range(1 + rounds):
            for mode, sender in senders.items():
                seen[mode].append(sender.update(dict.fromkeys(receivers, named), timeout_s=TIMEOUT_S))
        _check(engines, named, metas)
    return {mode: _figures(reports[1:]) for mode, reports in seen.items()} | {
        "receivers": RECEIVERS,
        "tensors": len(metas),
        "buckets": len(manifest.buckets),
        "bytes_per_receiver": manifest.payload_bytes,
    }


def _figures(reports: list[RefitReport]) -> dict[str, float]:
    return {
        "wall_s": statistics.median(report.wall_s for report in reports),
        "control_bytes_per_receiver": max(reports[-1].control_bytes.values()),
    }


def _check(
    engines: dict[str, EngineProcess], named: dict[str, torch.Tensor], metas: list[TensorMeta]
) -> None:
    whole = Bucket.aligned(metas)
    expected_N = torch.zeros(whole.payload_bytes, dtype=torch.uint8)
    digest = payload_digest(pack(whole, list(named.values()), expected_N))
    for name, engine in engines.items():
        if int(engine.do("digest", raw=False)) != digest:
            raise WeightsDiffer(f"receiver {name} holds other bytes than were sent")
