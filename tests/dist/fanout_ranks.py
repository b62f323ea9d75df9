"""Worker of test_fanout.py: one TP rank of a group of two, forward-only hand-on of a received shard."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from r3channel.config import ChannelConfig
from r3channel.errors import R3Error
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.recording import Recording
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.transport.tensor_parallel import TensorParallelFanout
from tests.dist.ranks import write_result
from tests.dist.test_fanout import RECORDING


def receive(job: dict[str, Any], *, sp: bool, broken: bool = False) -> Any:
    """TP0 hosts a loopback relay of its own; both ranks end with their part of the shard."""
    layout = TrainerLayout(tp=2, sp=sp)
    recording = Recording.load(RECORDING).replan(layout, microbatch_size=4)
    config = ChannelConfig(backend="loopback", bucket_bytes=4096, step_timeout_s=5, join_timeout_s=20)
    relay = Relay(recording.ticket.spec, layout, config)
    ticket = recording.ticket
    if job["rank"] == 0:
        for sample in recording.ticket.samples:
            relay.add_frame(sample.sample_id, recording.frames[sample.sample_id], recording.tokens[sample.sample_id])
        ticket = relay.seal(ticket.step + broken, ticket.assignment)
        if broken:  # a ticket of a step that the relay never sealed
            ticket = recording.ticket
    coords = RankCoords(dp=0, pp=0, cp=0, tp=job["rank"])
    fanout = TensorParallelFanout(dist.group.WORLD, device=torch.device("cpu"))
    receiver = Receiver(relay, spec=ticket.spec, layout=layout, coords=coords, config=config, fanout=fanout)
    return receiver.receive(ticket)


def main(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=job["init_method"], rank=job["rank"], world_size=2)
    result: dict[str, Any] = {}
    for name, sp in (("scatter", True), ("rebroadcast", False)):
        shard = receive(job, sp=sp)
        result[name] = bytes(shard.data_N.numpy()).hex()
    try:
        receive(job, sp=False, broken=True)
    except R3Error as error:
        result["error"] = [type(error).__name__, str(error)]
    write_result(job, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
