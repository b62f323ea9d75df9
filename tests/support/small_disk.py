"""A small file system of a process's own, to be filled."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_NEW_NAMESPACE = 0x20000


def mounted(folder: str | Path, size: str) -> bool:
    """Mount a tmpfs there that nobody else sees; return whether this process may."""
    mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "none", str(folder)])
    allowed = not ctypes.CDLL(None).unshare(_NEW_NAMESPACE)
    return allowed and not any(subprocess.call(["mount", *mount]) for mount in mounts)
