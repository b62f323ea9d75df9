"""A whole relay, which engines, a rollout manager and receivers use in any order, agrees with a model of it.

Every row is delivered once and exactly, or an error names its sample. Ingest, connections and receivers are the real ones.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer import relay_connection
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.wire import row_protocol as wire
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.routing import Ids
from tests.support.delivery import compare, connected, hand, receivers_of, relays, threads
from tests.support.direct import deliver, parcel_of, post, reference_reply, said_hello
from tests.support.samples import SPEC, flipped, random_ids, reply_of, span
from tests.support.waits import SOON_S, until

HELD, WAITING, FAILED = "held", "waiting", "failed"
OUTCOMES = ("received", "duplicate", "rejected", "discarded", "expired", "delivered")
Error = type[errors.R3Error]


@dataclass(eq=False)
class Turn:
    """A reply with the rows from `first` on. They lie in it or, where it has a serial, in the frame of that number."""

    name: str
    append: bool
    first: int
    ids_TLK: Ids
    serial: int
    state: str = HELD

    @property
    def tokens(self) -> range:
        return range(self.first + len(self.ids_TLK) + 1)


@dataclass(eq=False)
class Step:
    names: Collection[str]
    seal: int
    missing: set[ShardKey]


class Model:
    """Where each sample is. An error that must come is told by its class."""

    def __init__(self, keys: Sequence[ShardKey]) -> None:
        self.keys, self.newest = keys, -1
        self.samples = defaultdict[str, list[Turn]](list)
        self.steps: dict[int, Step] = {}
        self.seals: dict[int, int] = {}  # a step that was given up -> the number of its next seal
        self.loose: dict[int, bool] = {}  # a frame whose reply has not come -> is it whole?
        self.used = set[int]()  # frames that nobody wants any more
        self.expired: list[str] = []
        self.count = Counter[str]()

    def rows(self, name: str) -> int:
        return sum(len(turn.ids_TLK) for turn in self.samples.get(name, ()))

    def free(self) -> dict[str, set[str]]:
        """A sample that no step has -> the states of its turns."""
        taken = {name for step in self.steps.values() for name in step.names}
        free = [name for name in self.samples if name not in taken]
        return {name: {turn.state for turn in self.samples[name]} for name in free}

    def awaited(self) -> dict[int, Turn]:
        return {turn.serial: turn for turns in self.samples.values() for turn in turns if turn.state != HELD}

    def reply(self, turn: Turn, *, damaged: bool) -> Error | None:
        held, here, error = self.rows(turn.name), self.loose.pop(turn.serial, None), None
        if damaged or here is False:
            error = errors.FrameCorrupt
        if held and not (turn.append and turn.name in self.free()) and not damaged:
            error = errors.SampleTwice
        elif turn.append and not held and not damaged:
            error = errors.SampleUnknown
        elif error is None and turn.first != held:
            error = errors.TurnMismatch if held else errors.RowCountMismatch
        elif error is None and turn.serial and turn.serial in {*self.used, *self.awaited()}:
            error = errors.FrameReferenceInvalid
        if here is not None or (error and turn.serial not in self.awaited()):
            self.used.add(turn.serial)
        if error is None:
            turn.state = HELD if here or not turn.serial else WAITING
            self.samples[turn.name].append(turn)
        if not turn.append:
            outcome = "duplicate" if error is errors.SampleTwice else "rejected"
            self.count.update(["received", *[outcome] * bool(error)])
        return error

    def frame(self, serial: int, *, whole: bool) -> bool:
        """Is it wanted?"""
        if serial in self.used or self.loose.get(serial):
            return False
        turn = self.awaited().get(serial)
        if turn is None:
            self.loose[serial] = whole
        else:
            turn.state = HELD if whole else FAILED
            self.used |= {serial} if whole else set()
        return True

    def seal(self, number: int, names: Collection[str]) -> tuple[Error | None, list[str]]:
        """The error, and the samples that it names."""
        free = self.free()
        kinds = {WAITING: errors.FrameMissing, "": errors.SampleUnknown, FAILED: errors.FrameCorrupt}
        for state, error in kinds.items():
            if named := [name for name in names if state in free.get(name, {""})]:
                return error, named
        self.steps[number] = Step(names, self.seals.pop(number, 0), set(self.keys))
        self.newest = max(self.newest, number)
        return None, []

    def live(self, ticket: Ticket) -> Step | None:
        step = self.steps.get(ticket.step)
        return step if step and step.seal == ticket.seal else None

    def acknowledge(self, ticket: Ticket, key: ShardKey) -> None:
        if (step := self.live(ticket)) is not None:
            step.missing.discard(key)
            if not step.missing:
                self.drop(self.steps.pop(ticket.step).names, "delivered")

    def abandon(self, number: int) -> int:
        if (step := self.steps.pop(number, None)) is None:
            return 0
        self.seals[number] = step.seal + 1
        return len(step.names)

    def drop(self, names: Collection[str], outcome: str) -> int:
        gone = {name: states for name, states in self.free().items() if name in names}
        for name, states in gone.items():
            self.used |= {turn.serial for turn in self.samples.pop(name) if turn.state != HELD}
            self.count["rejected" if FAILED in states else outcome] += 1
        return len(gone)

    def status(self) -> dict[str, Any]:
        free, turns = self.free(), [turn for turns in self.samples.values() for turn in turns]
        return {
            "pending": sorted(name for name, states in free.items() if states == {HELD}),
            "waiting": sorted(name for name, states in free.items() if WAITING in states and FAILED not in states),
            "failed": sorted(name for name, states in free.items() if FAILED in states),
            "expired": sorted(self.expired),
            "unclaimed": {"frames": len(self.loose)},
            "missing": {number: sorted(step.missing) for number, step in self.steps.items()},
            "blocks": sum(turn.state == HELD for turn in turns) + sum(self.loose.values()),
            "count": {outcome: self.count[outcome] for outcome in OUTCOMES},
            "in flight": self.count["received"] - sum(self.count[ended] for ended in OUTCOMES[1:]),
        }  # fmt: skip


class Wire:
    """A receiver's `Control`. Its connections lead through here, where they stand still, break, or lose an answer."""

    def __init__(self, relay: Relay, calls: Counter[ShardKey]) -> None:
        self._relay, self._calls, self._door = relay, calls, socket.create_server(("127.0.0.1", 0))
        self.room, self.loses_thanks, self.breaks = 0, False, False
        """`room`: bytes for the receiver that pass before it stands still; 0: all."""
        self.said = list[int]()
        """The kinds of records that the receiver sent."""
        self.stands, self.go_on = threading.Event(), threading.Event()

    def hello(self, **key: int) -> dict[str, Any]:
        told = self._relay.hello(**key)
        self._calls[key["dp"], key["pp"], key["cp"]] += 1
        threading.Thread(target=self._carry, args=[(told["host"], told["port"])], daemon=True).start()
        return told | {"port": self._door.getsockname()[1]}

    def _carry(self, place: tuple[str, int]) -> None:
        with suppress(OSError), self._door.accept()[0] as receiver, socket.create_connection(place) as relay:
            for end in (receiver, relay):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                for source in select.select([receiver, relay], [], [])[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    if source is relay:
                        self._answer(receiver, data)
                        continue
                    relay.sendall(data)
                    if data[:4] == b"R3L\x01":
                        self.said.append(data[4])
                    if self.loses_thanks and self.said[-1:] == [wire.DONE]:
                        self.loses_thanks = not relay.recv(1 << 16)
                        return

    def _answer(self, receiver: socket.socket, data: bytes) -> None:
        room = self.room
        self.room = max(0, room - len(data))  # before it is sent: more may be asked then
        if 0 < room <= len(data):
            receiver.sendall(data[:room])
            self.stands.set()
            if not self.go_on.wait(SOON_S) or self.breaks:
                raise ConnectionError
            data = data[room:]
        receiver.sendall(data)


@contextmanager
def refused(error: Error | None, names: Collection[Any] = (), *, what: str = "samples") -> Iterator[None]:
    """What is within raises this very error, which names these very samples (or ranks); or nothing where there is none."""
    with pytest.raises(error) if error else nullcontext() as told:
        yield
    if told is not None:
        assert (type(told.value), sorted(getattr(told.value, what))) == (error, sorted(names))


NAMES = "abcdef"
WHICH, BACK, FLAG = st.integers(0, 99), st.integers(0, 3), st.booleans()
RARELY = st.integers(0, 6).map(lambda number: number == 6)
FLIP = st.one_of(*[st.none()] * 3, st.integers(0, 9999))
"""Which byte of a frame comes damaged."""
HOW = [("frames come meanwhile", {HELD, WAITING}), ("", {HELD}), ("", {HELD, WAITING, FAILED})]
ORDERS = ["I", "I", "R", "R", "RF", "RF", "FR", "F"]
"""I: a reply that holds its frame. R: one with a reference, F: the frame; what is not here comes late, or never."""
REQUEST = st.fixed_dictionaries({
    "name": st.sampled_from(NAMES), "rows": st.integers(1, 30), "order": st.sampled_from(ORDERS),
    "flip": FLIP,
    "shift": st.sampled_from([0] * 9 + [1, -1]),  # where its rows begin, from where they must
    "wrong": RARELY,  # a first turn is said to be a later one, or a later one a first
    "other": FLAG,  # it comes by the other of two ways in
})  # fmt: skip
EVENT = st.tuples(st.integers(1, 9), st.integers(1, 3), FLIP, FLAG)


class RelayMachine(RuleBasedStateMachine):
    steps = 0
    patience_s = SOON_S
    """How long the relay's background may take; short once something was wrong, for that is run again and again."""

    @initialize(layout=st.sampled_from(["dp=2", "dp=2,cp=2", "dp=2,pp=2,packing=thd"]))
    def starts(self, layout: str) -> None:
        self.before, self.stack = threads(), ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(relay_connection, "_PAUSE_S", 0.01)
        make = self.stack.enter_context(relays(max_group_failures=1, frame_timeout_s=0.002))
        self.pool = self.stack.enter_context(ThreadPoolExecutor(5))
        self.relay = make(layout)
        self.config = self.relay.config
        token_file = Path(self.stack.enter_context(TemporaryDirectory()), "token")
        self.ingest = self.relay.serve(token_file=token_file), token_file
        assert said_hello(*self.ingest)
        coords = map(self.relay.layout.coords, range(self.relay.layout.world_size))
        self.keys = [(at.dp, at.pp, at.cp) for at in coords]
        self.turns, self.sealed = list[Turn](), list[tuple[Ticket, dict[str, Ids]]]()
        self.got, self.last = defaultdict[int, dict[ShardKey, int]](dict), dict[ShardKey, tuple[int, int]]()
        self.receivers = dict[ShardKey, tuple[Receiver, Wire]]()
        self.slow = dict[ShardKey, tuple[int, Future[RankShard]]]()
        self.model, self.lives, self.calls = Model(self.keys), Counter[ShardKey](), Counter[ShardKey]()
        for key in self.keys:
            self.begins_anew(key)

    # -- engines -------------------------------------------------------------------------------------------------------

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=4))
    def requests_end(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.request_ends(**request)

    def request_ends(
        self, name: str, rows: int, order: str, shift: int = 0, wrong: bool = False, flip: int | None = None, other: bool = False
    ) -> None:  # fmt: skip
        held, serial = self.model.rows(name), 0 if order == "I" else len(self.turns) + 1
        ids_TLK = random_ids(rows, seed=len(self.turns))
        turn = Turn(name, (held > 0) != wrong, max(0, held + shift), ids_TLK, serial)
        self.turns.append(turn)
        for event in order:
            if event == "F":
                self.sends(turn, flip=flip, http=other)
            else:
                self.answers(turn, flip=flip if event == "I" else None, body=other)

    @rule(events=st.lists(EVENT, min_size=1, max_size=4))
    def replies_and_frames_come_late_or_again(self, events: list[tuple[int, int, int | None, bool]]) -> None:
        for reply_back, frame_back, flip, other in events:
            for turn in self.turns[-reply_back:][: reply_back > 6]:
                self.answers(replace(turn), flip=None, body=other)
            for turn in [turn for turn in self.turns if turn.serial][-frame_back:][:1]:
                self.sends(turn, flip=flip, http=other)

    def frame(self, turn: Turn, flip: int | None = None) -> bytes:
        spans = [span(turn.first, turn.tokens[-1], turn.first)]
        codec = ("stored", "lz4")[len(turn.ids_TLK) % 2]
        options: Any = {"provenance": spans, "first_row": turn.first, "codec": codec}
        data = encode_frame(SPEC, expert_ids_TLK=turn.ids_TLK, sample_key=sample_key(turn.name), **options)
        if flip is None:
            return data
        at = 5 + flip % (len(data) - 5)  # magic and version before it: not damaged, but another format
        return flipped(data, 8 * at + 2)

    def answers(self, turn: Turn, *, flip: int | None, body: bool) -> None:
        reply = reply_of(self.frame(turn, flip), request_id=turn.name)
        if turn.serial:
            reply = reference_reply(turn.name, len(turn.tokens), serial=turn.serial, first_row=turn.first)
        add: Any = self.relay.add_body if body else self.relay.add
        said = json.dumps(reply).encode() if body else reply
        with refused(self.model.reply(turn, damaged=flip is not None), [turn.name]):
            add(turn.name, said, turn.tokens, append=turn.append)

    def sends(self, turn: Turn, *, flip: int | None, http: bool) -> None:
        damaged = self.model.frame(turn.serial, whole=flip is None) and flip is not None
        frame = turn.serial, self.frame(turn, flip)
        if http:
            assert post(*self.ingest, parcel_of(frame, frame)) == (425 if damaged else 200)
        else:
            with refused(errors.FrameCorrupt if damaged else None):
                deliver(self.relay, frame)

    # -- the rollout manager -------------------------------------------------------------------------------------------

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=3))
    def discards(self, names: set[str]) -> None:
        assert self.relay.discard(names) == self.model.drop(names, "discarded")

    @rule(samples=RARELY)
    def an_hour_passes(self, samples: bool) -> None:
        """For samples, or for frames without a reply."""
        samples_s, frames_s = (1e-9, 3600.0) if samples else (3600.0, 1e-9)
        self.relay.samples.config = replace(self.config, expiry_s=samples_s, unclaimed_timeout_s=frames_s)
        self.relay.samples.expire()
        self.relay.samples.config = self.config
        if samples:
            self.model.expired += self.model.free()
            self.model.drop(NAMES, "expired")
        else:
            self.model.loose.clear()

    @rule(
        order=st.permutations(NAMES), count=st.integers(2, 5), any_name=RARELY, how=st.sampled_from(HOW), again=FLAG
    )  # fmt: skip
    def seals(self, order: list[str], count: int, any_name: bool, how: Any, again: bool) -> None:
        """Samples in some states, and new ones in place of those that are not there. `again`: a step that was given up."""
        model, free, (frames_come, usable) = self.model, self.model.free(), how
        step = max(model.seals) if again and model.seals else model.newest + 1
        if not any_name:
            order = [n for n in order if (free[n] <= usable if n in free else n not in model.samples)]
            for name in (n for n in order[:count] if n not in free):
                self.request_ends(name, 1 + count, "I", other=again)
        if len(names := order[:count]) < 2:
            return
        assignment = Assignment.given([[names[::2]], [names[1::2]]])
        late = [turn for turn in model.awaited().values() if turn.name in names and turn.state == WAITING]
        come = bool(frames_come) and not model.used & {turn.serial for turn in late}
        coming = [turn for turn in late if come and model.frame(turn.serial, whole=True)]
        self.relay.steps.config = replace(self.config, frame_timeout_s=SOON_S if come else 0.002)
        sent = self.pool.submit(deliver, self.relay, *((turn.serial, self.frame(turn)) for turn in coming))
        with refused(*model.seal(step, assignment.sample_ids)):
            ticket = Ticket.from_bytes(self.relay.seal(step, assignment).to_bytes())
            assert (ticket.step, ticket.seal) == (step, model.steps[step].seal)
            versions = {turn.first for name in names for turn in model.samples[name]}
            assert set(ticket.weight_versions) == versions
            rows = {name: np.concatenate([turn.ids_TLK for turn in model.samples[name]]) for name in names}
            self.sealed.append((ticket, rows))
        sent.result(SOON_S)
        self.relay.steps.config = self.config

    @rule(names=st.permutations(NAMES), dp=st.integers(1, 2))
    def seals_what_it_must_not(self, names: list[str], dp: int) -> None:
        """For another number of DP ranks, or a step that is not newer."""
        step = self.model.newest + 2 - dp
        if step >= 0 and step not in self.model.seals:
            with refused((errors.ConfigError, errors.StepError)[dp - 1]):
                self.relay.seal(step, Assignment.given([[[name]] for name in names[:dp]]))

    @rule(back=st.integers(0, 2))
    def abandons(self, back: int) -> None:
        step = self.model.newest - back
        assert self.relay.abandon(step) == self.model.abandon(step)

    # -- receivers -----------------------------------------------------------------------------------------------------

    def begins_anew(self, key: ShardKey) -> None:
        """A trainer starts, or again after it was killed."""
        control = Wire(self.relay, self.calls)
        receiver = receivers_of(self.relay, self.config, control=control)[self.keys.index(key)]
        self.stack.callback(receiver.close)  # not before: the relay ends the older connection
        receiver.join()
        self.receivers[key], self.last[key] = (receiver, control), (-1, 0)
        self.lives[key] += 1

    def pick(self, which: int, back: int, *, live: bool) -> list[tuple[ShardKey, int]]:
        """A receiver that is not busy and the number of a seal, where there are any; `live`: of one under way."""
        keys = [key for key in self.keys if key not in self.slow]
        seals = [at for at, (ticket, _) in enumerate(self.sealed) if not live or self.model.live(ticket)]
        return [(keys[which % len(keys)], seals[-1 - back % len(seals)])] if keys and seals else []

    @rule(which=WHICH, back=BACK, live=FLAG, lost=RARELY)
    def receives(self, which: int, back: int, live: bool, lost: bool) -> None:
        """`lost`: the relay's thanks do not arrive, so that the receiver repeats itself."""
        for key, number in self.pick(which, back, live=live):
            ticket, (receiver, control) = self.sealed[number][0], self.receivers[key]
            gone = self.last[key] >= (ticket.step, ticket.seal) or self.model.live(ticket) is None
            control.loses_thanks = lost and not gone
            self.lives[key] += control.loses_thanks
            with refused(errors.TicketMismatch if gone else None):
                self.has(key, number, receiver.receive(ticket))
                assert control.said[-2 - lost :] == [wire.READY, wire.DONE, wire.DONE][: 2 + lost]

    @rule(back=BACK)
    def all_receive(self, back: int) -> None:
        for which in range(len(self.keys) - len(self.slow)):
            self.receives(which, back, live=True, lost=False)

    def has(self, key: ShardKey, number: int, shard: RankShard) -> None:
        """Its rows are the model's; those of all receivers are all rows, each once."""
        ticket, rows = self.sealed[number]
        wrong, self.got[number][key] = compare(shard, rows)
        assert not wrong
        hand(shard)
        self.last[key] = ticket.step, ticket.seal
        if len(self.got[number]) == len(self.keys):
            assert sum(self.got[number].values()) == SPEC.num_moe_layers * sum(map(len, rows.values()))
        self.model.acknowledge(ticket, key)

    @rule(which=WHICH, back=BACK, room=st.integers(1, 100))
    def stands_still(self, which: int, back: int, room: int) -> None:
        """A receiver, once so many bytes have come of what is announced, the rows and their digests."""
        for key, number in self.pick(which, back, live=True):
            ticket, (receiver, control) = self.sealed[number][0], self.receivers[key]
            if self.last[key] < (ticket.step, ticket.seal):
                control.room = room
                self.slow[key] = number, self.pool.submit(receiver.receive, ticket)
                assert control.stands.wait(SOON_S)

    @precondition(lambda self: self.slow)
    @rule(end=st.sampled_from(["goes on", "its connection breaks", "is killed"]))
    def goes_on(self, end: str) -> None:
        """The receiver that stands still; after a break it comes again by itself, and killed, another takes its place."""
        key = next(iter(self.slow))
        (number, receiving), (receiver, control) = self.slow.pop(key), self.receivers[key]
        control.breaks = end != "goes on"
        self.lives[key] += end == "its connection breaks"
        if end == "is killed":
            receiver.close()
        control.go_on.set()
        # After a break it asks again, and its seal may have been abandoned.
        gone = end == "its connection breaks" and not self.model.live(self.sealed[number][0])
        error = errors.TransportError if end == "is killed" else errors.TicketMismatch if gone else None
        with pytest.raises(error) if error else nullcontext():
            self.has(key, number, receiving.result(SOON_S))
        self.begins_anew(key)

    @rule(which=WHICH, back=BACK)
    def acknowledges_again(self, which: int, back: int) -> None:
        """Or what is over: a step, a seal, a run. Then the receiver begins anew, as its connection has ended."""
        for key, number in self.pick(which, back, live=False):
            ticket = self.sealed[number][0]
            if (step := self.model.live(ticket)) and key in step.missing:
                ticket = replace(ticket, run="another")
            with closing(connected(self.relay, key)) as link:
                link.send_record(wire.DONE, wire.pack(**wire.seal_of(ticket.identity)), timeout_s=SOON_S)
                assert link.recv_record(timeout_s=SOON_S)[0] == wire.THANKS
            self.calls[key] += 1
            self.lives[key] += 1
            self.begins_anew(key)

    # -- what holds after each -----------------------------------------------------------------------------------------

    def seen(self) -> dict[str, Any]:
        """The relay's status, as the model tells it."""
        status, value = self.relay.status(), self.relay.metrics.value
        assert (status["store"]["bytes"] > 0) == (status["store"]["frames"] > 0)
        return {name: status[name] for name in ("pending", "waiting", "unclaimed")} | {
            "failed": sorted(status["failed"]), "expired": sorted(status["expired"]), "blocks": status["store"]["frames"],
            "missing": {number: sorted(step["missing"]) for number, step in status["steps"].items()},
            "lives": status["receivers"]["lives"], "calls": self.calls,
            "count": {outcome: value("r3channel_samples_total", outcome=outcome) for outcome in OUTCOMES},
            "in flight": value("r3channel_samples_in_flight"),
        }  # fmt: skip

    def refused_for_the_missing(self, error: Error) -> AbstractContextManager[None]:
        missing = [key for step in self.model.steps.values() for key in step.missing]
        return refused(error if missing else None, missing, what="ranks")

    @invariant()
    def agrees(self) -> None:
        RelayMachine.steps += 1
        expected, end_s = self.model.status(), time.monotonic() + self.patience_s
        expected["lives"] = expected["calls"] = self.lives
        while (seen := self.seen()) != expected and time.monotonic() < end_s:
            time.sleep(0.001)
        RelayMachine.patience_s = self.patience_s if seen == expected else 0.5
        assert seen == expected
        with self.refused_for_the_missing(errors.DeadlineExceeded):
            self.relay.join_previous(timeout_s=0)

    def teardown(self) -> None:
        with self.refused_for_the_missing(errors.StepError):
            self.relay.close()
        for key, (_, receiving) in self.slow.items():
            self.receivers[key][1].go_on.set()
            assert receiving.exception(SOON_S)
        self.stack.close()
        until(lambda: threads() <= self.before, "no thread is left")


@pytest.mark.parametrize(("runs", "steps"), [(10, 40), pytest.param(200, 50, marks=pytest.mark.full)])
def test_a_relay_agrees_with_its_model(runs: int, steps: int) -> None:
    """R3TEST_SEED=n: other runs than always."""
    machine, before = seed(int(os.environ.get("R3TEST_SEED", "0")))(RelayMachine), RelayMachine.steps
    run_machine(machine, settings=settings(max_examples=runs, stateful_step_count=steps, database=None))
    assert RelayMachine.steps - before > 2000 or runs < 200
