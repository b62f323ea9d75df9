"""Plays the engine's end of a weight group: joins as SGLang 0.5.23 does (`init_custom_process_group`), then obeys stdin.

Arguments: port, group name. Lines: `receive N` reads one broadcast of N bytes and prints their sum, or the error's kind;
`quit` ends.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


def joined(port: int, name: str) -> dist.ProcessGroup:
    timeout = timedelta(seconds=60)
    store, rank, size = next(iter(rendezvous(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", timeout=timeout)))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=c10d.GroupName(name),
        timeout=timeout,
    )  # fmt: skip
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def receive(group: dist.ProcessGroup, size: int) -> str:
    data = torch.zeros(size, dtype=torch.uint8)
    try:
        dist.broadcast(data, src=0, group=group)
    except RuntimeError as error:
        return "closed" if "closed by peer" in str(error) else f"error {error}"
    return f"sum {int(data.long().sum())}"


def main() -> None:
    group = joined(int(sys.argv[1]), sys.argv[2])
    print("joined", flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        print(receive(group, int(line.split()[1])), flush=True)


if __name__ == "__main__":
    main()
