"""Whole servers for the checks: SGLang 0.5.15.post1 with its own kernels on a GPU, the embedded one on a CPU.

Which release is found `tests.gpu.run` says, by the path.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

from examples.embedded.model import ModelShape, config_of, write_model, write_tokenizer
from examples.embedded.sglang import EngineOptions, EngineServer, free_port
from r3channel.model.spec import RoutingSpec
from r3channel.transport.http import urlopen

READY_S = 150.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a server captures, if it does."""

    r3channel: bool = True
    capture: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


class GpuOptions(EngineOptions):
    """Kernels that need no flashinfer; graphs of decode passes alone, since those of prefills are compiled for minutes."""

    def arguments(self, *, port: int) -> list[str]:
        arguments = ["--model-path", os.fspath(self.model), "--load-format", "dummy", "--device", "cuda"]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--attention-backend", "triton"]
        arguments += ["--sampling-backend", "pytorch", "--moe-runner-backend", "triton"]
        arguments += ["--grammar-backend", "none", "--disable-custom-all-reduce", "--skip-server-warmup"]
        arguments += ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *GRAPHS]
        arguments += ["--sleep-on-idle", "--log-level", "warning", "--dtype", "bfloat16"]
        arguments += ["--max-total-tokens", str(self.max_total_tokens), "--mem-fraction-static", "0.95"]
        arguments += ["--max-running-requests", str(RUNNING), "--chunked-prefill-size", "2048"]
        arguments += ["--random-seed", "0", "--weight-version", "0"]
        return [*arguments, *["--enable-return-routed-experts"] * self.capture]

    def environment(self) -> dict[str, str]:
        own = {
            "R3CHANNEL_ENGINE": str(int(self.r3channel)),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.gpu.served",
        }
        own |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_GRPC_PORT": str(free_port())}
        own |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return {**os.environ, **own, **self.env, "R3DEMO_PARENT_PID": str(os.getpid())}


class GpuServer(EngineServer):
    """Asks no kernel whose port it is: some containers do not tell."""

    def _answers(self) -> bool:
        with suppress(OSError, URLError), urlopen(self.url + "/health", timeout_s=2) as reply:
            return reply.status == 200
        return False


def written(device: str, folder: Path, *, layers: int = LAYERS) -> tuple[Path, RoutingSpec]:
    """The model's folder: on a GPU what describes it, and the server makes its values."""
    if device == "cpu":
        model = write_model(folder / "model")
    else:
        model = folder / "model"
        model.mkdir()
        config = config_of(ModelShape(layers=layers, dense_layers=(), dtype="bfloat16")) | WIDTHS
        (model / "config.json").write_text(json.dumps(config))
        write_tokenizer(model)
    return model, RoutingSpec.from_hf_config(model)


@contextmanager
def serving(
    device: str, model: Path, variants: Mapping[str, Variant], *, logs: Path
) -> Iterator[dict[str, EngineServer]]:
    """Name -> its server; all start beside one another."""
    with ExitStack() as stack:
        servers = dict[str, EngineServer]()
        for name, variant in variants.items():
            given: dict[str, Any] = {"r3channel": variant.r3channel, "capture": variant.capture}
            make, options = (
                (GpuServer, GpuOptions(model=model, env=variant.env, max_total_tokens=65_536, **given))
                if device == "cuda"
                else (
                    EngineServer,
                    EngineOptions(model=model, env=variant.env, chunked_prefill_size=128, **given),
                )
            )
            servers[name] = stack.enter_context(make(options, log_path=logs / f"{name}.log"))
        deadline_s = time.monotonic() + READY_S
        for server in servers.values():
            server.wait_ready(deadline_s - time.monotonic())
        yield servers
