"""What a trainer's channel says of its steps, by a real relay, receiver and driver in one process."""

from __future__ import annotations

import inspect
import math
import re
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from r3channel.errors import RowsStale, TicketMismatch, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters import megatron
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.model_tokens import say_once
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.wire.frame import encode_frame
from tests.support.children import ROOT
from tests.support.delivery import receivers_of, relays
from tests.support.samples import SPEC, reply_for
from tests.unit.test_replay_step import Router, handle

TOKENS = 9
ROW_BYTES = len(SPEC.moe_layers) * SPEC.top_k


@contextmanager
def attached(**options: object) -> Iterator[tuple[Relay, TrainerChannel, list[Router]]]:
    routers = [Router(SPEC.num_experts, SPEC.top_k) for _ in SPEC.moe_layers]
    chunk = torch.nn.ModuleList(routers)
    handles = {layer: handle(router, layer) for layer, router in zip(SPEC.moe_layers, routers, strict=True)}
    with relays() as make:
        relay = make(**options)
        (receiver,) = receivers_of(relay)
        with TrainerChannel(ReplayDriver(handles, [chunk], spec=SPEC), receiver, relay.config) as channel:
            yield relay, channel, routers


def run(step: ReplayStep, routers: list[Router], *, rows: int) -> None:
    with torch.no_grad(), step.microbatch(0, mode="logprob"):
        for router in routers:
            router(torch.randn(rows, SPEC.num_experts))


@pytest.mark.parametrize("reads", [False, True])
def test_a_mask_that_nobody_reads_is_warned_of(caplog: pytest.LogCaptureFixture, reads: bool) -> None:
    with attached(max_staleness=1, on_stale="mask") as (relay, channel, routers):
        relay.add("a", reply_for("a", TOKENS, version=3), range(TOKENS))
        with channel.step(relay.seal(1, Assignment.given([[["a"]]])), version=5) as step:
            run(step, routers, rows=TOKENS)
            if reads:
                assert channel.shard is not None and not channel.shard.loss_mask(0)[0, :-1].any()
    assert ("loss_mask(i) was never read" in caplog.text) is not reads


def test_each_figure_for_a_loops_logger_is_the_steps_own_and_every_name_is_in_the_contract() -> None:
    with attached() as (relay, channel, routers):
        assert not (figures := channel.log_dict())
        for number in range(2):
            names = [f"{number}a", f"{number}b"]
            for name, version in zip(names, (5 - 2 * number, 5), strict=True):
                relay.add(name, reply_for(name, TOKENS, version=version), range(TOKENS))
            # so long that what this machine really takes is nothing beside it
            channel.receiver.clock.record("recv", 0, 4e6)
            channel.receiver.clock.record("wait_wire", 0, 1e6 * (1 + number))
            with channel.step(relay.seal(number, Assignment.given([[names]])), version=5) as step:
                run(step, routers, rows=2 * TOKENS)
                step.compare_logprobs(0, torch.tensor([0.5, 9.0]), torch.zeros(2), torch.tensor([1, 0]))
            figures = {name.removeprefix("r3channel/"): value for name, value in channel.log_dict().items()}
        report = channel.report
    assert report is not None and {type(value) for value in figures.values()} == {float}
    listed = re.findall(r"^ {4}(\w+(?:, \w+)*) {2,}", inspect.getdoc(TrainerChannel.log_dict) or "", re.M)
    assert {name for names in listed for name in names.split(", ")} == figures.keys()
    assert 0 < report.different_fraction <= 1 and figures.pop("hand_on_s") < 1e6
    assert figures == {
        "wait_s": pytest.approx(2e6, rel=1e-3), "hidden_share": pytest.approx(0.5, abs=1e-3), "live_rows": 0,
        "wire_bytes": 2 * (TOKENS - 1) * ROW_BYTES, "landed_bytes": 2 * TOKENS * ROW_BYTES,
        "staleness": 1, "staleness_max": 2, "disagreement": report.different_fraction,
        "logprob_abs_diff": 0.5, "logprob_k3": pytest.approx(math.exp(0.5) - 1.5),
    }  # fmt: skip


def test_a_refused_step_leaves_the_channel_as_it_was_and_a_relay_that_is_gone_no_hook_or_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attached(metrics_port=0, max_staleness=1, on_stale="reject") as (relay, channel, routers):
        for name in "abc":
            relay.add(name, reply_for(name, TOKENS, version=5), range(TOKENS))
        stale, first, second = (relay.seal(at, Assignment.given([[[name]]])) for at, name in enumerate("abc"))
        with pytest.raises(RowsStale), channel.step(stale, version=9):
            pass
        assert channel.shard is None
        with channel.step(first, version=5) as step:
            with pytest.raises(UsageError, match="step 2 inside step 1"), channel.step(second, version=5):
                pass
            run(step, routers, rows=TOKENS)
        assert 2 in relay.status()["steps"], "no row of it has moved"
        monkeypatch.setattr(relay, "list_page", Mock(side_effect=ConnectionError("gone")))
    assert not channel.metrics.target and not any(vars(router.replay) for router in routers)


PLAIN = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/06_plain_torch.py"), run_name="plain"))
OWN, LONGER = list(range(10, 30)), list(range(40, 73))


Embedding = type("Embedding", (PLAIN.PlainTorch,), {"input_ids": lambda *_: None})
Older = type("Older", (PLAIN.PlainTorch,), {"input_ids": None})


@contextmanager
def planned_step(adapter: Any, tokens: Any) -> Iterator[tuple[ReplayStep, torch.nn.Module]]:
    """A step of one pack in plain torch, and its model."""
    routers = PLAIN.MoE(), PLAIN.MoE()
    model = torch.nn.Sequential(torch.nn.Embedding(100, PLAIN.WIDTH), *routers)
    with (
        Relay(PLAIN.SPEC, PLAIN.LAYOUT) as relay,
        TrainerChannel.attach([model], relay, layout=PLAIN.LAYOUT, adapter=adapter) as channel,
    ):
        for name, own in (("a", OWN), ("b", LONGER)):
            relay.add_frame(name, encode_frame(PLAIN.SPEC, expert_ids_TLK=PLAIN.captured(own)), own)
        with channel.step(relay.seal(0, Assignment.given([[["a", "b"]]])), tokens=tokens) as step:
            yield step, model
        relay.join_previous()


@pytest.mark.parametrize("tokens", [None, [[OWN, LONGER]]], ids=["hashes", "tokens"])
@pytest.mark.parametrize("mode", ["logprob", "train"])
def test_a_pack_in_another_order_is_refused_before_a_router_of_either_pass(tokens: Any, mode: Any) -> None:
    with (
        pytest.raises(TicketMismatch, match=r"order \[1, 0\] of the ticket's"),
        planned_step(PLAIN.PlainTorch(), tokens) as (step, model),
        torch.set_grad_enabled(mode == "train"), step.microbatch(0, mode=mode),
    ):  # fmt: skip
        model(torch.tensor(LONGER + OWN))
    with planned_step(PLAIN.PlainTorch(), tokens) as (step, model), step.microbatch(0):
        model(torch.tensor(OWN + LONGER)).sum().backward()


@pytest.mark.parametrize(
    ("adapter", "said"), [(Embedding, "is given embeddings"), (Older, "the adapter has no input_ids")]
)
def test_what_no_adapter_sees_is_said_once(adapter: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with planned_step(adapter(), None) as (step, model):
        for mode in ("logprob", "train"):
            with torch.set_grad_enabled(mode == "train"), step.microbatch(0, mode=mode):
                model(torch.tensor(LONGER + OWN)).sum()
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(("installed", "newer"), [(megatron.READ_AGAINST[-1], False), ("0.20.0rc1", True)])
def test_a_megatron_newer_than_any_that_was_read_says_so_at_the_attach(
    installed: str, newer: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_ins = {"version": installed, "check_layout": None, "config_of": None, "routers_by_layer": {}}
    for name, value in stand_ins.items():
        monkeypatch.setattr(megatron, name, Mock(return_value=value))
    assert megatron.routers([], TrainerLayout()) == {}
    assert (f"megatron-core {installed} is newer than" in caplog.text) is newer
