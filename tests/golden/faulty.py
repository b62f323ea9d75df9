"""Writes the faulty recordings: `python -m tests.golden.faulty`. Each is a folder with an engines' and a routers' side.

The engines' sides hold beginnings of the real samples in `recording`, the routers' one known mistake each; two pairs are clean.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from r3channel.recordings.manifest import Manifest
from r3channel.recordings.recorder import segment_name, write_segment
from r3channel.recordings.recording import Recording
from r3channel.recordings.segment import Kind, pack
from r3channel.recordings.step import RecordedStep
from tests.misaligned import CASES, engine_step, router_step, rows_of

FOLDER = Path(__file__).parent
FAULTY = FOLDER / "faulty"
NAMES = {
    "zero_rows": "",
    "off_by_one_row": "dp=2",
    "missing_prefix": "",
    "dense_layer_counted": "",
    "stale_row": "",
    "swapped_samples": "cp=2",
    "physical_ids": "",
    "sp_halves_swapped": "tp=2",
    "zigzag_order": "cp=2,packing=thd",
    "version_off_by_one": "pp=2",
}
"""Mistake -> layout."""
CLEAN = {"clean_tp": "tp=2", "clean_pack": "dp=2,cp=2,packing=thd"}
_VERSIONS = {"r3channel": "0.1.0", "sglang": "0.5.23"}


def write_engine(step: RecordedStep, folder: Path) -> None:
    Manifest(spec=step.spec, layout=step.ticket.layout, versions=_VERSIONS).write(folder)
    records = [pack(Kind.TICKET, step.ticket.to_bytes())]
    for place, sample in enumerate(step.ticket.samples):
        tokens = np.ascontiguousarray(step.tokens[sample.sample_id], "<i4")
        records.append(pack(Kind.TOKENS, tokens.data, sample=place))
        records += [pack(Kind.FRAME, frame, sample=place) for frame in step.frames[sample.sample_id]]
    write_segment(folder / segment_name(step.number, 0), records)


def write_router(step: RecordedStep, folder: Path) -> None:
    Manifest(
        spec=step.spec, layout=step.ticket.layout, side="router", tokens=False, versions=_VERSIONS
    ).write(folder)
    places = {sample.sample_id: place for place, sample in enumerate(step.ticket.samples)}
    frames = [
        pack(Kind.FRAME, frame, sample=places[name], part=1)
        for (_, name), own in step.passes.items()
        for frame in own
    ]
    write_segment(folder / segment_name(step.number, 0), [pack(Kind.TICKET, step.ticket.to_bytes()), *frames])


def main() -> None:
    shutil.rmtree(FAULTY, ignore_errors=True)
    real = Recording.open(FOLDER / "recording").step(2)
    for name, layout in {**NAMES, **CLEAN}.items():
        want = engine_step(real.spec, layout, lengths=(33, 25, 33, 25), real=real)
        seen = CASES[name][0][2](want) if name in CASES else router_step(want, rows_of(want))
        write_engine(want, FAULTY / name / "engine")
        write_router(seen, FAULTY / name / "router")


if __name__ == "__main__":
    main()
