"""The trainer's calls to a relay in a Ray actor: an acknowledgement is not waited for, and is not lost either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from r3channel.errors import TransportError
from r3channel.relay.actor import RayControl
from tests.dist.ray_relay import Notary, ray_node

pytestmark = pytest.mark.dist

WHERE = {"run": "r", "dp": 0, "pp": 0, "cp": 0}


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    with ray_node():
        yield


def ready(control: RayControl) -> object:
    return control.ready(step=9, epoch=1, wait_s=0.0, **WHERE)


def test_an_acknowledgement_that_its_actor_took_to_the_grave_is_repeated(node: None, tmp_path: Path) -> None:
    import ray

    actor = ray.remote(Notary).options(max_restarts=1).remote(str(tmp_path))
    control = RayControl(actor, timeout_s=30.0)
    control.ack(step=3, **WHERE)  # ends the actor's first life
    assert ready(control) == ["3"]
    control.ack(step=4, **WHERE)
    control.settle()
    assert (tmp_path / "acks").read_text().split() == ["3", "4"]


def test_an_actor_that_is_gone_for_good_is_told_by_the_next_call(node: None, tmp_path: Path) -> None:
    import ray

    actor = ray.remote(Notary).remote(str(tmp_path))
    control = RayControl(actor, timeout_s=30.0)
    control.ack(step=3, **WHERE)
    with pytest.raises(TransportError, match="gone during ack"):
        ready(control)
    with pytest.raises(TransportError, match="gone during ready"):
        ready(control)
