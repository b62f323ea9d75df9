"""What every process of a run without a GPU needs changed; `setup` is Ray's worker_process_setup_hook. No file is edited.

Each change is made when the module concerned is imported, so that processes that need none of it pay nothing. Lines are of
slime 624b824a.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after its code has run, before the importer sees it."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Any], None]] = {}
        self._inside: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.callbacks or name in self._inside:
            return None
        self._inside.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._inside.discard(name)
        if spec is None or spec.loader is None:
            return spec
        run, callback = spec.loader.exec_module, self.callbacks[name]

        def exec_module(module: Any) -> None:
            run(module)
            callback(module)

        spec.loader.exec_module = exec_module
        return spec


_FINDER = _AfterImport()


def after_import(name: str, callback: Callable[[Any], None]) -> None:
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        _FINDER.callbacks[name] = callback


def _cpu_accelerator(module: Any) -> None:
    """slime's own extension point: register_accelerator, SLIME_ACCELERATOR."""
    import torch
    from slime.utils.accelerator.base import Accelerator  # pyright: ignore[reportMissingImports]

    device = torch.device("cpu")
    # with less than 3 GiB of memory slime collects garbage at every collective
    answers: dict[str, Any] = {
        "is_available": True, "device": device, "device_name": "cpu", "set_device": None, "current_device": "cpu",
        "device_count": 1, "synchronize": None, "current_stream": None, "empty_cache": None,
        "mem_get_info": (64 << 30, 128 << 30), "memory_allocated": 0, "memory_reserved": 0,
        "distributed_device_id": None,
    }  # fmt: skip
    methods = {name: (lambda *_args, _answer=answer, **_options: _answer) for name, answer in answers.items()}
    names = {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    kind = type("CPUAccelerator", (Accelerator,), {**names, **methods})
    module.register_accelerator("cpu", kind, lambda: True, communication_backends=("gloo",))


class _NumpyOne(types.ModuleType):
    """numpy under the version that initialize.py:66 asserts."""

    __version__ = "1.26.4"

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)


def _numpy_assert(module: Any) -> None:
    module.np = _NumpyOne("numpy")


def _newer_sglang(module: Any) -> None:
    """sglang_engine.py:575: ServerArgs is a msgspec Struct since 0.5.2x. :423,430: it takes broadcasts only between two calls."""

    def fields(kind: Any) -> Any:
        if dataclasses.is_dataclass(kind):
            return dataclasses.fields(kind)
        import msgspec

        return msgspec.structs.fields(kind)

    module.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "fields": fields})


def _newer_collectives(module: Any) -> None:
    """reloadable_process_group.py:285 forwards each method by name; torch 2.13 calls new ones, which then find no backend."""
    group = module.ReloadableProcessGroup

    def forward(name: str) -> Callable[..., Any]:
        return lambda self, *args, **options: self._fwd(name, *args, **options)

    for kind in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        for name in (kind, f"{kind}_coalesced"):
            if hasattr(group, name) and name not in vars(group):
                setattr(group, name, forward(name))


def _te_names(module: Any) -> None:
    """update_weight/common.py:130 and hf_to_megatron know parameter names of the Transformer Engine spec only."""
    from r3channel.weights.convert import te_name

    class Named:
        def __init__(self, chunk: Any) -> None:
            self._chunk = chunk

        def named_parameters(self) -> Any:
            return ((te_name(name), value) for name, value in self._chunk.named_parameters())

        def named_buffers(self) -> Any:
            return ((te_name(name), value) for name, value in self._chunk.named_buffers())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._chunk, name)

    inner = module.named_params_and_buffers

    def named_params_and_buffers(args: Any, model: Any, *rest: Any, **options: Any) -> Any:
        return inner(args, [Named(chunk) for chunk in model], *rest, **options)

    module.named_params_and_buffers = named_params_and_buffers


def _unpinned() -> None:
    """tensor_backper.py:61 and routing_replay.py:101 ask for pinned memory with empty_like."""
    import torch

    inner = torch.empty_like
    torch.empty_like = lambda *args, pin_memory=False, **options: inner(*args, **options)  # type: ignore[assignment]


def _device_properties(torch: Any) -> None:
    """Megatron's validate_args asks for the compute capability."""
    found = types.SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1 << 30, name="cpu")
    torch.cuda.get_device_properties = lambda *_args, **_options: found


def _watched_manager(module: Any) -> None:
    from tests.upstream.slime_cpu import witness

    manager = module.RolloutManager.__ray_metadata__.modified_class
    generate, dispose = manager.generate, manager.dispose

    def generated(self: Any, rollout_id: int) -> Any:
        witness.TOLD["rollout"] = rollout_id
        return generate(self, rollout_id)

    def disposed(self: Any) -> None:
        witness.tell_args("manager", self.args)
        witness.tell_pages()
        if hasattr(self, "relay"):
            self.rows.tidy()
            value = self.relay.metrics.value
            for outcome in ("discarded", "live"):
                witness.TOLD[outcome] = value("r3channel_samples_total", outcome=outcome)
            witness.TOLD["lost"] = value("r3channel_rejected_total", reason="frame_missing")
        witness.tell("manager", **witness.TOLD)
        dispose(self)

    manager.generate, manager.dispose = generated, disposed
    _told_router(module)


def _told_router(module: Any) -> None:
    """slime starts its router as it always does, and requests go through run.py's: the released wheel drops the field."""
    import multiprocessing

    from tests.upstream.slime_cpu import witness

    start = module._start_router

    def start_router(args: Any, **options: Any) -> Any:
        found = start(args, **options)
        for child in multiprocessing.active_children():
            witness.TOLD["router_sockets"] = len(witness.sockets("self") & witness.sockets(child.pid))
            with witness.urlopen(f"http://{found[0]}:{found[1]}/workers", timeout_s=60) as page:
                witness.TOLD["router_answers"] = page.status
        return ("127.0.0.1", int(os.environ["SLIME_CPU_ROUTER"])) if args.sglang_router_ip is None else found

    module._start_router = start_router


def _watched_rows(module: Any) -> None:
    from tests.upstream.slime_cpu import witness

    take, witness.TOLD["reply_bytes"] = module.SampleRows.take, 0

    def counted(self: Any, sample: Any, meta_info: Any, **options: Any) -> Any:
        witness.TOLD["reply_bytes"] += len(meta_info.get("routed_experts") or "")
        return take(self, sample, meta_info, **options)

    module.SampleRows.take = counted
    witness.watch_turns(module.SampleRows)


def _killed(module: Any) -> None:
    """The manager is killed once: between two buckets of a step that is recorded."""
    from pathlib import Path

    from r3channel.recordings.recorder import Recorder
    from tests.upstream.slime_cpu import witness

    send, when = module.RowStream.batches, Path(os.environ["SLIME_CPU_TOLD"], "killed")
    witness.timed(Recorder, "write", "recorded")

    def batches(self: Any, nbytes: int) -> Any:
        from tests.support.waits import until

        for number, batch in enumerate(send(self, nbytes)):
            if number and not when.exists():
                until(lambda: "recorded" in witness.SPENT)
                when.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    module.RowStream.batches = batches


def setup() -> None:
    """Install in this process. Ray calls it in each worker; the driver calls it itself."""
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)
    after_import("slime.utils.accelerator", _cpu_accelerator)
    after_import("slime.utils.reloadable_process_group", _newer_collectives)
    after_import("slime.backends.sglang_utils.sglang_engine", _newer_sglang)
    after_import("slime.backends.megatron_utils.initialize", _numpy_assert)
    after_import("slime.backends.megatron_utils.update_weight.common", _te_names)
    after_import("torch", _device_properties)
    witnessed = bool(os.environ.get("SLIME_CPU_WITNESS"))
    if os.environ.get("SLIME_CPU_TRAINER") == "1":
        from examples.embedded import megatron_shim

        megatron_shim.install()
        _unpinned()
        if witnessed:
            from tests.upstream.slime_cpu import witness

            after_import("r3channel.integrations.slime.trainer", witness.watch_channel)
            after_import("r3channel.integrations.slime.weights", witness.watch_weights)
            after_import("slime.utils.routing_replay", witness.watch_replay)
            after_import("slime.backends.megatron_utils.actor", witness.watch_actor)
    elif witnessed:
        from tests.upstream.slime_cpu import witness

        after_import("r3channel.integrations.slime.rollout", witness.watch_engine)
        after_import("r3channel.integrations.slime.relay_manager", witness.watch_fetches)
        after_import("r3channel.integrations.slime.sample_rows", _watched_rows)
        after_import("slime.ray.rollout", _watched_manager)
        if os.environ["SLIME_CPU_KILL"] == "1":
            after_import("r3channel.relay.row_stream", _killed)
    if os.environ.get("SLIME_CPU_FAULTS"):
        from tests.upstream.slime_cpu import faults

        after_import("r3channel.config", faults.tiny_store)
        after_import("r3channel.relay.ingest_server", faults.watch_frames)
