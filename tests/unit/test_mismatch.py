"""The audit's sums, without Megatron: what differs, what is sampled, how ranks add up, what reaches the metrics."""

from __future__ import annotations

import math

import torch

from r3channel.observe.metrics import Metrics
from r3channel.trainer.mismatch import LayerMismatch, LogprobDifference, MismatchReport, RoutingAudit, publish

NATURAL = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
COUNTED = torch.arange(4) < 3
REPLAYED = torch.tensor([[1, 0], [2, 9], [8, 9], [0, 1]])  # same set, half, disjoint, not counted


def audit(
    counted_R: torch.Tensor = COUNTED, *, step: int = 0, microbatches: int = 1, count: int = 1
) -> RoutingAudit:
    return RoutingAudit(step=step, microbatches=microbatches, count=count, counted_rows=lambda _: counted_R)


def audited(audit: RoutingAudit, *layers: tuple[int, torch.Tensor, torch.Tensor]) -> MismatchReport:
    """What is said of (layer, the router's own choice, what it replayed)."""
    for layer, natural_RK, replayed_RK in layers:
        observer = audit.observer(layer, 0)
        assert observer is not None and audit.observer(layer, 0) is None, "the first pass only"
        observer(natural_RK, replayed_RK)
    return audit.report()


def report() -> MismatchReport:
    return audited(audit(), (3, NATURAL, REPLAYED), (5, NATURAL, NATURAL))


def test_choices_that_have_nothing_to_do_with_each_other_are_at_chance() -> None:
    def of(rows: int, replayed_RK: torch.Tensor) -> MismatchReport:
        own = audit(torch.ones(rows, dtype=torch.bool))
        return audited(own, (3, choices[:rows], replayed_RK[:rows]))

    torch.manual_seed(0)
    choices, others = (torch.rand(1200, 128).topk(8).indices for _ in range(2))
    assert of(1200, others).is_at(8 / 128)
    assert not of(900, others).is_at(8 / 128)  # too few to tell
    half = torch.where(torch.arange(1200)[:, None] % 4 == 0, choices, others)
    assert not of(1200, half).is_at(8 / 128)
    assert not of(1200, others).is_at(0.5)  # of 16 experts 8: chance itself is agreement


def test_tokens_count_once_however_many_layers_differ_but_for_the_order_or_in_padding() -> None:
    found = report()
    assert found.layers[0] == LayerMismatch(3, rows=3, different=2, overlap=1.5, disjoint=1)
    assert (found.tokens, found.tokens_different, found.pairs) == (3, 2, 6)
    assert math.isclose(found.different_fraction, 2 / 6) and math.isclose(found.mean_overlap, 4.5 / 6)


def test_other_micro_batches_are_audited_in_each_step() -> None:
    chosen = [audit(step=step, microbatches=5, count=2).chosen for step in range(5)]
    assert {index for pair in chosen for index in pair} == set(range(5)) and all(len(p) == 2 for p in chosen)
    assert audit(step=9, microbatches=2, count=5).chosen == (0, 1)
    assert audit(step=9, microbatches=2, count=0).chosen == ()


def test_log_prob_differences_are_those_of_response_tokens() -> None:
    own = audit()
    ours, engine = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.5, -math.inf]])
    own.add_logprobs(ours[:, :1], engine[:, :1], torch.ones(1, 1))
    own.add_logprobs(ours[:, 1:], engine[:, 1:], torch.tensor([[1.0, 0.0]]))
    sums = own.report().logprobs
    assert sums.tokens == 2 and math.isclose(sums.absolute, 1.0) and math.isclose(sums.k1, 0.0)
    assert math.isclose(sums.k3, math.exp(0.5) + math.exp(-0.5) - 2, rel_tol=1e-6)


def test_the_report_reaches_the_metrics_by_layer() -> None:
    metrics = Metrics("trainer")
    found = report()
    found.logprobs = LogprobDifference(tokens=1, absolute=0.5, k1=-0.5, k3=0.15)
    publish(found, metrics)
    totals = {"pairs": 6, "pairs_different": 2, "pairs_disjoint": 1, "tokens_different": 2}
    assert {name: metrics.value(f"r3channel_audit_{name}_total") for name in totals} == totals
    assert metrics.value("r3channel_audit_layer_overlap", layer="3") == 0.5
    assert metrics.value("r3channel_audit_layer_different", layer="5") == 0.0
    assert metrics.value("r3channel_audit_logprob_abs_diff") == 0.5
