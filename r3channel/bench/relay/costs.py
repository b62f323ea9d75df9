"""What our path costs, part by part, in one process without Ray: CPU time.

    body_to_placed   reply bodies in memory -> the rows of all layers placed in one receiver's shard and verified: JSON, base64,
                     token ids, the frame's checks, ids checked and digested, seal, ticket there and back, each row written where
                     its router will look, digests compared. Not the sending: rows are placed from where the relay keeps them
    floor            of those the parts that touch every byte, alone: base64, decoding and checking, placing. The rest is Python
    turns            30 turns of one sample, appended one by one, tokens as an array
    seal_ms          of the calling thread: `seal`, the ticket's bytes, and a receiver's own plan out of them; nobody receives
    step_memory      what relay and receiver hold of a step that was sealed and received: rows in the store, buckets, the shard
    recording        what a recorder adds to the whole way, in interleaved pairs; what the disk does later is not in it
    digest           what engine, relay, placing and routers pay for the digest. Each kernel runs alone here; relay and placing
                     have it in a pass over the same bytes, where it costs less

Samples have about 4,096 tokens. A step's bodies, rows and shard are larger than a cache.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pybase64

from r3channel.bench.relay.workload import Case, Workload
from r3channel.bench.routing_data import generate
from r3channel.bench.timing import cpu_seconds_each
from r3channel.models import model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder, segment_name
from r3channel.relay.arrival.reply import decode_base64
from r3channel.relay.relay import Relay
from r3channel.trainer.landing import LandedShard
from r3channel.trainer.receiver import Receiver
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame, parse_frame

MODELS = ("qwen3-30b-a3b", "qwen3-next", "kimi-k2", "gpt-oss-120b")
"""The first is the one of what is measured for one model."""
SEALS = {64: "dp=4,packing=thd", 8192: "dp=64,pp=4,tp=4,packing=thd"}
"""Samples of a step -> its layout."""
_TURNS, _TURN_ROWS = 30, 2000
_SHORT = 8
"""Tokens of a sample where only the number of samples matters."""


@dataclass(frozen=True, slots=True)
class Effort:
    tokens: int
    """Of a step; 0: as many as have 100 MB of ids."""
    rounds: int


def measure(effort: Effort) -> dict[str, Any]:
    """As `bench relay --json` prints them; per token in microseconds."""
    found = {model: _body_to_placed(_work(model, effort.tokens), effort.rounds) for model in MODELS}
    return {
        "body_to_placed_cpu_us_per_token": {model: whole for model, (whole, _) in found.items()},
        "body_to_placed_floor_us_per_token": {model: floor for model, (_, floor) in found.items()},
        "turns_us_per_token": _turns(effort.rounds),
        "seal_ms": {
            str(samples): _seal_ms(samples, layout, effort.rounds) for samples, layout in SEALS.items()
        },
        "recording_cpu_us_per_token": recording(effort, model=MODELS[0]),
        **_received(_work(MODELS[0], effort.tokens), effort.rounds),
    }


def _work(model: str, tokens: int) -> Workload:
    tokens = tokens or 100_000_000 // model_named(model).spec.bytes_per_token
    return Workload(Case(model=model, tokens=tokens, layout="dp=1"))


def receive(relay: Relay, ticket: Ticket, rows_N: Any = None) -> Any:
    """What the only receiver of a step does, without a connection; returns the memory of its rows, to be used again."""
    shard = ticket.plan.shard(dp=0, pp=0)
    rows_N = np.zeros(shard.nbytes, np.uint8) if rows_N is None else rows_N
    outgoing = relay.steps.outgoing(ticket.step, shard.key, ticket.run)
    landed, begin = LandedShard(ticket, shard, rows_N), 0
    sink = landed.sink(outgoing.stream)
    for ids_TLK in outgoing.pieces():
        sink.rows(ids_TLK, begin=begin)
        begin += len(ids_TLK)
    assert not sink.verify(outgoing.digests), "rows were damaged"
    relay.steps.acknowledge(ticket.step, shard.key)
    return rows_N


def _body_to_placed(work: Workload, rounds: int) -> tuple[float, float]:
    """(The whole way, its floor)."""
    seen, rows_N, ticket, bodies = [], None, None, work.bodies
    with closing(Relay(work.spec, work.case.trainer)) as relay:
        for step in range(rounds + 1):  # the first one compiles, and touches the memory
            begin_s = time.process_time()
            _add(relay, bodies)
            ticket = Ticket.from_bytes(relay.seal(step, work.assignment).to_bytes())
            rows_N = receive(relay, ticket, rows_N)
            seen.append(time.process_time() - begin_s)
    assert ticket is not None
    return _us(median(seen[1:]), work), _floor(work, ticket, rows_N, rounds)


def recording(effort: Effort, *, model: str) -> dict[str, float]:
    """Median and quartiles of (with - without a recorder), each pair in another order than the one before."""
    work, rows_N, seen = _work(model, effort.tokens), None, []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        relays = [
            stack.enter_context(closing(Relay(work.spec, work.case.trainer, recorder=recorder)))
            for recorder in (None, Recorder(Path(folder)))
        ]
        for step in range(effort.rounds + 1):
            spent_s = [0.0, 0.0]
            for which in (0, 1) if step % 2 else (1, 0):
                begin_s = time.process_time()
                _add(relays[which], work.bodies)
                rows_N = receive(relays[which], relays[which].seal(step, work.assignment), rows_N)
                spent_s[which] = time.process_time() - begin_s
            (Path(folder) / segment_name(step, 0)).unlink(missing_ok=True)  # who prunes pays, not who records
            seen.append(_us(spent_s[1] - spent_s[0], work))
    low, middle, high = quantiles(seen[1:], n=4)
    return {"low": low, "median": middle, "high": high, "pairs": effort.rounds}


def _add(relay: Relay, bodies: dict[str, bytes]) -> None:
    for name, body in bodies.items():
        relay.add_body(name, body, lambda reply: reply["output_ids"])


def _floor(work: Workload, ticket: Ticket, rows_N: Any, rounds: int) -> float:
    shard = ticket.plan.shard(dp=0, pp=0)
    landed, stream = LandedShard(ticket, shard, rows_N), Stream.of(ticket, shard)
    frames = [work.frame(name) for name in work.lengths]
    texts = [pybase64.b64encode(frame) for frame in frames]
    own = [work.narrow[sample.sample_id] for sample in stream.samples]
    out = {name: np.zeros_like(ids) for name, ids in work.narrow.items()}

    def decode() -> None:
        for text in texts:
            decode_base64(text)

    def check() -> None:
        for frame, out_TLK in zip(frames, out.values(), strict=True):
            parse_frame(frame, spec=work.spec).verify(out_TLK)

    def place() -> None:
        sink, begin = landed.sink(stream), 0
        for ids_TLK in own:
            sink.rows(ids_TLK, begin=begin)
            begin += len(ids_TLK)

    seen = cpu_seconds_each({"base64": decode, "check": check, "place": place}, rounds=rounds, min_s=0)
    return _us(sum(seen.values()), work)


def _turns(rounds: int) -> float:
    model = model_named(MODELS[0])
    ids_TLK = generate(model, regime="Zmid", rows=_TURN_ROWS)
    first_rows = range(0, _TURNS * _TURN_ROWS, _TURN_ROWS)
    frames = [encode_frame(model.spec, expert_ids_TLK=ids_TLK, first_row=first) for first in first_rows]
    tokens_T = np.arange(_TURNS * _TURN_ROWS + 1, dtype=np.int32)
    with closing(Relay(model.spec, TrainerLayout())) as relay:

        def turns() -> None:
            for first, frame in zip(first_rows, frames, strict=True):
                relay.add_frame("s", frame, tokens_T[: first + _TURN_ROWS + 1], append=first > 0)
            relay.discard(["s"])

        return cpu_seconds_each({"": turns}, rounds=rounds, min_s=0)[""] / (len(tokens_T) - 1) * 1e6


def _seal_ms(samples: int, layout: str, rounds: int) -> float:
    model, trainer = model_named(MODELS[0]), TrainerLayout.parse(layout)
    frame = encode_frame(model.spec, expert_ids_TLK=generate(model, regime="Zmid", rows=_SHORT - 1))
    names, seen_s = [f"sample-{number}" for number in range(samples)], []
    assignment = Assignment.round_robin(names, dp=trainer.dp, microbatch_size=samples // trainer.dp)
    with closing(Relay(model.spec, trainer)) as relay:
        for name in names:
            relay.add_frame(name, frame, range(_SHORT))
        for step in range(rounds + 2):
            begin_s = time.thread_time()
            data = relay.seal(step, assignment).to_bytes()
            Ticket.from_bytes(data).plan.shard(dp=0, pp=0)
            seen_s.append(time.thread_time() - begin_s)
            relay.abandon(step)
    return median(seen_s[2:]) * 1e3


def _received(work: Workload, rounds: int) -> dict[str, float]:
    layout = work.case.trainer
    with closing(Relay(work.spec, layout)) as relay:
        receiver = Receiver(relay, spec=work.spec, layout=layout, coords=RankCoords(dp=0, pp=0, cp=0, tp=0))
        with closing(receiver):
            _add(relay, work.bodies)
            ticket = relay.seal(0, work.assignment)
            store_bytes = relay.status()["store"]["bytes"]
            shard = receiver.receive(ticket)
            relay.join_previous()
            memory = store_bytes + relay.peak_staging_bytes + _bytes_of(receiver)
    ids, layers = list(work.narrow.values()), shard.shard.layers
    each = [(n, layer, shard.layer_ids(n, layer)) for n in range(shard.num_microbatches) for layer in layers]
    calls = {
        "rows": lambda: [layer_digests(ids_TLK, first_row=0) for ids_TLK in ids],
        "handed": lambda: [shard.handed(*one) for one in each],
    }
    seen = cpu_seconds_each(calls, rounds=rounds, min_s=0)
    return {
        "step_memory_bytes": memory,
        "step_ids_bytes": sum(ids_TLK.nbytes for ids_TLK in ids),
        "digest_cpu_us_per_token": _us(3 * seen["rows"] + seen["handed"], work),  # engine, relay, placing
    }


def _bytes_of(receiver: Receiver) -> int:
    buckets = [bucket for member in receiver._members for bucket in member._buckets]
    return sum(len(data_N) for data_N in (*receiver._buffers.values(), *buckets))


def _us(seconds: float, work: Workload) -> float:
    return seconds / sum(work.lengths.values()) * 1e6
