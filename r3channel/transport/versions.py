"""The versions of this process that the other end of a group must share: NCCL hangs or fails between versions. Asks no device."""

from __future__ import annotations

import torch
from torch.cuda import nccl


def torch_version() -> str:
    """With its build, for example `2.13.0+cpu`."""
    return str(torch.__version__)


def nccl_version() -> str:
    """For example `2.27.5`; empty in a build of torch without it, which lacks the function behind this one."""
    try:
        return ".".join(map(str, nccl.version()))
    except AttributeError:
        return ""
