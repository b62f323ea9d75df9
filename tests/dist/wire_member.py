"""Worker of test_member_killed.py: receives one shard; on demand it is killed while a bucket is on the wire."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.trainer import inflow
from r3channel.trainer.receiver import Receiver
from tests.dist.control import TcpControl


def die_at(bucket: int) -> None:
    """SIGKILL this process when it verifies that bucket: the next one is under way then."""
    hash_bucket, verified = inflow.hash_bucket, []

    def hash_or_die(data_N: Any) -> int:
        verified.append(len(data_N))
        if len(verified) > bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_bucket(data_N)

    inflow.hash_bucket = hash_or_die


def main(job: dict[str, Any]) -> None:
    ticket = Ticket.from_bytes(Path(job["ticket"]).read_bytes())
    if job["die_at"] is not None:
        die_at(job["die_at"])
    receiver = Receiver(
        TcpControl(job["port"]),
        spec=ticket.spec,
        layout=ticket.layout,
        coords=ticket.layout.coords(job["rank"]),
        config=ChannelConfig(**job["config"]),
    )
    shard = receiver.receive(ticket)
    Path(job["out"]).write_bytes(shard.data_N.numpy().tobytes())
    receiver.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
