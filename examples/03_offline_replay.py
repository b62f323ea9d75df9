"""Replay a recorded step through a real Megatron-core model, without an engine, Ray or a relay.

make demo ARGS="--record rec"
python examples/03_offline_replay.py rec 0     folder and step (default: the recording that the tests keep)
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from examples.embedded import megatron
from examples.embedded.model import write_model
from r3channel import TrainerLayout
from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.consumed import consumed_by
from r3channel.recordings.diagnose import judge
from r3channel.recordings.recording import Recording
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.replay import ReplayDriver

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "recording"
LAYOUT = TrainerLayout()


def main(folder: Path, number: int, scratch: str) -> int:
    recorded = Recording.open(folder).step(number).replan(LAYOUT, microbatch_size=4)
    ticket = recorded.ticket
    shard = ticket.plan.shard(dp=0, pp=0)
    routing = RankShard.from_whole(ticket, shard, torch.from_numpy(recorded.shards(dp=0)[0, 0, 0]), tp=0)

    megatron.init_distributed(rank=0, world_size=1, init_method=f"file://{scratch}/rendezvous", layout=LAYOUT)
    model = megatron.build(write_model(f"{scratch}/model"), LAYOUT, dtype="float32", lr=1e-4)
    driver = ReplayDriver.attach(model.chunks, spec=ticket.spec, layout=LAYOUT)

    with RouterTap(driver) as tap, driver.step(routing, step=ticket.step) as step:
        for index, batch in enumerate(shard.microbatches):
            tokens = torch.zeros(len(batch.sample_ids), batch.seq_len, dtype=torch.int64)
            for row, sample_id in enumerate(batch.sample_ids):
                tokens[row, : batch.tokens[row]] = torch.from_numpy(
                    recorded.tokens[sample_id].astype(np.int64)
                )
            positions = torch.arange(batch.seq_len).expand_as(tokens)
            with step.microbatch(index):
                loss = model.chunks[0](tokens, positions, None, labels=tokens.roll(-1, 1))
            loss.mean().backward()
    megatron.close_distributed()
    used = consumed_by(tap.records, shard, ticket=ticket, tp=0)
    passes = list(AlignedPair.align(recorded, used.step()))
    compared = sum(int(there.sum()) for there in used.there.values()) * ticket.spec.top_k
    different = sum(int(sides.differs_RL.sum()) for sides in passes)
    print(f"step {ticket.step}: {compared:,} ids of forward and recompute compared, {different} different")
    for finding in itertools.chain.from_iterable(map(judge, passes)):
        print(finding)
    return 1 if different else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        folder, number = (Path(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (GOLDEN, 2)
        sys.exit(main(folder, number, work))
