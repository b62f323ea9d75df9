"""The audit: compares replayed ids with the live router's choices, on a sample of the micro-batches.

Routing that drifts with the weights differs in a few percent of (token, layer) pairs. Routing that is shifted by one layer
or one token differs in nearly all pairs, with shapes that stay right. So the share of differing pairs is the alarm. Nothing here
changes what the routers do. This module imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from r3channel.observe.metrics import Metrics
from r3channel.trainer.router import Seen

_ENOUGH_PAIRS = 1000
"""With fewer pairs than this the mean overlap of unrelated choices scatters."""

_WORST_LAYERS = 8
"""Layers that get gauges; a hundred would be most of a process's series."""
_COUNTED = tuple(
    f"r3channel_audit_{name}_total"
    for name in ("pairs", "pairs_different", "pairs_disjoint", "tokens", "tokens_different")
)


@dataclass(slots=True)
class LayerMismatch:
    """Sums over the audited rows of one layer; divide by `rows`."""

    layer: int
    rows: int = 0
    different: int = 0
    """Rows whose sets of experts differ."""
    overlap: float = 0.0
    """Sum over rows of |live and replayed| / K."""
    disjoint: int = 0
    """Rows that share no expert."""


@dataclass(slots=True)
class LogprobDifference:
    """Sums of d = trainer - engine log-prob over response tokens; divide by `tokens`."""

    tokens: int = 0
    absolute: float = 0.0
    k1: float = 0.0
    """The sum of -d: the estimator of KL(engine || trainer)."""
    k3: float = 0.0
    """The sum of exp(d) - 1 - d."""

    def means(self) -> dict[str, float]:
        """Return the figures of the mean token by name; empty without tokens."""
        if not self.tokens:
            return {}
        return {"logprob_abs_diff": self.absolute / self.tokens, "logprob_k3": self.k3 / self.tokens}


@dataclass(slots=True)
class MismatchReport:
    """The audit of one step on one rank. Only rows that an engine computed count. Reports of ranks add up field by field."""

    step: int
    microbatches: tuple[int, ...]
    layers: list[LayerMismatch]
    tokens: int = 0
    tokens_different: int = 0
    """Tokens with at least one differing layer, among this rank's layers."""
    logprobs: LogprobDifference = field(default_factory=LogprobDifference)

    def total(self, name: str) -> Any:
        """Add up one field of all layers."""
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def pairs(self) -> int:
        """Return the number of (token, layer) pairs compared."""
        return self.total("rows")

    @property
    def different_fraction(self) -> float:
        return self.total("different") / max(self.pairs, 1)

    @property
    def mean_overlap(self) -> float:
        return self.total("overlap") / max(self.pairs, 1)

    def is_at(self, chance: float) -> bool:
        """Return whether replayed and live choices agree only by chance.

        They then have as much in common as unrelated choices have.

        Args:
            chance: The share of experts that unrelated choices have in common.
        """
        return self.pairs >= _ENOUGH_PAIRS and self.mean_overlap < 1.5 * chance < 0.5

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"pairs": self.pairs, "different_fraction": self.different_fraction}


class RoutingAudit:
    """The audit of `count` micro-batches of a step, other ones in each step.

    Each layer is audited in the first pass that reaches it. OPEN -> report(). Calls come on the routers' thread. Sums stay on the
    routers' device: only `report` waits for it, once.
    """

    def __init__(
        self, *, step: int, microbatches: int, count: int, counted_rows: Callable[[int], torch.Tensor]
    ) -> None:
        """Choose the micro-batches to audit.

        Args:
            step: The step's number.
            microbatches: The number of micro-batches in the step.
            count: How many of them to audit.
            counted_rows: Gives [rows] bool of a micro-batch: rows that an engine computed.
        """
        chosen = {(step * count + index) % microbatches for index in range(min(count, microbatches))}
        self.step, self.chosen = step, tuple(sorted(chosen))
        self._counted_rows = counted_rows
        self._top_k = 0
        self._seen: set[tuple[int, int]] = set()
        self._layers: dict[int, torch.Tensor] = {}
        """[4]: rows, different, experts in common, disjoint."""
        self._different: dict[int, torch.Tensor] = {}
        self._logprobs: list[torch.Tensor] = []

    def wants(self, microbatch: int) -> bool:
        return microbatch in self.chosen

    def observer(self, layer: int, microbatch: int) -> Seen | None:
        """Return the function that a router calls in an audited pass.

        Args:
            layer: The router's layer.
            microbatch: The index of the micro-batch.

        Returns:
            The function; None where the micro-batch is not audited, or this layer has been seen.
        """
        if not self.wants(microbatch) or (layer, microbatch) in self._seen:
            return None
        self._seen.add((layer, microbatch))
        return lambda natural, replayed: self._compare(layer, microbatch, natural, replayed)

    def add_logprobs(self, ours: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        """Add log-probs of both sides.

        Args:
            ours: The trainer's log-probs. All tensors of this call have equal shapes.
            engine: The engine's log-probs.
            mask: Above 0 where log-probs count.
        """
        chosen = mask > 0
        # Not times the mask: padding may be infinite.
        d = torch.where(chosen, ours.detach().double() - engine.double(), 0.0)
        self._logprobs.append(torch.stack([chosen.sum(), d.abs().sum(), -d.sum(), (d.exp() - 1 - d).sum()]))

    def report(self) -> MismatchReport:
        """Return what has been seen so far. Waits for the device."""
        flags = self._different.items()
        tokens = [torch.stack([self._counted_rows(batch).sum(), flag_R.sum()]) for batch, flag_R in flags]
        by_layer, by_batch, logprobs = _read([*self._layers.values()], tokens, self._logprobs)
        layers = [
            LayerMismatch(layer, int(rows), int(different), shared / self._top_k, int(disjoint))
            for layer, (rows, different, shared, disjoint) in sorted(zip(self._layers, by_layer, strict=True))
        ]
        seen, different = map(sum, zip([0] * 2, *by_batch, strict=True))
        count, *sums = map(sum, zip([0] * 4, *logprobs, strict=True))
        difference = LogprobDifference(int(count), *sums)
        return MismatchReport(self.step, self.chosen, layers, int(seen), int(different), difference)

    def _compare(
        self, layer: int, microbatch: int, natural_RK: torch.Tensor, replayed_RK: torch.Tensor
    ) -> None:
        counted_R, self._top_k = self._counted_rows(microbatch), natural_RK.shape[1]
        shared_R = (natural_RK[:, :, None] == replayed_RK[:, None, :]).any(-1).sum(-1)
        # Masked, not indexed: indexing would wait for the device, which alone knows how many rows are counted.
        differs_R, disjoint_R = (shared_R < self._top_k) & counted_R, (shared_R == 0) & counted_R
        sums = torch.stack([counted_R.sum(), differs_R.sum(), (shared_R * counted_R).sum(), disjoint_R.sum()])
        self._layers[layer] = self._layers.get(layer, 0) + sums
        self._different[microbatch] = self._different.get(microbatch, False) | differs_R


def _read(*groups: Sequence[torch.Tensor]) -> list[list[list[float]]]:
    # All sums in one copy to the host; as doubles, counts are exact up to 2**53.
    sums = [part for group in groups for part in group]
    joined = [part.double().to(sums[0].device, non_blocking=True) for part in sums]
    numbers = iter(torch.cat(joined).tolist() if joined else ())
    return [[[*islice(numbers, len(part))] for part in group] for group in groups]


def measure(metrics: Metrics) -> None:
    """Create the counters of an audit at 0."""
    for name in _COUNTED:
        metrics.measure(name)


def publish(report: MismatchReport, metrics: Metrics) -> None:
    """Put one rank's report into its metrics, which `measure` has prepared."""
    pairs = map(report.total, ("rows", "different", "disjoint"))
    for name, count in zip(_COUNTED, (*pairs, report.tokens, report.tokens_different), strict=True):
        metrics.inc(name, count)
    for name, worst in (("overlap", 1), ("different", -1)):
        shares = {str(one.layer): getattr(one, name) / max(one.rows, 1) for one in report.layers}
        kept = sorted(shares.items(), key=lambda item: worst * item[1])[:_WORST_LAYERS]
        metrics.replace(f"r3channel_audit_layer_{name}", "layer", dict(kept))
    for name, mean in report.logprobs.means().items():
        metrics.set(f"r3channel_audit_{name}", mean)
