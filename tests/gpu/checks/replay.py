"""Real Megatron, a world of one: ids from frames through relay and receiver to every router; gradients, waits, cost."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3channel.config import ChannelConfig
from r3channel.embedded import megatron as embedded
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec
from r3channel.trainer.audit import Consumed, ConsumptionTap
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.replay import ReplayDriver
from r3channel.trainer.shard import RankShard
from r3channel.trainer.step import index_dtype
from r3channel.wire.frame import encode_frame
from tests.gpu.facts import Facts
from tests.samples import random_ids

MICROBATCHES, SAMPLES, VOCAB = 2, 2, 512
LAYOUT = TrainerLayout.parse("dp=1,pad_policy=native")
"""The live router chooses where no engine did, as without replay."""
NAMES = [[f"m{i}s{j}" for j in range(SAMPLES)] for i in range(MICROBATCHES)]
SAMPLE_IDS = [name for names in NAMES for name in names]
DTYPES = torch.float32, torch.bfloat16
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LIKELY_STEP_S = 0.2


class Trainer:
    """One model with its channel; a step is as in training, without an optimizer."""

    def __init__(self, device: str, *, dtype: torch.dtype, recompute: str) -> None:
        on_gpu = device == "cuda"
        layers, experts, top_k, self.length = (48, 32, 8, 512) if on_gpu else (3, 16, 4, 8)
        moe_layers = tuple(range(1, layers))
        self.spec = RoutingSpec(num_layers=layers, moe_layers=moe_layers, num_experts=experts, top_k=top_k)
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.model = build(self.spec, self.device, dtype=dtype, length=self.length, **RECOMPUTE[recompute])
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
        self.train(lambda index: self.driver.off(microbatch=index))

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


def build(spec: RoutingSpec, device: torch.device, *, dtype: torch.dtype, length: int, **changes: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = device.type == "cuda"
    hidden, heads, wide, expert = (1024, 8, 2048, 128) if on_gpu else (32, 4, 64, 32)
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": wide}
    routing: dict[str, Any] = {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.top_k,
        "moe_ffn_hidden_size": expert,
        "moe_layer_freq": [0] + [1] * spec.num_moe_layers,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    plain: dict[str, Any] = {"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    gated: dict[str, Any] = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    kind: dict[str, Any] = {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
    }
    own = embedded.LOCAL_CONFIG | sizes | routing | plain | gated | kind | changes
    config = TransformerConfig(num_layers=spec.num_layers, **own)
    block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if not on_gpu:
        from r3channel.embedded.megatron_modules import use_local_modules

        block = use_local_modules(block)
    torch.manual_seed(3)
    model: Any = GPTModel(config, block, VOCAB, length, position_embedding_type="rope")
    return model.to(device=device, dtype=dtype).train()


def set_up(device: str, folder: str) -> None:
    where: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous", "rank": 0, "world_size": 1}
    if device == "cpu":
        torch.set_num_threads(1)
        embedded.init_distributed(**where, layout=TrainerLayout(), timeout_s=60)
        return
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", **where)
    embedded._init_megatron(TrainerLayout(), seed=1, timeout_s=60)


def ids_and_gradients(own: Trainer, name: str, facts: Facts, *, exact: bool) -> None:
    """Random ids through the channel to the routers; then the ids that the routers choose themselves, with their gradients."""
    with ConsumptionTap(own.driver) as tap:
        own.natural()
        chosen = [one for one in tap.records if one.microbatch >= 0]  # a recompute is outside of its block
    wanted = own.gradients()
    given = {n: random_ids(own.length - 1, spec=own.spec, seed=i) for i, n in enumerate(SAMPLE_IDS)}
    shard = own.received(given)
    with ConsumptionTap(own.driver) as tap:
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
    own.replay(own.received(own.by_sample(shard, chosen)))
    worst = max(
        float((a - b).norm() / b.norm().clamp_min(1e-30))
        for a, b in zip(own.gradients(), wanted, strict=True)
    )
    if exact:
        facts.expect(f"{name}: gradients, relative", worst, worst <= 1e-6, "at most 1e-6")


def waits_of(run: Callable[[], object], device: str) -> int:
    """How often the host waited for the device."""
    if device == "cpu":
        from tests.unit.test_host_reads import watched

        with watched() as seen:
            run()
        return len(seen)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:  # of every activity: runtime calls are the device's
        run()
    return sum(event.count for event in profile.key_averages() if event.key in WAITS)


def audit(own: Trainer, device: str, facts: Facts) -> None:
    """Megatron's own dispatcher waits too, so what counts is what replay adds; the look at the step's end comes after it."""
    shard = own.received({n: random_ids(own.length - 1, spec=own.spec, seed=7) for n in SAMPLE_IDS})
    if device == "cpu":
        shard._handed._host_SL = (
            None  # as where rows lie on a device: what is found is read at the step's end
        )
    seen = waits_of(lambda: own.forward(0).item(), device) - waits_of(lambda: own.forward(0), device)
    facts.expect("waits that are seen of one read", seen, seen > 0, "some")
    natural = waits_of(own.natural, device)
    for count in (0, 1):
        look = RoutingAudit(step=0, microbatches=MICROBATCHES, count=count, counted_rows=shard.counted_rows)
        with own.driver.step(shard, step=0, audit=look) as step:
            for index in range(MICROBATCHES):  # maps of rows are made once a step, before the passes
                shard.live_rows(index)
                shard.counted_rows(index)
            added = waits_of(lambda step=step: own.train(step.microbatch), device) - natural
        facts.expect(f"waits that replay adds, audit {'on' if count else 'off'}", added, added <= 0, "0")


def cost(own: Trainer, facts: Facts) -> None:
    shard = own.received({n: random_ids(own.length - 1, spec=own.spec, seed=8) for n in SAMPLE_IDS})
    runs = {"off": own.natural, "on": lambda: own.replay(shard)}
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(13):
        for name, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seen[name] += [time.perf_counter() - begin] if number >= 3 else []
    off_s = statistics.median(seen["off"])
    percent = statistics.median(100 * (a / b - 1) for a, b in zip(seen["on"], seen["off"], strict=True))
    facts.expect("step without replay, s", off_s, off_s >= LIKELY_STEP_S, f"at least {LIKELY_STEP_S}")
    facts.expect("replay, percent of a step", percent, percent <= 1.0, "at most 1")


def check(device: str, facts: Facts) -> None:
    with tempfile.TemporaryDirectory() as folder:
        set_up(device, folder)
        facts.figures["index dtype"] = str(index_dtype(torch.device(device)))
        for dtype, recompute, deterministic in product(DTYPES, RECOMPUTE, (False, True)):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            own = Trainer(device, dtype=dtype, recompute=recompute)
            name = f"{dtype}, recompute {recompute}, deterministic {deterministic}"
            ids_and_gradients(own, name, facts, exact=dtype == torch.float32)
            if (dtype, recompute, deterministic) == (torch.bfloat16, "none", False):
                audit(own, device, facts)
                if device == "cuda":
                    cost(own, facts)
            own.close()
            del own
        if device == "cpu":
            facts.left_out.append("cost of replay: `r3channel bench replay` measures it on a CPU")
        embedded.close_distributed()
