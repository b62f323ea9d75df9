"""Runs at the start of every Python process that has this folder on PYTHONPATH; acts only when R3DEMO_EMBEDDED=1.

The torchvision wheel links libtorch_cuda, so beside a CPU torch its operators are never registered and importing it fails
when its Python side describes `torchvision::nms` and `qnms` (torchvision 0.28, `_meta_registrations.py`). An import hook
declares both operators, without a kernel, just before torchvision is imported. Text models never call them.
Another `sitecustomize` further down the path is run too, as if this one were not here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _declare_once() -> None:
    """Two checkouts may both have put their shims on the path; the operators can be declared once only."""
    if not any(type(finder).__name__ == _DeclareTorchvisionOperators.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeclareTorchvisionOperators())


def _run_next_sitecustomize() -> None:
    folders = [os.path.abspath(folder or ".") for folder in sys.path]
    further_down = folders[folders.index(_HERE) + 1 :] if _HERE in folders else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", further_down)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("R3DEMO_EMBEDDED") == "1":
    _declare_once()
_run_next_sitecustomize()
