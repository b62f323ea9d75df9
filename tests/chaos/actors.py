"""The demo's manager and trainer as a framework runs them: a relay takes over what a killed one left; notes outlive a process."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from examples.async_grpo import channel_side
from examples.async_grpo.batch import Sample
from examples.async_grpo.grpo import Request
from examples.async_grpo.variants.audited import AuditedManager, AuditedTrainer
from r3channel.relay.relay import Relay
from tests.chaos import shim

NOTES = "notes.jsonl"
DEPARTURES = "departures"
"""When connections to the relay ended, by the clock that all processes share; a line each."""


def note(**what: Any) -> None:
    """One line, written at once."""
    with Path(os.environ["R3CHAOS_FOLDER"], NOTES).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _relay(spec: Any, layout: Any, config: Any, **options: Any) -> Relay:
    """A new one, or the next life of one that was killed: sealed steps go on, samples that no step has are given up by name."""
    if not [*Path(config.journal).glob("relay-*")]:
        return Relay(spec, layout, config, **options)
    relay, found = Relay.recover(spec, layout, config, **options)
    relay.resume(found)
    relay.discard([*found.pending])
    return relay


class Manager(AuditedManager):
    routing: Any

    def __init__(self, args: argparse.Namespace, spec: dict[str, Any]) -> None:
        shim.apply("relay")
        setattr(channel_side, "Relay", _relay)  # noqa: B010
        super().__init__(args, spec)
        Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        relay, before = self.routing.relay, frozenset[Any]()
        while True:
            now = frozenset([*list(relay._door._open), *relay.status()["receivers"]["connected"]])
            if before - now:
                with Path(os.environ["R3CHAOS_FOLDER"], DEPARTURES).open("a") as file:
                    file.write(f"{time.monotonic()}\n")
            before = now
            time.sleep(0.02)

    def state(self) -> int:
        return os.getpid()

    def stay(self, seconds: float) -> None:
        """A call that is under way; it fails with this process."""
        time.sleep(seconds)

    def forget(self, step: int, names: list[str]) -> None:
        """A step that is given up."""
        self.routing.relay.abandon(step)
        self.routing.relay.discard(names)

    def _ask(self, requests: list[Request], times: Any) -> dict[str, Any]:
        requests = [replace(each, rid=f"{each.sample_id}~{time.time_ns()}") for each in requests]
        note(asked={each.sample_id: (each.rid, each.prompt) for each in requests})
        return super()._ask(requests, times)

    def _collect(self, step: int, requests: list[Request]) -> dict[str, Sample]:
        samples = super()._collect(step, requests)
        note(received={name: len(sample.tokens) - 1 for name, sample in samples.items()})
        note(named={each.sample_id: "left out" for each in requests if each.sample_id not in samples})
        return samples

    def _usable(self, requests: list[Request], samples: dict[str, Sample]) -> dict[str, Sample]:
        kept = super()._usable(requests, samples)
        gone = samples.keys() - kept
        left = {name: "evaluated" if "/eval/" in name else "group not whole" for name in gone}
        note(named=left, sealed=dict.fromkeys(kept))
        return kept


class Trainer(AuditedTrainer):
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        shim.apply("trainer")
        Path(os.environ["R3CHAOS_FOLDER"], f"rank{rank}").write_text(str(os.getpid()))
        super().__init__(args, rank)

    def state(self) -> int:
        return os.getpid()
