"""One small step from relay to receivers, whose trainers are threads: what is added, and what must arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.errors import PeerFailed, StepError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.relay.relay import Relay
from r3channel.relay.sealed_steps import SealedStep
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.transport.connection import Connection
from r3channel.transport.listener import connect
from r3channel.transport.tp_fanout import TensorParallelFanout
from r3channel.wire import row_protocol as wire
from tests.support.samples import SPEC, random_ids, reply_for
from tests.support.waits import SOON_S, until

TOKENS = {f"s{i}": n for i, n in enumerate((9, 30, 17, 5))}
MakeRelay = Callable[..., Relay]


@contextmanager
def relays(**common: Any) -> Iterator[MakeRelay]:
    """Makes relays, by layout and options; all are closed at the end, and with them every wait of a receiver."""
    made: list[Relay] = []
    limits = dict.fromkeys(("join_timeout_s", "send_timeout_s", "step_timeout_s"), SOON_S)

    def make(
        layout: str = "", *, spec: RoutingSpec = SPEC, recorder: Recorder | None = None, **changes: Any
    ) -> Relay:
        # several buckets even for tiny shards
        values: dict[str, Any] = {"bucket_bytes": 1024} | limits | common | changes
        made.append(Relay(spec, TrainerLayout.parse(layout), ChannelConfig(**values), recorder=recorder))
        return made[-1]

    try:
        yield make
    finally:
        for relay in made:
            try:
                relay.close()
            except StepError as error:  # a test may leave steps undelivered, and no thread
                assert "still running: []" in str(error), error


def receivers_of(relay: Relay, config: ChannelConfig | None = None, *, control: Any = None) -> list[Receiver]:
    """A receiver for every rank of the layout, in its order. Those of one TP group hand on to each other."""
    layout = relay.layout
    options: dict[str, Any] = {"spec": relay.spec, "config": config or relay.config}
    boards: dict[tuple[int, int, int], Board] = {}
    found = []
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        board = boards.setdefault((at.dp, at.pp, at.cp), Board(layout.tp))
        fanout = Fanout(board, at.tp) if layout.tp > 1 else None
        found.append(Receiver(control or relay, layout=layout, coords=at, fanout=fanout, **options))
    return found


class Board:
    """Where the ranks of one TP group, threads of this process, see each other's values."""

    def __init__(self, size: int) -> None:
        self._meeting = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._meeting.wait(SOON_S)
        found = list(self._values)
        self._meeting.wait(SOON_S)
        return found


class Fanout(TensorParallelFanout):
    """As over a process group."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(None, device=torch.device("cpu"))
        self._board, self.rank, self.size = board, rank, len(board._values)

    def vote(self, failure: BaseException | None, *, what: str) -> None:
        failures = [one for one in self._board.exchange(self.rank, failure) if one is not None]
        if failure is not None:
            raise failure
        if failures:
            raise PeerFailed(f"{what}: {failures[0]}")

    def rebroadcast(self, data_N: torch.Tensor) -> None:
        data_N.copy_(self._board.exchange(self.rank, data_N.clone() if self.rank == 0 else None)[0])

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        own = None if parts is None else [part.clone() for part in parts]
        out_N.copy_(self._board.exchange(self.rank, own)[0][self.rank])


def connected(relay: Relay, key: tuple[int, int, int]) -> Connection:
    """A receiver that has connected and says nothing more."""
    dp, pp, cp = key
    where, hello = relay.hello(dp=dp, pp=pp, cp=cp), wire.pack(dp=dp, pp=pp, cp=cp)
    token = bytes.fromhex(where["token"])
    return connect(where["host"], where["port"], token, timeout_s=SOON_S, hello=hello)


def threads() -> set[threading.Thread]:
    """This package's, of this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("r3channel-")}


def fill(relay: Relay, *, prefix: str = "") -> None:
    for index, (name, tokens) in enumerate(TOKENS.items()):
        reply = reply_for(prefix + name, tokens, seed=index, spec=relay.spec)
        relay.add(prefix + name, reply, range(tokens))


def assignment(*, prefix: str = "", dp: int = 2) -> Assignment:
    return Assignment.round_robin([prefix + s for s in TOKENS], dp=dp, microbatch_size=2 if dp == 2 else 4)


def sealed(relay: Relay, step: int = 0, *, prefix: str = "") -> Ticket:
    """A step of the four samples, added now."""
    fill(relay, prefix=prefix)
    return relay.seal(step, assignment(prefix=prefix, dp=relay.layout.dp))


def start(receivers: list[Receiver], ticket: Ticket) -> list[Future[RankShard]]:
    pool = ThreadPoolExecutor(len(receivers))
    return [pool.submit(receiver.receive, ticket) for receiver in receivers]


def receive(receivers: list[Receiver], ticket: Ticket) -> list[RankShard]:
    """All of them, each in a thread of its own."""
    return [future.result(SOON_S) for future in start(receivers, ticket)]


def check_rows(shard: RankShard, *, prefix: str = "") -> int:
    """Compare every real row with what was added, and have it judged as a router's call does; returns their number."""
    spec = shard.ticket.spec
    originals = {prefix + s: random_ids(n - 1, spec=spec, seed=i) for i, (s, n) in enumerate(TOKENS.items())}
    wrong, seen = compare(shard, originals)
    assert not wrong
    hand(shard)
    return seen


def compare(shard: RankShard, originals: dict[str, np.ndarray]) -> tuple[int, int]:
    """(rows that differ, rows) of all layers."""
    wrong = seen = 0
    for number, batch in enumerate(shard.shard.microbatches):
        sample_R, position_R = shard.shard.row_map(number, tp=shard.tp)
        for layer in shard.shard.layers:
            rows = shard.layer_ids(number, layer).cpu().numpy()
            for row in np.flatnonzero(sample_R >= 0):
                own_TLK = originals[batch.sample_ids[sample_R[row]]]
                expected_K = own_TLK[position_R[row], shard.ticket.spec.moe_index(layer)]
                wrong += not np.array_equal(rows[row], expected_K)
                seen += 1
    return wrong, seen


def hand(shard: RankShard) -> None:
    """What a step of the trainer does: every router of every micro-batch is handed its rows."""
    for microbatch in range(shard.num_microbatches):
        for layer in shard.shard.layers:
            shard.check_digest(microbatch, layer, shard.layer_ids(microbatch, layer))
    shard.verify()


def recorded(root: Path, step: int = 0) -> RecordedStep:
    """A step, once the relay's background has written it."""

    def written() -> bool:
        found = Recording.open(root)
        return step in found.steps and found.segment(step).ended

    until(written)
    return Recording.open(root).step(step)


def lives(relay: Relay) -> list[int]:
    """Connections of each receiver."""
    return [count for _, count in sorted(relay.status()["receivers"]["lives"].items())]


def ticket_of(relay: Relay, step: int) -> Ticket:
    """The ticket of a step under way."""
    return relay.steps._steps[step].ticket


class Slowly:
    """`SealedStep.prepare` that waits to be let go, for the DP ranks from `dp` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, dp: int = 0) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.prepared: list[int] = []
        prepare = SealedStep.prepare

        def slow(step: SealedStep, rank: int) -> Any:
            self.entered.set()
            assert rank < dp or self.go_on.wait(SOON_S)
            self.prepared.append(step.ticket.step)
            return prepare(step, rank)

        monkeypatch.setattr(SealedStep, "prepare", slow)


def places_of(shard: RankShard) -> Iterator[tuple[int, int, str, int]]:
    """(micro-batch, place in its flattened model input, sample, position) of each token; of a tail `tail`."""
    for number, batch in enumerate(shard.shard.microbatches):
        sample, position = (part.ravel().tolist() for part in shard.shard.token_map(number))
        for place, (index, at) in enumerate(zip(sample, position, strict=True)):
            yield number, place, batch.sample_ids[index] if index >= 0 else "tail", at
