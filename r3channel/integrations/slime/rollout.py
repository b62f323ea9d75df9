"""slime's rollout side: its manager with a relay in it, its engines with the plug-in on. Imported where slime is.

slime offers every place to hook into: `RolloutManager` is subclassed, `Sample._apply_meta_info` sees each reply before slime
decodes it as int32, and `_split_train_data_by_dp` has slime's own split. `launch` puts these classes in their places; those of
slime 0.4.0 are in `detached`.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import slime.ray.rollout  # pyright: ignore[reportMissingImports]
import slime.rollout.sglang_rollout as sglang_rollout  # pyright: ignore[reportMissingImports]
import slime.utils.http_utils as http_utils  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # pyright: ignore[reportMissingImports]
from slime.ray.utils import ray_noset_visible_devices  # pyright: ignore[reportMissingImports]
from slime.utils.types import Sample  # pyright: ignore[reportMissingImports]

from r3channel.errors import EngineUnavailable, RoutingMissing
from r3channel.integrations import preflight
from r3channel.integrations.slime import relay_gpu
from r3channel.integrations.slime.arguments import layout_of, memory_fault, spec_of
from r3channel.integrations.slime.engine_variables import engine_variables
from r3channel.integrations.slime.relay_manager import RelayManager, config_of, node_count
from r3channel.integrations.slime.sample_rows import START, SampleRows
from r3channel.relay.journal import LOCK
from r3channel.relay.ray_host import RelayHost
from r3channel.relay.relay import Relay
from r3channel.transport.select import TRANSPORTS

log = logging.getLogger(__name__)
GROUPS = {"r3channel": 8}
_PROBE_TOKENS = 3
_PROBE_S = 120.0
"""Seconds to wait for a probe: an engine's first request may compile."""


class ChannelManager(RelayManager, slime.ray.rollout.RolloutManager.__ray_metadata__.modified_class):
    """The rollout manager. Its relay opens before the engines start, so that the engines know where to deliver.

    If the manager is killed and has a journal, Ray starts it again as a relay alone: trainers get the rows of the steps that were
    sealed. slime's part ended with its engines, its router and its place in the data.
    """

    splits: ModuleType = slime.ray.rollout
    """The module that has slime's split."""

    def __init__(self, args: Namespace, pg: Any, **startup: Any) -> None:
        preflight.refuse([memory_fault(args)])
        config = config_of(args, **self._device(args))
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.relay, found = Relay.recover(spec_of(args), layout_of(args), config)
            self.relay.resume(found)
            self.relay.discard(found.pending)  # rows of no step: their samples were in the killed process
            log.error("r3channel: the rollout manager was killed; its journal has steps %s", [*found.steps])
            return
        self.start_relay(args, config, self.splits)
        self._asked: set[Any] = set()
        """Engines and the router that have answered."""
        self.tell_engines(args)
        _watch_replies(self.rows)
        http_utils.run_router = run_router
        super().__init__(args, pg, **startup)  # pyright: ignore[reportCallIssue]

    def _device(self, args: Namespace) -> dict[str, int]:
        """Return which GPU the relay uses.

        It is empty if Ray hides all other GPUs or gives this actor none.
        """
        gpu = getattr(args, "r3_gpu", None)
        counted = ray.get_gpu_ids() if ray_noset_visible_devices() else ()
        if gpu is None:
            return {"device": int(counted[0])} if counted else {}
        import torch

        device = relay_gpu.device_of(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if device < torch.cuda.device_count():  # otherwise the relay raises
            total, layout = torch.cuda.get_device_properties(device).total_memory, layout_of(args)
            relay_gpu.check_room(args, total, receivers=layout.dp * layout.pp * layout.cp)
        return {"device": device}

    def tell_engines(self, args: Namespace) -> None:
        """Open the relay's ingest, and set the engines' variables.

        Engines that slime starts get these variables beside the job's environment. Whoever starts external engines sets theirs.
        """
        args.r3_engine = engine_variables(self.relay, args, nodes=node_count())
        slime.ray.rollout.SGLangEngine = ChannelEngine

    @ray.method(concurrency_group="r3channel")  # answered while generate() runs
    def r3channel_control(self, call: str, arguments: dict[str, Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RelayHost.r3channel_control(self, call, arguments)

    def r3channel_start(self) -> None:
        """Probe each new engine of the trained model, and the router.

        A request for one token with its routing shows a fault at the start. Each is asked once, all at the same time. An engine
        that answers late is busy, and is asked again before the next update.

        Raises:
            EngineUnavailable: If an engine or the router cannot be asked.
            RoutingMissing: If the router does not pass the engines' routing on.
        """
        if self.args.debug_train_only or self.args.load_debug_rollout_data:
            return
        server = self._get_updatable_server()
        new = [each for each in (server.engines if server else ()) if each and each not in self._asked]
        engines = dict(zip(ray.get([engine.get_url.remote() for engine in new]), new, strict=True))
        router = f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}"
        targets = [*filter(None, engines), *({router} - self._asked)]
        for url, reply in preflight.probe_all(targets, timeout_s=_PROBE_S).items():
            if url in engines:
                self.relay.check_engine(reply, engine=url, tokens=_PROBE_TOKENS)
            elif not (reply.get("meta_info") or {}).get("routed_experts"):
                text = f"the engines send routing, and the router at {router} does not pass it on: it drops "
                text += "return_routed_experts from requests (sgl-project/sglang#20696). Use the router of slime's image"
                raise RoutingMissing(text)
            self._asked.add(engines.get(url, url))

    def offload(self) -> Any:
        self.r3channel_start()  # engines that sleep from the start on answer nothing later
        return super().offload()

    def recover_updatable_engines(self) -> None:
        super().recover_updatable_engines()
        recovers = self.args.use_fault_tolerance or getattr(self, "serving", None)
        if recovers and not self.args.offload_rollout and self.rollout_id >= 0:
            with suppress(EngineUnavailable):  # slime's own checks find such an engine, and start it again
                self.r3channel_start()  # a restarted engine says hello, or is refused, before it is asked for samples

    def _convert_samples_to_train_data(self, samples: Sequence[Any]) -> Any:
        return self.convert(samples, super()._convert_samples_to_train_data(samples))

    def _split_train_data_by_dp(self, data: Any) -> list[Any]:
        return self.seal(super()._split_train_data_by_dp, data, self.rollout_id)


_GENERATED: ContextVar[tuple[Any, bool]] = ContextVar("generated", default=(None, True))
"""The sample that slime generates in this task and in the tasks that it starts, and whether it is trained on."""


class ChannelEngine(SGLangEngine):
    """An engine whose server gets our variables through this actor's environment; slime hands engines a fixed list of them."""

    def init(self, *args: Any, **options: Any) -> Any:
        os.environ.update(self.args.r3_engine)
        return super().init(*args, **options)


def remote_manager(args: Namespace, pg: Any) -> Any:
    """Return the class that replaces `slime.ray.rollout.RolloutManager`.

    Over NCCL it has a GPU (`relay_gpu`), although slime asks for none.

    Args:
        args: Prepared arguments.
        pg: slime's placement group, bundles and GPUs of the engines.

    Raises:
        ConfigError: If there is no GPU for the relay.
    """
    remote: Any = ray.remote
    restarts = int(bool(args.r3_channel["journal"]))
    kind = remote(concurrency_groups=GROUPS, max_restarts=restarts)(ChannelManager)
    if not TRANSPORTS[args.r3_channel["transport"]].needs_gpu:
        return kind
    group, bundles, gpus = pg
    variables, more = relay_gpu.LIKE_TRAINERS, dict[str, Any](num_gpus=1)
    if args.r3_relay_gpu == "own":
        relay_gpu.check_own(int(ray.cluster_resources().get("GPU", 0)), group.bundle_count)
    else:
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        node, args.r3_gpu = relay_gpu.shared_gpu(nodes, bundles, gpus)
        variables = variables | relay_gpu.SEES_ALL
        more = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

    def options(*, runtime_env: dict[str, Any], **given: Any) -> Any:
        runtime_env = runtime_env | {"env_vars": runtime_env["env_vars"] | variables}
        return kind.options(runtime_env=runtime_env, **given | more)

    return SimpleNamespace(options=options)


def _watch_replies(rows: SampleRows) -> None:
    """Wrap slime's calls that see replies, samples and requests.

    Every reply passes `_apply_meta_info` with its sample, whichever generate function asked for it. Requests wait while there is
    no room for the rows that they bring.
    """
    inner = Sample._apply_meta_info

    @wraps(inner)
    def apply(self: Any, args: Any, meta_info: dict[str, Any], **options: Any) -> None:
        if meta_info.get("routed_experts") is not None or meta_info.get("finish_reason"):
            meta_info = rows.take(self, meta_info, trained=_GENERATED.get()[1])
        inner(self, args, meta_info, **options)

    Sample._apply_meta_info = apply
    generate = sglang_rollout.generate_and_rm

    @wraps(generate)
    async def generate_and_rm(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
        _GENERATED.set((sample, not evaluation))
        return await generate(args, sample, sampling_params, evaluation=evaluation)

    sglang_rollout.generate_and_rm = generate_and_rm
    send = http_utils.post

    @wraps(send)
    async def post(url: str, payload: Any, *args: Any, **options: Any) -> Any:
        if not url.endswith("/generate"):
            return await send(url, payload, *args, **options)
        await rows.room()
        payload = await rows.request(_GENERATED.get()[0], payload)
        reply = await send(url, payload, *args, **options)
        if START in payload:
            reply["meta_info"][START] = payload[START]
        return reply

    http_utils.post = sglang_rollout.post = post


_run_router = http_utils.run_router


def run_router(args: Any) -> Any:
    """Run slime's router without this process's sockets.

    slime forks a process for the router. The router may outlive a manager that is killed. It would then hold the relay's ports,
    where trainers would wait and where the next relay could not listen.

    The router does not get the lock of the relay's journal either, by which the next relay sees that this one has ended. Nothing
    else of the relay matters in the router's process: no other thread exists there, and the router takes none of its locks. Each
    file number stays taken, so that no object that still has the number can close another file.
    """
    with open(os.devnull) as nothing:
        for path in Path("/proc/self/fd").iterdir():
            if path.is_socket() or path.resolve().name == LOCK:
                os.dup2(nothing.fileno(), int(path.name))
    return _run_router(args)
