"""An update from a trainer's memory to the parameters of an engine on the same GPU, in two processes, by each wire."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from r3channel.errors import NonFiniteWeights, WeightUpdateFailed
from r3channel.weights.checksums import cross_sums, tensor_digest
from r3channel.weights.session import WeightSync
from tests.fake_engine import FakeEngine
from tests.gpu.facts import Facts

TENSORS = 24
WIRES = "tcp", "shared_memory", "cuda_ipc"


def made(device: str, rows: int, *, seed: int) -> dict[str, torch.Tensor]:
    """84 MB each with 4,096 rows; on a CPU they are small."""
    seeded = torch.Generator(device).manual_seed(seed)
    options: Any = {"device": device, "dtype": torch.bfloat16, "generator": seeded}
    return {f"model.layers.{at}.weight": torch.randn(rows, 10240, **options) for at in range(TENSORS)}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_digest(cross_sums(tensor)) for name, tensor in tensors.items()}


def engine(device: str, rows: int, pipe: Any) -> None:
    """A process of its own: tells where it listens, then what it holds as often as it is asked."""
    served = FakeEngine(
        receives={name: torch.zeros_like(one) for name, one in made(device, rows, seed=0).items()}
    )
    pipe.send(served.url)
    while pipe.recv():
        left = torch.cuda.memory_allocated() if device == "cuda" else 0
        pipe.send((digests(served.tensors), left))


@contextmanager
def started(device: str, rows: int) -> Iterator[tuple[str, Any]]:
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine, args=(device, rows, its), daemon=True
    )
    process.start()
    try:
        assert ours.poll(60), "the engine did not start within 60 s"
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


def check(device: str, facts: Facts) -> None:
    rows = 16 if facts.small else 4096
    with started(device, rows) as (url, pipe):
        for number, wire in enumerate(WIRES if device == "cuda" else WIRES[:2]):
            updated(device, rows, wire, number, url, facts, pipe)
    if device == "cpu":
        facts.left_out.append("cuda_ipc: a CPU has none")


def updated(device: str, rows: int, wire: Any, number: int, url: str, facts: Facts, pipe: Any) -> None:
    with WeightSync.whole([url], staged=True, wire=wire) as sync:
        sync.connect(timeout_s=60)
        for version in (2 * number + 1, 2 * number + 2):  # the second one finds links and plan
            given = made(device, rows, seed=version)
            report = sync.update(given.items(), version=version, timeout_s=100)
        gb = report.payload_bytes / 1e9
        pipe.send(True)
        found, _ = pipe.recv()
        wrong = sum(found[name] != seen for name, seen in digests(given).items())
        facts.expect(f"{wire}: parameters with other bytes", wrong, wrong == 0, "0")
        facts.note(f"{wire}: update of {gb:.3f} GB, s", report.wall_s)
        facts.note(f"{wire}: paused, s", report.paused_s)
        facts.note(f"{wire}: seconds", {stage: round(took_s, 4) for stage, took_s in report.seconds.items()})
        last = given["model.layers.7.weight"]
        last[-1, -1] = torch.nan
        try:
            sync.update(given.items(), version=version + 1, timeout_s=100)
            facts.wrong.append(f"{wire}: NaN was not found")
        except (NonFiniteWeights, WeightUpdateFailed) as error:
            facts.expect(f"{wire}: NaN", str(error)[:300], "layers.7" in str(error), "its tensor by name")
    pipe.send(True)
    found, left = pipe.recv()
    last[-1, -1] = 0
    kept = sum(
        found[name] == seen for name, seen in digests(given).items() if name != "model.layers.7.weight"
    )
    facts.expect(f"{wire}: parameters as before after NaN", kept, kept == TENSORS - 1, f"{TENSORS - 1}")
    held = TENSORS * last.nbytes if device == "cuda" else 0
    facts.expect(f"{wire}: bytes of the GPU that stay taken", left - held, left - held < 1 << 20, "none")
