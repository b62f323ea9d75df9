"""The relay behind Ray: the one place of this room that imports ray.

`RelayHost` is what an actor class holds (or inherits) beside its own methods; `RayControl` is how a trainer in another
actor calls it. The actor needs `max_concurrency` above 1, because a trainer says `ready` while `generate` is running.
Ray carries the ticket and a few words; ids only as references into its object store, for steps that fell back to it.
"""

from __future__ import annotations

from typing import Any

from r3channel.errors import DeadlineExceeded, TransportError, UsageError
from r3channel.relay.relay import Relay

_CALLS = frozenset({"hello", "ready", "ack", "mail", "status"})


class RelayHost:
    """Gives an actor class the control channel: `class RolloutManager(RelayHost): ...`, then set `self.relay`."""

    relay: Relay

    def r3channel_control(self, call: str, arguments: dict[str, Any]) -> Any:
        """One call of the control channel."""
        if call not in _CALLS:
            raise UsageError(f"control call {call!r}, expected one of {sorted(_CALLS)}")
        return getattr(self.relay, call)(**arguments)


class RayControl:
    """`trainer.receiver.Control` over calls to an actor that is a `RelayHost`."""

    def __init__(self, actor: Any, *, timeout_s: float = 60.0) -> None:
        """`actor` is a Ray actor handle; `timeout_s` bounds each call."""
        self._actor, self._timeout_s = actor, timeout_s

    def hello(self, *, dp: int, pp: int, cp: int, boot_id: str, after_epoch: int) -> dict[str, Any] | None:
        return self._call("hello", dp=dp, pp=pp, cp=cp, boot_id=boot_id, after_epoch=after_epoch)

    def ready(self, *, run: str, step: int, dp: int, pp: int, cp: int, epoch: int, wait_s: float) -> bool:
        return self._call("ready", run=run, step=step, dp=dp, pp=pp, cp=cp, epoch=epoch, wait_s=wait_s)

    def ack(self, *, run: str, step: int, dp: int, pp: int, cp: int) -> None:
        self._call("ack", run=run, step=step, dp=dp, pp=pp, cp=cp)

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        return self._call("mail", **{"call": call, "name": name, **arguments})

    def _call(self, method: str, /, **arguments: Any) -> Any:
        import ray
        from ray import exceptions

        try:
            return ray.get(self._actor.r3channel_control.remote(method, arguments), timeout=self._timeout_s)
        except exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"the relay's actor did not answer {method} {_told(arguments)} within {self._timeout_s:.1f} s"
            ) from error
        except exceptions.RayTaskError as error:
            raise error.cause from error  # the relay's own typed error
        except exceptions.RayActorError as error:
            raise TransportError(f"the relay's actor is gone during {method}: {error}") from error


def _told(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the bytes of a message."""
    return {name: value for name, value in arguments.items() if name != "content"}
