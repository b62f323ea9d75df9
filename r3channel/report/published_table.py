"""The scaling table and text of the post "The Infrastructure Cost of MoE Routing Replay", computed anew.

`r3channel plan --preset published`. Its unit is M = 10**6 tokens and GB = 10**9 bytes; its assumptions are int16 ids, 60
MoE layers for R1, 50 GB/s of NCCL, HTTP at 10 Gbit/s with data compressed five times. What it got wrong is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from r3channel.models import model_named
from r3channel.plan.capacity import ORDINARY_BYTES_PER_TOKEN, Machines

_TOP_K, _INT16 = 8, 2
_GB = 1e9
_COMPRESSION, _HTTP_GBIT_S = 5, 10.0
_DP = 4


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of the post."""

    config: str
    model: str
    layers: int
    """MoE layers that the post counts."""
    samples: int
    length: int
    million_tokens: int
    payload_gb: float
    """The post's own figures from here on."""
    transfer_s: float
    staging_gb: float


ROWS = (
    PublishedRow("Qwen3-30B-A3B (48L, 1024 x 16k)", "qwen3-30b-a3b", 48, 1024, 16384, 16, 12.3, 0.25, 12.3),
    PublishedRow("R1 (60L, 1024 x 16k)", "deepseek-r1", 60, 1024, 16384, 16, 15.4, 0.3, 15.4),
    PublishedRow("R1 (60L, 512 x 32k)", "deepseek-r1", 60, 512, 32768, 16, 15.4, 0.3, 15.4),
    PublishedRow("R1 (60L, 512 x 128k)", "deepseek-r1", 60, 512, 131072, 64, 61.4, 1.2, 61.4),
    PublishedRow("R1 (60L, 1024 x 128k)", "deepseek-r1", 60, 1024, 131072, 128, 122.9, 2.5, 122.9),
)


def published_table() -> dict[str, Any]:
    """Rows with the post's figure, the same computed, and this package's; the text's figures; the corrections."""
    return {
        "preset": "published",
        "rows": [_row(row) for row in ROWS],
        "text": _text(),
        "corrections": _corrections(),
    }


def _row(row: PublishedRow) -> dict[str, Any]:
    machines, spec = Machines(), model_named(row.model).spec
    tokens = row.million_tokens * 10**6
    payload = tokens * row.layers * _TOP_K * _INT16
    exact = row.samples * row.length
    ours = exact * spec.bytes_per_token
    return {
        "config": row.config,
        "tokens": tokens,
        "bytes_per_token": row.layers * _TOP_K * _INT16,
        "payload_gb": round(payload / _GB, 1),
        "published_payload_gb": row.payload_gb,
        "transfer_s": payload / (machines.wire_gbyte_s * _GB),
        "published_transfer_s": row.transfer_s,
        "staging_coalesced_gb": round(payload / _GB, 1),
        "published_staging_gb": row.staging_gb,
        "staging_bucketed_gb": {f"dp{dp}": round(payload / dp / _GB, 2) for dp in (_DP, 8, 32)},
        "exact_tokens": exact,
        "moe_layers": spec.num_moe_layers,
        "r3channel_payload_gb": round(ours / _GB, 2),
        "r3channel_transfer_s": ours / (machines.wire_gbyte_s * _GB),
        "r3channel_staging_gb": 2 * machines.bucket_bytes / _GB,
    }


def _text() -> dict[str, Any]:
    """Figures of the running text, at its largest row unless said."""
    small, large = 16 * 10**6, 128 * 10**6
    payload = large * 60 * _TOP_K * _INT16
    compressed = payload / _COMPRESSION
    ordinary = ORDINARY_BYTES_PER_TOKEN
    return {
        "http_gb": compressed / _GB,
        "published_http_gb": 25,
        "http_s": compressed * 8 / (_HTTP_GBIT_S * _GB),
        "published_http_s": 20,
        "ordinary_mb_per_dp": {f"dp{dp}": large * ordinary / dp / 1e6 for dp in (_DP, 8)},
        "ordinary_mib_per_dp": {f"dp{dp}": large * ordinary / dp / 2**20 for dp in (_DP, 8)},
        "published_ordinary_mb_per_dp": 370,
        "manager_host_gb": {
            "int16 before partitioning": payload / _GB,
            "int32 of all 61 layers as SGLang sends it": large * 61 * _TOP_K * 4 / _GB,
        },
        "routing_share": 768 / (768 + ordinary),
        "published_routing_share": 0.97,
        "routing_over_rest": 768 / ordinary,
        "published_routing_over_rest": 32,
        "rest_gb": {"per field": small * 8 / _GB, "together": small * ordinary / _GB},
        "published_rest_gb": {"per field": 0.12, "together": 0.4},
        "payload_per_dp_gb": small * 768 / _DP / _GB,
        "published_payload_per_dp_gb": 3,
    }


def _corrections() -> list[str]:
    exact = {row.config: row.samples * row.length for row in ROWS}
    r1 = model_named("deepseek-r1").spec
    largest, per_token = exact[ROWS[-1].config], r1.num_moe_layers * _TOP_K * _INT16
    return [
        f"DeepSeek-R1 has {r1.num_moe_layers} MoE layers of {r1.num_layers}, not 60: {per_token} B/token in int16, "
        f"so {128e6 * per_token / _GB:.1f} GB for 128M tokens and not 122.9.",
        f"k and M mix 2**10 and 10**6: 1024 x 16k are {exact[ROWS[0].config]:,} tokens "
        f"({exact[ROWS[0].config] * 768 / _GB:.2f} GB, not 12.3) and 1024 x 128k are {largest:,}.",
        "Per-field 0.12 GB is GiB (16M x 8 B = 0.128 GB), while the routing's 12.3 GB is decimal.",
        "'~3 GB of staging regardless of the payload' is one DP rank's share at DP 4 and 16M tokens: at 128M tokens it is "
        f"{128e6 * 960 / _DP / _GB:.1f} GB at DP 4. A ceiling needs buckets smaller than a DP rank's share; ours are two of "
        f"{Machines().bucket_bytes >> 20} MiB at any size.",
        "'~370 MB per DP rank' of other data is 366 MiB at DP 8, while the 3 GB above are at DP 4.",
        "Both models fit one byte per id; int16 doubles every figure of the table. Only models above 256 experts need it.",
    ]
