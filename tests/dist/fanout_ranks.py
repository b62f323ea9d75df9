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
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.transport.tp_fanout import TensorParallelFanout
from tests.delivery import assignment, check_rows, fill
from tests.dist.ranks import write_result
from tests.samples import SPEC


def receive(job: dict[str, Any], *, sp: bool, broken: bool = False) -> RankShard:
    """TP0 hosts a relay of its own; both ranks end with their part of the shard."""
    layout = TrainerLayout(tp=2, sp=sp)
    config = ChannelConfig(bucket_bytes=1024, step_timeout_s=20, join_timeout_s=20)
    relay = Relay(SPEC, layout, config)
    told: list[Any] = [None]
    if job["rank"] == 0:
        fill(relay)
        told = [relay.seal(0, assignment(dp=1)).to_bytes()]
        if broken:
            relay.abandon(0)
    dist.broadcast_object_list(told)
    fanout = TensorParallelFanout(dist.group.WORLD, device=torch.device("cpu"))
    coords = RankCoords(dp=0, pp=0, cp=0, tp=job["rank"])
    receiver = Receiver(relay, spec=SPEC, layout=layout, coords=coords, config=config, fanout=fanout)
    try:
        return receiver.receive(Ticket.from_bytes(told[0]))
    finally:
        receiver.close()
        relay.close()


def main(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=job["init_method"], rank=job["rank"], world_size=2)
    result: dict[str, Any] = {}
    for name, sp in (("scatter", True), ("rebroadcast", False)):
        shard = receive(job, sp=sp)
        for number in range(shard.num_microbatches):
            for layer in shard.shard.layers:
                shard.check_digest(number, layer, shard.layer_ids(number, layer))
        shard.verified()
        result[name] = {"rows": check_rows(shard), "bytes": len(shard.data_N)}
    try:
        receive(job, sp=False, broken=True)
    except R3Error as error:
        result["error"] = [type(error).__name__, str(error)]
    write_result(job, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
