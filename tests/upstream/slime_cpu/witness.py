"""What each trainer's routers used, beside what the engines said. SLIME_CPU_WITNESS=FOLDER in the trainers' environment.

FOLDER/router-STEP-RANK.npz: equally long arrays sample, position, layer (0-based decoder layer) and ids [N, top-k]; rows that
slime pads are left out, and the last token of a sample, which no engine computed. Also seconds, and how large the process grew.
"""

from __future__ import annotations

import base64
import json
import os
import time
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np

from r3channel.recordings.recording import Recording
from r3channel.transport.network import urlopen
from r3channel.wire.frame import parse_frame
from r3channel.wire.header import FRAME_MAGIC

_EXPECTED: list[tuple[Any, Any]] = []
"""(samples, positions) of each micro-batch, as this rank's routers see the rows."""
_SEEN: list[tuple[Any, Any, Any, Any]] = []
_STEP = [0]
SPENT: dict[str, list[float]] = {}
TOLD: dict[str, float] = {}
"""What the rollout manager told. Read through the module: what Ray pickles with a patched class would be a copy."""


def timed(owner: Any, name: str, what: str) -> None:
    """Wrap a function of a module or class."""
    inner = getattr(owner, name)

    def run(*args: Any, **options: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return inner(*args, **options)
        finally:
            SPENT.setdefault(what, []).append(round(time.perf_counter() - begin_s, 6))

    setattr(owner, name, run)


def tell_args(who: str, args: Any) -> None:
    """What an actor has of slime's arguments, as slime itself sends them to W&B and as text, and its environment."""
    from slime.observability import wandb_utils  # pyright: ignore[reportMissingImports]

    logged = wandb_utils._compute_secondary_config_for_logging(args)
    _keep(f"{who}-{os.getpid()}", (args, logged, dict(os.environ)))


def tell_pages() -> None:
    """Every /metrics page of the run, but for those of processes that were killed."""
    for path in _folder("SLIME_CPU_TOLD").glob("*.json"):
        (found,) = json.loads(path.read_text())
        page = f"http://{found['targets'][0]}/metrics"
        with suppress(URLError), urlopen(page, timeout_s=10) as reply:
            _keep(f"page-{path.stem}", reply.read())


def tell_ray() -> None:
    """What Ray's head holds of the job: jobs, actors and workers with their runtime_env, task events, its internal keys."""
    import ray
    from ray._private import ray_constants, state

    head, client = state.state._connect_and_get_accessor(), ray.get_runtime_context().worker.gcs_client
    tables = [head.get_actor_table(None, None), head.get_job_table(), head.get_worker_table()]
    spaces = [space for name, space in vars(ray_constants).items() if name.startswith("KV_NAMESPACE_")]
    keys = [(key, space) for space in spaces for key in client.internal_kv_keys(b"", space)]
    values = [(key, client.internal_kv_get(key, space)) for key, space in keys]
    _keep("ray-head", (tables, head.get_task_events(), values))


def _keep(name: str, value: Any) -> None:
    _folder("SLIME_CPU_TOLD").joinpath(f"{name}.txt").write_text(repr(value))


def tell(who: str, **more: Any) -> None:
    """This process's figures so far."""
    (_folder() / f"{who}.json").write_text(json.dumps({"seconds": SPENT, **more}))


def _folder(name: str = "SLIME_CPU_WITNESS") -> Path:
    folder = Path(os.environ[name])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- with the channel ----------------------------------------------------------------------------------------------------


def watch_channel(module: Any) -> None:
    """r3channel.integrations.slime.trainer: a tap on the routers around each step."""
    from r3channel.trainer.audit import Consumed, RouterTap
    from r3channel.transport.process_group import ProcessGroupTransport

    timed(ProcessGroupTransport, "start_recv", "group")
    actor, inner = module.ChannelActor, module.ChannelActor.train_actor

    def train_actor(self: Any, rollout_id: int, rollout_data: Any, external_data: Any = None) -> None:
        tell_args("trainer", self.args)
        calls, shards = list[Consumed](), list[Any]()
        channel = self._attach()
        receive = channel.receiver.receive
        corrupt = os.environ.get("SLIME_CPU_CORRUPT") == "1"

        def received(*args: Any, **options: Any) -> Any:
            shards.append(shard := receive(*args, **options))
            if corrupt and shard.shard.layers:
                _corrupt(shard.layer_ids(0, shard.shard.layers[0]))
            return shard

        channel.receiver.receive = received
        try:
            with RouterTap(channel.driver, on_call=calls.append):
                inner(self, rollout_id, rollout_data, external_data=external_data)
        finally:
            channel.receiver.receive = receive
        for call in (each for each in calls if each.microbatch >= 0):
            batch = shards[0].shard
            samples, positions = batch.row_map(call.microbatch, tp=shards[0].tp)
            real, held = samples >= 0, batch.microbatches[call.microbatch].sample_ids
            names = np.asarray([int(name.partition(".")[0]) for name in held])
            _SEEN.append((names[samples[real]], positions[real], call.layer, call.ids_RK[real]))
        _write(rollout_id)

    actor.train_actor = train_actor


def _corrupt(ids_RK: Any) -> None:
    """One wrong but valid id in the first row of the placed shard."""
    ids_RK[0, 0] = min(set(range(ids_RK.shape[1] + 1)) - set(ids_RK[0].tolist()))


def watch_engine(module: Any) -> None:
    """r3channel.integrations.slime.rollout: what an engine's actor has, and its server with it."""
    inner = module.ChannelEngine.init

    def init(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return inner(self, *args, **options)
        finally:
            tell_args("engine", self.args)

    module.ChannelEngine.init = init


def watch_fetches(module: Any) -> None:
    """r3channel.integrations.slime.relay_manager: what the manager reads back from Ray's store, of ranks' batches."""
    ray, TOLD["fetched"] = module.ray, 0

    def get(refs: Any, **options: Any) -> Any:
        TOLD["fetched"] += 1
        return ray.get(refs, **options)

    module.ray = types.SimpleNamespace(**vars(ray) | {"get": get})


def watch_turns(rows: Any) -> None:
    """SampleRows: replies that add to a trained sample's rows, rows that came again and could so be another pass's, and what is
    sealed of samples that were cut, beside what engines sent."""
    take, seal = rows.take, rows.seal
    TOLD.update(turns=0, again=0, cut=0, others=0)

    def taken(self: Any, sample: Any, meta_info: Any, *, trained: bool = True) -> Any:
        if trained and meta_info.get("routed_experts"):
            start = meta_info.get("routed_experts_start_len", 0)
            TOLD["turns"] += start > 0
            TOLD["again"] += max(0, getattr(sample, "rows_seen", 0) - start)
            sample.rows_seen = len(sample.tokens) - 1
            frame = base64.b64decode(meta_info["routed_experts"])
            if frame.startswith(FRAME_MAGIC[:3]):  # not a frame reference
                before = sample.engine_rows[:start] if start else []
                sample.engine_rows = [*before, *parse_frame(frame, spec=self.relay.spec).ids()]
        return take(self, sample, meta_info, trained=trained)

    def sealed(self: Any, step: int, samples: Any, *args: Any, **options: Any) -> Any:
        ticket = seal(self, step, samples, *args, **options)
        for sample in samples:
            sent, left = getattr(sample, "engine_rows", ()), len(sample.tokens) - 1
            if left < len(sent):
                held = self.relay.samples.table.samples[sample.r3_rows.name].held
                TOLD["cut"] += 1
                TOLD["others"] += not np.array_equal(
                    np.concatenate([turn.ids_TLK for turn in held]), sent[:left]
                )
        return ticket

    rows.take, rows.seal = taken, sealed


def sockets(process: Any) -> set[str]:
    """The sockets that a process holds open, as the kernel names them."""
    named = (os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink())
    return {name for name in named if name.startswith("socket:")}


def watch_weights(module: Any) -> None:
    """r3channel.integrations.slime.weights: each rank's parts and each stage's tensors, beside slime's own of the whole model."""
    parts_of_rank, tensors_of_stage = module.shards, module.stage_tensors
    seen, whole = {"compared": 0, "differ": 0, "sent": 0}, dict[str, Any]()

    def shards(args: Any, model: Any, model_name: str) -> Any:
        from slime.backends.megatron_utils.update_weight import hf_weight_iterator_base as slimes  # pyright: ignore

        found, named = parts_of_rank(args, model, model_name), module.common.named_params_and_buffers
        own = slimes.HfWeightIteratorBase.create(args, model, model_name=model_name, quantization_config=None)
        for chunk in own.get_hf_weight_chunks(dict(named(args, model))):
            whole.update((name, value.clone()) for name, value in chunk)
        for shard in found:
            place = tuple(slice(*ends) for ends in zip(shard.box.start, shard.box.stop, strict=True))
            seen["differ"] += tuple(whole[shard.meta.name].shape) != shard.meta.shape
            compare(shard.tensor, whole[shard.meta.name][place])
        return found

    def stage_tensors(updater: Any) -> Any:
        shards(updater.args, updater.model, updater.model_name)  # looked at, not sent
        for name, tensor in tensors_of_stage(updater):
            seen["sent"] += 1
            compare(tensor, whole[name])
            yield name, tensor

    def compare(tensor: Any, wanted: Any) -> None:
        seen["compared"] += 1
        seen["differ"] += not tensor.equal(wanted)
        tell(f"weights-{os.environ['RANK']}", **seen)

    module.shards, module.stage_tensors = shards, stage_tensors


# -- slime's own way -----------------------------------------------------------------------------------------------------


def watch_actor(module: Any) -> None:
    """slime/backends/megatron_utils/actor.py:308: which rows each micro-batch holds on this rank."""
    actor = module.MegatronTrainRayActor
    fill = actor.fill_routing_replay

    def fill_routing_replay(self: Any, data_iterator: Any, num_microbatches: Any, rollout_data: Any) -> Any:
        _EXPECTED.clear()
        _LAYERS[:] = _own_moe_layers(self, self.model[0].module.config.moe_layer_freq)
        for indices in rollout_data["micro_batch_indices"]:
            _EXPECTED.append(_rows(self.args, rollout_data, indices))
        return fill(self, data_iterator, num_microbatches, rollout_data)

    actor.fill_routing_replay = fill_routing_replay


_LAYERS: list[int] = []


def _own_moe_layers(actor: Any, pattern: Any) -> list[int]:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layers: list[int] = []
    for stage, chunk in enumerate(actor.model):
        config = chunk.module.config
        first = get_transformer_layer_offset(config, vp_stage=stage)
        layers += [
            i for i in range(first, first + get_num_layers_to_build(config, vp_stage=stage)) if pattern[i]
        ]
    return layers


def _rows(args: Any, rollout_data: Any, indices: Any) -> tuple[Any, Any]:
    """Sample and position of each row, -1 where slime pads; the steps of prepare_routed_experts_for_routing_replay."""
    import torch
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_with_cp  # pyright: ignore[reportMissingImports]

    samples, positions = [], []
    for index in indices:
        length = len(rollout_data["tokens"][index])
        place = torch.arange(length)
        place[-1] = -1
        label = torch.full((length,), int(rollout_data["sample_indices"][index]))
        positions.append(slice_with_cp(place, -1))
        samples.append(slice_with_cp(label, -1))
    sample, position = torch.cat(samples), torch.cat(positions)
    pad = -len(sample) % (mpu.get_tensor_model_parallel_world_size() * args.data_pad_size_multiplier)
    sample, position = (torch.nn.functional.pad(rows, (0, pad), value=-1) for rows in (sample, position))
    if args.sequence_parallel:
        size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        sample, position = sample.chunk(size)[rank], position.chunk(size)[rank]
    return sample.numpy(), position.numpy()


def watch_replay(module: Any) -> None:
    """slime/utils/routing_replay.py:168 (what compute_topk returns) and :146 (clear_all, the end of a step)."""
    make, clear = module.get_routing_replay_compute_topk, module.RoutingReplay.clear_all

    def get_routing_replay_compute_topk(old: Any) -> Any:
        compute = make(old)

        def compute_topk(scores: Any, topk: int, *rest: Any, **options: Any) -> Any:
            replay, stage = module.ROUTING_REPLAY, os.environ.get("ROUTING_REPLAY_STAGE", "")
            index = -1
            if replay is not None and stage.startswith("replay_"):
                index = replay.forward_index if stage == "replay_forward" else replay.backward_index
            probs, ids = compute(scores, topk, *rest, **options)
            if index >= 0:
                sample, position = _EXPECTED[index]
                real = position >= 0
                layer = _LAYERS[module.RoutingReplay.all_routing_replays.index(replay)]
                _SEEN.append((sample[real], position[real], layer, ids.detach().numpy()[real].copy()))
            return probs, ids

        return compute_topk

    def clear_all() -> None:
        if _SEEN:
            _write(_STEP[0])
            _STEP[0] += 1
        clear()

    module.get_routing_replay_compute_topk = get_routing_replay_compute_topk
    module.RoutingReplay.clear_all = staticmethod(clear_all)


def _write(step: int) -> None:
    import torch.distributed as dist

    columns = {
        "sample": [call[0] for call in _SEEN],
        "position": [call[1] for call in _SEEN],
        "layer": [np.full(len(call[0]), call[2]) for call in _SEEN],
        "ids": [call[3] for call in _SEEN],
    }
    _SEEN.clear()
    if columns["ids"]:
        found: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
        np.savez(_folder() / f"router-{step}-{dist.get_rank()}.npz", **found)
    tell(f"trainer-{dist.get_rank()}")


# -- both ----------------------------------------------------------------------------------------------------------------


def compare(
    routers: Path, said: Mapping[int, Mapping[int, np.ndarray]], moe_layers: tuple[int, ...]
) -> dict[str, int]:
    """`said[step][sample]` is [rows, MoE layers, K], -1 where nobody said anything. Uses of rows in all passes and ranks; those
    with other ids than the engine said; those left to the live router; (sample, position, layer) that no rank used."""
    total = {"steps": 0, "rows": 0, "differ": 0, "live": 0, "missing": 0}
    place = {layer: index for index, layer in enumerate(moe_layers)}
    for step, samples in said.items():
        used: set[tuple[int, int, int]] = set()
        for file in routers.glob(f"router-{step}-*.npz"):
            data = np.load(file)
            columns = (data[name].tolist() for name in ("sample", "position", "layer"))
            places = list(zip(*columns, strict=True))
            if not places:  # the half of a short pack that a sequence-parallel rank has may be padding
                continue
            want = np.stack([samples[s][p, place[layer]] for s, p, layer in places])
            total["rows"] += len(want)
            live = (want < 0).any(1)
            total["differ"] += int((want != data["ids"])[~live].any(1).sum())
            total["live"] += int(live.sum())
            used |= set(places)
        rows = ((sample, row) for sample, ids_TLK in samples.items() for row in range(len(ids_TLK)))
        total["missing"] += len({(*at, layer) for at in rows for layer in moe_layers} - used)
        total["steps"] += 1
    return total


def said_by_recording(folder: Path) -> dict[int, dict[int, np.ndarray]]:
    """What engines said, from frames as `--r3-record` kept them."""
    found: dict[int, dict[int, np.ndarray]] = {}
    recording = Recording.open(folder)
    for step in map(recording.step, recording.steps):
        of_step = found[step.number] = {}
        for sample in step.samples:
            rows = step.rows(sample.sample_id).astype(np.int64)
            of_step[int(sample.sample_id.partition(".")[0])] = rows
            for start, end in sample.invalid:
                rows[start:end] = -1
    return found


def said_by_dump(folder: Path, moe_layers: tuple[int, ...]) -> dict[int, dict[int, np.ndarray]]:
    """What engines said, from slime's own --save-debug-rollout-data."""
    import torch

    found = {}
    for path in sorted(folder.glob("[0-9]*.pt"), key=lambda path: int(path.stem)):
        samples = torch.load(path, weights_only=False)["samples"]  # slime's own dump of this very run
        found[int(path.stem)] = {
            s["index"]: np.asarray(s["rollout_routed_experts"])[:, list(moe_layers)] for s in samples
        }
    return found
