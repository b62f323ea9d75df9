"""The audit's sums, without Megatron: what differs, what is sampled, how ranks add up, what reaches the metrics."""

from __future__ import annotations

import math

import torch

from r3channel.observe.metrics import Metrics
from r3channel.trainer.mismatch import LogprobDifference, MismatchReport, RoutingAudit, publish

NATURAL = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
REPLAYED = torch.tensor([[1, 0], [2, 9], [8, 9], [0, 1]])  # same set, half, disjoint, not counted


def report(step: int = 0, *, layers: tuple[int, ...] = (3, 5)) -> MismatchReport:
    audit = RoutingAudit(step=step, microbatches=4, count=1, counted_rows=lambda _: torch.arange(4) < 3)
    for layer in layers:
        observer = audit.observer(layer, step % 4)
        assert observer is not None
        observer(NATURAL, NATURAL if layer == 5 else REPLAYED)
    return audit.report()


def test_choices_that_have_nothing_to_do_with_each_other_are_at_chance() -> None:
    def audited(rows: int, replayed_RK: torch.Tensor) -> MismatchReport:
        counted = torch.ones(rows, dtype=torch.bool)
        audit = RoutingAudit(step=0, microbatches=1, count=1, counted_rows=lambda _: counted)
        observer = audit.observer(3, 0)
        assert observer is not None
        observer(choices[:rows], replayed_RK[:rows])
        return audit.report()

    torch.manual_seed(0)
    choices, others = (torch.rand(1200, 128).topk(8).indices for _ in range(2))
    assert audited(1200, others).is_at(8 / 128)
    assert not audited(900, others).is_at(8 / 128)  # too few to tell
    half = torch.where(torch.arange(1200)[:, None] % 4 == 0, choices, others)
    assert not audited(1200, half).is_at(8 / 128)
    assert not audited(1200, others).is_at(0.5)  # of 16 experts 8: chance itself is agreement


def test_order_within_a_row_is_no_difference_and_padding_is_not_counted() -> None:
    found = report(layers=(3,)).layers[0]
    assert (found.rows, found.different, found.overlap, found.disjoint) == (3, 2, 1.5, 1)


def test_tokens_count_once_however_many_layers_differ() -> None:
    found = report()
    assert (found.tokens, found.tokens_different, found.pairs) == (3, 2, 6)
    assert math.isclose(found.different_fraction, 2 / 6) and math.isclose(found.mean_overlap, 4.5 / 6)


def test_other_micro_batches_are_audited_in_each_step() -> None:
    chosen = [
        RoutingAudit(step=step, microbatches=5, count=2, counted_rows=lambda _: NATURAL).chosen
        for step in range(5)
    ]
    assert {index for pair in chosen for index in pair} == set(range(5)) and all(len(p) == 2 for p in chosen)
    assert RoutingAudit(step=9, microbatches=2, count=5, counted_rows=lambda _: NATURAL).chosen == (0, 1)
    assert RoutingAudit(step=9, microbatches=2, count=0, counted_rows=lambda _: NATURAL).chosen == ()


def test_a_layer_is_audited_in_the_first_pass_only() -> None:
    audit = RoutingAudit(step=0, microbatches=1, count=1, counted_rows=lambda _: NATURAL)
    assert audit.observer(3, 0) is not None and audit.observer(3, 0) is None
    assert audit.observer(4, 0) is not None


def test_log_prob_differences_are_those_of_response_tokens() -> None:
    audit = RoutingAudit(step=0, microbatches=1, count=1, counted_rows=lambda _: NATURAL)
    ours, engine = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.5, -math.inf]])
    audit.add_logprobs(ours[:, :1], engine[:, :1], torch.ones(1, 1))
    audit.add_logprobs(ours[:, 1:], engine[:, 1:], torch.tensor([[1.0, 0.0]]))
    sums = audit.report().logprobs
    assert sums.tokens == 2 and math.isclose(sums.absolute, 1.0) and math.isclose(sums.k1, 0.0)
    assert math.isclose(sums.k3, math.exp(0.5) + math.exp(-0.5) - 2, rel_tol=1e-6)


def test_the_report_reaches_the_metrics_by_layer() -> None:
    metrics = Metrics("trainer")
    found = report()
    found.logprobs = LogprobDifference(tokens=1, absolute=0.5, k1=-0.5, k3=0.15)
    publish(found, metrics)
    assert (
        metrics.value("r3channel_audit_pairs_total") == 6
        and metrics.value("r3channel_audit_pairs_different_total") == 2
    )
    assert metrics.value("r3channel_audit_pairs_disjoint_total") == 1
    assert metrics.value("r3channel_audit_tokens_different_total") == 2
    assert metrics.value("r3channel_audit_layer_overlap", layer="3") == 0.5
    assert metrics.value("r3channel_audit_layer_different", layer="5") == 0.0
    assert metrics.value("r3channel_audit_logprob_abs_diff") == 0.5
