"""Models of a server on a GPU, named by SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang's own, and what `--load-format dummy` fills in.

SGLang gives all parameters of one size the same values, norms too: every layer would route alike, and almost every token. With
R3TEST_TAP the server's choices are noted (`tests.engine.tapped`).
"""

from __future__ import annotations

import os

import torch
from sglang.srt.model_loader import loader

_STD = 0.02


def fill(model: torch.nn.Module) -> None:
    """Values of an untrained model, which differ from layer to layer; logits of routers have a deviation of about 1."""
    for name, values in model.state_dict().items():
        if torch.is_floating_point(values):
            values.fill_(1.0) if "norm" in name else values.normal_(std=_STD)


setattr(loader, "initialize_dummy_weights", fill)  # noqa: B010
if os.environ.get("R3TEST_TAP"):
    import tests.engine.tapped  # noqa: F401
