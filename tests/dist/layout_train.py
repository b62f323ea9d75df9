"""Worker: one rank of real Megatron receives a recorded step from a relay in another process, and trains on it.

For each layout of its job, one after another: log-probs, then a train step under the schedule, several micro-batches,
full recompute. The oracle is the default path's way: all rows and layers of all samples, padded, then cut for this rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from examples.embedded import megatron as embedded
from r3channel.config import ChannelConfig
from r3channel.observe.metrics import Metrics
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.recordings.recording import Recording
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import Consumed, RouterTap
from r3channel.trainer.channel import TrainerChannel
from r3channel.weights.convert import hf_weights
from tests.dist.control import TcpControl
from tests.dist.ranks import write_result

NO_AUX_LOSS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}  # it would count padding


class Rank:
    """One rank's model, channel and data under one layout."""

    def __init__(self, job: dict[str, Any], run: dict[str, Any]) -> None:
        self.layout = TrainerLayout.parse(run["layout"])
        self.recording = Recording.open(run["recording"]).step(0)
        self.plan, self.at = self.recording.ticket.plan, megatron.parallel_coords()
        self.model = embedded.build(
            job["model"], self.layout, dtype="float32", config_changes=NO_AUX_LOSS | run.get("changes", {})
        )
        self.metrics = Metrics("trainer")
        self.channel = TrainerChannel.attach(
            self.model.chunks,
            TcpControl(run["port"]),
            layout=self.layout,
            config=ChannelConfig(bucket_bytes=4096),
            metrics=self.metrics,
        )
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

    def run_pass(self, step: Any, mode: str, part: range) -> list[float]:
        """The whole schedule over some micro-batches; the sums of the loss over real tokens, on the last stage."""
        scale = self.layout.dp * len(part) / self.total  # Megatron averages over these

        def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> Any:
            index = next(numbers)
            tokens, positions, labels, mask = self.inputs(index)
            with step.microbatch(index, mode=mode, chunk=chunk):
                output = chunk(
                    tokens, positions, None, labels=labels, packed_seq_params=embedded.packed_params(self.batches[index])
                )  # fmt: skip

            def loss(output: torch.Tensor) -> Any:
                value = (output.float() * mask).sum()
                return value * scale, {"loss": value.item()}

            return output, loss

        first = self.batches[part[0]]
        found = self.model.run(
            forward_step,
            num_microbatches=len(part),
            seq_length=first.seq_len,
            micro_batch_size=first.width,
            forward_only=mode == "logprob",
            data=part,
        )
        return [item["loss"] for item in found]


def oracle_ids(rank: Rank, index: int, layer: int) -> np.ndarray:
    """[rows, K] of the default path, -1 where no engine row is: whole sequences, cut for CP, then flattened, then for SP."""
    spec, batch, layout = rank.plan.spec, rank.batches[index], rank.layout
    full = []
    for name, length in zip(batch.sample_ids, batch.padded, strict=True):
        rows = np.full((length, spec.top_k), -1)
        ids_TLK = rank.recording.rows(name)
        rows[: len(ids_TLK)] = ids_TLK[:, spec.moe_index(layer)]
        full.append(rows)
    if batch.tail:
        full.append(np.full((batch.tail, spec.top_k), -1))
    cut = [rows[zigzag(len(rows), rank.at.cp, layout.cp)] for rows in full]
    line = np.concatenate(cut) if batch.packed else np.stack(cut, axis=1).reshape(-1, spec.top_k)
    return np.split(line, layout.tp)[rank.at.tp] if layout.sequence_parallel else line


def zigzag(length: int, rank: int, size: int) -> np.ndarray:
    parts = np.split(np.arange(length), 2 * size) if size > 1 else [np.arange(length)] * 2
    return np.concatenate([parts[rank], parts[2 * size - 1 - rank]]) if size > 1 else parts[0]


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


def whole_gradients(rank: Rank) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, gathered and named as the weights are. Collective."""
    parameters: list[Any] = [p for chunk in rank.model.chunks for p in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = {name: t.clone() for name, t in hf_weights(rank.model.bridge, rank.model.chunks)}
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


def train(job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    rank = Rank(job, run)
    rank.model.zero_grad()
    with (
        RouterTap(rank.channel.driver) as tap,
        rank.channel.step(rank.recording.ticket, tokens=rank.tokens()) as step,
    ):
        with torch.no_grad():
            before = [
                loss for part in rank.plan.optimizer_steps for loss in rank.run_pass(step, "logprob", part)
            ]
        losses = []
        for part in rank.plan.optimizer_steps:  # gradients add up, as if the learning rate were 0
            losses += rank.run_pass(step, "train", part)
    assert before == losses or np.allclose(before, losses)
    ids = check_rows(rank, tap.records, "logprob", "forward", *(["recompute"] if run["recompute"] else []))
    gradients = whole_gradients(rank)
    if job["rank"] == 0:
        save_file(gradients, f"{job['out']}/{run['name']}.safetensors")
    report, counts = rank.channel.report, received(rank)
    rank.channel.close()
    assert report is not None
    speaks = rank.at.tp == 0  # TP ranks hold the same loss
    return {
        "ids": ids,
        "losses": losses if speaks else [],
        "layers": rank.shard.layers,
        **counts,
        "pairs": report.pairs,
        "megatron": megatron.version(),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    results = {}
    for number, run in enumerate(job["runs"]):
        embedded.init_distributed(
            rank=job["rank"],
            world_size=job["world_size"],
            init_method=f"{job['init_method']}.{number}",
            layout=TrainerLayout.parse(run["layout"]),
            timeout_s=60,
        )
        results[run["name"]] = train(job, run)
        embedded.close_distributed()
        Path(job["out"], f"done.{job['rank']}.{number}").touch()
    write_result(job, results)


if __name__ == "__main__":
    main()
