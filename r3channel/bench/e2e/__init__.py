"""`r3channel bench e2e`: what the channel costs a training loop, beside the default path and no routing at all.

The demo's loop runs with each (real SGLang, Ray and Megatron-core on this machine); a trainer's CPU per step is measured apart,
in interleaved pairs of the same step with and without the channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3channel.bench import at_least_one
from r3channel.bench.machine import show
from r3channel.report import commands


def run(argv: Sequence[str]) -> int:
    """Measure and print; exit status 0."""
    parser = commands.parser("bench", prog="bench e2e", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="one short run of each, few pairs")
    parser.add_argument("--pairs", type=at_least_one, help="interleaved pairs of train steps")
    parser.add_argument("--no-loop", action="store_true", help="the pairs alone")
    options = parser.parse_args(list(argv))
    show(
        ["e2e", *argv],
        lambda: measure(quick=options.quick, pairs=options.pairs, with_loop=not options.no_loop),
        _text,
        as_json=options.json,
    )
    return 0


def measure(*, quick: bool, pairs: int | None = None, with_loop: bool = True) -> dict[str, Any]:
    """`pairs`: trainer CPU, on over off. `loop`: per mode step time, train wait, trainer CPU and rollout speed."""
    from r3channel.bench.e2e import loop
    from r3channel.bench.e2e import pairs as steps

    found = steps.measure(rounds=pairs or (8 if quick else 60))
    report: dict[str, Any] = {
        "trainer_cpu_ratio": found["trainer_cpu_ratio"],
        "exposed_wait_ms": found["exposed_wait_ms"],
        "pairs": found,
    }
    if with_loop:
        report["loop"] = loop.measure(repeats=1 if quick else 2, steps=2 if quick else 6)
    return report


def _text(report: dict[str, Any]) -> str:
    pairs = report["pairs"]
    lines = [
        f"trainer CPU per step, on / off, {pairs['pairs']} pairs: {_interval(pairs['trainer_cpu_ratio'])} "
        f"(target: upper bound {pairs['target']})",
        f"the same step twice (noise): {_interval(pairs['noise_ratio'])}",
        f"wall: {_interval(pairs['trainer_wall_ratio'])}; exposed wait {pairs['exposed_wait_ms']:.1f} ms of a step of "
        f"{pairs['step_cpu_ms']['off']:.0f} ms CPU",
    ]
    if "loop" in report:
        lines += [
            "",
            f"{'':10s}{'step s':>9s}{'train s':>9s}{'wait s':>9s}{'CPU s':>9s}{'rollout tokens/s':>18s}",
        ]
        for mode, values in report["loop"].items():
            figures = (values[name] for name in ("step_s", "train_s", "train_wait_s", "trainer_cpu_s"))
            lines.append(
                f"{mode:10s}"
                + "".join(f"{figure:9.3f}" for figure in figures)
                + f"{values['rollout_tokens_per_s']:18.0f}"
            )
    return "\n".join(lines)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.4f} ({ratio['low']:.4f} .. {ratio['high']:.4f})"
