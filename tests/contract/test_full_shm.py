"""A full /dev/shm, or disk: a small file system in a mount namespace of a child's own. Weights in shared memory fail by name and
never by SIGBUS, also where it fills after it was looked at; what lies there is unharmed; rows need none of it. A reply whose
journal is full waits as it does for the store, and no sample is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from r3channel.errors import CannotStage, StoreFull
from r3channel.plan.assignment import Assignment
from r3channel.weights import staged_copy
from tests.support.children import mounted, run
from tests.support.delivery import check_rows, receive, receivers_of, relays, sealed
from tests.support.fake_engine import FakeEngine
from tests.support.samples import reply_for
from tests.support.waits import SOON_S, UPDATE_S, until
from tests.support.weights import give, holds, refused, serving, session

_REFUSED = 77


@contextmanager
def full() -> Iterator[None]:
    """Not a byte is left meanwhile."""
    filler = Path(staged_copy.SHM, "filler")
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


def give_weights() -> None:
    engine = serving()
    with session(engine, wire="shared_memory") as sync, full():
        refused(sync, 1, "8,192 bytes.* in /dev/shm is 0: enlarge it", cause=CannotStage, timeout_s=UPDATE_S)
    with pytest.MonkeyPatch.context() as patch:  # another process was faster
        patch.setattr(staged_copy.Room, "lacks", lambda *_, **__: "")
        with session(engine, wire="shared_memory") as sync, full():
            refused(sync, 1, "No space left on device", timeout_s=UPDATE_S)
    with session(engine, wire="shared_memory") as sync:
        give(sync, 1, timeout_s=UPDATE_S)
        with full():
            give(sync, 2, timeout_s=UPDATE_S)
    assert holds(engine, 2) and not [*Path(staged_copy.SHM).iterdir()]
    FakeEngine.started.pop().die()


def fill_journal() -> None:
    with relays(journal=f"{staged_copy.SHM}/journal", backpressure_timeout_s=0.5) as make:
        relay, calls = make(), [(name, reply_for(name, 1000), range(1000)) for name in "ab"]
        relay.add(*calls[0])
        with full():
            with pytest.raises(StoreFull, match=r"sample b .*no room for .*No space left.* 0\.5 s"):
                relay.add(*calls[1])
            with pytest.raises(StoreFull, match="step 0: no room for its ticket"):
                relay.seal(0, Assignment.given([[["a"]]]))
            assert relay.status()["pending"] == ["a"] and relay.status()["store"]["frames"] == 1
            assert len([*Path(staged_copy.SHM).glob("journal/*/*.frame")]) == 1, "nothing half written"
            relay.samples.config = replace(relay.config, backpressure_timeout_s=SOON_S)
            (waiting := threading.Thread(target=relay.add, args=calls[1])).start()
            until(lambda: relay.status()["store"]["frames"] == 2)
        waiting.join(SOON_S)
        assert relay.seal(0, Assignment.given([[["a", "b"]]])).step == 0


def main() -> None:
    if not mounted(staged_copy.SHM, "256k"):
        raise SystemExit(_REFUSED)
    give_weights()
    fill_journal()
    for transport in ("tcp", "gloo"):
        with relays(transport=transport) as make, full():
            relay = make("dp=2")
            for shard in receive(receivers_of(relay), sealed(relay)):
                check_rows(shard)


def test_a_full_file_system_is_named_and_kills_nobody() -> None:
    done = run("-m", __name__)
    if done.returncode == _REFUSED:
        pytest.skip("no mount namespace of our own is allowed here")
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    main()
