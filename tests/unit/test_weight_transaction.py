"""Every interleaving of an update of two engines by two trainer ranks, with one fault at any point, in both ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from r3channel.weights import transaction
from r3channel.weights.transaction import Action, Engine, EngineState, Event, Kind, Transaction, UpdateState

LOST, REFUSED, FAILED, LATE = (RuntimeError(word) for word in ("no answer", "refused", "failed", "too late"))
OLD, PARTS, NEW = 1, 0, 2
"""An engine's weights: of the version before, a mixture, of the update's version."""
ENDED = (UpdateState.DONE, UpdateState.ABORT)
DEAD = -1
TOGETHER = "plan", "group", "tell"
"""Calls in which rank 0 says what it knows."""


class Real(NamedTuple):
    """What an engine really holds and does, and the calls that it has not carried out yet, in order."""

    weights: int = OLD
    paused: bool = False
    dead: bool = False
    calls: tuple[tuple[int, str], ...] = ()
    """By which rank, and what."""
    got: frozenset[int] = frozenset()
    """Ranks whose part of the update has come."""


class World(NamedTuple):
    """Transactions and events by number, which is fast."""

    ranks: tuple[int, ...]
    engines: tuple[Real, ...]
    mail: frozenset[tuple[int, int]] = frozenset()
    """What is on its way to a rank, in no order."""
    given: frozenset[int] = frozenset()
    """Ranks that have given their bucket."""
    healthy: bool = True


STATES, EVENTS = list[Transaction](), list[Event]()


@cache
def numbered(value: Transaction | Event) -> int:
    kept: list[Any] = STATES if isinstance(value, Transaction) else EVENTS
    kept.append(value)
    return len(kept) - 1


@cache
def step(now: int, event: int) -> tuple[int, tuple[Action, ...]]:
    after, actions = transaction.step(STATES[now], EVENTS[event])
    return numbered(after), actions


def event(kind: Kind, *, number: int = 7, **what: Any) -> int:
    return numbered(Event(kind=kind, number=number, **what))


FAILURE = event(Kind.FAILED, error=FAILED)


def put(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def begun(way: str, first: EngineState, dead: bool) -> World:
    before: dict[str, Any] = {"holds": OLD} if first is EngineState.SERVING else {"why": "before"}
    engines = Engine("0", first, **before), Engine("1", EngineState.SERVING, holds=OLD)
    real = Real(PARTS, paused=True) if first is EngineState.FENCED else Real(dead=dead)
    whole = Transaction(number=7, version=NEW, way=way, engines=engines, rank=0, ranks=2)
    world = World((numbered(whole), numbered(whole._replace(rank=1))), (real, Real()))
    for rank in (0, 1):
        world = heard(world, rank, event(Kind.BEGIN))
    return world


def heard(world: World, rank: int, *events: int) -> World:
    """A rank takes events in, and what it then wants is on its way."""
    for one in events if world.ranks[rank] != DEAD else ():
        number, actions = step(world.ranks[rank], one)
        world = world._replace(ranks=put(world.ranks, rank, number))
        for action in actions:
            world = wanted(world, rank, STATES[number], action)
    return world


def wanted(world: World, rank: int, now: Transaction, action: Action) -> World:
    if action.engine and action.call != "forget":
        real = world.engines[int(action.engine)]
        real = real._replace(calls=(*real.calls, (rank, action.call)))
        return world._replace(engines=put(world.engines, int(action.engine), real))
    mail = set[tuple[int, int]]()
    if action.call == "fail":
        mail = {(1 - rank, FAILURE)}
    elif action.call == "vote":
        vote = event(Kind.VOTED, rank=rank, lost=tuple(now.left_out.items()))
        mail = {(0, vote), (1, vote)}
    elif action.call in TOGETHER and rank == 0:
        mail = {(1, event(Kind.TOLD, call=action.call, engines=now.engines))}
    return world._replace(mail=world.mail | mail)


def nexts(world: World) -> Iterator[World]:
    """What may happen next, without a fault."""
    states = [None if number == DEAD else STATES[number] for number in world.ranks]
    for rank, one in world.mail:
        now, word, after = states[rank], EVENTS[one], world._replace(mail=world.mail - {(rank, one)})
        if word.kind is not Kind.TOLD:
            yield heard(after, rank, one)
        elif now is None or now.state in ENDED or now.busy == word.call:  # it is heard where it is waited for
            yield heard(after, rank, one, event(Kind.ANSWERED, call=word.call))
    for rank, now in enumerate(states):
        if now is None or now.busy in ("", "vote") or any(engine.asked for engine in now.engines):
            continue
        other, together = states[1 - rank], now.busy in TOGETHER
        if now.busy == "give" and rank not in world.given:
            yield heard(world._replace(given=world.given | {rank}), rank, event(Kind.BUCKET))
        elif together and (other is None or other.state is UpdateState.ABORT):  # who waits is told again
            yield heard(world, rank, FAILURE)
        elif not together or (rank == 0 and other is not None and other.at >= now.at):
            yield heard(world, rank, event(Kind.ANSWERED, call=now.busy))
    for at, real in enumerate(world.engines):
        if real.calls:
            yield answered(world, at, "die" if real.dead else "")


def answered(world: World, at: int, fault: str) -> World:
    """An engine carries out its next call, or not, as the fault wants; its answer is on its way."""
    real = world.engines[at]
    (rank, call), *rest = real.calls
    done = real._replace(calls=tuple(rest), dead=fault == "die")
    if not fault:
        got = real.got | {"send": {rank}, "load": {0, 1}}.get(call, set())
        whole = NEW if got == world.given == {0, 1} else PARTS
        weights = {"load": PARTS, "commit": whole}.get(call, real.weights)
        paused = {"pause": True, "resume": False, "undo": False}.get(call, real.paused)
        done = done._replace(weights=weights, paused=paused, got=got)
    elif fault == "late":  # nobody waits any more when it is carried out; it is before later calls
        done = real
    elif fault == "half":
        done = done._replace(weights=PARTS)
    kind, error = (Kind.LOST, LOST) if fault else (Kind.ANSWERED, None)
    if fault in ("refuse", "half"):
        kind, error = Kind.REFUSED, REFUSED
    found = EngineState.PAUSED if call in ("commit", "load") and fault == "refuse" else None
    answer = event(kind, call=call, engine=str(at), error=error, found=found)
    world = world._replace(
        engines=put(world.engines, at, done), healthy=world.healthy and (real.dead or not fault)
    )
    return world._replace(mail=world.mail | {(rank, answer)})


def faults(world: World) -> Iterator[World]:
    for at, real in enumerate(world.engines):
        for fault in ("refuse", "drop", "die", "late", "half") if real.calls and not real.dead else ():
            if fault != "half" or real.calls[0][1] in ("commit", "load"):
                yield answered(world, at, fault)
    for rank, number in enumerate(world.ranks):
        if number != DEAD and STATES[number].state not in ENDED:
            broken = world._replace(healthy=False)
            yield heard(broken, rank, FAILURE)
            yield heard(broken, rank, *late(number))
            died = {(1 - rank, FAILURE)}
            yield broken._replace(ranks=put(world.ranks, rank, DEAD), mail=world.mail | died)
    for rank, one in world.mail:
        if EVENTS[one].kind is not Kind.TOLD:  # it is heard in time, but no time is left
            after = world._replace(mail=world.mail - {(rank, one)}, healthy=False)
            yield heard(after, rank, numbered(EVENTS[one]._replace(over=LATE)))


@cache
def late(number: int) -> list[int]:
    """What a rank hears when its time is over: who is waited for is lost."""
    now = STATES[number]
    lost = [
        event(Kind.LOST, engine=e.url, call=e.asked, error=LOST, over=LATE) for e in now.engines if e.asked
    ]
    return [*lost, event(Kind.FAILED, error=LATE, over=LATE)] if now.busy else lost


@cache
def ends(number: int) -> bool:
    """Whether a deadline ends what is under way, and another one what that began; a word of an older update changes nothing."""
    assert step(number, event(Kind.FAILED, error=FAILED, number=6)) == (number, ())
    before = STATES[number].state
    for turn in range(3):
        for one in late(number):
            number, _ = step(number, one)
        if turn == 0:  # before the commit nothing more is begun
            after = STATES[number].state
            assert after in ENDED or before in (UpdateState.COMMIT, UpdateState.RESUME), (before, after)
    return STATES[number].ended


def check(world: World) -> None:
    """What holds at any time."""
    assert all(number == DEAD or ends(number) for number in world.ranks)
    for at, real in enumerate(world.engines):
        assert real.paused or real.weights != PARTS, "it serves a mixture"
        if world.ranks[0] != DEAD and not real.dead:
            lead = STATES[world.ranks[0]]
            version = NEW if lead.state is UpdateState.DONE else OLD
            assert version is OLD or NEW in [one.weights for one in world.engines], "nobody took it"
            assert not lead.engines[at].serves(version) or real.weights == version


def check_end(world: World) -> None:
    """What holds when nothing is under way any more."""
    states = [STATES[number] for number in world.ranks if number != DEAD]
    for now in states:
        assert now.ended, f"rank {now.rank} waits for ever"
        for engine in now.engines:
            named = engine.state in (EngineState.FENCED, EngineState.OUT) and engine.why
            assert engine.state is EngineState.SERVING or (named and engine.holds is None), engine
    for now, (at, real) in product(states, enumerate(world.engines)):
        engine, knows = now.engines[at], now.rank == 0 or now.way != "broadcast"
        alive = world.ranks[0] != DEAD and not real.dead
        if knows and alive and engine.state is EngineState.SERVING:
            assert not real.paused and real.weights == (engine.holds or real.weights)
    if world.healthy and not world.engines[0].dead:
        assert [now.state for now in states] == [UpdateState.DONE] * 2
        assert [real[:4] for real in world.engines] == [Real(NEW)[:4]] * 2


@pytest.mark.parametrize(
    ("first", "dead"),
    [(EngineState.OUT, True), *product((EngineState.SERVING, EngineState.FENCED, EngineState.OUT), [False])],
)
@pytest.mark.parametrize("way", ["staged", "grouped", "broadcast"])
def test_whatever_fails_engines_end_with_whole_weights_or_fenced_and_named(
    way: str, first: EngineState, dead: bool
) -> None:
    start = begun(way, first, dead)
    seen, due = {start}, [start]
    while due:
        world = due.pop()
        check(world)
        after = list(nexts(world))
        if not after:
            check_end(world)
        new = {*after, *(faults(world) if world.healthy else ())} - seen
        seen |= new
        due += new
    assert len(seen) > 5000
