"""All relays of a run by number, and what goes wrong at one of them, named. Knows calls; knows nothing of samples' turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from r3channel.errors import ConfigError, R3Error, RelayLost, TransportError
from r3channel.relay.peer import Peer

_Answer = TypeVar("_Answer")


class Roster:
    """OPEN -> CLOSED. Any thread.

    Raises:
        ConfigError: the relays differ in spec or layout, or `config.relay` and `config.relays` do not number them.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self.runs = self._introduced()
        """The run of each relay."""
        self._pool = ThreadPoolExecutor(len(self.peers), thread_name_prefix="r3channel-peer")

    def __len__(self) -> int:
        return len(self.peers)

    def at(self, number: int, call: Callable[[Peer], _Answer]) -> _Answer:
        """Call one relay; its errors name it, and one that does not answer is `RelayLost`."""
        with self._named(number):
            return call(self.peers[number])

    def at_all(
        self,
        samples: Mapping[int, tuple[str, ...]],
        call: Callable[[Peer, tuple[str, ...]], _Answer],
        *,
        step: int,
    ) -> dict[int, _Answer]:
        """Call these relays at once, each with its samples, and wait for all; then raise the first error, if any."""
        futures: dict[int, Future[_Answer]] = {
            number: self._pool.submit(call, self.peers[number], own) for number, own in samples.items()
        }
        found: dict[int, _Answer] = {}
        errors: list[R3Error] = []
        for number, future in futures.items():
            try:
                with self._named(number, held=_held(samples[number], step)):
                    found[number] = future.result()
            except R3Error as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    @contextmanager
    def _named(self, number: int, *, held: str = "") -> Iterator[None]:
        where = f"relay {number} of {len(self.peers)}"
        try:
            yield
        except TransportError as error:
            raise RelayLost(f"{where} does not answer{held}: {error}") from error
        except R3Error as error:
            raise type(error)(f"{where}: {error}") from error

    def _introduced(self) -> tuple[str, ...]:
        told = [peer.introduce() for peer in self.peers]
        for number, its in enumerate(told):
            expected = {
                "relay": number,
                "relays": len(told),
                **{key: told[0][key] for key in ("spec", "layout")},
            }
            wrong = _differences(its, expected)
            if wrong:
                raise ConfigError(
                    f"relay {number} of {len(told)}: {wrong}. config.relay numbers the relays from 0 on, config.relays counts "
                    "them, and all have one spec and one layout"
                )
        return tuple(its["run"] for its in told)


def _differences(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key} is {seen[key]}, expected {expected[key]}" for key in expected if seen[key] != expected[key]
    )


def _held(samples: Sequence[str], step: int) -> str:
    return f"; it holds {len(samples)} samples of step {step}: {list(samples[:5])}" if samples else ""
