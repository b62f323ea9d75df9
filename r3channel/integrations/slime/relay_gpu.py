"""Chooses the GPU from which slime's relay sends over NCCL: an engine's, which it shares, or one that slime leaves.

A shared GPU is taken beside Ray's accounting: by its number, on the node that has it. Imports neither Ray nor slime.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from r3channel.errors import ConfigError
from r3channel.plan.capacity import relay_gpu_bytes

_TCP = "or --r3-transport tcp"
SEES_ALL = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Else Ray hides every GPU from an actor that asks for none."""


class SharedGpu(NamedTuple):
    """An engine's GPU: the id of its node in Ray, and its number there."""

    node: str
    gpu: str


def shared(nodes: Mapping[int, str], bundles: Sequence[int], gpus: Sequence[Any]) -> SharedGpu:
    """Return the first engine's GPU.

    Args:
        nodes: the node of each bundle of slime's placement group.
        bundles: those of engines.
        gpus: their GPUs, as slime numbers them.

    Raises:
        ConfigError: slime starts no engine that has one.
    """
    if not bundles:
        text = "--r3-relay-gpu shared: slime starts no engine whose GPU the relay could share (external ones, or none); "
        raise ConfigError(f"{text}expected --r3-relay-gpu own, {_TCP}")
    return SharedGpu(nodes[bundles[0]], str(gpus[0]))


def check_own(there: int, taken: int) -> None:
    """Raise ConfigError where slime leaves the relay no GPU: Ray would wait for one without end."""
    if there <= taken:
        text = f"--r3-relay-gpu own: the rollout manager needs a GPU of its own, and slime takes {taken} of {there}; give "
        raise ConfigError(f"{text}the cluster one more, --r3-relay-gpu shared, {_TCP}")


def device_of(gpu: str, visible: str | None) -> int:
    """Return which of a process's devices a GPU is; `visible` is its CUDA_VISIBLE_DEVICES.

    >>> device_of("5", None), device_of("5", "4,5")
    (5, 1)
    """
    listed = [each.strip() for each in (visible or "").split(",") if each.strip()]
    if listed and gpu not in listed:
        text = f"--r3-relay-gpu shared: the relay's process sees the GPUs {visible} (CUDA_VISIBLE_DEVICES), expected {gpu}, an"
        raise ConfigError(
            f"{text} engine's, among them; was the variable set for workers? Expected --r3-relay-gpu own, {_TCP}"
        )
    return listed.index(gpu) if listed else int(gpu)


def check_room(args: Namespace, total_bytes: int, *, receivers: int) -> None:
    """Raise ConfigError where the engine's `--sglang-mem-fraction-static` leaves no room on a GPU of `total_bytes`."""
    fraction = getattr(args, "sglang_mem_fraction_static", None)
    needs = relay_gpu_bytes(args.r3_channel["bucket_bytes"], receivers=receivers)
    if fraction and (1 - fraction) * total_bytes < needs:
        most = int(100 * (1 - needs / total_bytes)) / 100
        text = (
            f"--sglang-mem-fraction-static {fraction} leaves {(1 - fraction) * total_bytes / 1e9:.1f} of the "
        )
        text += f"{total_bytes / 1e9:.0f} GB of a GPU that the relay shares, and it takes about {needs / 1e9:.1f}; expected at "
        raise ConfigError(f"{text}most {most} less what the engine's graphs take, --r3-relay-gpu own, {_TCP}")
