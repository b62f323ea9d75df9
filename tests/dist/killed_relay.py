"""A relay and receivers in processes of their own that can be killed at a named point, and what must arrive of a step.

They are forked from one server process that has imported everything, so that many deaths are affordable. Each talks with
the test over its own pipe: a pipe whose other end was killed ends, and nothing else does.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import R3Error
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.journal import Journal, Recovery
from r3channel.relay.relay import Relay
from r3channel.relay.row_stream import RowStream
from r3channel.relay.sealed_steps import SealedStep
from r3channel.relay.verify import FrameVerifier
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.relay_connection import RelayConnection
from r3channel.trainer.shard_buffer import ShardBuffer
from tests.dist.control import ControlServer, TcpControl
from tests.support.delivery import compare
from tests.support.samples import SPEC, random_ids, reply_for
from tests.support.waits import SOON_S, until

TOKENS = {f"s{i}": n for i, n in enumerate((9, 700, 17, 5, 40, 30))}
STEP = 4
LAYOUT = TrainerLayout(dp=2)
LIMIT_S = SOON_S
CONFIG: dict[str, Any] = {"bucket_bytes": 1024, "step_timeout_s": LIMIT_S, "join_timeout_s": LIMIT_S}
STEPS = {
    STEP: Assignment.round_robin(list(TOKENS)[:4], dp=2, microbatch_size=2),
    STEP + 1: Assignment.round_robin(list(TOKENS)[4:], dp=2, microbatch_size=1),
}


def fill(relay: Relay, *, but: tuple[str, ...] = ()) -> None:
    for index, (name, tokens) in enumerate(TOKENS.items()):
        if name not in but:
            relay.add(name, reply_for(name, tokens, seed=index), range(100, 100 + tokens))


def config(folder: Path) -> ChannelConfig:
    return ChannelConfig(journal=str(folder), **CONFIG)


# -- where a process dies ------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner: type, name: str, *, call: int = 1, done: bool = False) -> None:
    """This process dies where a method is called for the so manyth time, or has done its work then."""
    inner, calls = getattr(owner, name), itertools.count(1)

    def method(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == call
        if now and not done:
            die()
        found = inner(*args, **kwargs)
        return die() if now else found

    setattr(owner, name, method)


before, after = at, partial(at, done=True)


def within_rows() -> None:
    """One bucket is on the wire and the next is not."""
    inner = RowStream.batches

    def batches(self: RowStream, nbytes: int) -> Iterator[list[memoryview]]:
        for number, batch in enumerate(inner(self, nbytes)):
            if number:
                die()
            yield batch

    RowStream.batches = batches


AT_RELAY: dict[str, Callable[[], None]] = {
    "before a frame is kept": partial(before, FrameVerifier, "keep", call=3),
    "after a frame is written": partial(after, Journal, "frame", call=3),
    "before the seal": partial(before, Relay, "seal"),
    "after the seal": partial(after, Journal, "write_ticket"),
    "before the rows are prepared": partial(before, SealedStep, "prepare"),
    "in the first bucket": within_rows,
    "before the last acknowledgement is written": partial(before, Journal, "write_acknowledgement", call=2),
    "after the last acknowledgement is written": partial(after, Journal, "write_acknowledgement", call=2),
    "before the first acknowledgement is written": partial(before, Journal, "write_acknowledgement"),
    "after the first acknowledgement is written": partial(after, Journal, "write_acknowledgement"),
}
AT_RECEIVER: dict[str, Callable[[], None]] = {
    "in its first bucket": partial(before, ShardBuffer, "rows"),
    "in its third bucket": partial(before, ShardBuffer, "rows", call=3),
    "between verifying and acknowledging": partial(before, RelayConnection, "_acknowledge"),
}


# -- the processes -------------------------------------------------------------------------------------------------------


class Child:
    """A process and this end of its pipe."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__, "tests.dist.warm"])
        self._pipe, theirs = server.Pipe()
        self.process: BaseProcess = server.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *what: Any) -> None:
        self._pipe.send(what)

    def hear(self) -> Any:
        """What it says next; None where it was killed."""
        assert self._pipe.poll(2 * LIMIT_S), "a process neither speaks nor ends"
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(LIMIT_S)
            assert self.process.exitcode == -signal.SIGKILL, self.process.exitcode
            return None

    def end(self) -> None:
        self._pipe.close()  # who waits for the next word ends
        self.process.join(LIMIT_S)
        self.process.kill()


def leave(pipe: Connection, folder: Path, point: str) -> None:
    """A relay with two sealed steps, which dies."""
    relay = Relay(SPEC, LAYOUT, config(folder))
    if point in AT_RELAY:
        AT_RELAY[point]()
    fill(relay)
    if point != "added":
        relay.seal(STEP, STEPS[STEP])
    die()


def be_relay(pipe: Connection, folder: Path, point: str) -> None:
    """The loop around a relay, from the first sample or from what a killed one left, until two steps are delivered."""
    if point in AT_RELAY:
        AT_RELAY[point]()
    if list(folder.glob("relay-*")):
        relay, recovery = Relay.recover(SPEC, LAYOUT, config(folder))
    else:
        relay, recovery = Relay(SPEC, LAYOUT, config(folder)), Recovery()
    fill(relay, but=tuple(recovery.pending))
    with ControlServer(relay) as server, suppress(EOFError):
        for step in STEPS:
            before = recovery.steps.get(step)
            ticket = relay.seal(step, before.assignment if before else STEPS[step])
            pipe.send((server.port, ticket.to_bytes(), recovery.damaged))
            relay.join_previous(timeout_s=LIMIT_S)
            pipe.send(relay.status())
            pipe.recv()
        until(lambda: not relay.status()["store"]["frames"])
        relay.close()
        pipe.send("closed")


def be_receiver(pipe: Connection, rank: int, point: str, transport: str = "tcp") -> None:
    """Receives what it is told to, from whatever relay there is."""
    if point in AT_RECEIVER:
        AT_RECEIVER[point]()
    control = TcpControl(port=0)
    own = ChannelConfig(transport=transport, **CONFIG)
    receiver = Receiver(control, spec=SPEC, layout=LAYOUT, coords=LAYOUT.coords(rank), config=own)
    with suppress(EOFError):
        while True:
            control.port, data = pipe.recv()
            try:
                pipe.send(receiver.receive(Ticket.from_bytes(data)).data_N.numpy().tobytes())
            except R3Error as error:
                pipe.send(error)
    receiver.close()


# -- what must arrive ----------------------------------------------------------------------------------------------------


def rows_in(ticket: Ticket, rank: int, data: bytes) -> int:
    """The rows of engines in a shard, over its layers, each as its engine made it."""
    at, data_N = LAYOUT.coords(rank), torch.frombuffer(bytearray(data), dtype=torch.uint8)
    own = ticket.plan.shard(dp=at.dp, pp=at.pp, cp=at.cp)
    ids = {name: random_ids(tokens - 1, seed=index) for index, (name, tokens) in enumerate(TOKENS.items())}
    wrong, rows = compare(RankShard.from_whole(ticket, own, data_N, tp=at.tp), ids)
    assert not wrong
    return rows
