"""The paths of `bench relay`: where all of them start, where all of them end, and the two halves of each.

The manager's half (`...Sending`): `prepare` starts from the bodies of engines' replies and returns its seconds (`whole=False`
may skip work whose result is at hand). `deliver` starts from what a sealed step starts from and starts every rank. It returns
the time.monotonic at which the clock started, as soon as the manager's part is done. `settle` frees what the step held, once all
ranks have ended. `bytes_sent` leave the manager per step, over all ranks.

A rank's half (`...Taking`): `take` ends when the rank's routers have taken the rows. It returns the time.monotonic at which the
rows were held, contiguous and writable. `tensors` are what the routers took, before widening, in memory of that path alone: so no
path can end right by what another has left. Both halves live in processes that all paths share.

Peers are written here from reading slime: JSON, base64 and copy, count check, all-zero-layer check (torch only), split
by DP rank, one put per DP rank; every rank gets its DP rank's whole object, then pads, cuts and copies per layer. They are at
their best: a rank is started as soon as its own object is put, gets read out of shared memory without a copy (numpy), and rows
are copied once into memory that is reused.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import pybase64
import ray
import torch
import xxhash

from r3channel.bench.wire import generate
from r3channel.config import ChannelConfig
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.shards import Plan, plan_shards
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.base import Rendezvous
from r3channel.transport.select import join, open_store
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.routing import Ids

OWN, LIMIT = "r3channel", "raw_gloo"
SLIME, NUMPY, DIRECT = "slime_torch_int32", "ray_numpy_uint8", "ray_direct_gloo_uint8"
PEERS = (SLIME, NUMPY, DIRECT)
"""Ray's object store, from one raylet to another, as slime uses it and in the id dtype; and Ray Direct Transport."""
ALL = (OWN, *PEERS, LIMIT)

_GENERATED_ROWS = 4096
"""Rows that are drawn. Each sample begins at another of these rows, and repeats them as often as it takes."""
_SAMPLE_TOKENS, _PACK_TOKENS = 4096, 16384
_DECODED_EACH = 4
_WAIT_S = 60.0
_CONFIG = ChannelConfig(step_timeout_s=60, send_timeout_s=30, join_timeout_s=60)
_BLOCK_ROWS = 256
"""Rows that are transposed at once: the fastest of 16 to 1,024 rows at 48 x top-8 (CPU time, AMD EPYC)."""

Seconds = tuple[float, float]
"""Wall and CPU seconds of this process."""
Start = Callable[[int, Any], None]
"""(rank, payload): lets a rank take its payload, without waiting for it."""


def spent(call: Callable[[], object]) -> Seconds:
    wall_s, cpu_s = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - wall_s, time.process_time() - cpu_s


# -- where every path starts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """The data that one measurement moves, as plain values. Each process builds the same plan from it."""

    model: str
    tokens: int
    dp: int = 1

    @property
    def spec(self) -> RoutingSpec:
        return model_named(self.model).spec

    @property
    def trainer(self) -> TrainerLayout:
        return TrainerLayout.parse(f"dp={self.dp},packing=thd")

    @property
    def lengths(self) -> dict[str, int]:
        """Return tokens by sample: uneven, 4,096 in the mean, `tokens` in all."""
        share = np.random.default_rng(0).uniform(0.5, 1.5, max(4 * self.dp, self.tokens // _SAMPLE_TOKENS))
        tokens = np.maximum(2, (share / share.sum() * self.tokens).astype(int))
        tokens[-1] += self.tokens - tokens.sum()
        return {f"sample-{index}": int(length) for index, length in enumerate(tokens)}

    def plan(self) -> tuple[Assignment, Plan]:
        """Return the assignment and the plan.

        Micro-batches are packs of at most 16,384 tokens, balanced over DP ranks.
        """
        assignment = Assignment.dynamic(self.lengths, dp=self.dp, max_tokens=_PACK_TOKENS)
        return assignment, plan_shards(assignment, tokens=self.lengths, spec=self.spec, layout=self.trainer)


class Workload:
    """A case's bytes, made on first use and kept: every path starts from the same memory."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.lengths = case, case.spec, case.lengths
        self.assignment, self.plan = case.plan()

    def ids(self, sample_id: str) -> Ids:
        """Return a sample's ids in a new array.

        The ids are [tokens - 1, L, K] in the id dtype.
        """
        drawn_TLK = _drawn(self.case.model)
        start = 257 * int(sample_id.rpartition("-")[2])
        return drawn_TLK[(start + np.arange(self.lengths[sample_id] - 1)) % len(drawn_TLK)]

    @cached_property
    def bodies(self) -> dict[str, bytes]:
        """Return the reply of an engine of ours, by sample."""
        found = {}
        for name, tokens in self.lengths.items():
            frame = encode_frame(self.spec, expert_ids_TLK=self.narrow[name], sample_key=sample_key(name))
            found[name] = reply(name, frame, tokens=tokens)
        return found

    @cached_property
    def narrow(self) -> dict[str, Ids]:
        """Return decoded ids in the id dtype, by sample."""
        return {name: self.ids(name) for name in self.lengths}

    @cached_property
    def wide(self) -> dict[str, Ids]:
        """Return decoded ids as int32, by sample, as SGLang sends them."""
        return {name: self.ids(name).astype(np.int32) for name in self.lengths}

    def of_rank(self, dp: int) -> list[str]:
        """Return the samples of a DP rank, micro-batch by micro-batch."""
        return [name for microbatch in self.assignment.ranks[dp] for name in microbatch]


def reply(sample_id: str, raw: Any, *, tokens: int) -> bytes:
    """Return an engine's JSON reply.

    Its token ids are those of the whole sequence, so no prompt is needed beside it.

    Args:
        sample_id: The sample.
        raw: What `routed_experts` holds in base64: bytes or a contiguous array.
        tokens: Number of token ids.
    """
    meta = {"id": sample_id, "finish_reason": {"type": "stop"}}
    meta["routed_experts"] = pybase64.b64encode(raw).decode()
    return json.dumps({"text": "", "output_ids": list(range(tokens)), "meta_info": meta}).encode()


@cache
def _drawn(model: str) -> Ids:
    return generate(model_named(model), regime="Zmid", rows=_GENERATED_ROWS)


# -- where every path ends -------------------------------------------------------------------------------------------------


class HeldRows:
    """A rank's rows in memory that is reused: `data_N`, and per micro-batch a view [L, rows, K] of it. Real rows begin as zeros,
    which no router chooses. Pads are written once and stay.

    `place` is the fastest placement in numpy that was found.
    """

    def __init__(self, plan: Plan, dp: int, dtype: Any) -> None:
        self.shard = plan.shard(dp=dp, pp=0)
        spec, batches = self.shard.spec, self.shard.microbatches
        tokens = {n: t for b in batches for n, t in zip(b.sample_ids, b.tokens, strict=True)}
        zeros = np.zeros((max(tokens.values()), spec.num_moe_layers, spec.top_k), spec.id_dtype)
        placed = place_samples(plan, dp=dp, ids_of=lambda name: zeros[: tokens[name] - 1])
        wholes = [whole[0] for whole in self.shard.views(placed[self.shard.key])]
        self.data_N = np.concatenate([whole.reshape(-1) for whole in wholes]).astype(dtype)
        parts = np.split(self.data_N, np.cumsum([whole.size for whole in wholes])[:-1])
        self.views = [part.reshape(whole.shape) for part, whole in zip(parts, wholes, strict=True)]

    def place(self, samples: Iterable[Ids]) -> None:
        """Write the samples of this DP rank.

        Args:
            samples: The samples' ids in the plan's order, each uint8 [tokens - 1, all MoE layers, 8].
        """
        arrays = iter(samples)
        for number, batch in enumerate(self.shard.microbatches):
            for index in range(len(batch.sample_ids)):
                source_TL, target_LT = _as_items(next(arrays)), _as_items(self.views[number])
                stretches = self.shard.table.of_sample(cp=0, microbatch=number, sample=index)
                for start, _, local, _, real in stretches:
                    _transpose(source_TL[start : start + real], target_LT[:, local : local + real])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield [rows, K] of each layer of each micro-batch, contiguous."""
        for view in self.views:
            yield from torch.from_numpy(view)


def _as_items(ids: Ids) -> Any:
    """View each row of 8 ids of a byte as one item.

    numpy then copies rows and not single ids.
    """
    return ids.view("u8")[..., 0]


def _transpose(source_TL: Any, target_LT: Any) -> None:
    for at in range(0, len(source_TL), _BLOCK_ROWS):
        target_LT[:, at : at + _BLOCK_ROWS] = source_TL[at : at + _BLOCK_ROWS].T


class Router:
    """A router's buffer, in which it widens ids to int32, as Megatron's gather takes them. The buffer is reused."""

    def __init__(self) -> None:
        self._wide = torch.empty((0, 0), dtype=torch.int32)

    def memory(self, ids_RK: torch.Tensor) -> torch.Tensor:
        """Return the memory where these ids go.

        The next call may reuse it.
        """
        if len(self._wide) < len(ids_RK):
            self._wide = torch.empty(ids_RK.shape, dtype=torch.int32)
        return self._wide[: len(ids_RK)]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of all ids in order, whatever their dtype.

    The call refuses rows that a router could not use in place.

    Raises:
        AssertionError: If rows are not contiguous.
    """
    state = xxhash.xxh3_128()
    for ids_RK in tensors:
        assert ids_RK.is_contiguous(), f"rows of stride {ids_RK.stride()}, expected contiguous ones"
        state.update(ids_RK.to(torch.int32).numpy().data)
    return state.hexdigest()


# -- the two halves --------------------------------------------------------------------------------------------------------


class ChannelSending:
    """Our half of the manager: replies go into a real relay, which seals a step. The ranks' control calls reach `relay`."""

    def __init__(self, work: Workload) -> None:
        self._work, self._steps, self._step = work, itertools.count(), 0
        self.relay = Relay(work.spec, work.case.trainer, _CONFIG)

    def prepare(self, *, whole: bool) -> Seconds:
        """Verify the bodies in memory and put their rows into the store."""
        bodies = self._work.bodies
        return spent(lambda: add_bodies(self.relay, bodies))

    def seal(self) -> Ticket:
        """Seal a step and wait until all receivers' rows can be sent.

        Nobody receives yet.
        """
        ticket = self.relay.seal(next(self._steps), self._work.assignment)
        for key in self.relay.status()["steps"][ticket.step]["missing"]:
            self.relay.steps.outgoing(ticket.identity, key, timeout_s=60.0)
        return ticket

    def deliver(self, start: Start, *, ticket: Ticket | None = None) -> float:
        begin_s = time.monotonic()
        ticket = ticket or self.relay.seal(next(self._steps), self._work.assignment)
        for rank in range(self._work.case.dp):
            start(rank, ticket.to_bytes())
        self._step = ticket.step
        return begin_s

    def settle(self) -> None:
        self.relay.join_previous(timeout_s=_WAIT_S)

    @property
    def bytes_sent(self) -> int:
        sent = self.relay.metrics.value("r3channel_bytes_total", leg="wire_sent")
        return round(sent / (self._step + 1))


def add_bodies(relay: Relay, bodies: dict[str, bytes]) -> None:
    for name, body in bodies.items():
        relay.add_body(name, body, lambda reply: reply["output_ids"])


class ChannelTaking:
    """Our half of a rank: a real receiver over TCP, which says hello over Ray."""

    def __init__(self, case: Case, rank: int, control: Control) -> None:
        coords = case.trainer.coords(rank)
        self.receiver = Receiver(control, spec=case.spec, layout=case.trainer, coords=coords, config=_CONFIG)
        self._router, self._shard = Router(), None
        self.receiver.join()

    def take(self, payload: Any) -> float:
        """Receive a step's rows and widen them, layer by layer.

        As in `ReplayDriver`, what a router takes is widened and compared with the engines' digests.
        """
        shard = self._shard = self.receiver.receive(Ticket.from_bytes(payload))
        held_s = time.monotonic()
        for number, layer in _each(shard):
            ids_RK = shard.layer_ids(number, layer)
            shard.check_digest(number, layer, ids_RK, out=self._router.memory(ids_RK))
        return held_s

    def tensors(self) -> Iterable[torch.Tensor]:
        assert self._shard is not None, "nothing was received"
        return [self._shard.layer_ids(number, layer) for number, layer in _each(self._shard)]


def _each(shard: RankShard) -> list[tuple[int, int]]:
    return [(number, layer) for number in range(shard.num_microbatches) for layer in shard.shard.layers]


def receive(relay: Relay, ticket: Ticket, rows_N: Any = None) -> Any:
    """Receive a step as its only receiver, without a connection.

    Args:
        relay: The relay that has sealed the step.
        ticket: The step's ticket.
        rows_N: Memory for the rows, from an earlier call, or None.

    Returns:
        The memory of the rows, to be used again.
    """
    shard = ticket.plan.shard(dp=0, pp=0)
    rows_N = np.zeros(shard.nbytes, np.uint8) if rows_N is None else rows_N
    outgoing: Any = relay.steps.outgoing(ticket.identity, shard.key, timeout_s=60.0)
    landed, begin = ShardBuffer(ticket, shard, rows_N), 0
    landed.begin()
    for ids_TLK in outgoing.pieces():
        landed.rows(ids_TLK, begin=begin)
        begin += len(ids_TLK)
    assert not landed.verify(outgoing.digests), "rows were damaged"
    relay.steps.acknowledge(ticket.identity, shard.key)
    return rows_N


class StoreSending:
    """Peers through Ray's object store."""

    def __init__(self, work: Workload, path: str) -> None:
        self._work, self._path = work, path
        self._arrays: dict[str, Any] = work.narrow
        if path == SLIME:
            self._arrays = {name: torch.from_numpy(ids) for name, ids in work.wide.items()}
        self.bytes_sent = sum(ids.nbytes for ids in self._arrays.values())
        self._refs: list[Any] = []

    def prepare(self, *, whole: bool) -> Seconds:
        """Decode every fourth sample and scale its times by tokens.

        The work is per sample, and the text of all samples has half a gigabyte.
        """
        work = self._work
        names = list(work.lengths)[::_DECODED_EACH] if whole else []
        stock = [
            (reply(name, work.wide[name], tokens=work.lengths[name]), len(work.wide[name])) for name in names
        ]
        seconds = [spent(partial(self._decode, *one)) for one in stock]
        scale = sum(work.lengths.values()) / max(1, sum(work.lengths[name] for name in names))
        return sum(wall_s for wall_s, _ in seconds) * scale, sum(cpu_s for _, cpu_s in seconds) * scale

    def _decode(self, body: bytes, rows: int) -> None:
        text, spec = json.loads(body)["meta_info"]["routed_experts"], self._work.spec
        flat = np.frombuffer(bytearray(pybase64.b64decode(text.encode("ascii"))), np.int32)
        ids_TLK = flat.reshape(rows, spec.num_layers, spec.top_k)
        if self._path != SLIME:
            ids_TLK.astype(spec.id_dtype)
        elif not all(torch.from_numpy(ids_TLK)[:, layer].count_nonzero() for layer in spec.moe_layers):
            raise ValueError("a layer of zeros only")

    def deliver(self, start: Start) -> float:
        begin_s = time.monotonic()
        for dp in range(self._work.case.dp):
            self._refs.append(ray.put([self._arrays[name] for name in self._work.of_rank(dp)]))
            start(dp, [self._refs[-1]])
        return begin_s

    def settle(self) -> None:
        self._refs.clear()


class ArraysTaking(HeldRows):
    """Peers that hand over per-sample arrays. Through Ray's store the payload is a reference; with Ray Direct Transport the
    arrays are there when the call begins.
    """

    def __init__(self, plan: Plan, dp: int, path: str) -> None:
        super().__init__(plan, dp, np.int32 if path == SLIME else plan.shard(dp=dp, pp=0).spec.id_dtype)
        self._path, self._router = path, Router()
        views = map(torch.from_numpy, self.views if path == SLIME else [])
        self._packs = [view.transpose(0, 1).contiguous() for view in views]  # with the pads

    def take(self, payload: Any) -> float:
        return self.hold(payload if self._path == DIRECT else ray.get(payload[0], timeout=_WAIT_S))

    def hold(self, samples: Sequence[Any]) -> float:
        """Place the arrays and widen them for routers.

        Routers take int32 as it is.
        """
        if self._path == SLIME:
            self._pad_cat_copy(samples)
            return time.monotonic()
        self.place([np.asarray(ids) for ids in samples])
        held_s = time.monotonic()
        for ids_RK in self.tensors():
            self._router.memory(ids_RK).copy_(ids_RK)
        return held_s

    def _pad_cat_copy(self, samples: Sequence[torch.Tensor]) -> None:
        """Concatenate samples and pads of each micro-batch, as slime does.

        Then copy each layer out of the result.
        """
        arrays, batches = iter(samples), self.shard.microbatches
        for pack_RLK, view, batch in zip(self._packs, self.views, batches, strict=True):
            starts = itertools.accumulate(batch.tokens, initial=0)
            for start, tokens in zip(starts, batch.tokens, strict=False):
                pack_RLK[start : start + tokens - 1].copy_(next(arrays))
            for layer, target_RK in enumerate(torch.from_numpy(view)):
                target_RK.copy_(pack_RLK[:, layer])


class RawSending:
    """The limit: the bytes of our shards, already cut, sent by plain gloo. Each rank has a group, a thread and a message."""

    def __init__(self, work: Workload) -> None:
        self._parts = []
        for dp in range(work.case.dp):
            shard, placed = work.plan.shard(dp=dp, pp=0), place_samples(work.plan, dp=dp, ids_of=work.ids)
            views = [view[0].reshape(-1).view(np.uint8) for view in shard.views(placed[shard.key])]
            self._parts.append(torch.from_numpy(np.concatenate(views)))
        self.bytes_sent = sum(len(part) for part in self._parts)
        self._store, self._pool = open_store("127.0.0.1"), ThreadPoolExecutor(len(self._parts))

    def rendezvous(self, rank: int, member: int) -> Rendezvous:
        where = {"host": self._store.host, "port": self._store.port}
        return Rendezvous(backend="gloo", name=f"raw{rank}", connection=1, rank=member, world_size=2, **where)

    def join(self) -> None:
        meets = [self.rendezvous(rank, 0) for rank in range(len(self._parts))]
        self._groups = [join(meet, timeout_s=_WAIT_S) for meet in meets]

    def prepare(self, *, whole: bool) -> Seconds:
        return 0.0, 0.0

    def deliver(self, start: Start) -> float:
        """Send the bytes of all ranks.

        The clock starts when every rank has said that it is about to receive.
        """
        word = torch.zeros(1, dtype=torch.uint8)
        for rank, group in enumerate(self._groups):
            start(rank, None)
            group.recv(1, word, timeout_s=_WAIT_S)
        begin_s = time.monotonic()
        sends = [partial(group.send, 1, timeout_s=_WAIT_S) for group in self._groups]
        list(self._pool.map(lambda send, part: send(part), sends, self._parts))
        return begin_s

    def settle(self) -> None:
        """Free nothing: nothing is held."""


class RawTaking(HeldRows):
    """A rank's half of the limit: one receive, without widening and without checks."""

    def __init__(self, plan: Plan, dp: int, rendezvous: Rendezvous) -> None:
        super().__init__(plan, dp, np.uint8)
        self._word = torch.zeros(1, dtype=torch.uint8)
        self._group = join(rendezvous, timeout_s=_WAIT_S)

    def take(self, payload: Any) -> float:
        self._group.send(0, self._word, timeout_s=_WAIT_S)
        self._group.recv(0, torch.from_numpy(self.data_N), timeout_s=_WAIT_S)
        return time.monotonic()
