"""Worker: one rank of a real Megatron trainer replays a step; every id that its routers used is compared with an oracle.

The oracle knows only Megatron's row order: ids [b, s, k] -> sequence-major -> the rank's contiguous slice.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from examples.embedded import megatron as embedded
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import Consumed, RouterTap
from r3channel.trainer.replay import ReplayDriver
from r3channel.weights.convert import hf_weights
from tests.dist.ranks import write_result

MICROBATCHES, SAMPLES, LENGTH, VOCAB = 4, 2, 12, 512


def global_ids(spec: RoutingSpec, microbatch: int, layer: int) -> torch.Tensor:
    """[samples, length, k] distinct random experts, the same on every rank."""
    rng = np.random.default_rng([7, microbatch, layer])
    scores = rng.random((SAMPLES, LENGTH, spec.num_experts))
    return torch.from_numpy(np.argsort(scores, axis=-1)[..., : spec.top_k].astype(spec.id_dtype))


class Oracle:
    """This rank's rows, cut by the one rule that is to be shown."""

    num_microbatches = MICROBATCHES

    def __init__(self, spec: RoutingSpec, layout: TrainerLayout) -> None:
        self.spec, self.layout, self.at = spec, layout, megatron.parallel_coords()

    def live_rows(self, microbatch: int) -> None:
        return None

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        return torch.zeros(len(self.layer_ids(microbatch, 1)), dtype=torch.bool)

    def check_digest(self, microbatch: int, layer: int, ids_RK: torch.Tensor) -> None: ...

    def verified(self) -> None: ...

    def samples(self) -> slice:
        width = SAMPLES // self.layout.dp
        return slice(self.at.dp * width, (self.at.dp + 1) * width)

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        rows = (
            global_ids(self.spec, microbatch, layer)[self.samples()]
            .transpose(0, 1)
            .reshape(-1, self.spec.top_k)
        )
        if self.layout.sequence_parallel:
            rows = rows.chunk(self.layout.tp)[self.at.tp]
        return rows.contiguous()

    def batch(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = torch.randint(
            0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(microbatch)
        )
        tokens = tokens[self.samples()]
        return tokens, torch.arange(LENGTH).expand_as(tokens), torch.roll(tokens, -1, 1)


class Rank:
    """One rank's model, driver and oracle."""

    def __init__(self, job: dict[str, Any], layout: TrainerLayout, *, dtype: str = "float32") -> None:
        self.layout = layout
        self.model = embedded.build(job["model"], layout, dtype=dtype, lr=1e-3)
        self.spec = megatron.spec_from_config(self.model.chunks)
        self.driver = ReplayDriver.attach(self.model.chunks, spec=self.spec, layout=layout)
        self.oracle = Oracle(self.spec, layout)
        self.at_origin = job["rank"] == 0 and dtype == "float32"
        self.layers = layout.stage_layers(self.spec, pp=self.oracle.at.pp)

    def forward(self, microbatch: int) -> torch.Tensor:
        tokens, positions, labels = self.oracle.batch(microbatch)
        return self.model.chunks[0](tokens, positions, None, labels=labels)

    def schedule(self, forward_step: Any, *, forward_only: bool = False) -> list[float]:
        losses = self.model.run(
            forward_step,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES // self.layout.dp,
            forward_only=forward_only,
            data=range(MICROBATCHES),
        )
        return [item["loss"] for item in losses]


def reduced(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return output.mean(), {"loss": output.mean().item()}


def replayed(rank: Rank, *, mode: Any) -> list[float]:
    """A whole schedule under the driver."""
    with rank.driver.step(rank.oracle, step=5) as step:

        def forward_step(data: Iterator[int], _chunk: Any) -> Any:
            index = next(data)
            with step.microbatch(index, mode=mode):
                return rank.forward(index), reduced

        return rank.schedule(forward_step, forward_only=mode == "logprob")


def check_rows(rank: Rank, records: list[Consumed], *passes: str) -> int:
    """Each (pass, micro-batch, layer) once, with exactly the oracle's ids. Gives the number of ids compared."""
    found = Counter((record.pass_name, record.microbatch, record.layer) for record in records)
    wanted = {(name, i, layer) for name in passes for i in range(MICROBATCHES) for layer in rank.layers}
    assert found == Counter(wanted), (found, wanted)
    for record in records:
        ids = rank.oracle.layer_ids(record.microbatch, record.layer).numpy()
        assert record.step == 5 and record.ids_RK.dtype == rank.spec.id_dtype
        assert np.array_equal(record.ids_RK, ids), (record.pass_name, record.microbatch, record.layer)
    return sum(record.ids_RK.size for record in records)


def check_clean(rank: Rank) -> None:
    for handle in rank.driver.handles.values():
        assert handle.replay.replay_backward_list == []
        assert handle.replay.target_topk_idx is None and handle.replay.router_replay_action is None
    assert rank.driver.tap is None


def check_export(rank: Rank, job: dict[str, Any]) -> int:
    """Every tensor of the checkpoint, bit for bit in the trainer's dtype."""
    wanted = load_file(f"{job['model']}/model.safetensors")
    exported = {name: tensor.clone() for name, tensor in hf_weights(rank.model.bridge, rank.model.chunks)}
    assert exported.keys() == wanted.keys(), sorted(exported.keys() ^ wanted.keys())[:5]
    different = [n for n, tensor in exported.items() if not torch.equal(tensor, wanted[n].to(tensor.dtype))]
    assert not different, different[:5]
    return len(exported)


def whole_gradients(rank: Rank) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, gathered and named as the weights are. Collective."""
    parameters: list[Any] = [p for chunk in rank.model.chunks for p in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = {n: t.clone() for n, t in hf_weights(rank.model.bridge, rank.model.chunks)}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return gradients


def train(rank: Rank, out: str) -> dict[str, Any]:
    rank.model.zero_grad()
    with RouterTap(rank.driver) as tap:
        losses = replayed(rank, mode="train")
    ids = check_rows(rank, tap.records, "forward", "recompute")
    check_clean(rank)
    gradients = whole_gradients(rank)
    if rank.at_origin:
        save_file(gradients, f"{out}/gradients.safetensors")
    done, norm, _ = rank.model.optimizer.step()
    assert done
    return {"losses": losses, "norm": norm, "ids": ids}


def logprob_on_and_off(rank: Rank) -> dict[str, Any]:
    """Forward-only passes: replayed ones use the oracle's ids and leave nothing, natural ones use others."""

    def natural(data: Iterator[int], _chunk: Any) -> Any:
        index = next(data)
        with rank.driver.off(microbatch=index):
            return rank.forward(index), reduced

    with torch.no_grad(), RouterTap(rank.driver) as tap:
        on = replayed(rank, mode="logprob")
        ids = check_rows(rank, tap.records, "logprob")
        tap.records.clear()
        off = rank.schedule(natural, forward_only=True)
    check_clean(rank)
    assert {(r.pass_name, r.step) for r in tap.records} == {("natural", -1)}
    same = [
        np.array_equal(r.ids_RK, rank.oracle.layer_ids(r.microbatch, r.layer).numpy()) for r in tap.records
    ]
    assert len(same) == MICROBATCHES * len(rank.layers) and not any(same)
    assert not on or max(abs(a - b) for a, b in zip(on, off, strict=True)) > 1e-3
    return {"logprob_ids": ids}


def action_left_on(rank: Rank) -> dict[str, Any]:
    """The trap that the driver prevents: Megatron's own recipe without the switch. Gradients only, no optimizer step."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def forward_step(data: Iterator[int], _chunk: Any) -> Any:
        index = next(data)
        for layer, handle in rank.driver.handles.items():
            handle.replay.set_target_indices(rank.oracle.layer_ids(index, layer).long())
            handle.replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        return rank.forward(index), reduced

    rank.model.zero_grad()
    losses = rank.schedule(forward_step)
    for handle in rank.driver.handles.values():
        handle.replay.clear_indices()
        handle.replay.clear_router_replay_action()
    rank.model.optimizer.prepare_grads()
    return {"trap_losses": losses, "trap_norm": float(rank.model.optimizer.get_grad_norm())}


def without_sequence_parallelism(rank: Rank, job: dict[str, Any]) -> dict[str, Any]:
    """TP > 1 without SP: every TP rank's routers take all rows; Megatron refuses to train so, hence eval only."""
    plain = Rank(job, TrainerLayout(tp=rank.layout.tp, sp=False))
    plain.model.chunks[0].eval()
    return {"plain": logprob_on_and_off(plain)}


def bfloat16(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """bf16 parameters over float32 main parameters: exported exactly, and they move under replay."""
    rank = Rank(job, layout, dtype="bfloat16")
    count = check_export(rank, job)
    before = {n: t.clone() for n, t in hf_weights(rank.model.bridge, rank.model.chunks, dtype=torch.float32)}
    result = train(rank, job["out"])
    after = dict(hf_weights(rank.model.bridge, rank.model.chunks, dtype=torch.float32))
    moved = sum(not torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.dtype == torch.float32 for tensor in after.values()) and moved > count / 2
    return {"bf16_norm": result["norm"], "bf16_tensors": count}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    layout = TrainerLayout.parse(job["layout"])
    embedded.init_distributed(
        rank=job["rank"],
        world_size=job["world_size"],
        init_method=job["init_method"],
        layout=layout,
        timeout_s=60,
    )
    rank = Rank(job, layout)
    result = {"layers": rank.layers, "tensors": check_export(rank, job)}
    if layout.pp > 1:
        result |= action_left_on(rank)
    result |= train(rank, job["out"]) | logprob_on_and_off(rank)
    if layout.tp == layout.world_size > layout.ep:
        result |= without_sequence_parallelism(rank, job)
    if layout.world_size == 1:
        result |= bfloat16(job, layout)
    embedded.close_distributed()
    write_result(job, result)


if __name__ == "__main__":
    main()
