"""The relay behind Ray: calls between its process and others. With `placement`, the places of this room that import ray.

`RelayHost` is what an actor class holds (or inherits) beside its own methods; `RayControl` is how a trainer in another
actor calls it, `RayPeer` how the coordinator of several relays does. The actor needs `max_concurrency` above 1, because a
trainer says `ready` while `generate` is running; with NCCL it needs `num_gpus=1`, for a device and a CUDA context of its own,
never an engine's. Ray carries the ticket and a few words; ids only as references into its object store, for steps that fell
back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3channel.errors import DeadlineExceeded, TransportError, UsageError
from r3channel.relay.peer import PEER_CALLS, LocalPeer
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

    def r3channel_peer(self, call: str, arguments: dict[str, Any]) -> Any:
        """One call of the coordinator of several relays."""
        if call not in PEER_CALLS:
            raise UsageError(f"peer call {call!r}, expected one of {sorted(PEER_CALLS)}")
        return getattr(LocalPeer(self.relay), call)(**arguments)


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
        return ask(self._actor.r3channel_control, method, arguments, timeout_s=self._timeout_s)


class RayPeer:
    """`relay.peer.Peer` over calls to an actor that is a `RelayHost`."""

    def __init__(self, actor: Any, *, timeout_s: float = 60.0) -> None:
        """`actor` is a Ray actor handle; `timeout_s` bounds each call, beyond what the call itself may wait."""
        self._actor, self._timeout_s = actor, timeout_s

    def introduce(self) -> dict[str, Any]:
        return self._call("introduce")

    def hellos(self) -> list[bytes]:
        return self._call("hellos")

    def claim(
        self,
        *,
        sample_id: str,
        receipt: bytes,
        request_id: str | None,
        tokens: int,
        engine: str,
        append: bool,
    ) -> None:
        self._call(
            "claim",
            sample_id=sample_id,
            receipt=receipt,
            request_id=request_id,
            tokens=tokens,
            engine=engine,
            append=append,
        )

    def holds(self, *, sample_id: str) -> bool:
        return self._call("holds", sample_id=sample_id)

    def rows_held(self, *, sample_id: str) -> int:
        return self._call("rows_held", sample_id=sample_id)

    def discard(self, *, sample_ids: Sequence[str]) -> int:
        return self._call("discard", sample_ids=list(sample_ids))

    def look(self, *, step: int, sample_ids: Sequence[str], timeout_s: float) -> list[list[Any]]:
        return self._call(
            "look", waits_s=timeout_s, step=step, sample_ids=list(sample_ids), timeout_s=timeout_s
        )

    def reserve(self, *, ticket: bytes) -> None:
        self._call("reserve", ticket=ticket)

    def start(self, *, step: int) -> None:
        self._call("start", step=step)

    def cancel(self, *, step: int) -> None:
        self._call("cancel", step=step)

    def undelivered(self, *, wait_s: float) -> dict[int, list[tuple[int, ...]]]:
        return self._call("undelivered", waits_s=wait_s, wait_s=wait_s)

    def report(self) -> dict[str, Any]:
        return self._call("report")

    def finish(self, *, timeout_s: float) -> None:
        self._call("finish", waits_s=timeout_s, timeout_s=timeout_s)

    def _call(self, method: str, /, waits_s: float = 0.0, **arguments: Any) -> Any:
        return ask(self._actor.r3channel_peer, method, arguments, timeout_s=self._timeout_s + waits_s)


def ask(method: Any, call: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
    """Call an actor's method with (call, arguments). Raises the relay's own typed error, `DeadlineExceeded` when there is no
    answer within `timeout_s`, `TransportError` when the actor is gone."""
    import ray
    from ray import exceptions

    try:
        return ray.get(method.remote(call, arguments), timeout=timeout_s)
    except exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(
            f"the relay's actor did not answer {call} {_told(arguments)} within {timeout_s:.1f} s"
        ) from error
    except exceptions.RayTaskError as error:
        raise error.cause from error  # the relay's own typed error
    except exceptions.RayActorError as error:
        raise TransportError(f"the relay's actor is gone during {call}: {error}") from error


def _told(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the bytes of a message or a ticket."""
    return {name: value for name, value in arguments.items() if name not in ("content", "ticket")}
