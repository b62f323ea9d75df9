"""Whether a server could start: its packages, its plug-in, its arguments, one of its kernels: before any model is made."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.gpu.facts import Facts
from tests.gpu.server import options_of, written

MODULES = (
    "sglang.srt.server_args", "sglang.srt.layers.moe.topk", "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.moe.fused_moe_triton", "sglang.srt.models.qwen3_moe", "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager", "sglang.srt.entrypoints.http_server",
    "tests.gpu.served.qwen3_moe",
)  # fmt: skip


def check(device: str, facts: Facts) -> None:
    packages = ("torch", "sglang", "sglang-kernel", "transformers", "tokenizers")
    facts.note("versions", {name: version(name) for name in packages})
    with tempfile.TemporaryDirectory() as folder:
        model, _ = written(device, Path(folder))
        options = options_of(device, model, {})
        os.environ.update(options.environment())
        begin = time.monotonic()
        for name in MODULES:
            import_module(name)
        facts.note("imports, s", time.monotonic() - begin)
        import_module("sglang.srt.plugins").load_plugins()  # ours ends the process where a hook has no place
        applied = "r3channel.engine.sglang" in sys.modules
        facts.expect("our plug-in is found and applied", applied, applied, "true")
        args: Any = import_module("sglang.srt.server_args")
        attention = args.prepare_server_args(options.arguments(port=30000)).attention_backend
        facts.expect("attention of the server", attention, attention == "triton", "triton")
    kernels, rows = import_module("sgl_kernel"), torch.ones((2, 2048), device=device, dtype=torch.bfloat16)
    change = float((kernels.rmsnorm(rows, rows[0]) - rows).abs().max())
    facts.expect("rmsnorm of ones, off by", change, change < 1e-2, "0")
