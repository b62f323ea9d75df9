"""A relay that kills its own process at a named point. Run as a program: store folder, point."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.placer import Placer
from r3channel.relay.relay import Relay
from r3channel.relay.segment import Segment
from r3channel.relay.store import FrameStore
from tests.direct import Engine
from tests.samples import SPEC, reply_for

TOKENS = {f"s{i}": n for i, n in enumerate((9, 700, 17, 5, 40))}
STEP = 4
LAYOUT = TrainerLayout(dp=2)
POINTS = ("writing", "added", "sealed", "placing", "acknowledged")


def assignment() -> Assignment:
    return Assignment.round_robin(list(TOKENS)[:4], dp=2, microbatch_size=2)


def fill(relay: Relay) -> None:
    for index, (name, tokens) in enumerate(TOKENS.items()):
        relay.add(name, reply_for(name, tokens, seed=index), range(100, 100 + tokens))


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder: str, point: str) -> None:
    relay = Relay(SPEC, LAYOUT, ChannelConfig(backend="loopback", store_dir=folder, place_threads=1))
    if point in ("delivered", "receiving"):
        deliver_until_killed(relay, Path(folder).parent / "token", within=point == "receiving")
    if point == "writing":
        add_until_killed(relay)
    fill(relay)
    if point == "added":
        die()
    if point == "placing":
        Placer._decode = die  # type: ignore[method-assign]
    ticket = relay.seal(STEP, assignment())
    if point == "sealed":
        die()
    deadline_s = time.monotonic() + 20
    while relay.status()["steps"][STEP]["state"] != "PLACED" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    relay.ack(run=ticket.run, step=STEP, dp=0, pp=0)
    die()


def deliver_until_killed(relay: Relay, token_file: Path, *, within: bool) -> None:
    """Three frames come past their replies, and one of these; or the first is received and not yet verified."""
    url = relay.serve(token_file=token_file)
    if within:
        FrameStore.commit = die  # type: ignore[method-assign]
    with Engine(url, token_file) as engine:
        replies = [engine.finish(f"r{i}", 9, seed=i) for i in range(3)]
        deadline_s = time.monotonic() + 20
        while relay.status()["unclaimed"]["frames"] < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        relay.add("s0", replies[0], range(9))
        die()


def add_until_killed(relay: Relay) -> None:
    """The last sample's bytes are written, and nobody has said that they are whole."""
    marked = Segment.mark
    left = [len(TOKENS) - 1]

    def mark(segment: Segment, place: Any, state: int) -> None:
        if not left[0]:
            die()
        left[0] -= 1
        marked(segment, place, state)

    Segment.mark = mark  # type: ignore[method-assign]
    fill(relay)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
