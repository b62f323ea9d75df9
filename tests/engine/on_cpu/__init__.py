"""Models of a server on a CPU with what SGLang 0.5.23 lacks there for them, in torch; the engine room's README has the list.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package. Routers, top-k and capture are SGLang's own.
"""

from __future__ import annotations

import torch

# The experts of the embedded engine, for all of these.
from examples.embedded.sglang_models import qwen3_moe as qwen3_moe

# EPLB's rebalancing frees a cache that a CPU has not.
torch.cpu.empty_cache = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
