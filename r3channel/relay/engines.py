"""Keeps which engines have said hello, and explains what is wrong with one that has not. Any thread may call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from r3channel.errors import PluginNotApplied
from r3channel.model.spec import RoutingSpec
from r3channel.relay.sample_table import Turn
from r3channel.wire.hello import Hello

_MOST_KNOWN = 4096
"""Most processes and names of engines that are kept. The one known longest is forgotten; its engine says hello again."""


@dataclass
class EngineRegistry:
    """The engines that are expected, and those that have said hello.

    EXPECTED (with a deadline) -> GREETED | REFUSED (by its hello) | SILENT (deadline over)
    An engine is known by its address or given name; frames name it by `boot_id`. An engine that was never expected may still
    greet; one that nobody expects is not waited for.
    """

    spec: RoutingSpec
    pages: dict[str, str] = field(default_factory=dict[str, str])
    """Process of an engine -> host:port of its /metrics, also where its hello was refused; one started anew replaces it."""
    hears: Callable[[int], bool] = lambda _boot_id: True
    """Returns whether an engine's process lives, as far as is known, so that its frames may still come."""
    unreached: Callable[[int], str] = lambda _boot_id: ""
    """Returns the ingest's address if an engine's process has never reached it, else an empty text."""
    _deadlines_s: dict[str, float] = field(default_factory=dict[str, float])
    _heard: dict[str, Hello | str | None] = field(default_factory=dict[str, Hello | str | None])
    """Name of an engine -> its hello, why that is refused, or None for an engine whose frames are good and that said none."""
    _names: dict[int, str] = field(default_factory=dict[int, str])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def expect(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """Require a hello from each of these engines in time.

        Args:
            engines: The engines' addresses or given names.
            timeout_s: Seconds from now within which each must have said hello.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._deadlines_s.update({_plain(engine): deadline_s for engine in engines})

    def greet(self, hello: Hello, *, engine: str | None = None) -> None:
        """Take a hello, under the name that the caller uses.

        Args:
            hello: The engine's hello.
            engine: The name that the caller knows the engine by; by default the hello's own.

        Raises:
            PluginNotApplied: The hello is refused; the message has the reason.
        """
        name = _plain(engine or hello.engine)
        reason = self._reason(hello)
        with self._changed:
            self._names[hello.boot_id] = name
            for known in (self._names, self._heard, self.pages):
                _forget_oldest(known)
            self.pages[f"engine {name}, replica {hello.replica}"] = hello.page
            self._heard[name] = reason or hello
            self._changed.notify_all()
        if reason:
            raise PluginNotApplied(f"the hello of engine {name} is refused: {reason}")

    def vouch(self, engine: str) -> None:
        """Accept an engine that sent a good frame without a hello.

        The engine answered a request that was no probe.
        """
        with self._changed:
            if not isinstance(self._heard.get(_plain(engine)), Hello):
                self._heard[_plain(engine)] = None
            self._changed.notify_all()

    def check(self, engine: str) -> None:
        """Return if the engine may be used, after waiting for its hello.

        An expected engine's hello is waited for until its deadline.

        Raises:
            PluginNotApplied: The hello is refused, or did not come before the engine's deadline.
        """
        name = _plain(engine)
        with self._changed:
            if (deadline_s := self._deadlines_s.get(name)) is not None:
                left_s = max(0.0, deadline_s - time.monotonic())
                self._changed.wait_for(lambda: name in self._heard, timeout=left_s)
            refused, silent = self._heard.get(name), deadline_s is not None and name not in self._heard
        if isinstance(refused, str):
            raise PluginNotApplied(f"engine {name} is refused: {refused}")
        if silent:
            raise PluginNotApplied(
                f"engine {name} did not say hello in time. Is r3channel installed in its environment, was it started with "
                "R3CHANNEL_ENGINE=1, and, for direct delivery, with this relay's R3CHANNEL_RELAY_URL and R3CHANNEL_TOKEN_FILE? "
                "Its log names a hook or a hello that failed; `r3channel doctor --engine URL` asks it"
            )

    def knows(self, boot_id: int) -> bool:
        return boot_id in self._names and not isinstance(self._heard.get(self._names[boot_id]), str)

    def name_of(self, boot_id: int) -> str:
        return self._names.get(boot_id, "?")

    def context_of(self, boot_id: int) -> int:
        """Return the longest sequence that an engine's process allows.

        The number is that of its hello. The result is 0 without a hello, or where another process has said hello under its name
        since.
        """
        hello = self._heard.get(self.name_of(boot_id))
        return hello.context if isinstance(hello, Hello) and hello.boot_id == boot_id else 0

    def counts(self) -> tuple[int, int]:
        """Return how many engines have said hello, and how many have not.

        The second number counts engines that were expected and have not said hello, or whose hello was refused.
        """
        with self._changed:
            greeted = {name for name, heard in self._heard.items() if not isinstance(heard, str)}
            return len(greeted), len({*self._deadlines_s, *self._heard} - greeted)

    def reports(self) -> dict[str, str]:
        """Return what is known about each engine, in words."""
        with self._changed:
            known = dict.fromkeys(self._deadlines_s, "no hello yet")
            return known | {name: _report(heard) for name, heard in self._heard.items()}

    def late(self, turn: Turn) -> str:
        """Return what is known about a frame that has not come.

        The text names the frame and its engine, and says what is known about the engine.
        """
        boot_id, serial = turn.name
        engine = turn.engine if turn.engine != "?" else self.name_of(boot_id)
        where = f"engine {engine}, frame {serial}, rows {turn.first_row}..{turn.end_row}"
        if not self.hears(boot_id):
            return f"{where}: the engine died, or was started anew, before its frame came"
        if self.knows(boot_id) and (url := self.unreached(boot_id)):
            return f"{where}: the engine has not reached {url}; does a firewall drop what it sends? Its log says what it got"
        if self.knows(boot_id):
            return f"{where}: not delivered; is it alive? Its log says why it gave up"
        refused = self.reports().get(self.name_of(boot_id), "it never said hello to this relay")
        return f"{where}: {refused}; are R3CHANNEL_RELAY_URL and R3CHANNEL_TOKEN_FILE this relay's?"

    def _reason(self, hello: Hello) -> str:
        if hello.spec_digest == self.spec.digest:
            return ""
        ours = self.spec.to_dict()
        seen = {key: hello.spec.get(key) for key in ours if hello.spec.get(key) != ours[key]}
        expected = {key: ours[key] for key in seen}
        return f"its model's routing has {seen or hello.spec_digest}, expected {expected or self.spec.digest}"


def _report(heard: Hello | str | None) -> str:
    if isinstance(heard, Hello):
        return f"SGLang {heard.sglang}, r3channel {heard.r3channel}, {heard.delivery}"
    return f"refused: {heard}" if heard else "frames seen"


def _forget_oldest(known: dict[Any, Any]) -> None:
    # engines restart for weeks, and who holds the token may invent names
    while len(known) >= _MOST_KNOWN:
        del known[next(iter(known))]


def _plain(engine: str) -> str:
    return engine.rstrip("/")
