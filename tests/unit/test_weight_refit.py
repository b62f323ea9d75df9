"""Packed refit through shared memory: what control messages cost per mode, and when memory may be written again."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

import r3channel.weights.refit as refit_module
from r3channel.errors import ConfigError, DeadlineExceeded, ManifestMismatch, TransportError, UsageError
from r3channel.weights.buckets import plan_buckets
from r3channel.weights.colocated import FOLDER, SharedArena, open_arena
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.receiver import BucketReceiver
from r3channel.weights.refit import MODES, Mode, RefitReceiver, RefitReport, RefitSender, Share
from tests.reshard_cases import whole_tensor

TIMEOUT_S = 20.0
CPU = torch.device("cpu")
TENSORS = 24


def shard_metas(tp: int) -> list[TensorMeta]:
    """The local tensors of one of `tp` receivers: rows are cut, names and count are not."""
    return [
        TensorMeta(name=f"layers.{i}.mlp.weight", dtype=torch.bfloat16, shape=(512 // tp, 16))
        for i in range(TENSORS)
    ]


def manifest_of(metas: list[TensorMeta]) -> Manifest:
    total = sum(meta.nbytes for meta in metas)
    cap = math.ceil(total / 4)
    return Manifest.of([Bucket.aligned(b.tensors) for b in plan_buckets(metas, cap_bytes=cap)])


class Engine:
    """One receiver with its parameters."""

    def __init__(self, metas: list[TensorMeta]) -> None:
        self.metas = metas
        self.parameters = {meta.name: torch.zeros(meta.shape).to(meta.dtype) for meta in metas}
        self.receiver = RefitReceiver(BucketReceiver(self.parameters.items))

    def holds(self, seed: int) -> bool:
        return all(
            torch.equal(self.parameters[m.name].float(), whole_tensor(m, seed).float()) for m in self.metas
        )

    def close(self) -> None:
        self.receiver.close()


def refit(mode: Mode, *, tp: int, updates: int = 2) -> list[RefitReport]:
    """Update `tp` receivers some times; every tensor is checked after each."""
    metas = shard_metas(tp)
    with ExitStack() as stack:
        engines = {f"tp{rank}": stack.enter_context(closing(Engine(metas))) for rank in range(tp)}
        shares = {name: Share(manifest_of(metas), engine.receiver.take) for name, engine in engines.items()}
        sender = stack.enter_context(closing(RefitSender(shares, device=CPU, mode=mode)))
        reports = []
        for seed in range(1, updates + 1):
            tensors = {name: {m.name: whole_tensor(m, seed) for m in metas} for name in engines}
            reports.append(sender.update(tensors, timeout_s=TIMEOUT_S))
            assert all(engine.holds(seed) for engine in engines.values())
        return reports


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_brings_every_tensor_in_every_update(mode: Mode) -> None:
    assert len(refit(mode, tp=2)) == 2


def test_nemo_rl_control_bytes_per_receiver_stay_flat_at_tp_2_4_8() -> None:
    bytes_at = {
        mode: [max(refit(mode, tp=tp, updates=1)[0].control_bytes.values()) for tp in (2, 4, 8)]
        for mode in ("packed", "per_receiver", "cached")
    }
    assert bytes_at["packed"][2] > 3 * bytes_at["packed"][0]  # one message for all grows with all
    for mode in ("per_receiver", "cached"):
        assert max(bytes_at[mode]) <= 1.05 * min(bytes_at[mode]), bytes_at


def test_nemo_rl_second_update_sends_ids_only() -> None:
    first, second = refit("cached", tp=2)
    buckets = len(manifest_of(shard_metas(2)).buckets)
    for name in first.control_bytes:
        assert second.control_bytes[name] < 70 * buckets < first.control_bytes[name]


def test_nemo_rl_each_step_of_its_ablation_needs_fewer_control_bytes() -> None:
    second = [max(refit(mode, tp=4)[1].control_bytes.values()) for mode in MODES]
    assert second[1] > second[2] > second[3] and second[0] > second[2]


def test_a_receiver_that_never_saw_the_manifest_refuses_its_id() -> None:
    with (
        closing(Engine(shard_metas(2))) as engine,
        pytest.raises(ManifestMismatch, match="never sent to this engine"),
    ):
        engine.receiver.take(json.dumps({"id": "00" * 8, "bucket": 0, "used": 8}).encode())


def test_a_size_that_is_not_the_manifests_is_refused() -> None:
    metas = shard_metas(2)
    with closing(Engine(metas)) as engine:

        def falsify(message: bytes) -> bytes:
            told = json.loads(message)
            told["used"] += 2
            return engine.receiver.take(json.dumps(told).encode())

        with closing(RefitSender({"a": Share(manifest_of(metas), falsify)}, device=CPU)) as sender:
            with pytest.raises(ManifestMismatch, match="bytes used, its manifest says"):
                sender.update({"a": {m.name: whole_tensor(m) for m in metas}}, timeout_s=TIMEOUT_S)
            with pytest.raises(UsageError, match="after a failed update"):
                sender.update({"a": {}}, timeout_s=TIMEOUT_S)


def test_memory_is_not_written_before_the_receiver_has_acknowledged() -> None:
    """The receiver looks at its bytes, waits until the sender has had every chance to go on, and looks again."""
    metas = shard_metas(2)
    manifest = manifest_of(metas)
    changed: list[int] = []

    def apply(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
        before = data_N.clone()
        threading.Event().wait(0.03)
        if not torch.equal(before, data_N):
            changed.append(index)

    with (
        closing(RefitReceiver(apply)) as receiver,
        closing(RefitSender({"a": Share(manifest, receiver.take)}, device=CPU)) as sender,
    ):
        sender.update({"a": {m.name: whole_tensor(m, 3) for m in metas}}, timeout_s=TIMEOUT_S)
    assert len(manifest.buckets) >= 4 and changed == []


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


@pytest.mark.parametrize("mode", MODES)
def test_on_a_device_a_bucket_is_told_when_packed_and_its_memory_left_when_applied(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class DeviceArena:
        def __init__(self, inner: SharedArena, name: str) -> None:
            self.handle, self._inner, self._name = inner.handle, inner, name

        @property
        def buffer_N(self) -> torch.Tensor:
            return self._inner.buffer_N.as_subclass(OnDevice)

        def close(self) -> None:
            events.append(self._name)
            self._inner.close()

    class Stream:
        def synchronize(self) -> None:
            events.append("packed")

    monkeypatch.setattr(
        refit_module, "create_arena", lambda nbytes, _: DeviceArena(SharedArena.create(nbytes), "freed")
    )
    monkeypatch.setattr(refit_module, "open_arena", lambda card: DeviceArena(SharedArena.open(card), "left"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: events.append("applied"))
    metas = shard_metas(2)

    with closing(Engine(metas)) as engine:

        def call(message: bytes) -> bytes:
            events.append("told")
            return engine.receiver.take(message)

        with closing(RefitSender({"a": Share(manifest_of(metas), call)}, device=CPU, mode=mode)) as sender:
            sender.update({"a": {m.name: whole_tensor(m, 3) for m in metas}}, timeout_s=TIMEOUT_S)
        assert engine.holds(3)

    order = ("packed", "told", "applied", "left")
    for end in range(len(events)):
        counts = [events[: end + 1].count(event) for event in order]
        assert counts == sorted(counts, reverse=True)
    assert set(order) <= set(events)


def test_a_receiver_that_never_answers_ends_by_the_deadline() -> None:
    metas, release = shard_metas(2), threading.Event()

    def hang(message: bytes) -> bytes:
        release.wait(TIMEOUT_S)
        return b"done"

    with (
        closing(RefitSender({"tp0": Share(manifest_of(metas), hang)}, device=CPU)) as sender,
        pytest.raises(DeadlineExceeded, match="receiver tp0"),
    ):
        sender.update({"tp0": {m.name: whole_tensor(m) for m in metas}}, timeout_s=0.3)
    release.set()


def test_a_manifest_survives_json_and_offsets_are_computed_anew() -> None:
    manifest = manifest_of(shard_metas(4))
    text = json.dumps(manifest.to_dict())
    assert Manifest.from_dict(json.loads(text)) == manifest
    assert "offset" not in text
    with pytest.raises(ManifestMismatch, match="arrived as"):
        Manifest.from_dict(json.loads(text.replace("layers.3.", "layers.4.")))


@pytest.mark.parametrize(
    "row", [["w", "complex64", [1]], ["w", "bfloat16", [-1]], [3, "bfloat16", [1]], ["w"], None]
)
def test_a_row_that_no_manifest_has_is_refused(row: Any) -> None:
    with pytest.raises(ManifestMismatch, match=r"expected \[name, dtype, \[sizes\]\]"):
        TensorMeta.from_row(row)


@pytest.mark.parametrize(
    "handle",
    [
        {},
        {"name": "../etc/passwd", "nbytes": 1},
        {"name": "r3channel-locked-arena-" + "0" * 32, "nbytes": -1},
    ],
)
def test_a_handle_that_is_not_ours_is_refused(handle: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shared memory handle"):
        open_arena(handle)


def test_memory_whose_owner_has_closed_it_is_told_as_gone() -> None:
    arena = SharedArena.create(64)
    handle = arena.handle
    arena.close()
    arena.close()
    assert not os.path.exists(f"{FOLDER}/{handle['name']}")
    with pytest.raises(TransportError, match="is gone"):
        open_arena(handle)
    with pytest.raises(TransportError, match="closed here"):
        _ = arena.buffer_N


def test_a_sender_that_finds_no_room_for_all_receivers_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SharedArena] = []

    def create(nbytes: int, _: torch.device) -> SharedArena:
        if made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(SharedArena.create(nbytes))
        return made[0]

    monkeypatch.setattr(refit_module, "create_arena", create)
    share = Share(manifest_of(shard_metas(2)), bytes)
    with pytest.raises(OSError, match="No space left"):
        RefitSender({"a": share, "b": share}, device=CPU)
    assert made[0].handle["name"] not in os.listdir(FOLDER)


def test_memory_that_a_killed_process_left_is_removed_by_the_next_one() -> None:
    make = "from r3channel.weights.colocated import SharedArena as A; a = A.create(64); print(a.handle['name'], flush=True);"
    killed = subprocess.Popen(
        [sys.executable, "-c", f"{make} import signal; signal.pause()"], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    with closing(SharedArena.create(64)) as living, killed:
        left = killed.stdout.readline().strip()
        assert {left, living.handle["name"]} <= set(os.listdir(FOLDER))
        killed.kill()
        killed.wait(TIMEOUT_S)
        ended = subprocess.run(
            [sys.executable, "-c", f"{make} a.close()"], capture_output=True, text=True, check=True
        )
        assert not {left, ended.stdout.strip()} & set(os.listdir(FOLDER))
        assert living.handle["name"] in os.listdir(FOLDER)
        with closing(open_arena(living.handle)) as theirs:
            assert len(theirs.buffer_N) == 64


def test_views_outlive_the_close_of_their_memory() -> None:
    arena = SharedArena.create(1 << 16)
    view = arena.buffer_N[100:200]
    view.fill_(7)
    arena.close()
    assert view.sum().tolist() == 700
