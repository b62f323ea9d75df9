"""The broadcast pipeline over real gloo between threads: overlap, fixed buffers, and one stop for all ranks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch

from r3channel.errors import (
    ConfigError,
    ManifestMismatch,
    PeerFailed,
    PlanMismatch,
    R3Error,
    TransportError,
)
from r3channel.transport.base import Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from r3channel.weights.buckets import pack
from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.pipeline import BroadcastPipeline, SharedManifest
from r3channel.weights.receiver import BucketReceiver, register_apply
from tests.reshard_cases import whole_tensor

TIMEOUT_S = 20.0
SHAPES = [(64, 8), (3,), (), (40, 16), (0, 5), (33, 9), (17,), (128, 4)]
METAS = [
    TensorMeta(name=f"t{i}", dtype=(torch.bfloat16, torch.float32, torch.float8_e4m3fn)[i % 3], shape=shape)
    for i, shape in enumerate(SHAPES)
]
Depth = Literal[1, 2]


@pytest.fixture
def ranks() -> Iterator[Callable[[int, Callable[[ProcessGroupTransport], Any]], list[Any]]]:
    store = RendezvousStore("127.0.0.1")

    def on_ranks(world_size: int, work: Callable[[ProcessGroupTransport], Any]) -> list[Any]:
        name = uuid.uuid4().hex

        def rank_main(rank: int) -> Any:
            rendezvous = Rendezvous(
                backend="gloo",
                name=name,
                epoch=1,
                rank=rank,
                world_size=world_size,
                host=store.host,
                port=store.port,
            )
            group = ProcessGroupTransport(rendezvous, timeout_s=TIMEOUT_S)
            try:
                return work(group)
            except Exception as error:
                return error
            finally:
                group.close()

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(rank_main, range(world_size)))

    yield on_ranks
    store.close()


def shared(world_size: int, *, cap_bytes: int = 1500) -> SharedManifest:
    """Every rank holds everything: each feeds its share."""
    return SharedManifest.of([(meta, range(world_size)) for meta in METAS], cap_bytes=cap_bytes)


def feed(seed: int) -> Callable[[int, Bucket, torch.Tensor], None]:
    tensors = {meta.name: whole_tensor(meta, seed) for meta in METAS}
    return lambda index, bucket, out_N: void(pack(bucket, [tensors[name] for name in bucket.names], out_N))


def void(value: object) -> None:
    del value


def void_move(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
    pass


def model() -> dict[str, torch.Tensor]:
    return {meta.name: torch.zeros(meta.shape).to(meta.dtype) for meta in METAS}


def holds(parameters: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(parameters[m.name].float(), whole_tensor(m, seed).float()) for m in METAS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_ends_with_every_tensor_each_fed_by_its_owner(
    ranks: Any, depth: Depth, world_size: int
) -> None:
    plan = shared(world_size)

    def work(group: ProcessGroupTransport) -> dict[str, torch.Tensor]:
        parameters, fed = model(), []
        pipeline = BroadcastPipeline(group, plan, depth=depth)
        source = feed(1)
        pipeline.run(
            lambda i, b, out: (fed.append(i), source(i, b, out))[0],
            BucketReceiver(parameters.items),
            timeout_s=TIMEOUT_S,
        )
        assert fed == [i for i, owner in enumerate(plan.owners) if owner == group.rank]
        return parameters

    results = ranks(world_size, work)
    assert [r for r in results if isinstance(r, Exception)] == []
    assert all(holds(parameters, 1) for parameters in results)


def test_checkpoint_engine_every_node_feeds_an_equal_share_in_turns() -> None:
    metas = [TensorMeta(name=f"w{i}", dtype=torch.bfloat16, shape=(100,)) for i in range(90)]
    plan = SharedManifest.of([(meta, range(3)) for meta in metas], cap_bytes=2000)
    fed = {
        rank: sum(
            b.payload_bytes
            for b, owner in zip(plan.manifest.buckets, plan.owners, strict=True)
            if owner == rank
        )
        for rank in range(3)
    }
    assert len(set(fed.values())) == 1 and plan.owners[:6] == (0, 1, 2, 0, 1, 2)


def test_gaps_between_small_tensors_count_towards_the_cap() -> None:
    metas = [TensorMeta(name=f"s{i}", dtype=torch.float32, shape=()) for i in range(100)]
    plan = SharedManifest.of([(meta, [0]) for meta in metas], cap_bytes=4096)
    assert max(bucket.payload_bytes for bucket in plan.manifest.buckets) <= 4096
    assert plan.manifest.tensor_count == 100


def test_a_unit_has_one_owner_and_one_bucket() -> None:
    names = [f"layers.0.self_attn.{m}_proj.weight" for m in "qkv"]
    metas = [TensorMeta(name=name, dtype=torch.bfloat16, shape=(64,)) for name in names]
    plan = SharedManifest.of([(meta, (0, 1)) for meta in metas], cap_bytes=64)
    assert [set(bucket.names) for bucket in plan.manifest.buckets] == [set(names)]


class Watched:
    """A group that notes when each broadcast of a bucket begins."""

    def __init__(self, inner: ProcessGroupTransport, begun: Callable[[int], None]) -> None:
        self._inner, self._begun, self._count = inner, begun, 0
        self.rank, self.world_size, self.epoch = inner.rank, inner.world_size, inner.epoch

    def broadcast(self, root: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        self._begun(self._count)
        self._count += 1
        self._inner.broadcast(root, data_N, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("depth", [1, 2])
def test_checkpoint_engine_depth_two_broadcasts_the_next_bucket_while_one_is_applied(
    ranks: Any, depth: Depth
) -> None:
    """apply(0) waits until broadcast(1) has begun: it does at depth 2, and does not (within the wait) at depth 1."""
    plan = shared(2)
    assert len(plan.owners) >= 3

    def work(group: ProcessGroupTransport) -> bool:
        second = threading.Event()
        watched: Any = Watched(group, lambda number: second.set() if number == 1 else None)
        overlapped: list[bool] = []

        def apply(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
            if index == 0:
                overlapped.append(second.wait(TIMEOUT_S / 2 if depth == 2 else 0.3))

        BroadcastPipeline(watched, plan, depth=depth).run(feed(1), apply, timeout_s=TIMEOUT_S)
        return overlapped[0]

    assert ranks(2, work) == [depth == 2] * 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["fill", "apply"])
def test_an_error_on_one_rank_stops_all_ranks_at_the_same_bucket(
    ranks: Any, depth: Depth, where: str
) -> None:
    plan = shared(3)
    bad = next(i for i, owner in enumerate(plan.owners) if owner == 1)

    def work(group: ProcessGroupTransport) -> list[Any]:
        applied: list[int] = []
        source = feed(1)

        def fill(index: int, bucket: Bucket, out_N: torch.Tensor) -> None:
            if where == "fill" and index == bad:
                raise ManifestMismatch("tensor t5 went away")
            source(index, bucket, out_N)

        def apply(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
            if where == "apply" and group.rank == 1 and index == bad:
                raise ManifestMismatch("tensor t5 does not fit")
            applied.append(index)

        try:
            BroadcastPipeline(group, plan, depth=depth).run(fill, apply, timeout_s=TIMEOUT_S)
        except R3Error as error:
            return [error, applied]
        return ["no error", applied]

    results = ranks(3, work)
    assert isinstance(results[1][0], ManifestMismatch)
    for rank in (0, 2):
        assert isinstance(results[rank][0], PeerFailed) and "rank 1: tensor t5" in str(results[rank][0])
    assert len({str(results[rank][0]) for rank in (0, 2)}) == 1  # the same bucket
    # nobody applies beyond the bucket after the one that failed
    assert all(applied == list(range(len(applied))) and len(applied) <= bad + 1 for _, applied in results)


@pytest.mark.parametrize(
    ("names", "cap_bytes"),
    [(("a", "b"), 512), (("b", "a"), 32), (("a", "c"), 32)],
    ids=["cap", "order", "name"],
)
def test_ranks_with_other_buckets_stop_before_a_byte_moves(
    ranks: Any, names: tuple[str, ...], cap_bytes: int
) -> None:
    def plan(names: tuple[str, ...], cap_bytes: int) -> SharedManifest:
        metas = [TensorMeta(name=name, dtype=torch.float32, shape=(8,)) for name in names]
        return SharedManifest.of([(meta, [0]) for meta in metas], cap_bytes=cap_bytes)

    def work(group: ProcessGroupTransport) -> list[int]:
        own = plan(names, cap_bytes) if group.rank else plan(("a", "b"), 32)
        applied: list[int] = []
        with pytest.raises(PlanMismatch, match=rf"rank {group.rank} planned buckets {own.digest:016x}"):
            BroadcastPipeline(group, own).run(
                lambda *_: None, lambda index, *_: applied.append(index), timeout_s=TIMEOUT_S
            )
        return applied

    assert ranks(2, work) == [[], []]


def test_after_an_error_the_same_pipeline_runs_again(ranks: Any) -> None:
    plan = shared(2)

    def work(group: ProcessGroupTransport) -> bool:
        parameters = model()
        pipeline = BroadcastPipeline(group, plan)

        def refuse(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
            raise ManifestMismatch("not now")

        with pytest.raises(R3Error):
            pipeline.run(
                feed(1), refuse if group.rank else BucketReceiver(parameters.items), timeout_s=TIMEOUT_S
            )
        pipeline.run(feed(2), BucketReceiver(parameters.items), timeout_s=TIMEOUT_S)
        return holds(parameters, 2)

    assert ranks(2, work) == [True, True]


def test_a_copy_ahead_of_a_run_that_failed_does_not_write_into_the_next_run(ranks: Any) -> None:
    plan, entered = shared(2), threading.Event()
    ahead = [i for i, owner in enumerate(plan.owners) if owner == 1][1]

    def work(group: ProcessGroupTransport) -> bool:
        parameters = model()
        pipeline = BroadcastPipeline(group, plan)
        old, new = feed(1), feed(2)

        def slowly(index: int, bucket: Bucket, out_N: torch.Tensor) -> None:
            if index == ahead:
                entered.set()
                threading.Event().wait(0.5)
            old(index, bucket, out_N)

        def refuse(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
            if group.rank == 0:
                entered.wait(TIMEOUT_S)
                raise ManifestMismatch("not now")

        def fill(index: int, bucket: Bucket, out_N: torch.Tensor) -> None:
            new(index, bucket, out_N)
            if group.rank == 1:
                threading.Event().wait(1.0)

        with pytest.raises(R3Error):
            pipeline.run(slowly, refuse, timeout_s=TIMEOUT_S)
        pipeline.run(fill, BucketReceiver(parameters.items), timeout_s=TIMEOUT_S)
        return holds(parameters, 2)

    assert ranks(2, work) == [True, True]


def test_checkpoint_engine_second_update_allocates_no_buffer_cats_nothing_and_asks_no_item(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, asked = shared(2), []
    counted: list[str] = []
    both_here = threading.Barrier(2, action=counted.clear)
    for owner, name in ((torch, "cat"), (torch.Tensor, "item"), (torch, "empty")):
        original = getattr(owner, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counted.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    def work(group: ProcessGroupTransport) -> bool:
        parameters = model()

        def named() -> Any:
            asked.append(group.rank)
            return parameters.items()

        pipeline, receiver = BroadcastPipeline(group, plan), BucketReceiver(named)
        source = feed(7)
        pipeline.run(source, receiver, timeout_s=TIMEOUT_S)
        both_here.wait(TIMEOUT_S)  # what is counted from now on is the second update
        pipeline.run(source, receiver, timeout_s=TIMEOUT_S)
        return holds(parameters, 7)

    assert ranks(2, work) == [True, True]
    assert counted == [] and sorted(asked) == [0, 1]


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


class Alone:
    """A group of one."""

    rank, world_size, epoch = 0, 1, 1

    def broadcast(self, root: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        pass

    def largest(self, value: int, *, timeout_s: float) -> int:
        return value


def test_on_a_device_each_step_has_ended_before_another_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    class Stream:
        def synchronize(self) -> None:
            ended.append(threading.get_ident())

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    plan, alone = shared(1), Alone()
    pipeline = BroadcastPipeline(alone, plan)  # pyright: ignore[reportArgumentType]
    pipeline._buffers[:] = [buffer_N.as_subclass(OnDevice) for buffer_N in pipeline._buffers]
    pipeline.run(feed(1), void_move, timeout_s=TIMEOUT_S)
    copies = ended.count(threading.get_ident())
    assert copies == len(plan.owners) and len(ended) == 3 * copies  # fill and apply in threads of their own


def test_checkpoint_engine_each_engine_kind_may_bring_its_own_apply() -> None:
    taken: list[str] = []
    kind = uuid.uuid4().hex
    register_apply(kind, lambda parameters, tensors: taken.extend(name for name, _ in tensors))
    bucket = Bucket.aligned(METAS[:3])
    data_N = torch.zeros(bucket.payload_bytes, dtype=torch.uint8)
    BucketReceiver(model().items, kind=kind)(0, bucket, data_N)
    assert taken == ["t0", "t1", "t2"]
    for wrong in (lambda: register_apply(kind, print), lambda: BucketReceiver(model().items, kind="no")):
        with pytest.raises(ConfigError, match="engine kind"):
            wrong()


def test_a_tensor_that_the_engine_lacks_is_refused_before_anything_is_written() -> None:
    parameters = model()
    del parameters["t1"]
    bucket = Bucket.aligned(METAS[:2])
    with pytest.raises(ManifestMismatch, match=r"t1.*no such parameter"):
        BucketReceiver(parameters.items)(0, bucket, torch.full((bucket.payload_bytes,), 1, dtype=torch.uint8))
    assert not parameters["t0"].float().any()


def test_an_apply_that_hangs_ends_all_ranks_by_the_deadline(ranks: Any) -> None:
    plan, release = shared(2), threading.Event()

    def work(group: ProcessGroupTransport) -> None:
        def apply(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
            if group.rank == 1:
                release.wait(TIMEOUT_S)

        BroadcastPipeline(group, plan).run(feed(1), apply, timeout_s=1.0)

    errors = ranks(2, work)
    release.set()
    assert all(isinstance(error, TransportError) for error in errors)
    assert any("apply of bucket 0 did not end" in str(error) for error in errors)
