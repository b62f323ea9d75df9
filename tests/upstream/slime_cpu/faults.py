"""What goes wrong in a run on purpose. SLIME_CPU_FAULTS="stop=1,kill=2" in the rollout manager, where all direct frames come.

In rollout 1 an engine is stopped for a while, in rollout 2 one is killed that has not sent frames whose replies are here. Each
fault waits for the moment that makes it one; `witness.TOLD` has the proof.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import psutil

from r3channel.errors import StepError, StoreFull
from r3channel.relay.intake import Intake
from tests.upstream.slime_cpu import witness
from tests.upstream.slime_cpu.functions import drops

_STOPPED_S = 20.0
_LAST_TURN, _OWED = 40, 2
"""Rows that only a last turn has (`functions.turns`), and how many such frames the killed engine owes at least."""


def tiny_store(module: Any) -> None:
    """r3channel.config: the rows of a step of this model are kilobytes, and so may its store be."""
    module._BOUNDS["store_bytes"] = (0, math.inf, "as small as a step")


def watch_frames(module: Any) -> None:
    """r3channel.relay.ingest_server, and what is behind it."""
    begin, deliver, victims = module.IngestServer.__init__, Intake.deliver, dict[str, int]()
    given = (fault.split("=") for fault in os.environ["SLIME_CPU_FAULTS"].split(","))
    due = {float(rollout): name for name, rollout in given}

    def begin_wide(self: Any, *args: Any, **options: Any) -> None:
        begin(
            self, *args, **options | {"max_body_bytes": 1 << 30}
        )  # a parcel may be larger than a tiny store

    def faulty(self: Intake, boot_id: int, count: int, body: Any) -> None:
        rollout, url = witness.TOLD.get("rollout", -1), self.engines.name_of(boot_id)
        fault = due.get(rollout)
        if fault == "stop" and due.pop(rollout, None):
            victims["stop"] = boot_id
            threading.Thread(target=_stop, args=(_family(url),)).start()
        another = boot_id != victims.get("stop")
        if fault == "kill" and another and victims.setdefault("kill", boot_id) == boot_id:
            if _owed(self, boot_id) >= _OWED and due.pop(rollout, None):
                _kill(_family(url))
            raise StepError("this engine is to die with its frames: it is to come again")
        try:
            deliver(self, boot_id, count, body)
        except StoreFull:
            witness.TOLD["refused"] = witness.TOLD.get("refused", 0) + 1
            raise

    module.IngestServer.__init__, Intake.deliver = begin_wide, faulty


def _kill(family: list[psutil.Process]) -> None:
    for process in family:
        process.kill()
    witness.TOLD["killed"] = len(psutil.wait_procs(family, timeout=20)[0])


def _stop(family: list[psutil.Process]) -> None:
    for process in family:
        process.send_signal(signal.SIGSTOP)
    time.sleep(_STOPPED_S)
    witness.TOLD["stopped"] = sum(process.status() == psutil.STATUS_STOPPED for process in family)
    for process in family:
        process.send_signal(signal.SIGCONT)


def _owed(intake: Intake, boot_id: int) -> int:
    """Frames of last turns that replies have promised, of samples that no filter drops."""
    with intake._changed:
        mine = [turn for name, turn in intake._table._awaited.items() if name[0] == boot_id]
    return sum(
        turn.end_row >= _LAST_TURN and not drops(int(turn.sample_id.partition(".")[0])) for turn in mine
    )


def _family(url: str) -> list[psutil.Process]:
    """The process that listens there, and those below it."""
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    (pid,) = {each.pid for each in listening if each.laddr and each.laddr.port == urlsplit(url).port}
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]
