"""SIGTERM and Ctrl-C at ten moments that a seed chooses: all is gone within five seconds, what was not delivered is named in the
last lines, and nothing is left behind. The demo's own end: `test_demo`, `test_demo_family`.

`python -m tests.e2e.test_signals FOLDER` is a run as a user writes it: a relay with a journal and an ingest, two trainers in
processes of their own, steps without end, each under way while the next is added.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from examples.embedded.sglang import kill_family
from r3channel import Assignment, Ticket, TrainerLayout
from r3channel.config import ChannelConfig
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from tests.support.children import ROOT
from tests.support.foreground import foreground
from tests.support.samples import SPEC, frame_of
from tests.support.waits import PROGRAM_S, SOON_S, until

pytestmark = [pytest.mark.e2e, pytest.mark.full]
LAYOUT, TOKENS = TrainerLayout(dp=2), 2000
LIMIT_S = 5.0
"""Until all is gone, on a machine that has nothing else to do."""


def trainer(rank: int, told: Any, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the run ends its trainers
    where = told.get()
    control: Any = SimpleNamespace(hello=lambda **_: where)
    receiver = Receiver(control, spec=SPEC, layout=LAYOUT, coords=LAYOUT.coords(rank))
    while True:
        ticket = Ticket.from_bytes(told.get())
        time.sleep(0.2)  # it trains
        (folder / f"asks{rank}").write_text(str(ticket.step))
        receiver.receive(ticket)


def main(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    context = multiprocessing.get_context("fork")  # before there are threads
    queues = [context.SimpleQueue() for _ in range(LAYOUT.world_size)]
    ranks = [context.Process(target=trainer, args=(*each, folder), daemon=True) for each in enumerate(queues)]
    for rank in ranks:
        rank.start()
    config = ChannelConfig(journal=str(folder / "journal"), token_file=str(folder / "token"))
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(SPEC, LAYOUT, config))
        for rank in ranks:
            stack.callback(rank.kill)  # before the relay closes: they have nothing to say of that
        relay.serve()
        for dp, queue in enumerate(queues):
            queue.put(relay.hello(dp=dp, pp=0))
        for step in itertools.count():
            for name in (names := [f"step{step}-{number}" for number in range(4)]):
                relay.add_frame(name, frame_of(TOKENS), range(TOKENS))
            relay.join_previous(timeout_s=SOON_S)
            ticket = relay.seal(step, Assignment.round_robin(names, dp=2, microbatch_size=2))
            (folder / "sealed").write_text(str(step))
            for queue in queues:
                queue.put(ticket.to_bytes())


def stopped(folder: Path, kind: int, moment: Callable[[], object]) -> list[str]:
    """What a run has said; the signal comes as a terminal or a supervisor sends it. Nothing of it is left."""
    (folder / "tmp").mkdir()
    with (folder / "said").open("wb") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)], stdout=said, stderr=said, cwd=ROOT, start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder / "tmp")}, preexec_fn=foreground,
        )  # fmt: skip
        try:
            moment()
            family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
            maps = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in family)
            shared = set(map(Path, re.findall(r"/dev/shm/\S+", maps)))
            (os.killpg if kind == signal.SIGINT else os.kill)(child.pid, kind)
            child.wait(LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        finally:
            kill_family(child)
    assert not psutil.wait_procs(family[1:], timeout=1)[1] and not [path for path in shared if path.exists()]
    assert not [*(folder / "tmp").iterdir(), *folder.glob("journal/*")]
    assert child.returncode in (128 + kind, -kind), said
    return (folder / "said").read_text().splitlines()


@pytest.mark.parametrize("number", range(10))
def test_run_that_is_stopped_at_any_moment_names_what_was_not_delivered(tmp_path: Path, number: int) -> None:
    def moment() -> None:
        """While two of them start, and in the steps of the others."""
        # not in an import: there Python itself makes another error of a Ctrl-C
        until((tmp_path / ("journal" if number < 2 else "asks0")).exists, limit_s=PROGRAM_S)
        time.sleep(random.Random(number).uniform(0.0, 2.0))

    said = stopped(tmp_path, (signal.SIGTERM, signal.SIGINT)[number % 2], moment)
    named = set(re.findall(r"step\d+-\d", "\n".join(line for line in said[-4:] if "r3channel" in line)))
    assert bool(named) == (tmp_path / "sealed").exists() or number < 2, said
    if named:
        files = map(tmp_path.joinpath, ("sealed", "asks0", "asks1"))
        last, *asks = (int(file.read_text()) if file.exists() else -1 for file in files)
        assert {name[:-2] for name in named} <= {f"step{last}", f"step{last + 1}"}
        assert {f"step{last}-{at}" for at in range(4) if asks[at % 2] < last} <= named, said


if __name__ == "__main__":
    main(Path(sys.argv[1]))
