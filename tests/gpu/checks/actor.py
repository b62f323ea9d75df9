"""The relay as a Ray actor that owns the GPU on which the trainer runs too: rows over the host transport; NCCL is refused."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from r3channel.errors import ConfigError
from r3channel.trainer import member
from r3channel.transport.joining import gpu_of
from tests.gpu.apart import receiver_of, relay_in, steps
from tests.gpu.facts import Facts


def check(device: str, facts: Facts) -> None:
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    how = facts.figures["the relay is in a process of"] = "ray" if find_spec("ray") else "python"
    with relay_in(how, "host") as (owner, control):
        given, gpu = owner.device()
        facts.figures["CUDA_VISIBLE_DEVICES there"] = given
        own = gpu_of(0) if device == "cuda" else ""
        facts.expect("its GPU", gpu, gpu == own, f"the trainer's, {own}")
        rows = steps(owner, receiver_of(control, "host", where))
        facts.expect("rows that are right, by step", rows, len({*rows}) == 1 and rows[0] > 0, "all of each")
    stand_in = [] if device == "cuda" else ["GPU-0"]
    if stand_in:
        setattr(member, "gpu_of", lambda: stand_in[0])  # noqa: B010
        facts.left_out.append("the GPU is one that Ray and the relay were told of")
    with relay_in(how, "nccl", *stand_in) as (_, control):
        try:
            receiver_of(control, "nccl", where).join()
            told = "joined"
        except ConfigError as error:
            told = str(error)
    named = f"uses GPU {own or stand_in[0]}" in told and "transport='host'" in told
    facts.expect("NCCL on one GPU", told, named, "refused by the GPU's name")
