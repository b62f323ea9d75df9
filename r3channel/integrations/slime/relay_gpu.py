"""Chooses the GPU from which slime's relay sends over NCCL: an engine's, which it shares, or one that slime leaves.

A shared GPU is taken beside Ray's accounting: by its number, on the node that has it. Imports neither Ray nor slime.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from r3channel.errors import ConfigError
from r3channel.plan.capacity import relay_gpu_bytes

_TCP = "or --r3-transport tcp"
SEES_ALL = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Without this variable Ray hides every GPU from an actor that asks for none."""
LIKE_TRAINERS = {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0")}
"""slime's trainers have this value (`ray/actor_group.py`). On one node the two ends of an NCCL pair need the same."""


def shared_gpu(nodes: Mapping[int, str], bundles: Sequence[int], gpus: Sequence[Any]) -> tuple[str, str]:
    """Return the first engine's GPU.

    Args:
        nodes: The node of each bundle of slime's placement group.
        bundles: The bundles of engines.
        gpus: The GPUs of these bundles, as slime numbers them.

    Returns:
        The id of the GPU's node in Ray, and the GPU's number there.

    Raises:
        ConfigError: If slime starts no engine that has a GPU.
    """
    if not bundles:
        text = "--r3-relay-gpu shared: slime starts no engine whose GPU the relay could share (external ones, or none); "
        raise ConfigError(f"{text}expected --r3-relay-gpu own, {_TCP}")
    return nodes[bundles[0]], str(gpus[0])


def check_own(there: int, taken: int) -> None:
    """Check that slime leaves the relay a GPU.

    Args:
        there: Number of the cluster's GPUs.
        taken: Number of GPUs that slime takes.

    Raises:
        ConfigError: If no GPU is left. Ray would wait for one without end.
    """
    if there <= taken:
        text = f"--r3-relay-gpu own: the rollout manager needs a GPU of its own, and slime takes {taken} of {there}; give "
        raise ConfigError(f"{text}the cluster one more, --r3-relay-gpu shared, {_TCP}")


def device_of(gpu: str, visible: str | None) -> int:
    """Return the index of a GPU among a process's devices.

    Args:
        gpu: Number of the GPU on its node.
        visible: The process's CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: If the process does not see the GPU.

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
    """Check that an engine leaves the relay room on a shared GPU.

    Args:
        args: Prepared arguments.
        total_bytes: Memory of the GPU.
        receivers: Number of receivers that the relay sends to.

    Raises:
        ConfigError: If `--sglang-mem-fraction-static` leaves no room.
    """
    fraction = getattr(args, "sglang_mem_fraction_static", None)
    needs = relay_gpu_bytes(args.r3_channel["bucket_bytes"], receivers=receivers)
    if fraction and (1 - fraction) * total_bytes < needs:
        most = int(100 * (1 - needs / total_bytes)) / 100
        raise ConfigError(
            f"--sglang-mem-fraction-static {fraction} leaves {(1 - fraction) * total_bytes / 1e9:.1f} of the "
            f"{total_bytes / 1e9:.0f} GB of a GPU that the relay shares, and it takes about {needs / 1e9:.1f}; expected at most "
            f"{most} less what the engine's graphs take, --r3-relay-gpu own, {_TCP}"
        )
