"""Who masks stale tokens and never reads the mask is told so: by a real relay, receiver and driver in one process."""

from __future__ import annotations

import pytest
import torch

from r3channel.plan.assignment import Assignment
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayDriver
from tests.delivery import receivers_of, relays
from tests.samples import SPEC, reply_for
from tests.unit.test_replay_step import Handle, Router

TOKENS = 9


@pytest.mark.parametrize("reads", [False, True])
def test_a_mask_that_nobody_reads_is_warned_of(caplog: pytest.LogCaptureFixture, reads: bool) -> None:
    routers = [Router(SPEC.num_experts, SPEC.top_k) for _ in SPEC.moe_layers]
    chunk = torch.nn.ModuleList(routers)
    handles = {layer: Handle(router, layer) for layer, router in zip(SPEC.moe_layers, routers, strict=True)}
    with relays() as make:
        relay = make(max_staleness=1, on_stale="mask")
        (receiver,) = receivers_of(relay)
        channel = TrainerChannel(ReplayDriver(handles, [chunk], spec=SPEC), receiver, relay.config)
        relay.add("a", reply_for("a", TOKENS, version=3), range(TOKENS))
        ticket = relay.seal(1, Assignment.given([[["a"]]]))
        with channel.step(ticket, version=5) as step, torch.no_grad(), step.microbatch(0, mode="logprob"):
            for router in routers:
                router(torch.randn(TOKENS, SPEC.num_experts))
            if reads:
                assert channel.shard is not None and not channel.shard.loss_mask(0)[0, :-1].any()
        channel.close()
    assert ("loss_mask(i) was never read" in caplog.text) is not reads
