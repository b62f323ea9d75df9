"""One rank of real Megatron receives a recorded step from a relay in another process, and trains on it.

For each layout of its job, one after another: the checkpoint out again, log-probs with replay and without, then a train step
under the schedule, several micro-batches, full recompute. The oracle is the default path's way: all rows and layers of all
samples, padded, then cut for this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from examples.embedded import megatron as embedded
from r3channel.config import ChannelConfig
from r3channel.errors import PeerFailed
from r3channel.observe.metrics import Metrics
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.recordings.recording import Recording
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import Consumed, RouterTap
from r3channel.trainer.channel import TrainerChannel
from r3channel.transport.tp_fanout import TensorParallelFanout
from r3channel.weights.convert import hf_weights
from tests.dist.control import TcpControl
from tests.dist.ranks import megatron_world
from tests.support.plans import oracle_rows

NO_AUX_LOSS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}  # it would count padding


class Rank:
    """One rank's model, channel and data under one layout."""

    def __init__(self, job: dict[str, Any], run: dict[str, Any], layout: TrainerLayout) -> None:
        self.layout = layout
        self.recording = Recording.open(run["recording"]).step(0)
        self.plan, self.at = self.recording.ticket.plan, megatron.parallel_coords()
        how = {"dtype": run["dtype"], "lr": 1e-3, "config_changes": NO_AUX_LOSS}
        self.model = embedded.build(job["model"], layout, **how)
        self.metrics = Metrics("trainer")
        self.channel = TrainerChannel.attach(
            self.model.chunks, TcpControl(run["port"]), layout=layout, config=ChannelConfig(bucket_bytes=4096),
            metrics=self.metrics,
        )  # fmt: skip
        self.shard: Shard = self.plan.shard(dp=self.at.dp, pp=self.at.pp, cp=self.at.cp)
        self.batches = self.shard.microbatches
        self.total = sum(len(tokens) - 1 for tokens in self.recording.tokens.values())

    def tokens(self) -> list[list[list[int]]]:
        return [[self.recording.tokens[name].tolist() for name in batch.sample_ids] for batch in self.batches]

    def inputs(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens, positions, labels, mask of this CP rank: [b, s / cp] or [1, t / cp]."""
        own = [self.recording.tokens[name].astype(np.int64) for name in self.batches[index].sample_ids]
        tokens = self.shard.lay_out(index, own)
        labels = self.shard.lay_out(index, [tokens[1:] for tokens in own])
        mask = self.shard.lay_out(index, [np.ones(len(tokens) - 1, np.float32) for tokens in own])
        positions = np.ascontiguousarray(self.shard.token_map(index)[1])
        return tuple(map(torch.from_numpy, (tokens, positions, labels, mask)))  # type: ignore[return-value]

    def run_pass(self, around: Around, part: range, *, forward_only: bool = False) -> list[float]:
        """The whole schedule over some micro-batches; the sums of the loss over real tokens, on the last stage."""
        scale = self.layout.dp * len(part) / self.total  # Megatron averages over these

        def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> Any:
            index = next(numbers)
            tokens, positions, labels, mask = self.inputs(index)
            packed = embedded.packed_params(self.batches[index])
            with around(index, chunk):
                output = chunk(tokens, positions, None, labels=labels, packed_seq_params=packed)

            def loss(output: torch.Tensor) -> Any:
                value = (output.float() * mask).sum()
                return value * scale, {"loss": value.item()}

            return output, loss

        first = self.batches[part[0]]
        sizes = {"seq_length": first.seq_len, "micro_batch_size": first.width, "num_microbatches": len(part)}
        found = self.model.run(forward_step, **sizes, forward_only=forward_only, data=part)
        return [item["loss"] for item in found]

    def exported(self, **options: Any) -> dict[str, torch.Tensor]:
        """Every parameter, gathered and named as in the checkpoint. Collective."""
        named = hf_weights(self.model.bridge, self.model.chunks, **options)
        return {name: tensor.clone() for name, tensor in named}


Around = Callable[[int, torch.nn.Module], AbstractContextManager[Any]]


def oracle_ids(rank: Rank, index: int, layer: int) -> np.ndarray:
    """[rows, K] of the default path, -1 where no engine row is."""
    batch, place = rank.batches[index], rank.plan.spec.moe_index(layer)
    rows = [rank.recording.rows(name)[:, place] for name in batch.sample_ids]
    return oracle_rows(rows, batch, rank.layout, cp=rank.at.cp, tp=rank.at.tp)


def check_rows(rank: Rank, records: list[Consumed], *passes: str) -> dict[str, int]:
    """Each (pass, micro-batch, layer) once, real rows with exactly the oracle's ids. Gives ids compared, by pass."""
    found = Counter((record.pass_name, record.microbatch, record.layer) for record in records)
    wanted = {(p, i, layer) for p in passes for i in range(len(rank.batches)) for layer in rank.shard.layers}
    assert found == Counter(wanted), (found, wanted)
    compared: Counter[str] = Counter()
    for record in records:
        expected = oracle_ids(rank, record.microbatch, record.layer)
        assert record.ids_RK.shape == expected.shape, (record.ids_RK.shape, expected.shape)
        real = expected[:, 0] >= 0
        assert np.array_equal(record.ids_RK[real], expected[real]), (record.pass_name, record.layer)
        compared[record.pass_name] += int(real.sum()) * expected.shape[1]
    return dict(compared)


def check_export(rank: Rank, job: dict[str, Any]) -> None:
    """Every tensor of the checkpoint, bit for bit in the trainer's dtype."""
    wanted, exported = load_file(f"{job['model']}/model.safetensors"), rank.exported()
    assert exported.keys() == wanted.keys(), sorted(exported.keys() ^ wanted.keys())[:5]
    different = [n for n, tensor in exported.items() if not torch.equal(tensor, wanted[n].to(tensor.dtype))]
    assert not different, different[:5]


def check_vote(rank: Rank) -> None:
    """A failure of TP0 is its own error there, and names it at the others."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    fanout, failure = TensorParallelFanout(group, device=torch.device("cpu")), MemoryError("no room")
    try:
        fanout.vote(None if rank.at.tp else failure, what="step 0")
    except (MemoryError, PeerFailed) as error:
        assert error is failure or "TP rank 0 of this group cannot go on: no room" in str(error)
        assert isinstance(error, PeerFailed) == bool(rank.at.tp)
    else:
        raise AssertionError("the vote passed")


def check_live(rank: Rank, replayed: list[float]) -> None:
    """A pass with replay off takes other ids than the engine's, and gives another loss."""
    live, off = list[float](), rank.channel.driver.disable
    with RouterTap(rank.channel.driver) as tap:
        for part in rank.plan.optimizer_steps:  # micro-batches of one step share a length
            live += rank.run_pass(lambda index, _: off(microbatch=index), part, forward_only=True)
    assert len(tap.records) == len(rank.batches) * len(rank.shard.layers)
    for record in tap.records:
        assert (record.pass_name, record.step) == ("natural", -1)
        assert not np.array_equal(record.ids_RK, oracle_ids(rank, record.microbatch, record.layer))
    assert not live or max(abs(a - b) for a, b in zip(live, replayed, strict=True)) > 1e-3


def whole_gradients(rank: Rank) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, named as the weights are. Collective."""
    parameters: list[Any] = [p for chunk in rank.model.chunks for p in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = rank.exported(dtype=torch.float32)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return gradients


def received(rank: Rank) -> dict[str, float]:
    """Bytes counted by this rank's receiver beside the plan's: on the wire the rows that engines made, and nothing else."""
    count = {leg: rank.metrics.value("r3channel_bytes_total", leg=leg) for leg in ("wire_received", "landed")}
    shard, spec = rank.shard, rank.plan.spec
    slots = range(shard.tp_slots) if rank.at.tp == 0 else ()
    rows = sum(int((shard.row_map(i, tp=tp)[0] >= 0).sum()) for i in range(len(rank.batches)) for tp in slots)
    planned = rows * len(shard.layers) * spec.top_k * spec.id_dtype.itemsize
    assert count == {"wire_received": planned, "landed": shard.slot_bytes}, (count, planned)
    return count


def train(job: dict[str, Any], run: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    rank = Rank(job, run, layout)
    check_export(rank, job)
    if layout.tp > 1:
        check_vote(rank)
    rank.model.zero_grad()
    parts, losses = rank.plan.optimizer_steps, list[float]()
    with (
        RouterTap(rank.channel.driver) as tap,
        rank.channel.step(rank.recording.ticket, tokens=rank.tokens()) as step,
    ):
        if run["eval"]:
            rank.model.chunks[0].eval()
        with torch.no_grad():
            before = [
                loss
                for part in parts
                for loss in rank.run_pass(
                    lambda index, chunk: step.microbatch(index, mode="logprob", chunk=chunk), part, forward_only=True
                )
            ]  # fmt: skip
        for part in () if run["eval"] else parts:  # gradients add up, as if the learning rate were 0
            losses += rank.run_pass(lambda index, chunk: step.microbatch(index, chunk=chunk), part)
    assert rank.channel.report is not None
    passes = ["logprob"] if run["eval"] else ["logprob", "forward", "recompute"]
    result = {"ids": check_rows(rank, tap.records, *passes), **received(rank)}
    result |= {"pairs": rank.channel.report.pairs, "megatron": megatron.version()}
    with torch.no_grad():
        check_live(rank, before)
    if not run["eval"]:
        assert before == losses or np.allclose(before, losses)
        result |= learned(rank, f"{job['out']}/{run['name']}.safetensors")
        result["losses"] = losses if rank.at.tp == 0 else []  # TP ranks hold the same loss
    rank.channel.close()
    return result


def learned(rank: Rank, file: str) -> dict[str, Any]:
    """The gradients into a file, their norm, and weights that an optimizer's step has moved."""
    gradients, before = whole_gradients(rank), rank.exported(dtype=torch.float32)
    if torch.distributed.get_rank() == 0:
        save_file(gradients, file)
    done, norm, _ = rank.model.optimizer.step()
    after = rank.exported(dtype=torch.float32)
    assert done and sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    return {"norm": norm, "gradients": file}


def run(job: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for number, own in enumerate(job["runs"]):
        with megatron_world(job, layout=own["layout"], meeting=f".{number}") as layout:
            results[own["name"]] = train(job, own, layout)
    return results
