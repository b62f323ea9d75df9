"""A DeepSeek-V3-like model of real Megatron with its replay driver, and routing of our making for its routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.errors import R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.replay import ReplayDriver
from tests.dist import deepseek

SAMPLES, LENGTH, MICROBATCHES = 2, 16, 3
ROWS = SAMPLES * LENGTH
SPEC = RoutingSpec(num_layers=deepseek.LAYERS, moe_layers=(1, 2, 3), num_experts=16, top_k=4)


class Routing:
    """Ids of every micro-batch and layer, the same on all ranks; this one's samples and its SP slice. They can be spoilt."""

    num_microbatches = MICROBATCHES
    live: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def __init__(self, layout: TrainerLayout) -> None:
        self.layout, self.at = layout, megatron.parallel_coords()
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
        self.whole = {
            (index, layer): torch.from_numpy(random_rows(index, layer))
            for index in range(MICROBATCHES)
            for layer in range(deepseek.LAYERS + 1)
        }

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        # row = position * samples + sample
        rows = self.whole[microbatch, layer][self.at.dp :: self.layout.dp]
        slots = self.layout.tp_slots
        return self.spoil((rows.chunk(slots)[self.at.tp] if slots > 1 else rows).contiguous())

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        return self.live

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        none = torch.zeros(len(self.layer_ids(microbatch, 1)), dtype=torch.bool)
        return none if self.padding is None else self.padding

    def check_digest(
        self, microbatch: int, layer: int, ids_RK: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return ids_RK.to(dtype)

    def verify(self) -> None: ...


def random_rows(index: int, layer: int) -> np.ndarray:
    scores = np.random.default_rng([index, layer]).random((ROWS, 16))
    return np.argsort(scores, axis=-1)[:, :4].astype(np.uint8)


class Bench:
    """One model with its driver."""

    def __init__(self, layout: TrainerLayout, **changes: Any) -> None:
        self.layout = layout
        self.model = deepseek.build(**changes)
        self.driver = ReplayDriver.attach([self.model], spec=SPEC, layout=layout)
        self.routing = Routing(layout)

    def forward(self, index: int = 0, *, pads: int = 0, **given: Any) -> torch.Tensor:
        """The mean loss of a micro-batch; `pads` tokens behind each sample, which count for nothing."""
        rng = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, deepseek.VOCAB, (SAMPLES, LENGTH), generator=rng)
        tokens = tokens[self.routing.at.dp :: self.layout.dp]
        both = (torch.nn.functional.pad(each, (0, pads)) for each in (tokens, tokens.roll(-1, 1)))
        tokens, given["labels"] = both
        positions = torch.arange(LENGTH + pads).expand_as(tokens)
        return self.model(tokens, positions, None, **given)[:, :LENGTH].mean()

    def step(self, number: int = 1, **options: Any) -> AbstractContextManager[Any]:
        return self.driver.step(self.routing, step=number, **options)

    def whole_step(
        self, indices: Iterable[int] = range(MICROBATCHES), *, audit: RoutingAudit | None = None, **given: Any
    ) -> None:
        with self.step(audit=audit) as step:
            for index in indices:
                with step.microbatch(index):
                    loss = self.forward(index, **given)
                loss.backward()
                self.loss = loss.item()

    def train(self, *, audit: RoutingAudit | None = None) -> list[Any]:
        """A whole step with the gradients of all micro-batches; gives the tap's records."""
        self.model.zero_grad()
        with RouterTap(self.driver) as tap:
            self.whole_step(audit=audit)
        return tap.records

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: w.grad.clone() for n, w in self.model.named_parameters() if w.grad is not None}

    def natural(self) -> None:
        """Let the routing be what the live routers choose, as an engine with the same weights would record it."""
        with torch.no_grad(), RouterTap(self.driver) as tap:
            for index in range(MICROBATCHES):
                with self.driver.disable(microbatch=index):
                    self.forward(index)
        for record in tap.records:
            self.routing.whole[record.microbatch, record.layer] = torch.from_numpy(record.ids_RK)


@contextmanager
def bench(layout: TrainerLayout | None = None, **changes: Any) -> Iterator[Bench]:
    own = Bench(layout or TrainerLayout(), **changes)
    yield own
    own.driver.close()


def refused(kind: type[R3Error], *words: str) -> AbstractContextManager[Any]:
    """The error is of this kind, and says all of these."""
    return pytest.raises(kind, check=lambda error: all(word in str(error) for word in words))
