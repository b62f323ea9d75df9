"""A framework's samples and the relay's rows: replaced, continued, forgotten, dumped, sealed."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.errors import RoutingMissing, RowCountMismatch, StepError
from r3channel.integrations.slime.sample_rows import Rows, SampleRows, rows_of
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.samples import SPEC, random_ids, reply_for


@dataclass
class Sample:
    """What slime's has of it."""

    index: int
    tokens: list[int] = field(default_factory=list)
    rollout_routed_experts: Any = None


@pytest.fixture
def rows() -> Iterator[SampleRows]:
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(transport="tcp", step_timeout_s=0.5))
    try:
        yield SampleRows(relay)
    finally:
        relay.steps.close()
        relay.abandon(0)
        relay.close()


def meta(name: str, tokens: int, *, seed: int = 0, reason: str = "stop", **changes: Any) -> dict[str, Any]:
    reply = reply_for(name, tokens, seed=seed, **changes)
    return {**reply["meta_info"], "finish_reason": {"type": reason}, "weight_version": "3"}


def held(rows: SampleRows) -> int:
    rows.tidy()
    return rows.relay.status()["store"]["frames"]


def waiting(rows: SampleRows) -> set[str]:
    rows.tidy()
    return {name for name in (f"{i}.{n}" for i in range(5) for n in range(9)) if rows.relay.rows_held(name)}


def test_a_reply_is_taken_and_the_rest_of_it_goes_on(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rest = rows.take(sample, meta("a", 9))
    assert "routed_experts" not in rest and rest["weight_version"] == "3"
    assert waiting(rows) == {"0.0"}


def test_a_later_reply_replaces_the_rows(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rows.take(sample, meta("a", 9))
    sample.tokens += [1, 2, 3]
    rows.take(sample, meta("a", 12, seed=1))
    assert waiting(rows) == {"0.1"}
    ticket = rows.seal(0, [sample], [[[0]]], steps=[1])
    assert ticket.sample("0.1").tokens == 12


def test_a_reply_from_a_start_adds_to_the_rows(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rows.take(sample, meta("a", 9))
    sample.tokens += [1, 2, 3]
    more = reply_for("a", 12, expert_ids_TLK=random_ids(11)[8:], first_row=8, provenance=None)["meta_info"]
    rows.take(sample, {**more, "routed_experts_start_len": 8, "finish_reason": {"type": "stop"}})
    assert waiting(rows) == {"0.0"} and rows.relay.rows_held("0.0") == 11
    assert rows.seal(0, [sample], [[[0]]], steps=[1]).sample("0.0").tokens == 12


def test_what_nobody_holds_is_discarded_and_counted(rows: SampleRows) -> None:
    kept, gone = Sample(0, list(range(9))), Sample(1, list(range(7)))
    rows.take(kept, meta("a", 9))
    rows.take(gone, meta("b", 7))
    del gone
    gc.collect()
    assert waiting(rows) == {"0.0"}
    assert rows.relay.metrics.value("r3channel_samples_total", outcome="discarded") == 1


def test_a_copy_holds_the_rows_too(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rows.take(sample, meta("a", 9))
    twin = copy.deepcopy(sample)
    del sample
    gc.collect()
    assert waiting(rows) == {"0.0"}
    assert rows.seal(0, [twin], [[[0]]], steps=[1]).sample("0.0").tokens == 9


def test_a_dumped_sample_holds_no_rows(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rows.take(sample, meta("a", 9))
    loaded = pickle.loads(pickle.dumps(sample))  # noqa: S301 - what torch.save of a framework's samples does
    assert rows_of(loaded) is None and isinstance(rows_of(sample), Rows)
    with pytest.raises(RoutingMissing, match=r"sample 0\.1"):
        rows.seal(0, [loaded], [[[0]]], steps=[1])


def test_ids_that_the_framework_decoded_itself_are_sealed(rows: SampleRows) -> None:
    dense_TLK = np.zeros((8, SPEC.num_layers, SPEC.top_k), np.int32)
    dense_TLK[:, list(SPEC.moe_layers)] = random_ids(8, seed=4)
    ticket = rows.seal(0, [Sample(0, list(range(9)), dense_TLK)], [[[0]]], steps=[1])
    assert ticket.samples[0].tokens == 9


def test_an_aborted_reply_without_usable_rows_leaves_a_sample_without(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    assert "routed_experts" not in rows.take(sample, meta("a", 5, reason="abort"))
    rows.take(sample, {"finish_reason": {"type": "abort"}})
    assert rows_of(sample) is None and waiting(rows) == set()


def test_a_finished_reply_with_other_rows_or_none_is_refused_by_name(rows: SampleRows) -> None:
    with pytest.raises(RowCountMismatch, match=r"sample 0\.0"):
        rows.take(Sample(0, list(range(9))), meta("a", 5))
    with pytest.raises(RoutingMissing, match=r"sample 1\.1"):
        rows.take(Sample(1, list(range(9))), {"finish_reason": {"type": "stop"}})


def test_an_evaluated_sample_holds_nothing_and_is_counted(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    assert "routed_experts" not in rows.take(sample, meta("a", 9), trained=False)
    assert rows_of(sample) is None and waiting(rows) == set()
    assert rows.relay.metrics.value("r3channel_samples_total", outcome="discarded") == 1
    rows.take(sample, {"finish_reason": {"type": "stop"}}, trained=False)  # no routing is no fault either


def test_a_step_is_sealed_while_the_one_before_waits_for_its_trainers(rows: SampleRows) -> None:
    for step in range(3):
        sample = Sample(step, list(range(9)))
        rows.take(sample, meta(str(step), 9, seed=step))
        assert rows.seal(step, [sample], [[[0]]], steps=[1]).step == step
    assert set(rows.relay.undelivered(wait_s=0)) == {0, 1, 2}
    for step in range(3):
        rows.relay.abandon(step)


def test_tokens_after_the_last_reply_are_refused_at_the_seal(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rows.take(sample, meta("a", 9))
    sample.tokens += [7]
    with pytest.raises(StepError, match="10 tokens, and the routing of 9"):
        rows.seal(0, [sample], [[[0]]], steps=[1])


def test_the_assignment_is_the_callers_own(rows: SampleRows) -> None:
    samples = [Sample(index, list(range(5 + index))) for index in range(4)]
    for sample in samples:
        rows.take(sample, meta(str(sample.index), len(sample.tokens), seed=sample.index))
    rows.relay.layout = TrainerLayout(dp=2)
    ticket = rows.seal(0, samples, [[[2], [0]], [[3], [1]]], steps=[1, 1])
    assert ticket.assignment.ranks == ((("2.2",), ("0.0",)), (("3.3",), ("1.1",)))
    assert ticket.assignment.steps == (1, 1)
