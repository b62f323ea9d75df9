"""The compiled loops: placement with its digests, and what happens where nothing can be cached."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import r3channel
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from tests.support.children import run, said_by
from tests.support.loops import numba
from tests.support.plans import Step
from tests.support.samples import random_ids, sparse
from tests.unit.test_place import filled


@pytest.mark.parametrize(
    ("experts", "top_k"), [(128, 8), (384, 8), (512, 10), (128, 4), (60, 6), (64, 7), (256, 16)]
)
@pytest.mark.parametrize("rows", [1, 3, 512, 1100])
def test_rows_of_each_size_are_placed_as_by_numpy(experts: int, top_k: int, rows: int) -> None:
    """One after another in a micro-batch of their own, and with steps between them beside a shorter sample."""
    spec, layout = sparse(5, experts=experts, top_k=top_k), TrainerLayout(mtp=(2,))
    ids = {name: random_ids(own, spec=spec) for name, own in {"a": rows, "b": rows, "c": 1}.items()}
    samples = [TicketSample(name, 1 + len(ids_TLK), 0, 0, ()) for name, ids_TLK in ids.items()]
    ticket = Ticket("run", 1, spec, layout, Assignment.given([[["a"], ["b", "c"]]]), samples, 1 << 20)
    step = Step(ticket, ids, 0)
    (shard,) = step.shards
    compiled = filled(step, shard, bucket_rows=2048)
    with numba(False):
        plain = filled(step, shard, bucket_rows=2048)
    assert all(map(np.array_equal, compiled, plain))


PROGRAM = """
import numpy as np
from r3channel.wire import digest
ids = np.arange(48, dtype=np.uint8).reshape(2, 3, 8)
assert digest.kernels() is not None
print(digest.__file__, digest.check(ids, num_experts=128, first_row=0))
"""

FORMS = """
import numpy as np
from r3channel.wire import digest
for slots in (8, 24):
    ids = np.arange(slots, dtype=np.uint8)[None, None].repeat(3, 1).repeat(50, 0)
    print(slots, digest.check(ids, num_experts=100, first_row=0))
"""
TOGETHER = """
from numba.core.caching import IndexDataCacheFile as Cache
written, save = [], Cache._save_data
Cache._load_index = lambda self: {}
Cache._save_data = lambda *entry: written.append(entry)
"""
"""As two processes that began at once: neither saw the other's entry in the index, and who came first writes last."""


TRACED = """
import sys, threading
import tracemalloc  # noqa: TID251
import numpy as np
from r3channel.engine.capture import SlotRows
from r3channel.wire import digest
from r3channel.wire.digest import HostRuns, column_digests
from tests.support.samples import sparse
from tests.dist import warm
few, many = (np.arange(slots, dtype=np.uint8)[None, None].repeat(4, 1) for slots in (8, 64))
spec = sparse(5, experts=128, top_k=8)
runs = HostRuns.of(np.array([[0, 0, 0, 1, 4]]), samples=1, spec=spec)
held, at = SlotRows(spec, slots=8), np.arange(4)
loops = [
    lambda: held.write(at, few[:, [0] * 5].repeat(4, 0), weight_version=0, kind=0),
    lambda: held.gather_frame(at, first_row=0, sample_key=0, hashed=True),
    lambda: digest.check(few, num_experts=64, first_row=0),
    lambda: digest.check(many, num_experts=64, first_row=0),
    lambda: digest.sum_digests(digest.items_of(few), digest.count_coefficients(1, first_row=0, valid_T=None)),
    lambda: column_digests(few[0], runs),
    lambda: warm.place_samples(warm.PLAN, dp=0, ids_of=lambda _: warm.IDS_TLK),
]
ended = threading.Event()
def work():
    while not ended.is_set():
        for loop in loops:
            loop()
for loop in loops:
    loop()  # compiles
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
sys.setswitchinterval(1e-5)
for _ in range(100_000):
    tracemalloc.start()
    bytearray(1000)
    tracemalloc.stop()
ended.set()
for thread in threads:
    thread.join()
print("whole")
"""


def test_a_package_that_nothing_can_be_written_to_works_without_a_cache(tmp_path: Path) -> None:
    """As on a read-only install; that root may write everywhere is why files stand where folders would be made."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(r3channel.__file__).parent, tmp_path / "r3channel", ignore=ignored)
    (tmp_path / "r3channel" / "__pycache__").write_text("")
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file")
    cache = dict.fromkeys(("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME"), nowhere)
    said = run("-c", PROGRAM, cwd=tmp_path, PYTHONPATH=str(tmp_path), **cache).stdout
    assert str(tmp_path) in said and "True" in said


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = said_by(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert files
    assert said_by(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == files


def test_processes_that_compile_two_forms_at_once_leave_no_form_under_the_others_name(tmp_path: Path) -> None:
    late = "for entry in reversed(written): save(*entry)"
    right = said_by(TOGETHER + FORMS + late, NUMBA_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("*.nbc"))
    assert said_by(FORMS, NUMBA_CACHE_DIR=str(tmp_path)) == right


def test_a_user_who_traces_memory_while_loops_run_keeps_the_process() -> None:
    """A loop that takes memory without the GIL ends it: six of six runs when three of the loops did."""
    assert said_by(TRACED) == "whole\n"
