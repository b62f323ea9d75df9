"""What capture costs SGLang's scheduler thread: its own functions on the real classes, stock and ours, in one process.

Run as a program in the embedded environment; prints one line of JSON. CPU time of the calling thread; fresh slots for every
call, in a host cache that is larger than the processor's caches, as an engine's is.

    python -m r3channel.bench.scheduler_calls --rounds 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.spec import RoutingSpec

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
ROWS = (1000, 4000, 16000)
SLOTS = 120_000
BATCH = 32
"""Requests that decode together: a request's decoded rows lie this many slots apart."""
ANSWER = "R3CHANNEL-CALLS "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--slots", type=int, default=SLOTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(rounds=options.rounds, slots=options.slots)
    print(ANSWER + json.dumps(result), flush=True)


def measure(*, rounds: int, slots: int) -> dict[str, Any]:
    """{variant: {"scheduler_us_per_request": {rows: us}, "scheduler_us_per_step": us}} for `stock` and `r3channel`."""
    sides = {"stock": Stock(slots), "r3channel": Ours(slots)}
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {name: {"scheduler_us_per_request": {}} for name in sides}
    for rows in (rows for rows in ROWS if rows < slots):
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 2):
            table = torch.from_numpy(slots_of_request(rows, slots=slots, rng=rng))[None]
            for name, side in sides.items():
                spent_us = thread_us(lambda side=side, table=table: side.finish(table))
                seen[name] += [spent_us] if number >= 2 else []
        for name, values in seen.items():
            result[name]["scheduler_us_per_request"][str(rows)] = round(statistics.median(values), 1)
    for name, value in _steps(sides, rounds=rounds, slots=slots, rng=rng).items():
        result[name]["scheduler_us_per_step"] = round(value, 1)
    return result


def _steps(sides: dict[str, Any], *, rounds: int, slots: int, rng: np.random.Generator) -> dict[str, float]:
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds * 10 + 5):
        slots_T = torch.from_numpy(rng.choice(slots, BATCH, replace=False))
        for name, side in sides.items():
            spent_us = thread_us(lambda side=side, slots_T=slots_T: side.step(slots_T))
            seen[name] += [spent_us] if number >= 5 else []
    return {name: statistics.median(values) for name, values in seen.items()}


def thread_us(call: Callable[[], object]) -> float:
    start_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start_ns) / 1e3


def slots_of_request(rows: int, *, slots: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """int32 [rows + 1]: a quarter prefilled in one run of slots, the rest decoded among `BATCH` requests."""
    prompt = rows // 4
    start = int(rng.integers(slots))
    decoded = start + prompt + np.arange(rows + 1 - prompt) * BATCH
    return (np.concatenate([start + np.arange(prompt), decoded]) % slots).astype(np.int32)


def random_ids(rows: int) -> torch.Tensor:
    """int32 [rows, layers, K], distinct within a row; a block that repeats."""
    scores = np.random.default_rng(1).random((256, SPEC.num_layers, SPEC.num_experts), dtype=np.float32)
    block = torch.from_numpy(scores.argsort(-1)[..., : SPEC.top_k].astype(np.int32))
    return block.repeat(-(-rows // len(block)), 1, 1)[:rows]


class Stock:
    """SGLang's capturer and its collecting method, on buffers of our making."""

    def __init__(self, slots: int) -> None:
        from sglang.srt.managers.scheduler_components import batch_result_processor as module
        from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

        self._module = module
        self._collect: Any = module.SchedulerBatchResultProcessor._maybe_collect_routed_experts
        self.capturer = self._capturer(RoutedExpertsCapturer)
        self.capturer.host_cache = SimpleNamespace(buffer=random_ids(slots))

    def _capturer(self, kind: type) -> Any:
        capturer: Any = object.__new__(kind)
        capturer.device_cache = SimpleNamespace(buffer=random_ids(BATCH))
        capturer.topk_size = SPEC.top_k
        return capturer

    def finish(self, table: torch.Tensor) -> Any:
        """A request ends: what the scheduler does before the reply can be sent."""
        req = self._request(table)
        self._module.get_global_experts_capturer = lambda: self.capturer
        self._collect(SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)), req)
        return req.routed_experts

    def _request(self, table: torch.Tensor) -> Any:
        return SimpleNamespace(
            rid="r",
            return_routed_experts=True,
            routed_experts=None,
            routed_experts_start_len=0,
            origin_input_ids=[1] * (table.shape[1] // 4),
            output_ids_through_stop=[1] * (table.shape[1] - table.shape[1] // 4),
            kv=SimpleNamespace(req_pool_idx=0),
        )

    def step(self, slots_T: torch.Tensor) -> None:
        """A decode pass ends and its rows reach the host cache; without a GPU the copy between is none."""
        batch = SimpleNamespace(
            out_cache_loc=slots_T,
            out_cache_loc_virtual=None,
            forward_mode=SimpleNamespace(is_decode=lambda: True),
        )
        self.capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True).finalize()


class Ours(Stock):
    """The same through our hooks."""

    def __init__(self, slots: int) -> None:
        super().__init__(1)
        from r3channel.config import EngineConfig
        from r3channel.engine import sglang as room
        from r3channel.engine.capture import LayerSelection, SlotRows
        from r3channel.engine.delivery import Outlet
        from r3channel.routing import RowKind
        from r3channel.wire.hello import Hello

        hello = Hello(
            engine="bench", boot_id=1, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="", r3channel="", hooks=(),
            delivery="inband", codec="auto",
        )  # fmt: skip
        self._room: Any = room
        self.capturer = self._capturer(room.FrameCapturer)
        rows = SlotRows(SPEC, random_ids(slots).to(torch.uint8))
        rows._stamps.fill_(rows._stamp((3, int(RowKind.DECODED))))
        self.capturer.host_cache = SimpleNamespace(rows=rows)
        self.capturer.outlet = Outlet(EngineConfig(), hello)
        self.capturer.spec, self.capturer._version = SPEC, ("3", 3)
        self.capturer._selection = LayerSelection(SPEC, device="cpu")
        room.weight_version = lambda: "3"

    def finish(self, table: torch.Tensor) -> Any:
        req = self._request(table)
        self._module.get_global_experts_capturer = self._room.get_global_experts_capturer = lambda: (
            self.capturer
        )
        pool = SimpleNamespace(req_to_token=table)
        self._room.collect_frame(self._collect, SimpleNamespace(req_to_token_pool=pool), req)
        return req.routed_experts


if __name__ == "__main__":
    main()
