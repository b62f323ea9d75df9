"""One trainer process: a Ray actor around a real Megatron-core model, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from examples.async_grpo.batch import MicrobatchData, unpack
from examples.async_grpo.grpo import policy_loss
from examples.async_grpo.modules import channel_modules
from examples.async_grpo.rays import fetch
from examples.async_grpo.weights_side import Publisher, Pushed, export
from examples.embedded import megatron
from examples.embedded.nodes import address
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.weights.convert import hf_shards, hf_weights

ENGINE_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""SGLang's kernels on a GPU take no float32."""


class TrainerRouting(Protocol):
    """How routing reaches the routers."""

    def shard(self, data: dict[str, Any], coords: RankCoords) -> Shard:
        """The plan's part of this rank: how its micro-batches are laid out."""
        ...

    def prefetch(self, data: dict[str, Any]) -> None:
        """Called first for each step: its routing may begin to travel."""

    def step(self, data: dict[str, Any], *, version: int) -> AbstractContextManager[None]:
        """`version`: of the weights that this trainer committed last."""
        ...

    def loss_mask(self, index: int) -> torch.Tensor | None:
        """Which tokens of a micro-batch stay in the loss, in its layout; None: all."""
        ...

    def microbatch(self, index: int, mode: str, chunk: torch.nn.Module) -> AbstractContextManager[None]:
        """`mode`: train, logprob, or natural (replay off)."""
        ...

    def compare_logprobs(
        self, ours: list[torch.Tensor], off: list[torch.Tensor], batches: list[MicrobatchData]
    ) -> None:
        """For audit and recording; [] off the last pipeline stage. `off`: with replay off, or []."""
        ...

    @property
    def metrics(self) -> Metrics | None:
        """This process's metrics."""
        ...

    def report(self) -> dict[str, Any]: ...

    def weight_version(self, version: int) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """slime's train actor. Every method is called on all ranks together; one thread."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        torch.set_num_threads(1)
        self.args, self.rank = args, rank
        self.layout = TrainerLayout.parse(args.layout)
        self.coords = self.layout.coords(rank)
        self.clock = StageClock("trainer")
        self.first = rank == 0
        self.publisher: Publisher | None = None
        self.version = -1
        self._data: dict[int, dict[str, Any]] = {}
        self._idle_since = self._begin_s = self._end_s = 0.0

    def init(self, init_method: str, manager: Any) -> dict[str, Any]:
        """Process groups, model, optimizer, routing."""
        size = self.layout.world_size
        megatron.init_distributed(
            rank=self.rank, world_size=size, init_method=init_method, layout=self.layout, seed=self.args.seed,
            device=self.args.device,
        )  # fmt: skip
        self.model = megatron.build(
            self.args.model, self.layout, dtype=self.args.trainer_dtype, lr=self.args.lr
        )
        self.routing = self._make_routing(manager)
        return self.routing.report()

    def _make_routing(self, manager: Any) -> TrainerRouting:
        if self.args.use_r3_channel:
            from examples.async_grpo.channel_side import ChannelReplay as Replay
        else:
            from examples.async_grpo.variants.stock import DefaultReplay as Replay
        return Replay(self.args, self.model.chunks, manager, self.layout, self.clock)

    def connect_engines(self, urls: list[str]) -> None:
        """The first rank speaks to the engines; where each rank sends its own part, all take part."""
        if self.first or self.args.weights == "exact":
            args = self.args
            self.publisher = Publisher(
                urls, model=args.model, bucket_bytes=args.weight_bucket_bytes, manifest=args.weights_manifest,
                weights=args.weights, wire=args.weights_wire, host=address("trainer"), token_file=args.r3_token_file,
                device=args.device, metrics=self.routing.metrics,
            )  # fmt: skip

    def begin(self) -> None:
        """The measured loop starts here."""
        self._begin_s = self._idle_since = time.monotonic()

    def prefetch(self, step: int, box: list[Any]) -> None:
        """Fetch the data of a step that comes, and let its routing travel. `box` holds a reference per DP rank."""
        self._waited()
        with self.clock.span("assemble", step=step):
            self._data[step] = fetch(box[self.coords.dp])
            self.routing.prefetch(self._data[step])
        self._idle_since = time.monotonic()

    def train(self, step: int, box: list[Any]) -> dict[str, Any]:
        """One step: log-probs of the policy before the update, then the update. `box` as in `prefetch`."""
        if step not in self._data:
            self.prefetch(step, box)
        self._waited()
        with self.clock.span("assemble", step=step):
            data = self._data.pop(step)
            batches = unpack(data, self.routing.shard(data, self.coords), device=self.args.device)
        with self.routing.step(data, version=self.version):
            self._mask(batches)
            with self.clock.span("logprob", step=step):
                old = self._logprobs(batches, "logprob")
                off = self._logprobs(batches, "natural") if step == 0 else []
            self.routing.compare_logprobs(old, off, batches)
            result = self._update(step, batches, old)
        result |= {"replay_on": _difference(old, batches), "replay_off": _difference(off, batches)}
        result["logprobs"] = _logprob_columns(old, off, batches) if self.coords.tp == 0 else []
        self._idle_since = time.monotonic()
        return result

    def update_weights(self, version: int) -> Pushed | None:
        """Gather, convert and push; every rank of the first replica takes part in the gathering. The first rank tells."""
        self._waited()
        with self.clock.span("weights"):
            pushed = self._pushed(version)
        self.version = version
        self.routing.weight_version(version)
        self._idle_since = time.monotonic()
        return pushed

    def export_weights(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder, gathered as for the engines."""
        self._gathered(lambda weights: export(weights, Path(folder), model=Path(self.args.model)))

    def end(self) -> dict[str, Any]:
        """The measured loop ends here."""
        self._waited()
        self._end_s = time.monotonic()
        wall = self._end_s - self._begin_s
        return self.routing.report() | {
            "rank": self.rank,
            "wall_s": wall,
            "modules": channel_modules(),
            "coverage": self.clock.coverage(self._begin_s, self._end_s),
        }

    def close(self) -> None:
        self.routing.close()
        if self.publisher is not None:
            self.publisher.close()
        megatron.close_distributed()

    # -- passes ------------------------------------------------------------------------------------------------------

    def _logprobs(self, batches: list[MicrobatchData], mode: str) -> list[torch.Tensor]:
        """Per micro-batch [b, s / cp] log-probs of the labels, without gradients; [] off the last pipeline stage."""
        found: list[torch.Tensor] = []

        def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            found.append(-output.detach().float())
            return output.new_zeros(()), {}

        with torch.no_grad():
            self._run(batches, mode, lambda index: keep, forward_only=True)
        return found

    def _update(self, step: int, batches: list[MicrobatchData], old: list[torch.Tensor]) -> dict[str, Any]:
        def loss_of(index: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]:
            batch = batches[index]

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                value = policy_loss(
                    -output.float(), old[index], batch.advantages, batch.mask, responses=batch.responses
                )
                return value, {"loss": value.item() * self.layout.cp}

            return loss

        with self.clock.span("backward", step=step):  # the schedule's time outside of our forward_step
            self.model.zero_grad()
            losses = self._run(batches, "train", loss_of, forward_only=False)
        with self.clock.span("optimizer", step=step):
            done, norm, _ = self.model.optimizer.step()
        return {"loss": [item["loss"] for item in losses], "grad_norm": float(norm), "updated": bool(done)}

    def _run(
        self, batches: list[MicrobatchData], mode: str, loss_of: Any, *, forward_only: bool
    ) -> list[Any]:
        def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            index = next(numbers)
            batch = batches[index]
            with (
                self.clock.span("logprob" if forward_only else "forward"),
                self.routing.microbatch(index, mode, chunk),
            ):
                packed = megatron.packed_params(batch.plan, device=self.args.device)
                output = chunk(
                    batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=packed
                )
            return output, loss_of(index)

        plan, numbers = batches[0].plan, range(len(batches))
        return self.model.run(
            forward_step, num_microbatches=len(batches), seq_length=plan.seq_len, micro_batch_size=plan.width,
            forward_only=forward_only, data=numbers,
        )  # fmt: skip

    def _pushed(self, version: int) -> Pushed | None:
        if self.args.weights != "exact":
            return self._gathered(lambda weights: self._publisher().push(weights, version))
        shards = hf_shards(self.model.bridge, self.model.chunks, dtype=ENGINE_DTYPES[self.args.device])
        pushed = self._publisher().push(shards, version)
        return pushed if self.first else None

    def _gathered(self, use: Callable[[Iterator[tuple[str, torch.Tensor]]], Any]) -> Any:
        """The first rank uses the gathered weights, the others of its replica take part in the gathering."""
        if self.first:
            return use(self._weights())
        if self.coords.dp == 0 or self.layout.ep > 1:
            for _ in self._weights():
                pass
        return None

    def _publisher(self) -> Publisher:
        assert self.publisher is not None
        return self.publisher

    def _mask(self, batches: list[MicrobatchData]) -> None:
        """Tokens whose routing is invalid or too stale leave the loss, as the channel's policies say."""
        for index, batch in enumerate(batches):
            keep = self.routing.loss_mask(index)
            if keep is not None:
                batch.mask = batch.mask * keep

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return hf_weights(self.model.bridge, self.model.chunks, dtype=ENGINE_DTYPES[self.args.device])

    def _waited(self) -> None:
        """From the end of the last call to now this process stood still: for the next rollout, or for its turn."""
        if self._idle_since:
            self.clock.record("wait_generation", self._idle_since, time.monotonic())


def _logprob_columns(
    on: list[torch.Tensor], off: list[torch.Tensor], batches: list[MicrobatchData]
) -> list[list[float]]:
    """[engine, replay on, replay off] of each response token; [] where there is no pass without replay."""
    found = []
    for with_replay, without, batch in zip(on, off, batches, strict=False):
        chosen = batch.mask > 0
        columns = torch.stack([batch.rollout_logprobs[chosen], with_replay[chosen], without[chosen]], dim=1)
        found += columns.tolist()
    return found


def _difference(logprobs: list[torch.Tensor], batches: list[MicrobatchData]) -> tuple[float, float]:
    """(sum of |trainer - engine| log-prob over response tokens, their number); zeros where there is nothing."""
    if not logprobs:
        return 0.0, 0.0
    pairs = zip(logprobs, batches, strict=True)
    total = sum(float(((found - batch.rollout_logprobs).abs() * batch.mask).sum()) for found, batch in pairs)
    return total, sum(float(batch.mask.sum()) for batch in batches)
