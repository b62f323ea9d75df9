"""Whole servers for the checks: SGLang 0.5.15.post1 with its own kernels on a GPU, the embedded one on a CPU.

Which release is found `tests.gpu.run` says, by the path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from examples.embedded.model import ModelShape, config_of, write_model, write_tokenizer
from examples.embedded.sglang import EngineOptions, EngineServer
from r3channel.model.spec import RoutingSpec
from tests.support.waits import ENGINE_S, await_memory

READY_S = 300.0
"""With kernels that are compiled at their first use."""
LAYERS = 12
"""14 GB in bfloat16: four servers beside one another on 80 GB."""
WIDTHS: dict[str, Any] = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "mlp_only_layers": [],
}  # fmt: skip
"""As Qwen3-30B-A3B has them, with 128 experts, top 8."""
RUNNING = 128
"""Requests at most."""
GRAPHS = ("1", "2", "4", "8", "16", "32", "64", str(RUNNING))


Variant = Mapping[str, Any]
"""How a server captures, if it does: `r3channel`, `capture` and `env` of its options."""


def options_of(device: str, model: Path, variant: Variant) -> EngineOptions:
    if device == "cpu":
        return EngineOptions(**{"model": model, "chunked_prefill_size": 128, **variant})
    arguments = ("--load-format", "dummy", "--mem-fraction-static", "0.95", "--cuda-graph-bs-decode", *GRAPHS)
    own: dict[str, Any] = {"model": model, **variant, "extra_args": arguments}
    own["env"] = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.gpu.served", **variant.get("env", {})}
    own |= {"max_total_tokens": 65_536, "max_running_requests": RUNNING, "chunked_prefill_size": 2048}
    return EngineOptions(**own, device="cuda", dtype="bfloat16")


def written(device: str, folder: Path) -> tuple[Path, RoutingSpec]:
    """The model's folder: on a GPU what describes it, and the server makes its values."""
    if device == "cpu":
        model = write_model(folder / "model")
    else:
        model = folder / "model"
        model.mkdir()
        config = config_of(ModelShape(layers=LAYERS, dense_layers=(), dtype="bfloat16")) | WIDTHS
        (model / "config.json").write_text(json.dumps(config))
        write_tokenizer(model)
    return model, RoutingSpec.from_hf_config(model)


@contextmanager
def serving(
    device: str, model: Path, variants: Mapping[str, Variant], *, logs: Path
) -> Iterator[dict[str, EngineServer]]:
    """Name -> its server; all start beside one another."""
    if device == "cpu":
        await_memory(3 * len(variants), "servers of a check")
    with ExitStack() as stack:
        servers = dict[str, EngineServer]()
        for name, variant in variants.items():
            server = EngineServer(options_of(device, model, variant), log_path=logs / f"{name}.log")
            servers[name] = stack.enter_context(server)
        deadline_s = time.monotonic() + (READY_S if device == "cuda" else ENGINE_S)
        for server in servers.values():
            server.wait_ready(deadline_s - time.monotonic())
        yield servers
