"""One update of some engines as a pure state machine. It takes a state and an event, returns a state and actions, and has no
I/O, threads or clock.

    IDLE -> LINK -> STAGE -> VOTE -> PAUSE -> COMMIT -> RESUME -> DONE     staged: the engines serve until PAUSE
    IDLE -> LINK -> PAUSE -> STAGE -> VOTE -> COMMIT -> RESUME -> DONE     broadcast: SGLang loads in place; grouped: staged, too
            a failure before the first engine is NEW -> ABORT

`ORDER` is the order of all calls: a call is made once every answer to the call before is there. Every trainer rank has such a
machine. Rank 0's machine also speaks to engines, and the others take over what rank 0 says of them. `update` carries out the
actions.

The first engine that is NEW decides for all, and nothing later undoes that: an engine that does not follow is FENCED. An engine
that is lost before that is left out, and the update goes on with the others. Only a commit ends the state FENCED.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from r3channel.errors import EngineUnavailable


class EngineState(Enum):
    """What an engine holds and does, as far as is known."""

    OUT = "not linked"
    LINKED = "serving, linked for an update"
    STAGED = "serving, an update staged and verified beside its parameters"
    PAUSED = "paused, weights untouched"
    NEW = "paused, holding the new weights and version"
    SERVING = "serving the committed weights"
    FENCED = "paused until it gets whole weights"


class UpdateState(Enum):
    """The phase of an update."""

    IDLE, LINK, STAGE, VOTE, PAUSE, COMMIT, RESUME, DONE, ABORT = range(9)


OUT, LINKED, STAGED, PAUSED, NEW, SERVING, FENCED = EngineState
IDLE, LINK, STAGE, VOTE, PAUSE, COMMIT, RESUME, DONE, ABORT = UpdateState
LEAD, EACH, OWN = "rank 0 to each engine", "each rank to each engine", "each rank"


class Call(NamedTuple):
    """One step of an update."""

    during: UpdateState
    by: str
    done: EngineState | None = None
    """The state of an engine that did it; None: the state stays."""
    failed: EngineState | None = None
    """The state of an engine that refused or gave no answer; None: the state stays, or is OUT if the engine is left out."""


CALLS = {
    "survey": Call(LINK, OWN), "meet": Call(LINK, LEAD), "link": Call(LINK, LEAD, LINKED, PAUSED), "plan": Call(LINK, OWN),
    "group": Call(PAUSE, OWN), "gather": Call(PAUSE, LEAD),
    "join": Call(LINK, LEAD, LINKED), "give": Call(STAGE, OWN), "send": Call(STAGE, EACH),
    "load": Call(STAGE, LEAD, FENCED, FENCED), "vote": Call(VOTE, OWN), "verify": Call(VOTE, LEAD, STAGED),
    "end": Call(VOTE, LEAD, FENCED, FENCED), "pause": Call(PAUSE, LEAD, PAUSED, PAUSED), "hold": Call(PAUSE, LEAD),
    "accept": Call(PAUSE, OWN), "begin": Call(PAUSE, LEAD), "check": Call(PAUSE, LEAD),
    "commit": Call(COMMIT, LEAD, NEW, FENCED), "resume": Call(RESUME, LEAD, SERVING, FENCED), "tell": Call(RESUME, OWN),
    "undo": Call(ABORT, LEAD, SERVING, OUT), "leave": Call(ABORT, LEAD),
}  # fmt: skip
ORDER = {
    "staged": ("survey", "meet", "link", "plan", "give", "vote", "verify", "pause", "commit", "resume", "tell"),
    "grouped": ("survey", "meet", "link", "plan", "pause", "group", "gather", "give", "vote", "verify", "commit", "resume",
                "tell"),
    "broadcast": ("survey", "meet", "join", "pause", "hold", "accept", "begin", "check", "give", "vote", "end", "commit",
                  "resume", "tell"),
}  # fmt: skip
BESIDE = {"staged": ("send", "undo"), "grouped": ("send", "undo"), "broadcast": ("load", "undo", "leave")}
"""Calls outside the order. The first is made for each bucket while buckets are given; the others after a failure."""


class Kind(Enum):
    """What an event says.

    BEGIN: the update may begin. ANSWERED: an engine, or this rank, did what was asked. LOST: an engine gave no answer. REFUSED:
    an engine answered that it does not. BUCKET: the next bucket is there. VOTED: a rank has sent everything, except to the
    engines that it names. TOLD: what rank 0 knows of the engines. FAILED: a rank has failed.
    """

    BEGIN, ANSWERED, LOST, REFUSED, BUCKET, VOTED, TOLD, FAILED = range(8)


class Engine(NamedTuple):
    """What is known of one engine."""

    url: str
    state: EngineState = OUT
    why: str = ""
    """Why it is FENCED, or was left out."""
    holds: int | None = None
    """The version that it committed; None once its weights may be others."""
    member: bool = True
    """Whether the update goes on with it."""
    asked: str = ""
    """The call that it has not answered yet."""

    def __str__(self) -> str:
        return f"{self.url}: {self.state.value}" + (f" ({self.why})" if self.why else "")

    def serves(self, version: int | None) -> bool:
        """Return whether requests may go to it: it serves this version."""
        return self.state in (SERVING, LINKED, STAGED) and self.holds == version is not None

    def enter(self, state: EngineState, why: str = "") -> Engine:
        """Return the engine in another state.

        A FENCED engine becomes clean only by a commit.
        """
        if self.state is FENCED and state is not NEW:
            return self._replace(why=self.why or why)
        holds = None if state in (OUT, FENCED) else self.holds
        return self._replace(state=state, why=why, holds=holds, member=self.member and state is not OUT)


class Action(NamedTuple):
    """A call to make; without an engine, this rank itself makes it. `fail` tells the other ranks, and `forget` ends links;
    neither has an answer."""

    call: str
    engine: str = ""


class Event(NamedTuple):
    """Something that happened in the update of this number."""

    kind: Kind
    number: int
    call: str = ""
    engine: str = ""
    rank: int = 0
    """The rank that has voted."""
    error: BaseException | None = None
    found: EngineState | None = None
    """FENCED: the engine held parts of somebody's update. PAUSED: the engine refused a commit before a parameter changed."""
    lost: tuple[tuple[str, str], ...] = ()
    """Engines that a rank could not reach, and why."""
    engines: tuple[Engine, ...] = ()
    over: BaseException | None = None
    """The error once the deadline has passed: before the commit no more calls are made. Calls under way have limits of their own,
    and are LOST by then."""


class Transaction(NamedTuple):
    """One update, at one trainer rank."""

    number: int
    version: int
    way: str
    engines: tuple[Engine, ...]
    rank: int = 0
    ranks: int = 1
    alone: bool = False
    """Whether the version is committed already; then no engine may be left out."""
    state: UpdateState = IDLE
    at: int = -1
    """The index of the current call in the order."""
    busy: str = ""
    """The call that this rank itself is making."""
    votes: frozenset[int] = frozenset()
    """Ranks that have sent everything."""
    error: BaseException | None = None
    """What failed the update. In a DONE update: why other ranks were not told."""

    @property
    def waits(self) -> bool:
        """Return whether a call is under way."""
        return bool(self.busy) or any(engine.asked for engine in self.engines)

    @property
    def ended(self) -> bool:
        return self.state in (DONE, ABORT) and not self.waits

    @property
    def decided(self) -> bool:
        """Return whether the update counts: an engine has the new version.

        This is what rank 0 knows.
        """
        return (self.state in (RESUME, DONE) and not self.rank) or any(e.state is NEW for e in self.engines)

    @property
    def left_out(self) -> dict[str, str]:
        return {engine.url: engine.why for engine in self.engines if not engine.member}

    def failing(self, error: BaseException | None) -> Transaction:
        return self if self.error is not None or self.decided else self._replace(error=error)

    def put(self, engine: Engine) -> Transaction:
        return self._replace(engines=tuple(engine if e.url == engine.url else e for e in self.engines))


Stepped = tuple[Transaction, tuple[Action, ...]]


def step(now: Transaction, event: Event) -> Stepped:
    """Return the update's next state, and the actions to carry out.

    An event of another update, or of an ended one, changes nothing.
    """
    if event.number != now.number or now.ended or (now.state is IDLE) != (event.kind is Kind.BEGIN):
        return now, ()
    actions: tuple[Action, ...] = ()
    match event.kind:
        case Kind.BEGIN:
            now = now._replace(state=LINK, engines=tuple(e._replace(member=True) for e in now.engines))
        case Kind.ANSWERED if not event.engine:
            now = now._replace(busy="" if now.busy == event.call else now.busy)
        case Kind.ANSWERED | Kind.LOST | Kind.REFUSED:
            for engine in now.engines:  # none matches if the answer comes too late
                if (engine.url, engine.asked) == (event.engine, event.call):
                    now, actions = _answer(now, engine, event)
        case Kind.BUCKET:
            now, actions = _ask(now, BESIDE[now.way][0]) if now.busy == "give" else (now, ())
        case Kind.VOTED:
            now, actions = _count(now, event)
        case Kind.TOLD:
            now = now._replace(engines=event.engines) if now.rank else now
        case Kind.FAILED:
            now = _fail(now, event.error)
    if not now.rank or now.state in (LINK, STAGE):  # a rank that has voted waits for what rank 0 decides
        now = now.failing(event.over)
    now, more = _go_on(now)
    return now, (*actions, *more)


def _answer(now: Transaction, engine: Engine, event: Event) -> Stepped:
    if event.kind is not Kind.ANSWERED:
        return _drop(now, engine, event)
    state = event.found or CALLS[event.call].done
    if state is STAGED and engine.state is PAUSED:
        state = None  # it does not serve beside the copy
    engine = engine._replace(asked="", holds=now.version if state is NEW else engine.holds)
    why = "it held parts of an update that nobody ended" if event.found else ""
    return now.put(engine.enter(state, why) if state else engine), ()


def _drop(now: Transaction, engine: Engine, event: Event) -> Stepped:
    """Handle an engine that did not do what was asked.

    A lost engine is left out, unless it is the last one, or the version counts already.
    """
    call, why, lost = CALLS[engine.asked or "send"], _text(event.error), event.kind is Kind.LOST
    failed = event.found or (call.failed if lost or call.during is not LINK else None)
    engine = engine._replace(asked="")
    rest = any(other.member for other in now.engines if other.url != engine.url)
    if lost and rest and not now.alone and call.during not in (RESUME, ABORT):
        kept = PAUSED if engine.state is PAUSED else OUT
        engine = engine.enter(failed or kept, why)._replace(member=False)
    else:
        now = now.failing(event.error)
        engine = engine if failed is None else engine.enter(failed, why)
    return now.put(engine), (() if engine.member else (Action("forget", engine.url),))


def _fail(now: Transaction, error: BaseException | None) -> Transaction:
    if now.busy == "tell" and not now.rank:
        return now._replace(busy="", error=error)
    if now.busy in ("vote", "tell") and now.rank:  # rank 0 may commit, or has committed
        now = now._replace(engines=tuple(engine.enter(OUT, _text(error)) for engine in now.engines))
    return now.failing(error)._replace(busy="")


def _count(now: Transaction, event: Event) -> Stepped:
    now, actions, lost = now._replace(votes=now.votes | {event.rank}), list[Action](), dict(event.lost)
    # What one rank could not reach is lost to all ranks.
    for engine in [engine for engine in now.engines if engine.member and engine.url in lost]:
        error = EngineUnavailable(f"engine {engine.url}: {lost[engine.url]}")
        now, more = _drop(now, engine, event._replace(kind=Kind.LOST, error=error))
        actions += more
    return now, tuple(actions)


def _go_on(now: Transaction) -> Stepped:
    actions: tuple[Action, ...] = ()
    if now.busy == "vote" and len(now.votes) == now.ranks:
        now = now._replace(busy="")
    while not now.waits and now.state not in (IDLE, DONE, ABORT):
        order = ORDER[now.way]
        if now.error is not None and not now.decided:
            now, more = _abort(now)
        elif now.at + 1 == len(order):
            return _finish(now), actions
        else:
            call = order[now.at + 1]
            now, more = _ask(now._replace(at=now.at + 1, state=CALLS[call].during, error=None), call)
        actions += more
    return now, actions


def _ask(now: Transaction, call: str) -> Stepped:
    by = CALLS[call].by
    if by == OWN:
        return now._replace(busy=call), (Action(call),)
    if by == LEAD and now.rank:
        return now, ()
    urls = [e.url for e in now.engines if e.member and (call != "resume" or e.state is NEW)]
    asked = tuple(engine._replace(asked=call) if engine.url in urls else engine for engine in now.engines)
    return now._replace(engines=asked), tuple(Action(call, url) for url in urls)


def _abort(now: Transaction) -> Stepped:
    """Let engines that hold whole weights serve.

    The other engines are FENCED already.
    """
    engines, undone = list[Engine](), dict(zip((PAUSED, FENCED), BESIDE[now.way][1:], strict=False))
    for engine in now.engines:
        asked = undone.get(engine.state, "") if engine.member or engine.state is PAUSED else ""
        if engine.state in (LINKED, STAGED, FENCED):
            engine = engine.enter(SERVING, _text(now.error) if engine.state is FENCED else "")
        if now.rank and asked == "undo":  # only rank 0 knows how that ends
            engine = engine.enter(OUT, _text(now.error))
        engines.append(engine._replace(asked="" if now.rank else asked))
    asked = (Action(engine.asked, engine.url) for engine in engines if engine.asked)
    return now._replace(state=ABORT, engines=tuple(engines)), (Action("fail"), *asked)


def _finish(now: Transaction) -> Transaction:
    # An engine that was lost while it paused is met again. One that refused before it changed is fenced.
    engines = (e.enter(FENCED if e.member else OUT, e.why) if e.state is PAUSED else e for e in now.engines)
    return now._replace(state=DONE, engines=tuple(engines))


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
