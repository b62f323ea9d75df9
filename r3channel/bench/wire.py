"""`r3channel bench wire`: bytes per token and speed of every codec, beside entropy, memcpy and how others do it.

GB are raw int16 GB of the ids (768 B per token of 48 layers x top-8) whatever travels, so that all rows compare; times are
CPU times of one core. Nothing here is a recorded trace: see `bench.routing_data`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from r3channel.bench.machine import show
from r3channel.bench.peers import peers
from r3channel.bench.routing_data import REGIMES, entropy_bytes_per_token, generate
from r3channel.bench.timing import cpu_seconds, cpu_seconds_each
from r3channel.models import Model, model_named
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import Placement
from r3channel.plan.shards import plan_shards
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import TicketSample
from r3channel.report import commands
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.prefix import PrefixCache

MODELS = ("qwen3-30b-a3b", "deepseek-v3", "kimi-k2", "qwen3-next")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rows: int
    rounds: int
    chain_bytes: int
    """Ids that the chain of verify, decode and place walks over: more than a last-level cache."""


FULL, QUICK = Effort(4096, 7, 192 << 20), Effort(256, 3, 24 << 20)


@dataclass(frozen=True, slots=True)
class Result:
    """One codec on one model's rows of one regime."""

    model: str
    regime: str
    codec: str
    bytes_per_token: float
    encode_gbps: float
    decode_gbps: float
    entropy_bytes_per_token: float
    """Best memoryless model of the same ids, order dropped for `set`."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Frames in memory to a placed shard: CPU ms per raw GB of each step, and the whole as a share of memcpy."""

    model: str
    codec: str
    verify_ms: float
    """Parse, decode, range, distinctness and digest."""
    place_ms: float
    """Layer by layer, with the digest of what was read."""
    whole_ms: float
    """Measured as one, not summed."""
    us_per_token: float
    share_of_memcpy: float


def run(argv: Sequence[str]) -> int:
    """Measure and print; exit status 0."""
    parser = commands.parser("bench", prog="bench wire", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="small data and few rounds: the shape of the result only"
    )
    parser.add_argument("--model", action="append", help=f"repeatable; default {' '.join(MODELS)}")
    options = parser.parse_args(list(argv))
    effort = QUICK if options.quick else FULL
    show(
        ["wire", *argv], lambda: measure(options.model or MODELS, effort=effort), _text, as_json=options.json
    )
    return 0


def measure(models: Sequence[str], *, effort: Effort) -> dict[str, Any]:
    """All results as plain values."""
    chosen = [model_named(name) for name in models]
    results = [
        asdict(result)
        for model in chosen
        for regime in REGIMES
        for result in _codecs(model, regime, effort=effort)
    ]
    chains = [asdict(_chain(model, codec, effort=effort)) for model in chosen for codec in ("stored", "lz4")]
    return {
        "memcpy_gbps": _memcpy_gbps(effort),
        "rows": effort.rows,
        "results": results,
        "verify_decode_place": chains,
        "prefix_sharing": prefix_sharing(model_named(MODELS[0]).spec),
    }


def _codecs(model: Model, regime: str, *, effort: Effort) -> Iterator[Result]:
    ids_TLK = generate(model, regime=regime, rows=effort.rows)
    ordered, unordered = entropy_bytes_per_token(ids_TLK, num_experts=model.num_experts)
    gigabytes = ids_TLK.size * 2 / 1e9

    def result(codec: str, size: int, encode_s: float, decode_s: float) -> Result:
        entropy = unordered if codec == "set" else ordered
        speeds = (round(gigabytes / encode_s, 3), round(gigabytes / decode_s, 3))
        return Result(model.name, regime, codec, round(size / len(ids_TLK), 2), *speeds, round(entropy, 1))

    nine_bits = ("packed9",) if 256 < model.num_experts <= 512 else ()
    packed = ("set",) if _has_set() else ()  # a codec of an extra is left out, and no reason to stop
    for codec in ("auto", "stored", "lz4", *nine_bits, *packed):
        yield result(codec, *_ours(model.spec, ids_TLK, codec=codec, rounds=effort.rounds))
    for peer in peers(ids_TLK, spec=model.spec):
        wire = peer.encode()
        calls = {"encode": peer.encode, "decode": lambda peer=peer, wire=wire: peer.decode(wire)}
        seconds = cpu_seconds_each(calls, rounds=effort.rounds)
        yield result(peer.name, len(wire), seconds["encode"], seconds["decode"])


def _has_set() -> bool:
    return importlib.util.find_spec("zstandard") is not None


def _ours(spec: RoutingSpec, ids_TLK: Ids, *, codec: str, rounds: int) -> tuple[int, float, float]:
    """(frame bytes, encode seconds, parse and decode seconds). Header, sections and, encoding, digests are part of all three."""
    data, out_TLK = encode_frame(spec, expert_ids_TLK=ids_TLK, codec=codec), np.empty_like(ids_TLK)
    calls = {
        "encode": lambda: encode_frame(spec, expert_ids_TLK=ids_TLK, codec=codec),
        "decode": lambda: parse_frame(data, spec=spec).decode_into(out_TLK),
    }
    seconds = cpu_seconds_each(calls, rounds=rounds)
    return len(data), seconds["encode"], seconds["decode"]


def _memcpy_gbps(effort: Effort) -> float:
    """Raw int16 GB per second when uint8 ids are copied between two touched buffers larger than the cache."""
    source = np.ones(effort.chain_bytes, np.uint8)
    target = np.zeros_like(source)
    seconds = cpu_seconds(lambda: np.copyto(target, source), rounds=effort.rounds)
    return round(2 * source.nbytes / 1e9 / seconds, 2)


def _chain(model: Model, codec: str, *, effort: Effort) -> Chain:
    spec = model.spec
    ids_TLK = generate(model, regime="U", rows=effort.rows // 8)
    # lz4 is for a row repeated, as padding is; further apart than its window nothing is found
    ids_TLK = np.repeat(ids_TLK, 8, axis=0) if codec == "lz4" else np.tile(ids_TLK, (8, 1, 1))
    frames = [
        encode_frame(spec, expert_ids_TLK=ids_TLK, codec=codec, sample_key=index)
        for index in range(max(2, effort.chain_bytes // ids_TLK.nbytes))
    ]
    names = tuple(str(index) for index in range(len(frames)))
    tokens = dict.fromkeys(names, len(ids_TLK) + 1)
    assignment = Assignment.given([[[name] for name in names]])
    shard = plan_shards(assignment, tokens=tokens, spec=spec, layout=TrainerLayout()).shard(dp=0, pp=0)
    buffer = np.zeros(shard.nbytes, np.uint8)
    samples = [TicketSample(name, tokens[name], 0, 0, (), (), ((len(ids_TLK), 0),)) for name in names]
    stream = Stream(shard, samples)
    placement = Placement(stream, buffer)
    digests = placement.new_digests()
    total = np.repeat(ids_TLK[None], len(frames), axis=0)
    copy, out_TLK = np.zeros_like(total), np.empty_like(ids_TLK)

    def place(index: int, ids_TLK: Ids) -> None:
        placement.rows(stream, ids_TLK, digests, begin=index * len(ids_TLK))

    def verified(frame: bytes) -> Ids:
        return parse_frame(frame, spec=spec).verify(out_TLK)

    calls = {
        "memcpy": lambda: np.copyto(copy, total),
        "verify": lambda: [verified(frame) for frame in frames],
        "place": lambda: [place(index, ids) for index, ids in enumerate(total)],
        "whole": lambda: [place(index, verified(frame)) for index, frame in enumerate(frames)],
    }
    seconds = cpu_seconds_each(calls, rounds=effort.rounds)
    per_gb = {name: round(1000 * value / (total.size * 2 / 1e9), 1) for name, value in seconds.items()}
    return Chain(
        model=model.name,
        codec=codec,
        **{f"{name}_ms": value for name, value in per_gb.items() if name != "memcpy"},
        us_per_token=round(1e6 * seconds["whole"] / (len(ids_TLK) * len(frames)), 4),
        share_of_memcpy=round(seconds["memcpy"] / seconds["whole"], 3),
    )


def prefix_sharing(
    spec: RoutingSpec, *, samples: int = 8, prompt_rows: int = 1024, response_rows: int = 3072
) -> dict[str, Any]:
    """Bytes of one group with and without a shared prompt. Content does not matter to stored ids: rows are random."""
    rng = np.random.default_rng(0)
    ids_TLK = rng.integers(
        0, spec.num_experts, (prompt_rows + response_rows, spec.num_moe_layers, spec.top_k)
    ).astype(spec.id_dtype)
    cache = PrefixCache(spec, max_bytes=64 << 20)
    alone = shared_bytes = 0
    for _ in range(samples):
        alone += len(encode_frame(spec, expert_ids_TLK=ids_TLK))
        shared = cache.share(ids_TLK[:prompt_rows], token_ids=np.arange(prompt_rows), weight_version=0)
        frame = encode_frame(spec, expert_ids_TLK=ids_TLK, prefix=shared.ref)
        shared_bytes += len(frame) + len(shared.frame or b"")
    return {
        "samples": samples,
        "prompt_rows": prompt_rows,
        "response_rows": response_rows,
        "bytes_per_token": round(shared_bytes / (samples * len(ids_TLK)), 2),
        "ratio": round(shared_bytes / alone, 4),
    }


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"memcpy {report['memcpy_gbps']} GB/s (raw int16 GB, moved as uint8); {report['rows']} rows per frame",
        "",
    ]
    lines += _table(report["results"])
    lines += ["", "verify + decode + place, CPU ms per raw GB:", *_table(report["verify_decode_place"])]
    sharing = report["prefix_sharing"]
    lines += [
        "",
        "shared prompt, {samples} x ({prompt_rows} + {response_rows}) rows: {ratio} of the bytes without".format(
            **sharing
        ),
    ]
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    widths = [
        max(len(str(row[column])) for row in [*rows, {column: column}] if column in row) for column in columns
    ]
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
