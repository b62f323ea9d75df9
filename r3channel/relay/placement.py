"""Where several relays run: one Ray actor on every other node with engines, beside the coordinator in the rollout manager.

    placed = place_relays(nodes, spec=spec, layout=layout, config=config, token_file=path)     # in the manager's process
    relay = Relay(spec, layout, placed.config)                                                 # relay 0, for this node's engines
    relays = Coordinator(relay, placed.peers())
    ...start each engine with R3CHANNEL_RELAY_URL=placed.urls[its node], or what relay.serve() returned on this node
    ...give trainers placed.controls(manager)

Ray decides and enforces the placement (node affinity, resources, no restarts); nothing here schedules anything. The engines are
placed by whoever starts them, so their nodes are given: `ray.get_runtime_context().get_node_id()` tells an actor its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, RelayLost
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import Recorder
from r3channel.relay.actor import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.relay.several import Peer
from r3channel.spec import RoutingSpec

_SPARE_CALLS = 8
"""Of the coordinator, beside one long poll of every trainer."""


class RelayActor(RelayHost):
    """A relay alone in its process, with its ingest open."""

    def __init__(
        self,
        spec: dict[str, Any],
        layout: dict[str, Any],
        config: dict[str, Any],
        record: dict[str, Any] | None = None,
    ) -> None:
        self.relay = Relay(
            RoutingSpec.from_dict(spec),
            TrainerLayout.from_dict(layout),
            ChannelConfig(**config),
            recorder=Recorder(**record) if record else None,
        )

    def serve(self, token_file: str) -> str:
        """`Relay.serve`."""
        return self.relay.serve(token_file=token_file)

    def r3channel_samples(self, call: str, arguments: dict[str, Any]) -> Any:
        """One call of a `FarRelay`."""
        answer = getattr(self.relay, call)(*arguments["given"], **arguments["named"])
        return answer if call in ("seal", "serve") else None  # held rows stay here, where their locks are


@dataclass(frozen=True)
class PlacedRelays:
    """Relays 1, 2, ... that answer."""

    config: ChannelConfig
    """For relay 0, in the process that seals."""
    actors: tuple[Any, ...]
    urls: dict[str, str]
    """Node id -> address of its relay's ingest."""

    def peers(self, *, timeout_s: float = 60.0) -> list[Peer]:
        """For the coordinator; `timeout_s` bounds each call."""
        return [cast(Peer, RayRelay(actor, timeout_s=timeout_s)) for actor in self.actors]

    def controls(self, manager: Any, *, timeout_s: float = 60.0) -> list[RayRelay]:
        """For a trainer; `manager` is the handle of the actor (a `RelayHost`) that has relay 0."""
        return [RayRelay(actor, timeout_s=timeout_s) for actor in (manager, *self.actors)]


def place_relays(
    nodes: Sequence[str],
    *,
    spec: RoutingSpec,
    layout: TrainerLayout,
    config: ChannelConfig,
    token_file: str,
    interfaces: Sequence[str] = (),
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    timeout_s: float = 60.0,
) -> PlacedRelays:
    """Start a relay on each of these nodes, pinned to it, and return when all have their ingest open.

    `nodes` are Ray's ids of the nodes with engines other than the caller's own. `interfaces[i]` is the address that the relay of
    `nodes[i]` binds; without them all bind `config.interface`. `token_file` is read (or created) on every node, so it belongs on
    a shared folder or must hold the same token everywhere. `num_gpus` is 1 for relays that send over NCCL: each then owns a GPU.
    An actor that dies is not restarted, because its frames would be gone: the coordinator names it.

    Raises:
        ConfigError: a node is named twice, is not alive, or `interfaces` has another length.
        RelayLost: a relay did not start within `timeout_s`, e.g. because its node has no such resources.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    _check(nodes, interfaces, alive=alive)
    remote: Any = ray.remote
    actor_class = remote(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=layout.dp * layout.members + _SPARE_CALLS,
    )(RelayActor)
    first = replace(config, relay=0, relays=len(nodes) + 1)
    actors = tuple(
        actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            spec.to_dict(), layout.to_dict(), asdict(_numbered(first, number, interfaces))
        )
        for number, node in enumerate(nodes, 1)
    )
    return PlacedRelays(first, actors, _serve(nodes, actors, token_file, timeout_s=timeout_s))


def _check(nodes: Sequence[str], interfaces: Sequence[str], *, alive: set[str]) -> None:
    if not nodes or len(set(nodes)) != len(nodes) or not alive.issuperset(nodes):
        raise ConfigError(
            f"relays on nodes {list(nodes)}, expected at least one, each once, of {sorted(alive)}"
        )
    if interfaces and len(interfaces) != len(nodes):
        raise ConfigError(f"{len(interfaces)} interfaces for {len(nodes)} nodes, expected one each or none")


def _numbered(config: ChannelConfig, number: int, interfaces: Sequence[str]) -> ChannelConfig:
    interface = interfaces[number - 1] if interfaces else config.interface
    return replace(config, relay=number, interface=interface)


def _serve(
    nodes: Sequence[str], actors: Sequence[Any], token_file: str, *, timeout_s: float
) -> dict[str, str]:
    """Node id -> address. Ends every actor when one does not start."""
    import ray
    from ray import exceptions

    urls: dict[str, str] = {}
    answers = [actor.serve.remote(token_file) for actor in actors]
    for number, (node, answer) in enumerate(zip(nodes, answers, strict=True), 1):
        try:
            urls[node] = ray.get(answer, timeout=timeout_s)
        except exceptions.RayError as error:
            for actor in actors:
                ray.kill(actor)
            late = isinstance(error, exceptions.GetTimeoutError)
            why = (
                f"no answer within {timeout_s:.1f} s; has it the CPUs or GPUs asked for?"
                if late
                else str(error)
            )
            raise RelayLost(f"relay {number} on node {node} did not start: {why}") from error
    return urls
