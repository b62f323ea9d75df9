"""The note that NCCL carried rows between two GPUs of this machine. `make gpu` writes it, `transport="auto"` asks for it.

It holds for the GPUs and the versions that it names: another torch or NCCL, or another machine with the same home folder, has to
show it again. Reading it imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from r3channel.transport.joining import gpu_of

NOTE = Path.home() / ".cache/r3channel/nccl.json"


def write() -> Path:
    """Called where two GPUs of this machine have just done it."""
    NOTE.parent.mkdir(parents=True, exist_ok=True)
    NOTE.write_text(json.dumps(_now()) + "\n")
    return NOTE


def read() -> dict[str, Any] | None:
    """What was run, or None."""
    try:
        note = json.loads(NOTE.read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and note.keys() >= {"torch", "nccl", "gpus"} else None


def why_not(device: int) -> str:
    """Why NCCL is not known to work from CUDA device `device` of this process; empty where it is."""
    note, now = read(), _now()
    if not 0 <= device < len(now["gpus"]):
        return f"this process has no CUDA device {device}"
    if note is None:
        return f"it never ran between two GPUs of this machine ({NOTE}: make gpu)"
    if now["gpus"][device] not in note["gpus"]:
        return f"it ran on other GPUs ({NOTE}: make gpu)"
    for what in ("torch", "nccl"):
        if note[what] != now[what]:
            return f"it ran with {what} {note[what]}, this is {now[what]} ({NOTE}: make gpu)"
    return ""


def _now() -> dict[str, Any]:
    import torch

    from r3channel.versions import nccl_version, torch_version

    gpus = [gpu_of(device) for device in range(torch.cuda.device_count())]
    return {"torch": torch_version(), "nccl": nccl_version(), "gpus": gpus}
