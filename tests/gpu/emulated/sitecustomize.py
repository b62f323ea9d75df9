"""Runs at the start of each Python process that has this folder on PYTHONPATH, as if on an image with CUDA 13 and no SGLang.

Only the packages of `image.txt` and the wheels of `make gpu-wheels` can be imported. CUDA is said to be there,
and what is put on it lies in host memory: a check goes the way that it goes on a GPU until it asks for what only a kernel can
give, which raises `NeedsKernel`. It proves nothing about a GPU, but that no check ends for a name, an argument or a package.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
import threading
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class NeedsKernel(RuntimeError):
    """The emulation ends here."""


class Machine(PathFinder):
    """Finds what the machine has."""

    missing: set[str]

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        there = fullname.partition(".")[0] not in cls.missing
        return PathFinder.find_spec(fullname, path, target) if there else None


def distribution_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> set[str]:
    """Names of distributions, as the machine would have them."""
    from tests.gpu.wheels import NAMES

    lines = (Path(__file__).parents[1] / "image.txt").read_text().splitlines()[1:]
    image = (word.partition("==")[0] for line in lines for word in line.split())
    return {"r3channel", *map(distribution_name, (*image, *NAMES))}


def missing_packages() -> set[str]:
    """Top-level modules that this environment has and the machine has not."""
    there, owners = installed(), importlib.metadata.packages_distributions()
    return {top for top, names in owners.items() if there.isdisjoint(map(distribution_name, names))}


def needs_kernel(what: str) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise NeedsKernel(f"only a GPU has {what}")

    return raises


def absent(what: str) -> type:
    """A class, because annotations name it."""
    return type("Absent", (), {"__init__": needs_kernel(what)})


class Event:
    """One that is over."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...

    query = needs_kernel("work that is under way")


class Stream(Event):
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()


def pretend() -> None:
    """Tell torch that CUDA is there."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    host = torch.device("cpu")

    def on_host(value: Any) -> Any:
        named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return host if named else value

    class InHostMemory(TorchFunctionMode):
        """What is asked of the device lies on the host."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = host
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            return func(*args if func is torch.device else map(on_host, args), **kwargs)

    def in_host_memory(run: Any) -> Any:
        def runs(*args: Any, **kwargs: Any) -> Any:
            with InHostMemory():
                return run(*args, **kwargs)

        return runs

    class HostGenerator(torch.Generator):
        def __new__(cls, *_: Any) -> Any:
            return super().__new__(cls)

    InHostMemory().__enter__()
    # A mode is its thread's alone, and off in what is called through it, such as a backward pass that computes again.
    threading.Thread.run = in_host_memory(threading.Thread.run)
    engine: Any = torch.autograd
    engine._engine_run_backward = in_host_memory(engine._engine_run_backward)
    gpu = SimpleNamespace(name="GPU", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132)
    vars(gpu).update(uuid="GPU-0", warp_size=32, L2_cache_size=60 << 20, shared_memory_per_block_optin=232448)
    started = list[bool]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaError=SimpleNamespace(success=0)
    )
    constant: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "mem_get_info": (139 << 30, 141 << 30), "get_device_name": gpu.name, "get_device_properties": gpu, "cudart": runtime,
        "current_stream": Stream(), **dict.fromkeys(("synchronize", "set_device", "_sleep", "empty_cache")),
        **dict.fromkeys(("stream", "device"), contextlib.nullcontext()),
    }  # fmt: skip
    said: dict[str, Any] = {name: lambda *_, value=value: value for name, value in constant.items()}
    said |= {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": absent("graphs"),
        "manual_seed": torch.manual_seed,
    }
    said |= {"set_sync_debug_mode": needs_kernel("waits"), "is_initialized": lambda: bool(started)}
    said |= {
        "init": lambda: started.append(True),
        "host_memory_stats": lambda: {"active_bytes.current": 0} if started else {},
    }
    for name, value in said.items():
        setattr(torch.cuda, name, value)
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.version.cuda = "13.0"
    torch.Generator = HostGenerator  # type: ignore[misc]
    torch.profiler.profile = absent("a profile of its own")  # type: ignore[misc]
    dist.ProcessGroupNCCL = SimpleNamespace(Options=needs_kernel("NCCL"))  # type: ignore[attr-defined]
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, **options: begin("gloo", **options)  # type: ignore[misc]
    # The torchvision wheel cannot register its operators beside a CPU torch.
    pretend.kept = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[attr-defined]
    for operator in ("nms", "qnms"):
        pretend.kept.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[attr-defined]
    kernels: Any = ModuleType(
        "common_ops"
    )  # where SGLang looks for its kernels when the library cannot be loaded
    sys.modules["common_ops"], kernels.__file__ = kernels, "common_ops.abi3.so"
    from triton.runtime.jit import JITFunction

    JITFunction.run = needs_kernel("Triton's kernels")  # type: ignore[method-assign]


try:
    Machine.missing = missing_packages()
    sys.meta_path[sys.meta_path.index(PathFinder)] = Machine
    pretend()
except BaseException:
    traceback.print_exc()
    os._exit(70)  # Python would go on without
