"""The relay behind Ray: calls between its process and others. Only this module of the relay imports ray.

An actor class holds (or inherits) a `RelayHost` beside its own methods, and a trainer calls it with a `RayRelay`. The actor needs
`max_concurrency` above 1, because receivers say hello while `generate` is running. With NCCL it needs `num_gpus=1`, for a device
and a CUDA context of its own, never an engine's. Ray carries hellos and small records.
"""

from __future__ import annotations

import logging
from typing import Any

from r3channel.errors import BackgroundFailed, DeadlineExceeded, TransportError, UsageError
from r3channel.recordings.recorder import Recorder
from r3channel.relay.relay import Relay
from r3channel.typed import Json

NAME = "r3channel-relay"
"""The actor that holds the demo's relay: `r3channel record` asks for it."""
_CONTROL_CALLS = frozenset({"hello", "list_page", "status"})


class RelayHost:
    """Gives an actor class the control channel.

    Write `class RolloutManager(RelayHost): ...`, then set `self.relay`.
    """

    relay: Relay

    def r3channel_control(self, call: str, arguments: Json) -> Any:
        """Call the relay for a receiver, or for whoever asks its state.

        Args:
            call: `hello`, `list_page`, `status` or `record`.
            arguments: The call's arguments. `record` takes those of a `Recorder`; without any it ends the recording.

        Raises:
            UsageError: There is no such call.
        """
        if call in _CONTROL_CALLS:
            return getattr(self.relay, call)(**arguments)
        if call == "record":
            return self.relay.record(Recorder(**arguments) if arguments else None)
        raise UsageError(f"control call {call!r}, expected record or one of {sorted(_CONTROL_CALLS)}")


class RayRelay:
    """The calls of a relay that lives in an actor.

    They are a trainer's `trainer.relay_connection.Control`, and the relay's state.
    """

    def __init__(self, actor: Any, *, timeout_s: float = 60.0) -> None:
        """Take the handle of a `RelayHost`.

        Args:
            actor: The handle of an actor that is a `RelayHost`.
            timeout_s: Seconds that each call may take.
        """
        self._actor, self._timeout_s = actor, timeout_s

    def hello(self, *, dp: int, pp: int, cp: int) -> Json:
        return self._ask("hello", dp=dp, pp=pp, cp=cp)

    def list_page(self, process: str, target: str) -> None:
        """List a process's page, as `Relay.list_page` does."""
        self._ask("list_page", process=process, target=target)

    def status(self) -> Json:
        """Return the relay's status, as `Relay.status` does."""
        return self._ask("status")

    @classmethod
    def find_relay(cls, name: str, *, address: str) -> RayRelay:
        """Find a relay by its name in a running Ray.

        All namespaces are searched.

        Args:
            name: The actor's name.
            address: The Ray's address.

        Raises:
            TransportError: No Ray answers at the address, or not exactly one actor has the name.
        """
        ray = _ray()
        try:
            ray.init(
                address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR
            )
        except ConnectionError as error:
            raise TransportError(f"no Ray answers at {address!r}: {error}") from error
        found: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        spaces = [actor["namespace"] for actor in found if actor["name"] == name]
        if len(spaces) != 1:
            raise TransportError(
                f"{len(spaces)} actors are called {name!r} in the Ray at {ray.get_runtime_context().gcs_address}, expected one; "
                f"named are {sorted({one['name'] for one in found})}. Is another Ray on this machine? Say which: --address"
            )
        return cls(ray.get_actor(name, namespace=spaces[0]))

    def record(self, values: Json) -> None:
        """Start a recording, or end it.

        Args:
            values: The arguments of `Recorder`, as plain values; with none the recording ends.
        """
        self._ask("record", **values)

    def _ask(self, call: str, **arguments: Any) -> Any:
        """Call the relay's actor and return its answer.

        Raises the relay's own typed error, `DeadlineExceeded` when there is no answer in time, `TransportError` while Ray starts
        the actor again, and `BackgroundFailed` once the actor is gone for good.
        """
        ray, exceptions = _ray(), _ray().exceptions
        try:
            return ray.get(self._actor.r3channel_control.remote(call, arguments), timeout=self._timeout_s)
        except exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"the relay's actor did not answer {call} within {self._timeout_s:.1f} s. Is one of its methods running? An "
                "actor that is a RelayHost needs max_concurrency above 1"
            ) from error
        except exceptions.RayTaskError as error:
            raise error.cause from error  # the relay's own typed error
        except exceptions.ActorUnavailableError as error:
            raise TransportError(f"the relay's actor does not answer {call}: {error}") from error
        except exceptions.RayActorError as error:
            said = f"the relay's actor (slime's rollout manager) is gone during {call}, and nobody else has the rows: {error}"
            raise BackgroundFailed(said) from error


def _ray() -> Any:  # Ray's own types leave out what is used here
    import ray

    return ray
