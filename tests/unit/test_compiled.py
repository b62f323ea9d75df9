"""The compiled loops: placement with its digests, and what happens where nothing can be cached."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import r3channel
from r3channel.model.spec import RoutingSpec
from r3channel.wire.digest import item_bytes_of, layer_digests
from r3channel.wire.kernels import place_runs
from r3channel.wire.mixing import coefficients, multipliers
from r3channel.wire.routing import Ids
from r3channel.wire.validate import items_of
from tests.support.children import run, said_by
from tests.support.samples import random_ids, sparse

LAYERS = 5
SOURCES = np.array([0, 2, 3, 3], np.int64)
"""A stage of four target layers, two of which replay one source layer."""


def placed(spec: RoutingSpec, ids_TLK: Ids, *, widths: int, pads: int, first: int) -> tuple[Ids, Ids]:
    """(target [layer, position, sample, K], digests) of one sample in column 1 of `widths`, its pads behind it."""
    item, rows = item_bytes_of(spec), len(ids_TLK)
    row_bytes = spec.top_k * spec.id_dtype.itemsize
    target = np.full((len(SOURCES), rows + pads, widths, spec.top_k), 77, spec.id_dtype)
    pad_ids = np.arange(spec.num_experts * spec.top_k).reshape(-1, spec.top_k) % spec.num_experts
    pads_EI = np.ascontiguousarray(pad_ids.astype(spec.id_dtype)).view(f"u{item}")
    digests = np.ones((3, len(SOURCES)), np.uint64)
    offset, step = (widths - 1) * row_bytes, widths * row_bytes
    run = [0, rows, rows + pads, offset, target[0].nbytes, step, first, 2]
    place_runs(item, items=pads_EI.shape[1])(
        items_of(ids_TLK), np.array([run]), SOURCES, target.reshape(-1).view(np.uint8), pads_EI,
        coefficients(0, first + rows), multipliers(pads_EI.shape[1]), digests,
        np.empty(LAYERS * (1 + pads_EI.shape[1]), np.uint64),
    )  # fmt: skip
    return target, digests


@pytest.mark.parametrize(
    ("experts", "top_k"), [(128, 8), (384, 8), (512, 10), (128, 4), (60, 6), (64, 7), (256, 16)]
)
@pytest.mark.parametrize("widths", [1, 2])
@pytest.mark.parametrize("rows", [0, 3, 512, 1100])
def test_rows_of_all_layers_become_layers(experts: int, top_k: int, widths: int, rows: int) -> None:
    spec = sparse(LAYERS, experts=experts, top_k=top_k)
    ids = np.resize(random_ids(64, spec=spec), (rows, LAYERS, top_k))
    ids[rows // 2 :] = ids[rows // 2 :, ::-1]
    target, digests = placed(spec, ids, widths=widths, pads=5, first=9)
    own = target[:, :, widths - 1]
    assert np.array_equal(own[:, :rows], ids[:, SOURCES].transpose(1, 0, 2))
    positions = np.arange(9 + rows, 9 + rows + 5)[:, None] % experts
    assert np.array_equal(own[0, rows:], (positions * top_k + np.arange(top_k)) % experts)
    assert (target[:, :, : widths - 1] == 77).all()
    assert np.array_equal(digests[2], layer_digests(ids, first_row=9)[SOURCES] + np.uint64(1))
    assert (digests[:2] == 1).all()


PROGRAM = """
import numpy as np
from r3channel.wire import validate as distinct
ids = np.arange(48, dtype=np.uint8).reshape(2, 3, 8)
assert distinct.kernels() is not None
print(distinct.__file__, distinct.checked(ids, num_experts=128, first_row=0))
"""

FORMS = """
import numpy as np
from r3channel.wire import validate as distinct
for slots in (8, 24):
    ids = np.arange(slots, dtype=np.uint8)[None, None].repeat(3, 1).repeat(50, 0)
    print(slots, distinct.checked(ids, num_experts=100, first_row=0))
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
from r3channel.wire import validate as distinct
from r3channel.wire.digest import HostRuns, column_digests
from tests.support.samples import sparse
from tests.unit.test_compiled import placed
few, many = (np.arange(slots, dtype=np.uint8)[None, None].repeat(4, 1) for slots in (8, 64))
spec = sparse(5, experts=128, top_k=8)
runs = HostRuns.of(np.array([[0, 0, 0, 1, 4]]), samples=1, spec=spec)
held, at = SlotRows(spec, slots=8), np.arange(4)
loops = [
    lambda: held.write(at, few[:, [0] * 5].repeat(4, 0), weight_version=0, kind=0),
    lambda: held.unfinished(at, first_row=0, sample_key=0, hashed=True),
    lambda: distinct.checked(few, num_experts=64, first_row=0),
    lambda: distinct.checked(many, num_experts=64, first_row=0),
    lambda: distinct.summed(distinct.items_of(few), distinct.counted(1, first_row=0, valid_T=None)),
    lambda: column_digests(few[0], runs),
    lambda: placed(spec, few[:, [0] * 5], widths=1, pads=1, first=0),
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
