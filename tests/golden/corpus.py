"""Writes the corpus that `check` is held against, both sides of a step in each folder: `python -m tests.golden.corpus`.

With `--engines` the clean recordings are made anew by real SGLang servers, each of another model and layout, through a relay
and its recorder. The faulty ones come from them: the engines' side as it is, and a routers' side with one known mistake.

Beside it lie frames that every later release of wire version 2 must decode, and one of version 1, which it must refuse by name.
Never regenerate the files of a released wire version.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.embedded.model import write_model
from examples.embedded.sglang import EngineOptions, EngineServer
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.consumed import consume_step
from r3channel.recordings.recorder import Recorder, write_step
from r3channel.recordings.recording import Recording
from r3channel.relay.relay import Relay
from tests.engine.client import generate, set_weight_version
from tests.engine.families import ON_CPU, write_families
from tests.support.delivery import recorded
from tests.support.misaligned import CASES, given
from tests.support.waits import ENGINE_S

FOLDER = Path(__file__).parent / "corpus"
STEP = 7
LENGTHS = (33, 25, 33, 25)
"""Tokens of the samples of one DP rank."""
_PROMPT, _SHARED = 10, 8


@dataclass(frozen=True)
class Source:
    """A model that a real engine served, and the trainer that its step was sealed for."""

    layout: str
    write: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)


def _deepseek(folder: Path) -> Path:
    write_families(folder, "deepseek_v3")
    return folder / "deepseek_v3"


SPARSE: dict[str, Any] = {"layers": 6, "dense_layers": (), "experts": 16, "top_k": 2}
CLEAN = {
    "clean_all_sparse": Source("dp=2,tp=2", lambda folder: write_model(folder, **SPARSE)),
    "clean_deepseek": Source("cp=2,packing=thd", _deepseek, {"env": ON_CPU}),
    "clean_wide": Source("pp=2", lambda folder: write_model(folder, layers=6, experts=384, top_k=4)),
}
FAULTY = {
    "off_by_one_row": "clean_all_sparse", "sp_halves_swapped": "clean_all_sparse",
    "shifted_layer": "clean_all_sparse", "zero_rows": "clean_deepseek", "version_off_by_one": "clean_deepseek",
    "mixed_versions": "clean_deepseek", "swapped_samples": "clean_deepseek", "stale_row": "clean_deepseek",
    "dense_layer_counted": "clean_deepseek", "mtp_shift": "clean_deepseek",
    "fused_shared_expert": "clean_deepseek", "zigzag_order": "clean_deepseek",
    "cp_chunks_swapped": "clean_deepseek", "missing_prefix": "clean_deepseek",
    "recompute_other_microbatch": "clean_deepseek", "int16_as_uint8": "clean_wide", "physical_ids": "clean_wide",
    "stage_reversed": "clean_wide",
}  # fmt: skip
"""Mistake -> the clean recording in which it is made."""


# -- clean: real engines -------------------------------------------------------------------------------------------------


def record(source: Source, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        model = source.write(Path(work) / "model")
        layout = TrainerLayout.parse(source.layout)
        recorder = Recorder(folder / "engine")
        spec = RoutingSpec.from_hf_config(model)
        options = EngineOptions(model=model, weight_version="3", **source.options)
        relay = Relay(spec, layout, ChannelConfig(), recorder=recorder)
        with EngineServer(options) as server, closing(relay):
            server.wait_ready(ENGINE_S)
            lengths = _generate(server.url, relay, layout)
            relay.seal(STEP, given(list(lengths), dp=layout.dp))
            recorded(folder / "engine", STEP)
            relay.abandon(STEP)  # nobody receives it
    consume_step(Recording.open(folder / "engine").step(STEP)).write(folder / "router")


def _generate(url: str, relay: Relay, layout: TrainerLayout) -> list[str]:
    """Samples s0, s1, ...: every second one goes on under new weights, and every fourth begins as the one before it did."""
    rng, names, prompt = np.random.default_rng(0), list[str](), list[int]()
    for index, length in enumerate(LENGTHS * layout.dp):
        name, shared = f"s{index}", prompt[:_SHARED] if index % 4 == 3 else []
        prompt = [*shared, *rng.integers(4, 512, _PROMPT - len(shared)).tolist()]
        set_weight_version(url, "3")
        new = length - _PROMPT
        first = generate(url, prompt, new_tokens=new // 2 if index % 2 else new)
        relay.add(name, {"meta_info": first.meta}, first.tokens)
        if index % 2:
            set_weight_version(url, "4")
            held = relay.rows_held(name)
            more = length - len(first.tokens)
            rest = generate(url, first.tokens, new_tokens=more, routed_experts_start_len=held)
            relay.add(name, {"meta_info": rest.meta}, rest.tokens, append=True)
        names.append(name)
    return names


# -- faulty ---------------------------------------------------------------------------------------------------------------


def main() -> None:
    if "--engines" in sys.argv:
        shutil.rmtree(FOLDER, ignore_errors=True)
        for name, source in CLEAN.items():
            record(source, FOLDER / name)
            print(name, flush=True)
    for path in FOLDER.iterdir():
        if path.name not in CLEAN:
            shutil.rmtree(path)
    for name, clean in FAULTY.items():
        shutil.copytree(FOLDER / clean / "engine", FOLDER / name / "engine")
        want = Recording.open(FOLDER / clean / "engine").step(STEP)
        write_step(FOLDER / name / "router", CASES[name][0][2](want))


if __name__ == "__main__":
    main()
