"""Real Megatron, a world of one: ids from frames through relay and receiver to every router; gradients, waits, cost.

What must be equal under deterministic algorithms is held, without them, against what the model's own atomics change.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.embedded import megatron as embedded
from examples.embedded import megatron_shim
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.audit import Consumed, RouterTap
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.replay import ReplayDriver
from r3channel.trainer.step import index_dtype
from r3channel.wire.frame import encode_frame
from tests.gpu.facts import WAITS, Facts
from tests.support.samples import random_ids

MICROBATCHES, SAMPLES, VOCAB = 2, 2, 512
LAYOUT = TrainerLayout.parse("dp=1,pad_policy=live")
"""The live router chooses where no engine did, as without replay."""
NAMES = [[f"m{i}s{j}" for j in range(SAMPLES)] for i in range(MICROBATCHES)]
SAMPLE_IDS = [name for names in NAMES for name in names]
DTYPES = torch.float32, torch.bfloat16
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
UPLOAD = "Memcpy HtoD (Pageable"
"""How the profiler's name of one begins: an asynchronous copy by its call, and CUDA waits until its turn has come."""
NOISE = 4
"""Times what two runs of the model differ by."""


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    experts: int
    top_k: int
    length: int
    hidden: int
    heads: int
    wide: int
    expert: int


TINY = Sizes(3, 16, 4, 8, 32, 4, 64, 32)
SOME = Sizes(6, 32, 8, 512, 1024, 8, 2048, 128)
"""Enough for each kernel to work on more than a block."""
DEEP = replace(SOME, layers=48)
"""A step takes as long as one does."""


class Trainer:
    """One model with its channel; a step is as in training, without an optimizer."""

    def __init__(self, device: str, sizes: Sizes, *, dtype: torch.dtype, recompute: str) -> None:
        routing = {"num_experts": sizes.experts, "top_k": sizes.top_k}
        moe_layers, self.length = tuple(range(1, sizes.layers)), sizes.length
        self.spec = RoutingSpec(num_layers=sizes.layers, moe_layers=moe_layers, **routing)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.model = build(self.spec, self.device, sizes, dtype=dtype, **RECOMPUTE[recompute])
        self.driver = ReplayDriver.attach([self.model], spec=self.spec, layout=LAYOUT)
        self.relay = Relay(self.spec, LAYOUT, ChannelConfig())
        at: dict[str, Any] = {"layout": LAYOUT, "coords": LAYOUT.coords(0), "device": self.device}
        self.receiver = Receiver(self.relay, spec=self.spec, config=self.relay.config, **at)
        self.batches = [self._batch(index) for index in range(MICROBATCHES)]
        self.steps = 0

    def _batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seed = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB, (SAMPLES, self.length), generator=seed).to(self.device)
        return tokens, torch.arange(self.length, device=self.device).expand_as(tokens), tokens.roll(-1, 1)

    def close(self) -> None:
        for part in (self.driver, self.receiver, self.relay):
            part.close()

    def random_ids(self, *, seed: int = 0) -> dict[str, np.ndarray]:
        """Ids for each sample."""
        named = enumerate(SAMPLE_IDS, seed)
        return {name: random_ids(self.length - 1, spec=self.spec, seed=at) for at, name in named}

    def received(self, ids: dict[str, np.ndarray]) -> RankShard:
        for name, ids_TLK in ids.items():
            self.relay.add_frame(name, encode_frame(self.spec, expert_ids_TLK=ids_TLK), range(self.length))
        ticket = self.relay.seal(self.steps, Assignment.given([NAMES]))
        self.steps += 1
        shard = self.receiver.receive(ticket)
        self.relay.join_previous()
        return shard

    def forward(self, index: int) -> torch.Tensor:
        tokens, positions, labels = self.batches[index]
        return self.model(tokens, positions, None, labels=labels).mean()

    def train(self, around: Callable[[int], AbstractContextManager[Any]]) -> None:
        self.model.zero_grad()
        for index in range(MICROBATCHES):
            with around(index):
                loss = self.forward(index)
            loss.backward()

    def natural(self) -> None:
        self.train(lambda index: self.driver.disable(microbatch=index))

    def replay(self, shard: RankShard, audit: RoutingAudit | None = None) -> None:
        with self.driver.step(shard, step=0, audit=audit) as step:
            self.train(step.microbatch)

    def gradients(self) -> list[torch.Tensor]:
        return [weight.grad.clone() for weight in self.model.parameters() if weight.grad is not None]

    def by_sample(self, shard: RankShard, records: list[Consumed]) -> dict[str, np.ndarray]:
        """[rows, L, K] of each sample: what its rows' routers used."""
        shape = (self.length - 1, self.spec.num_moe_layers, self.spec.top_k)
        found = {name: np.zeros(shape, self.spec.id_dtype) for name in SAMPLE_IDS}
        for record in records:
            sample_R, position_R = shard.shard.row_map(record.microbatch, tp=0)
            for row in np.flatnonzero(sample_R >= 0):
                own_TLK = found[NAMES[record.microbatch][sample_R[row]]]
                own_TLK[position_R[row], self.spec.moe_index(record.layer)] = record.ids_RK[row]
        return found


def build(spec: RoutingSpec, device: torch.device, own: Sizes, *, dtype: torch.dtype, **changes: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = device.type == "cuda"
    sizes: dict[str, Any] = {"hidden_size": own.hidden, "num_attention_heads": own.heads}
    sizes |= {"ffn_hidden_size": own.wide, "use_cpu_initialization": not on_gpu}
    routing: dict[str, Any] = {
        "num_moe_experts": spec.num_experts, "moe_router_topk": spec.top_k, "moe_ffn_hidden_size": own.expert,
        "moe_layer_freq": [0] + [1] * spec.num_moe_layers, "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }  # fmt: skip
    plain: dict[str, Any] = {"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    gated: dict[str, Any] = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    kind: dict[str, Any] = {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
    }
    settings = embedded.LOCAL_CONFIG | sizes | routing | plain | gated | kind | changes
    config = TransformerConfig(num_layers=spec.num_layers, **settings)
    block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if not on_gpu:
        from examples.embedded.megatron_modules import use_local_modules

        block = use_local_modules(block)
    torch.manual_seed(3)
    model: Any = GPTModel(config, block, VOCAB, own.length, position_embedding_type="rope")
    return model.to(device=device, dtype=dtype).train()


@contextmanager
def world_of_one(device: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous", "rank": 0, "world_size": 1}
        if device == "cpu":
            torch.set_num_threads(1)
            embedded.init_distributed(**where, layout=TrainerLayout(), timeout_s=60)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic with it only
            torch.cuda.set_device(0)
            dist.init_process_group("nccl", **where)
            megatron_shim.name_te_general_gemm()
            embedded._init_megatron(TrainerLayout(), seed=1, timeout_s=60)
        yield
        embedded.close_distributed()


def ids_reach_routers(own: Trainer, name: str, facts: Facts) -> None:
    """Random ids through the channel."""
    given = own.random_ids()
    shard = own.received(given)
    with RouterTap(own.driver) as tap:
        with torch.no_grad(), own.driver.step(shard, step=0) as step:
            for index in range(MICROBATCHES):
                with step.microbatch(index, mode="logprob"):
                    own.forward(index)
        own.replay(shard)
    passes = {record.pass_name for record in tap.records}
    different = 0
    for name_of_pass in passes:
        used = own.by_sample(shard, [r for r in tap.records if r.pass_name == name_of_pass])
        different += sum(int((used[sample] != ids_TLK).sum()) for sample, ids_TLK in given.items())
    facts.expect(f"{name}: ids that differ", different, different == 0, "0")
    facts.expect(f"{name}: passes", sorted(passes), {"forward", "logprob"} <= passes, "forward and logprob")


def gradients_stay(own: Trainer, name: str, facts: Facts, *, exactly: bool) -> None:
    shard = chosen(own)
    wanted = own.gradients()
    own.natural()
    noise = furthest(own.gradients(), wanted)
    own.replay(shard)
    change = furthest(own.gradients(), wanted)
    most = 0.0 if exactly and not noise else NOISE * max(noise, torch.finfo(wanted[0].dtype).eps)
    facts.note(f"{name}: gradients of two own runs, relative", noise)
    facts.expect(f"{name}: gradients, relative", change, change <= most, f"at most {most}")


def chosen(own: Trainer) -> RankShard:
    """The ids that the routers choose themselves, in a step of the model."""
    with RouterTap(own.driver) as tap:
        own.natural()
        records = [one for one in tap.records if one.microbatch >= 0]  # a recompute is outside of its block
    return own.received(own.by_sample(own.received(own.random_ids()), records))


def furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The norm of the difference, of the norm."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(some, others, strict=True))


def waits_of(run: Callable[[], object], device: str) -> int:
    """How often the host waited for the device; on a CPU, how often it would."""
    if device == "cpu":
        from tests.unit.test_replay_step import watched

        with watched() as seen:
            run()
        return len(seen)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:  # of every activity: runtime calls are the device's
        run()
    events = profile.key_averages()
    return sum(event.count for event in events if event.key in WAITS or event.key.startswith(UPLOAD))


def audit(own: Trainer, device: str, facts: Facts) -> None:
    """Megatron's own dispatcher waits too, so what counts is what replay adds; the look at the step's end comes after it."""
    somewhere = own.device if device == "cuda" else torch.device("meta")
    for name, run in {
        "read": lambda: torch.ones(1, device=own.device).sum().item(),
        "upload": lambda: torch.ones(1).to(somewhere, non_blocking=True),
    }.items():
        seen = waits_of(run, device)
        facts.expect(f"waits that are seen of one {name}", seen, seen > 0, "some")
    natural = waits_of(own.natural, device)
    for count in (0, 1):
        shard = own.received(own.random_ids(seed=7 + count))
        if device == "cpu":
            shard.digests._host_SL = None  # as where rows lie on a device: read at the step's end
        look = RoutingAudit(step=0, microbatches=MICROBATCHES, count=count, counted_rows=shard.counted_rows)
        with own.driver.step(shard, step=0, audit=look) as step:
            added = waits_of(lambda step=step: own.train(step.microbatch), device) - natural
        facts.expect(f"waits that replay adds, audit {'on' if count else 'off'}", added, added <= 0, "0")


def check(device: str, facts: Facts) -> None:
    sizes = TINY if facts.small else SOME
    with world_of_one(device):
        facts.note("index dtype", str(index_dtype(torch.device(device))))
        for dtype, recompute, exactly in product(DTYPES, RECOMPUTE, (False, True)):
            torch.use_deterministic_algorithms(exactly, warn_only=True)
            own = Trainer(device, sizes, dtype=dtype, recompute=recompute)
            name = f"{dtype}, recompute {recompute}, deterministic {exactly}"
            ids_reach_routers(own, name, facts)
            gradients_stay(own, name, facts, exactly=exactly)
            own.close()
        torch.use_deterministic_algorithms(False)
        own = Trainer(device, sizes, dtype=torch.bfloat16, recompute="none")
        audit(own, device, facts)
        own.close()


def cost(device: str, facts: Facts) -> None:
    with world_of_one(device):
        own = Trainer(device, TINY if facts.small else DEEP, dtype=torch.bfloat16, recompute="none")
        shard = chosen(own)  # other ids would fill experts otherwise, and cost what replay does not
        runs = {"off": own.natural, "on": lambda: own.replay(shard)}
        seen: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(4 if facts.small else 9):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                if device == "cuda":
                    torch.cuda.synchronize()
                seen[name] += [time.perf_counter() - begin] if number >= 3 else []
        percent = statistics.median(100 * (a / b - 1) for a, b in zip(seen["on"], seen["off"], strict=True))
        facts.note("step without replay, s", statistics.median(seen["off"]))
        facts.limit("replay, percent of a step", percent, percent <= 1.0, "at most 1")
        own.close()
