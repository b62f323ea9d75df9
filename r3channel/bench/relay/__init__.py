"""`r3channel bench relay`: a step's routing from the manager to every trainer rank, ours beside its peers and the limit.

One process tree: a manager and four ranks, Ray actors on two raylets of this machine, that run every path in turn on the same
data. The whole way begins with the bodies of engines' replies in memory (JSON and base64) and ends when every rank holds its own
rows, contiguous and writable per layer, and its routers have taken them in a dtype that Megatron's gather accepts; the timed
section ends there too, and begins with verified rows about to be sealed (peers: with decoded arrays in memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from r3channel.bench import at_least_one
from r3channel.bench.machine import show
from r3channel.models import model_named
from r3channel.report import commands

_PAIRS = 20


def run(argv: Sequence[str]) -> int:
    """Measure and print; exit status 0."""
    parser = commands.parser("bench", prog="bench relay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="few rounds and sizes, under a minute")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="routing shape by model name")
    parser.add_argument("--rounds", type=at_least_one, help="interleaved rounds of the main case")
    parser.add_argument(
        "--recording",
        action="store_true",
        help="instead: what recording adds, in interleaved pairs (--rounds)",
    )
    options = parser.parse_args(list(argv))
    if options.recording and options.rounds == 1:
        parser.error("--recording is measured with quartiles: leave out --rounds 1")
    model_named(options.model)  # said now, and not by an actor
    from r3channel.bench.relay import costs, measure, text

    stamped = partial(show, ["relay", *argv], as_json=options.json)
    if options.recording:
        effort = costs.Effort(tokens=measure.TOKENS, rounds=options.rounds or _PAIRS)
        stamped(lambda: costs.recording(effort, model=options.model), text.recording_line)
        return 0
    effort = measure.QUICK if options.quick else measure.FULL
    stamped(lambda: measure.measure(effort, model=options.model, rounds=options.rounds), text.table)
    return 0
