"""Two processes, a GPU each: rows from a relay to a receiver over NCCL, several steps. Over gloo on a CPU.

Where it passes over NCCL it writes the note that `--r3-transport auto` looks for.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay import proof
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from tests.delivery import check_rows, sealed
from tests.gpu.facts import Facts, main
from tests.samples import SPEC

STEPS, LIMIT_S = 20, 60.0
LAYOUT = TrainerLayout()


def config_for(device: str) -> ChannelConfig:
    limits: dict[str, Any] = {"join_timeout_s": LIMIT_S, "send_timeout_s": LIMIT_S, "step_timeout_s": LIMIT_S}
    return ChannelConfig(
        transport="nccl" if device == "cuda" else "gloo", bucket_bytes=1024, fallback="", **limits
    )


class Far:
    """The relay's `hello`, from the other process."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._place = place

    def hello(self, *, dp: int, pp: int, cp: int) -> dict[str, Any]:
        return self._place


def receiver_main(device: str, pipe: Connection) -> None:
    where = torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(1)
        where = torch.device("cuda", 1)
    place = pipe.recv()
    receiver = Receiver(
        Far(place), spec=SPEC, layout=LAYOUT, coords=LAYOUT.coords(0), config=config_for(device), device=where
    )
    begin = time.monotonic()
    receiver.join()
    pipe.send(time.monotonic() - begin)
    for ticket in iter(pipe.recv, None):
        pipe.send(check_rows(receiver.receive(ticket), prefix=f"{ticket.step}-"))
    receiver.close()


def check(device: str, facts: Facts) -> None:
    near, far = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=receiver_main, args=(device, far), daemon=True)
    child.start()
    relay = Relay(SPEC, LAYOUT, config_for(device))
    near.send(relay.hello(dp=0, pp=0, cp=0))
    facts.figures["join, communicator included, s"] = told(near)
    rows = []
    for step in range(STEPS):
        near.send(sealed(relay, step, prefix=f"{step}-"))
        rows.append(told(near))
        relay.join_previous(timeout_s=LIMIT_S)
    near.send(None)
    child.join(LIMIT_S)
    facts.expect(
        "rows that are right, by step", rows, len(set(rows)) == 1 and rows[0] > 0, "all of each step"
    )
    facts.expect("the receiver's process ended with", child.exitcode, child.exitcode == 0, "0")
    relay.close()
    if device == "cpu":
        facts.left_out.append("NCCL: gloo carried the rows")
    elif not facts.wrong:
        facts.figures["note"] = str(proof.write())


def told(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), "the receiver's process says nothing"
    return pipe.recv()


if __name__ == "__main__":
    main(check)
