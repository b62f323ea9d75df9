"""Drives the patched capture path of SGLang 0.5.9 in a process of its own; everything else of SGLang is a stand-in.

python drive_patch.py FOLDER     FOLDER: the patched wheel; prints one line of JSON
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

REAL = (
    "sglang.srt.layers.moe.routed_experts_capturer",
    "sglang.srt.managers.scheduler_output_processor_mixin",
    "sglang.srt.managers.scheduler_update_weights_mixin",
)
LAYERS, DENSE, EXPERTS, TOP_K, FUSED = 4, 1, 128, 8, 1
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "mlp_only_layers": [0], "decoder_sparse_step": 1,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
}  # fmt: skip


class StandIn(types.ModuleType):
    """A module that has any name; each is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


class StandIns(MetaPathFinder, Loader):
    """All of sglang but `REAL`, which is loaded from the patched wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in REAL:
            file = self.root.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname.split(".")[0] == "sglang":
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def set_up(root: Path) -> Any:
    sys.meta_path.insert(0, StandIns(root))
    args = SimpleNamespace(
        enable_return_routed_experts=True, speculative_algorithm=None, disaggregation_mode="null", pp_size=1,
        enable_hierarchical_cache=False, enable_lmcache=False, weight_version="default",
        enable_two_batch_overlap=False, enable_pdmux=False, moe_a2a_backend="none", moe_runner_backend="auto",
        chunked_prefill_size=16, dp_size=1, host="127.0.0.1", port=30000,
    )  # fmt: skip
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    server_args.get_global_server_args = lambda: args
    attention: Any = importlib.import_module("sglang.srt.layers.dp_attention")
    attention.is_dp_attention_enabled = lambda: False
    attention.get_attention_tp_rank = lambda: 0
    return importlib.import_module(REAL[0])


def create(module: Any) -> Any:
    return module.RoutedExpertsCapturer.create(
        enable=True, model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: CONFIG)),
        num_fused_shared_experts=FUSED, num_tokens=64, max_running_requests=4, device="cpu",
    )  # fmt: skip


def forward(capturer: Any, ids_TAK: np.ndarray, slots: list[int], *, decode: bool) -> None:
    """One pass: every sparse layer captures its ids, shared-expert column last; then the end of the pass."""
    for layer in range(DENSE, LAYERS):
        shared = np.full((len(ids_TAK), FUSED), EXPERTS, np.int32)
        capturer.capture(
            layer_id=layer, topk_ids=torch.from_numpy(np.concatenate([ids_TAK[:, layer], shared], axis=1))
        )
    mode = SimpleNamespace(is_decode=lambda: decode, is_mixed=lambda: False)
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots), forward_mode=mode)
    capturer.on_forward_end(forward_batch=batch, can_run_graph=False, cuda_graph_batch=None)


def main(root: str) -> None:
    module = set_up(Path(root))
    os.environ["R3CHANNEL_ENGINE"] = "1"
    capturer = create(module)
    module.set_global_experts_capturer(capturer)
    rng = np.random.default_rng(0)
    ids_TAK = rng.random((9, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int32)
    forward(capturer, ids_TAK[:6], [10, 11, 12, 13, 14, 15], decode=False)
    updates: Any = importlib.import_module(REAL[2])
    worker = SimpleNamespace(update_weights_from_distributed=lambda request: (True, ""))
    scheduler = SimpleNamespace(tp_worker=worker)
    request = SimpleNamespace(flush_cache=False, weight_version="5")
    updates.UpdateWeightsFromDistributedReqOutput = lambda *_: None
    updates.SchedulerUpdateWeightsMixin.update_weights_from_distributed(scheduler, request)
    for row, slot in ((6, 3), (7, 40), (8, 41)):
        forward(capturer, ids_TAK[row : row + 1], [slot], decode=True)

    table = torch.zeros((2, 16), dtype=torch.int32)
    table[1, :9] = torch.tensor([10, 11, 12, 13, 14, 15, 3, 40, 41])
    mixin: Any = importlib.import_module(REAL[1])
    scheduler = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    replies = []
    for wants in (True, False):
        req = SimpleNamespace(
            rid="r1", req_pool_idx=1, seqlen=10, return_routed_experts=wants, origin_input_ids=[1],
            routed_experts=None,
        )  # fmt: skip
        mixin.SchedulerOutputProcessorMixin.maybe_collect_routed_experts(scheduler, req)
        replies.append(req.routed_experts)
    os.environ["R3CHANNEL_ENGINE"] = "0"
    module._RoutedExpertsCapturerReal = lambda *_, **__: "SGLang's own"
    facts = {
        "capturer": type(capturer).__name__, "frame": replies[0].numpy().tobytes().hex(),
        "ids": ids_TAK[:, DENSE:].tolist(), "without opt-in": replies[1], "off": create(module),
    }  # fmt: skip
    print("FACTS " + json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
