"""The relay as a Ray actor that owns the GPU on which the trainer runs too: rows over TCP; NCCL is refused.

Where there is no Ray, in a process of Python's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.managers import BaseManager
from typing import Any

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, DigestMismatch
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay import row_server
from r3channel.relay.ray_host import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.relay.send_buffers import HostPool
from r3channel.trainer import relay_connection as member
from r3channel.trainer.receiver import Receiver
from r3channel.transport.base import Pending
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.transport.select import gpu_of
from tests.gpu.checks.device import SPEC as LARGE
from tests.gpu.checks.device import Steps
from tests.gpu.facts import Facts, words_of
from tests.support.delivery import check_rows, sealed
from tests.support.samples import SPEC
from tests.support.waits import PROGRAM_S

LAYOUT, STEPS, LIMIT_S = TrainerLayout(packing="thd"), 20, PROGRAM_S  # the relay is a program that starts


def config_of(transport: str, spec: RoutingSpec = SPEC) -> ChannelConfig:
    """Large steps go in the buckets of users."""
    limits: dict[str, Any] = dict.fromkeys(("join_timeout_s", "send_timeout_s", "step_timeout_s"), LIMIT_S)
    limits |= {"bucket_bytes": 1024} if spec is SPEC else {}
    return ChannelConfig(transport=transport, fallback="", **limits)


class Owner(RelayHost):
    """The relay's process."""

    large: Steps | None = None

    def __init__(self, transport: str, stand_in: str = "") -> None:
        """`stand_in`: the GPU that it is to think it has."""
        if stand_in and not torch.cuda.is_available():
            setattr(row_server, "DeviceStaging", lambda device: HostPool())  # noqa: B010
        if stand_in:
            setattr(row_server, "gpu_of", lambda device: stand_in)  # noqa: B010
        self.relay, self._sends, start_send = (
            Relay(SPEC, LAYOUT, config_of(transport)),
            0,
            ProcessGroupTransport.start_send,
        )

        def counted(group: ProcessGroupTransport, rank: int, data_N: torch.Tensor) -> Pending:
            self._sends += 1
            return start_send(group, rank, data_N)

        setattr(ProcessGroupTransport, "start_send", counted)  # noqa: B010

    def sends(self) -> int:
        """How many sends a group was given so far."""
        return self._sends

    def hello(self, **at: int) -> dict[str, Any]:
        return self.relay.hello(**at)

    def device(self) -> tuple[str, str]:
        """(the devices that it was given, the first one's uuid)."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "all"), gpu_of(0)

    def seal(self, step: int) -> Ticket:
        return sealed(self.relay, step, prefix=f"{step}-")

    def seal_large(self, step: int) -> Ticket:
        assert self.large is not None
        return self.large.seal(self.relay, step)

    def enlarge(self, transport: str, mebibytes: int) -> None:
        """From here on a relay of steps of this size."""
        self.relay.close()
        self.large = Steps(mebibytes, shifts=(0,))
        self.relay = Relay(LARGE, LAYOUT, config_of(transport, LARGE))

    def join_previous(self) -> None:
        self.relay.join_previous(timeout_s=LIMIT_S)

    def close(self) -> None:
        self.relay.close()


BaseManager.register("Owner", Owner)


class Actor:
    """Calls an actor's methods."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        import ray

        return lambda *args: ray.get(getattr(self._actor, name).remote(*args), timeout=LIMIT_S)


@contextmanager
def relay_in(how: str, *given: str) -> Iterator[tuple[Any, Any]]:
    """(its owner, a trainer's control of it); `how` is `ray` or `python`."""
    if how == "python":
        context = multiprocessing.get_context("spawn")
        with BaseManager(ctx=context, shutdown_timeout=LIMIT_S) as processes:
            child = vars(processes)["_process"]
            owner = getattr(processes, "Owner")(*given)  # noqa: B009 made at run time
            yield owner, owner
            owner.close()
        if child.exitcode != 0:
            raise RuntimeError(f"the relay's process ended with {child.exitcode}, expected 0")
        return
    import ray

    if not ray.is_initialized():
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, logging_level=logging.ERROR)
    remote: Any = ray.remote
    actor = remote(num_gpus=1, max_concurrency=8)(Owner).remote(*given)
    yield Actor(actor), RayRelay(actor, timeout_s=LIMIT_S)
    ray.kill(actor)  # the next one waits for its GPU


def receiver_of(control: Any, transport: str, device: torch.device, spec: RoutingSpec = SPEC) -> Receiver:
    at: dict[str, Any] = {"layout": LAYOUT, "coords": LAYOUT.coords(0), "device": device}
    return Receiver(control, spec=spec, config=config_of(transport, spec), **at)


def steps(owner: Any, receiver: Receiver, facts: Facts) -> None:
    rows = []
    for step in range(STEPS):
        rows.append(check_rows(receiver.receive(owner.seal(step)), prefix=f"{step}-"))
        owner.join_previous()
    shard = receiver.receive(owner.seal(STEPS))
    owner.join_previous()
    receiver.close()
    facts.expect("rows that are right, by step", rows, len({*rows}) == 1 and rows[0] > 0, "all of each")
    layer = shard.shard.layers[-1]
    changed_RK = shard.layer_ids(0, layer).clone()
    changed_RK[0] = changed_RK[0].roll(1)
    # where rows lie on a device, digests are read at `verify`
    told = words_of(lambda: (shard.check_digest(0, layer, changed_RK), shard.verify()), DigestMismatch)
    facts.expect("of a row that was changed", told, f"decoder layer {layer}" in told, "its layer")


def check(device: str, facts: Facts) -> None:
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    how = "ray" if find_spec("ray") else "python"
    facts.note("the relay is in a process of", how)
    with relay_in(how, "tcp") as (owner, control):
        visible, gpu = owner.device()
        facts.note("CUDA_VISIBLE_DEVICES there", visible)
        own = gpu_of(0) if device == "cuda" else ""
        facts.expect("its GPU", gpu, gpu == own, f"the trainer's, {own}")
        steps(owner, receiver_of(control, "tcp", where), facts)
    stand_in = [] if device == "cuda" else ["GPU-0"]
    if stand_in:
        setattr(member, "gpu_of", lambda: stand_in[0])  # noqa: B010
        facts.left_out.append("the GPU is one that Ray and the relay were told of")
    with relay_in(how, "nccl", *stand_in) as (_, control):
        told = words_of(lambda: receiver_of(control, "nccl", where).join(), ConfigError)
    named = f"uses GPU {own or stand_in[0]}" in told and "transport='tcp'" in told
    facts.expect("NCCL on one GPU", told, named, "refused by the GPU's name")
