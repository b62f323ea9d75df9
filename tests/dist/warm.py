"""Imported by the server that forks relays and receivers: the compiled loops that they use are loaded once, there."""

from __future__ import annotations

from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.shards import plan_shards
from r3channel.wire.frame import parse_frame
from tests.support.samples import SPEC, frame_of

IDS_TLK = parse_frame(frame_of(9), spec=SPEC).verify()
PLAN = plan_shards(Assignment.given([[["s"]]]), tokens={"s": 9}, spec=SPEC, layout=TrainerLayout())
place_samples(PLAN, dp=0, ids_of=lambda _: IDS_TLK)
